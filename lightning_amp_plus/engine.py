"""The flow of an optimizer step, in one place: scale, check, clip, then apply or skip. Plain torch.

    loss = closure()                        # forward and scaled backward, through ``StepEngine.backward``
    check loss and gradients                # one pass, one host read; all ranks agree
    finite:      hooks; clip; optimizer.step(); the scale grows when due
    not finite:  clear the gradients; lower the scale if it is to blame; report

User code and the optimizer see gradients that are multiplied by 1: ``held.py`` keeps the books, and ``finish.py`` takes
the gradients from the last backward to the optimizer.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_amp_plus import gradients, optimizers
from lightning_amp_plus.checks import Agree, Evidence
from lightning_amp_plus.finish import Clipping, Verdict, finish
from lightning_amp_plus.grad_scaler import DynamicLossScaler
from lightning_amp_plus.held import HeldGradients, Pending, has_gradients
from lightning_amp_plus.loss_scale import FLOAT16_LOSS_MAX_SCALE, LossScale, scale_loss
from lightning_amp_plus.report import Outcome, Place, Precision, StepCounters, StepReport, is_wider

_log = logging.getLogger(__name__)


class NonFiniteStepError(FloatingPointError):
    """Too many optimizer steps in a row had a loss or gradients that hold inf or NaN, and no lower scale can help."""


Policy = Callable[[StepReport, int], Precision | None]
"""Decides what follows a skipped step that no lower loss scale can help.

It gets the report of the step and how many such steps of its optimizer there were in a row. It returns the precision to
go on with, which may be the present one, or ``None`` to leave it at that: then ``max_skipped`` in a row raise.
"""


def _notify(level: int, text: str) -> None:
    if level >= logging.WARNING:
        warnings.warn(text, stacklevel=2)
    else:
        _log.log(level, text)


class StepEngine:
    """Runs optimizer steps so that only finite, true gradients reach an optimizer.

    Args:
        precision: ``"16-mixed"`` scales the loss, the others do not.
        loss_scale: The rules of loss scaling; the default :class:`LossScale` if ``None``.
        max_skipped: Skipped steps in a row of one optimizer that raise; at least 1. Skips that lower the loss scale
            do not count.
        agree: Reduces a small float32 tensor over all ranks by its maximum; ``None`` on one process.
        notify: Called with a ``logging`` level and a line of text, at most once per kind of incident.

    """

    def __init__(
        self,
        precision: Precision,
        loss_scale: LossScale | None = None,
        max_skipped: int = 10,
        agree: Agree | None = None,
        notify: Callable[[int, str], None] = _notify,
    ) -> None:
        self.configured_precision = precision
        self.policy: Policy | None = None
        self.loss_scaler = DynamicLossScaler(loss_scale)
        self.max_skipped = max_skipped
        self.agree = agree
        self.notify = notify
        self.restart()

    def configure(self, precision: Precision) -> None:
        """Compute in ``precision`` after every :meth:`restart`, and now, unless the run has moved to a wider one."""
        has_moved = self.precision != self.configured_precision
        if not (has_moved and is_wider(self.precision, precision)):
            self.precision = precision
        self.configured_precision = precision

    @property
    def precision(self) -> Precision:
        """What the steps are computed in now."""
        return self._precision

    @precision.setter
    def precision(self, precision: Precision) -> None:
        self._precision = precision
        self.loss_scaler.set_enabled(precision == "16-mixed")

    def restart(self) -> None:
        """Forget all steps: precision, scale, counters and reports are as in a new engine."""
        self.precision = self.configured_precision
        self.loss_scaler.restart()
        self.counters = StepCounters()
        self.last_step: StepReport | None = None
        self.skipped_in_a_row: dict[int, int] = {}
        self._said: set[str] = set()
        self._norm_requested = False
        self._held = HeldGradients()
        self.release()

    def release(self) -> None:
        """Leave true gradients behind, also where a window was not finished, and hold no tensor."""
        self._held.undo()
        self._held.pending.clear()
        self._loss: Tensor | None = None  # finite if all losses since the last step are
        self._loss_is_old = False
        self._wider: Precision | None = None  # what the next iteration is computed in
        self._blamed = False  # whether an overflow of the last backward is recorded: once is enough
        self._iteration_is_clean: bool | None = None  # None: no step yet whose gradients were scaled

    def request_grad_norm(self) -> None:
        """Have the next step measure ``last_step.grad_norm``; on every rank, or on none."""
        self._norm_requested = True

    @property
    def scaler(self) -> DynamicLossScaler | None:
        """The loss scaler, where the precision needs one."""
        return self.loss_scaler if self.precision == "16-mixed" else None

    # Backward ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def backward(
        self,
        loss: Tensor,
        among: Sequence[Optimizer],
        *,
        keep_true: bool,
        others: Sequence[Tensor] = (),
    ) -> Generator[Tensor, None, None]:
        """Yield what to call ``backward`` on.

        Args:
            loss: The loss, of any floating dtype.
            among: All optimizers; which of them the backward reaches need not be known.
            keep_true: Bring the gradients back to their true values afterwards. Without it they stay multiplied by the
                scale until the optimizer step, which saves a pass.
            others: Parameters of no optimizer whose gradients are to be kept true as well.

        """
        fresh = [not has_gradients(optimizer) for optimizer in among]
        self._remember(loss.detach(), alone=all(fresh))
        if self.scaler is None:
            yield loss
            return
        self.scaler.begin_backward(loss)
        scale = self.scaler.get_scale()
        if loss.dtype is torch.float16:
            scale = min(scale, FLOAT16_LOSS_MAX_SCALE)
        self._held.begin(scale, among, others, fresh=fresh, keep_true=keep_true)
        self._blamed = False
        try:
            yield scale_loss(loss, scale)
        except BaseException:
            self._held.undo()
            raise
        if keep_true:
            self._held.settle()

    def _remember(self, loss: Tensor, *, alone: bool) -> None:
        loss = gradients.whole(loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss)
        loss = loss.sum() if loss.ndim else loss
        if self._loss is not None and not (alone or self._loss_is_old):
            loss = self._loss * 0 + loss.to(self._loss.device)
        self._loss = loss
        self._loss_is_old = False

    # Step -------------------------------------------------------------------------------------------------------------

    def step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        *,
        index: int = 0,
        automatic: bool = True,
        hooks: Callable[[], None] | None = None,
        clipping: Clipping | None = None,
        rerun: Callable[[], Any] | None = None,
        trial: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run ``closure``, then apply the step or skip it; :attr:`last_step` says which.

        Args:
            optimizer: The optimizer, plain or fused.
            closure: Runs the forward and backward that complete the gradients, through :meth:`backward`.
            index: The position of ``optimizer`` among all.
            automatic: Whether the step is a whole iteration, whose gradients are the engine's to clear. Otherwise the
                user owns the loop, and :meth:`end_iteration` is to be called at the end of each iteration.
            hooks: Code of the user's that sees, and may change, the true gradients before clipping.
            clipping: What to clip the gradients to.
            rerun: What an optimizer gets that calls its closure again; ``closure`` if ``None``.
            trial: Whether the step belongs to a search that wants to see it fail: a skip lowers the scale, no more.
            kwargs: Handed to ``optimizer.step``.

        Returns:
            What ``optimizer.step`` returned or, for a skipped step, what ``closure`` returned.

        Raises:
            NonFiniteStepError: After ``max_skipped`` skipped steps in a row. State and weights are as they were.
            RuntimeError: If the optimizer needs to call its closure again and the precision is float16.

        """
        use = optimizers.use_of_closure(type(optimizer))
        if use == "required" and self.scaler is not None:
            raise optimizers.refusal(optimizer)
        output = closure()
        pending = self._held.pending.pop(index, None)
        made_at = None if pending is None else pending.scale
        self.loss_scaler.begin_step(optimizer, counted=made_at is not None)
        evidence = self._evidence(pending, automatic)
        wants_norm, self._norm_requested = self._norm_requested, False
        verdict = finish(optimizer, self._held, evidence, self.agree, hooks, clipping, wants_norm=wants_norm)
        if verdict.non_finite is None:
            if use != "none":
                again = partial(self._evaluate_again, optimizer, rerun or closure)
                kwargs["closure"] = optimizers.replay(optimizer, output, again)
            result = optimizers.apply(optimizer, verdict.divisor, kwargs)
            output = output if result is None else result
        elif automatic:
            for parameter in gradients.parameters_of(optimizer):
                parameter.grad = None
        self._held.stepped()
        report = self._conclude(index, verdict, made_at, counts=has_gradients(optimizer))
        try:
            if report.outcome == "skipped":
                self._answer_skip(report, made_at, trial=trial)
        finally:
            if automatic:
                self.end_iteration()
        return output

    def end_iteration(self) -> None:
        """Let the scale grow when due, if all steps of the iteration were applied; move on to a wider precision."""
        if self._iteration_is_clean and self.scaler is not None:
            self.scaler.record(overflow=False)
        self._iteration_is_clean = None
        if self._wider is not None:
            self.precision, self._wider = self._wider, None
            self.skipped_in_a_row.clear()
            self._held.pending.clear()  # what is known of gradients that were made in the narrow one

    def _evaluate_again(self, optimizer: Optimizer, rerun: Callable[[], Any]) -> Any:
        if self.scaler is not None:
            raise optimizers.refusal(optimizer)
        self._say(
            "closure",
            logging.INFO,
            f"{type(optimizer).__name__} evaluates its closure several times in a step. It is passed through: only the"
            " first evaluation is checked for inf and NaN.",
        )
        return rerun()

    def _evidence(self, pending: Pending | None, automatic: bool) -> Evidence:
        # A hook or a clipping may have replaced an inf that backward left. It is an overflow all the same, as long as a
        # lower scale or a wider precision may help; else the gradients are what the user made of them, as in fp32.
        return Evidence(
            loss=None if automatic and self._loss_is_old else self._loss,
            loss_counts=automatic,
            backward=None if pending is None else pending.evidence,
            backward_counts=pending is not None and self._can_be_cured(pending.scale),
        )

    # Outcome ----------------------------------------------------------------------------------------------------------

    def _conclude(self, index: int, verdict: Verdict, made_at: float | None, *, counts: bool) -> StepReport:
        outcome: Outcome = "applied" if verdict.non_finite is None else "skipped"
        self.last_step = report = StepReport(
            step=self.counters.applied_steps + self.counters.skipped_steps,
            optimizer=index,
            precision=self.precision,
            scale=1.0 if made_at is None else made_at,
            attempts=1,
            outcome=outcome,
            non_finite=verdict.non_finite,
            grad_norm=verdict.norm,
            clipped=verdict.clipped,
        )
        self.counters = self.counters.after(outcome)
        self._loss_is_old = True
        if outcome == "skipped":
            self._iteration_is_clean = False
            return report
        if counts:  # a step without gradients shows nothing
            self.skipped_in_a_row[index] = 0
        if self._iteration_is_clean is None and made_at is not None:
            self._iteration_is_clean = True
        return report

    def _answer_skip(self, report: StepReport, made_at: float | None, *, trial: bool) -> None:
        """Lower the scale if it may be to blame; otherwise count, and stop after ``max_skipped``."""
        if report.non_finite == "gradients" and made_at is not None and self._lower_scale(made_at):
            self._say(
                "scale",
                logging.INFO,
                f"Optimizer step {report.step}: the gradients overflowed at loss scale {made_at:g} and the step was"
                f" skipped; the next one is made at {self.loss_scaler.get_scale():g}. This is how the scale is found.",
            )
            return
        if self._wider is not None:
            return
        if trial:
            what = _WHAT[report.non_finite or "gradients"]
            self._say("trial", logging.INFO, f"Steps of the search were skipped in {report.precision!r}: {what}.")
            return
        skipped = self.skipped_in_a_row.get(report.optimizer, 0) + 1
        self.skipped_in_a_row[report.optimizer] = skipped
        what = _WHAT[report.non_finite or "gradients"]
        answer = None if self.policy is None else self.policy(report, skipped)
        if answer is not None and answer != report.precision:
            self._wider = answer
            self.notify(
                logging.WARNING,
                f"{skipped} optimizer steps in a row were skipped in {report.precision!r} because {what}, and"
                f" {self._why_not_lower()}: from optimizer step {report.step + 1} on the run computes in {answer!r}.",
            )
            return
        if answer is None and skipped >= self.max_skipped:
            self.skipped_in_a_row[report.optimizer] = 0
            raise NonFiniteStepError(
                f"{skipped} optimizer steps in a row were skipped because {what} (precision {report.precision!r}, last"
                f" loss scale {report.scale:g}); the last one was step {report.step}. None of them changed the weights,"
                f" and {self._why_not_lower()}. Look for inf or NaN in the batches; try a lower learning rate or"
                f" `Trainer(gradient_clip_val=1.0)`{_WIDER[report.precision]}."
                f" `max_skipped` (now {self.max_skipped}) sets how many such skips in a row are allowed."
            )
        self._say(
            f"{what}, {answer is None}",
            logging.WARNING if answer is None else logging.INFO,
            f"Optimizer step {report.step} was skipped because {what} (precision {report.precision!r}). "
            + (f"After {self.max_skipped} in a row the fit stops." if answer is None else "The precision may widen."),
        )

    def _why_not_lower(self) -> str:
        if self.scaler is None or self.scaler.loss_scale.dynamic:
            return "no lower loss scale can help"
        return "LossScale(dynamic=False) keeps the loss scale (a lower init_scale, or dynamic=True, may help)"

    def _lower_scale(self, made_at: float) -> bool:
        """Lower the scale, once for all gradients that were made with it; tell whether a lower one is to be tried."""
        if made_at <= self.loss_scaler.state.scale and not self._blamed:
            self.loss_scaler.record(overflow=True, at=made_at)
            self._blamed = True
        return self._may_help(made_at)

    def _may_help(self, scale: float) -> bool:
        """Tell whether a scale below ``scale`` can be had."""
        rules = self.loss_scaler.loss_scale
        return rules.dynamic and scale > rules.min_scale

    def _can_be_cured(self, scale: float) -> bool:
        return self._may_help(scale) or not self.loss_scaler.loss_scale.dynamic or self.policy is not None

    def _say(self, kind: str, level: int, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self.notify(level, text)


_WIDER: dict[Precision, str] = {
    "16-mixed": "; try a wider precision ('bf16-mixed' or '32-true')",
    "bf16-mixed": "; try a wider precision ('32-true')",
    "32-true": "; no precision is wider",
}
_WHAT: dict[Place, str] = {
    "loss": "the loss held inf or NaN",
    "gradients": "the gradients held inf or NaN",
    "hook": "a hook or a clipping of yours turned finite gradients into inf or NaN",
}
