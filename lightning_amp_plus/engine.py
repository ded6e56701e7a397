"""The flow of an optimizer step, in one place: scale, check, clip, then apply or skip. Plain torch.

    loss = closure()                        # forward and scaled backward, through ``StepEngine.backward``
    check loss and gradients                # one pass, one host read; all ranks agree
    while the gradients are not finite, the loss is, and a lower scale is left to try:
        clear the gradients; roll back; run the window again at the lower scale; check
    finite:      hooks; clip; optimizer.step(); the scale grows when due
    not finite:  clear the gradients; roll back; report; ask the policy

User code and the optimizer see gradients that are multiplied by 1: ``held.py`` keeps the books, and ``finish.py`` takes
the gradients from the last backward to the optimizer.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_amp_plus import gradients, optimizers
from lightning_amp_plus.checks import Agree, Evidence
from lightning_amp_plus.finish import Clipping, Verdict, finish
from lightning_amp_plus.grad_scaler import DynamicLossScaler
from lightning_amp_plus.held import HeldGradients, Pending, has_gradients
from lightning_amp_plus.loss_scale import FLOAT16_LOSS_MAX_SCALE, LossScale, scale_loss
from lightning_amp_plus.report import Outcome, Precision, StepCounters, StepReport, is_wider
from lightning_amp_plus.skips import Notify, Skips

_log = logging.getLogger(__name__)


class Window(Protocol):
    """The micro-batches whose gradients a step sums, as the engine sees them."""

    def obstacle(self) -> str | None:
        """Return why :meth:`run_again` would not do what the first attempt did, as a clause; ``None`` if it would."""

    def run_again(self) -> Any:
        """Roll back and run all micro-batches again, through :meth:`StepEngine.backward`; return what the last does."""

    def rollback(self) -> None:
        """Put back what the attempts have changed, but for gradients."""


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
        retries: How often a step whose gradients overflow is run again at lower loss scales; 0 skips it at once.
        agree: Reduces a small float32 tensor over all ranks by its maximum; ``None`` on one process.
        notify: Called with a ``logging`` level and a line of text, at most once per kind of incident.

    """

    def __init__(
        self,
        precision: Precision,
        loss_scale: LossScale | None = None,
        max_skipped: int = 10,
        retries: int = 5,
        agree: Agree | None = None,
        notify: Notify = _notify,
    ) -> None:
        self.configured_precision = precision
        self.loss_scaler = DynamicLossScaler(loss_scale)
        self.skips = Skips(max_skipped, notify)
        self.retries = retries
        self.agree = agree
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
        self.scaler: DynamicLossScaler | None = self.loss_scaler if precision == "16-mixed" else None

    def restart(self) -> None:
        """Forget all steps: precision, scale, counters and reports are as in a new engine."""
        self.precision = self.configured_precision
        self.loss_scaler.restart()
        self.counters = StepCounters()
        self.last_step: StepReport | None = None
        self.skips.restart()
        self._norm_requested = False
        self._held = HeldGradients()
        self.release()

    def release(self) -> None:
        """Leave true gradients behind, also where a window was not finished, and hold no tensor."""
        self._held.undo()
        self._held.pending.clear()
        self._loss: Tensor | None = None  # finite if all losses since the last step are
        self._loss_is_old = False
        self.skips.wider = None
        self._blamed = False  # whether an overflow of the last backward is recorded: once is enough
        self.iteration: list[Outcome] = []  # of the steps since the last iteration ended
        self._iteration_is_clean: bool | None = None  # None: no step yet whose gradients were scaled
        self._others: list[tuple[Tensor, Tensor | None]] = []  # and their gradients before the step
        self._began_fresh = True  # whether the optimizers had no gradients before the step
        self._retry_scale: float | None = None
        self._anomaly: RuntimeError | None = None

    def request_grad_norm(self) -> None:
        """Have the steps until :meth:`end_iteration` measure ``last_step.grad_norm``; on every rank, or on none."""
        self._norm_requested = True

    @property
    def can_retry(self) -> bool:
        """Whether a step whose gradients overflow is run again at lower scales, if its window allows it."""
        return self.scaler is not None and self.retries > 0

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
        is_first = self._loss is None or self._loss_is_old
        if is_first and self._retry_scale is None:
            self._began_fresh = all(fresh)
            self._others = [(other, None if other.grad is None else other.grad.clone()) for other in others]
        self._remember(loss.detach(), alone=all(fresh))
        if self.scaler is None:
            yield loss
            return
        self.scaler.begin_backward(loss)
        scale = self.scaler.get_scale() if self._retry_scale is None else self._retry_scale
        if loss.dtype is torch.float16:
            scale = min(scale, FLOAT16_LOSS_MAX_SCALE)
        self._held.begin(scale, among, others, fresh=fresh, keep_true=keep_true)
        self._blamed = False
        try:
            yield scale_loss(loss, scale)
        except BaseException as error:
            self._held.undo()
            if not self._is_anomaly(error):
                raise
            return
        if keep_true:
            self._held.settle()

    def _is_anomaly(self, error: BaseException) -> bool:
        """Take the error of torch's anomaly mode for the overflow that a lower scale may cure; on one process only."""
        if not isinstance(error, RuntimeError) or "returned nan values in its" not in str(error):
            return False
        if not torch.is_anomaly_enabled() or self.agree is not None:
            return False
        self._anomaly = error
        return True

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
        window: Window | None = None,
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
            window: What ``closure`` completes, where it can be rolled back and run again.
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
        check = partial(self._check, optimizer, index, automatic, hooks, clipping)
        verdict, made_at = check()
        attempts, failed_at = 1, None
        if window is not None:
            for scale in self._scales_to_retry(verdict, made_at, window):
                attempts, failed_at = attempts + 1, made_at
                output = self._run_again(optimizer, window, scale)
                verdict, made_at = check()
                if verdict.non_finite != "gradients":
                    break
        if verdict.non_finite is None:
            if use != "none":
                again = partial(self._evaluate_again, optimizer, rerun or closure)
                kwargs["closure"] = optimizers.replay(optimizer, output, again)
            result = optimizers.apply(optimizer, verdict.divisor, kwargs)
            output = output if result is None else result
        elif automatic:
            self._clear(optimizer)
            if window is not None:
                window.rollback()
        self._held.stepped()
        report = self._conclude(index, verdict, made_at, attempts, counts=has_gradients(optimizer))
        try:
            if report.outcome == "skipped":
                self._answer_skip(report, made_at, trial=trial)
            elif failed_at is not None and made_at is not None:
                self._note_cure(report, failed_at, made_at)
        finally:
            self._anomaly = None
            if automatic:
                self.end_iteration()
        return output

    def _check(
        self,
        optimizer: Optimizer,
        index: int,
        automatic: bool,
        hooks: Callable[[], None] | None,
        clipping: Clipping | None,
    ) -> tuple[Verdict, float | None]:
        """Check what the last backward has completed, and return the scale that it was made with too."""
        pending = self._held.pending.pop(index, None)
        made_at = None if pending is None else pending.scale
        self.loss_scaler.begin_step(optimizer, counted=made_at is not None)
        if self._anomaly is not None:
            return Verdict("gradients"), made_at
        evidence = self._evidence(pending, automatic)
        verdict = finish(optimizer, self._held, evidence, self.agree, hooks, clipping, wants_norm=self._norm_requested)
        return verdict, made_at

    def end_iteration(self) -> None:
        """Let the scale grow when due, if all steps of the iteration were applied; move on to a wider precision."""
        if self._iteration_is_clean and self.scaler is not None:
            self.scaler.record(overflow=False)
        self._iteration_is_clean = None
        self._norm_requested = False
        self.iteration.clear()
        if self.skips.wider is not None:
            self.precision = self.skips.wider
            self.skips.moved()
            self._held.pending.clear()  # what is known of gradients that were made in the narrow one

    # Again ------------------------------------------------------------------------------------------------------------

    def _scales_to_retry(self, verdict: Verdict, made_at: float | None, window: Window) -> list[float]:
        if not self.can_retry or made_at is None or verdict.non_finite != "gradients":
            return []
        why = window.obstacle() if self._began_fresh else "the optimizer had gradients before its first micro-batch"
        if self._on_all_ranks(why is None):
            return self.loss_scaler.retry_scales(made_at, self.retries)
        self.skips.say(
            "again",
            logging.WARNING,
            f"A step whose gradients overflowed cannot be run again: {why or 'another rank cannot'}. Such steps are"
            " skipped and lower the loss scale; retries=0 does so from the start, without this warning.",
        )
        return []

    def _on_all_ranks(self, true: bool) -> bool:
        return true if self.agree is None else self.agree(torch.tensor([0.0 if true else 1.0])).item() == 0

    def _run_again(self, optimizer: Optimizer, window: Window, scale: float) -> Any:
        self._clear(optimizer)  # first: one attempt at a time is what fits into memory
        self._loss, self._anomaly, self._retry_scale = None, None, scale
        try:
            return window.run_again()
        finally:
            self._retry_scale = None

    def _clear(self, optimizer: Optimizer) -> None:
        self._held.stepped()
        for parameter in gradients.parameters_of(optimizer):
            parameter.grad = None
        for other, gradient in self._others:  # which may have come from earlier steps
            other.grad = None if gradient is None else gradient.clone()

    def _evaluate_again(self, optimizer: Optimizer, rerun: Callable[[], Any]) -> Any:
        if self.scaler is not None:
            raise optimizers.refusal(optimizer)
        self.skips.say(
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

    def _conclude(
        self, index: int, verdict: Verdict, made_at: float | None, attempts: int, *, counts: bool
    ) -> StepReport:
        outcome: Outcome = "applied" if verdict.non_finite is None else "skipped"
        self.last_step = report = StepReport(
            step=self.counters.applied_steps + self.counters.skipped_steps,
            optimizer=index,
            precision=self.precision,
            scale=1.0 if made_at is None else made_at,
            attempts=attempts,
            outcome=outcome,
            non_finite=verdict.non_finite,
            grad_norm=verdict.norm,
            clipped=verdict.clipped,
        )
        self.counters = self.counters.after(outcome, attempts)
        self._loss_is_old = True
        self.iteration.append(outcome)
        if outcome == "skipped" or attempts > 1:
            self._iteration_is_clean = False
        if outcome == "skipped":
            return report
        if counts:  # a step without gradients shows nothing
            self.skips.in_a_row[index] = 0
        if self._iteration_is_clean is None and made_at is not None:
            self._iteration_is_clean = True
        return report

    def _note_cure(self, report: StepReport, failed_at: float, worked_at: float) -> None:
        self.loss_scaler.record_cure(failed=failed_at, worked=worked_at)
        text = f"Optimizer step {report.step}: the gradients overflowed at loss scale {failed_at:g}; the step was run"
        text += f" again and applied at {worked_at:g}."
        if self.loss_scaler.loss_scale.dynamic:
            self.skips.say("scale", logging.INFO, f"{text} This is how the scale is found.")
        else:
            self.skips.say("scale", logging.WARNING, f"{text} LossScale(dynamic=False) keeps the scale where it is.")

    def _answer_skip(self, report: StepReport, made_at: float | None, *, trial: bool) -> None:
        """Lower the scale if it may be to blame and was not tried; otherwise ask what follows."""
        untried = report.non_finite == "gradients" and report.attempts == 1
        if untried and made_at is not None and self._lower_scale(made_at):
            self.skips.say(
                "scale",
                logging.INFO,
                f"Optimizer step {report.step}: the gradients overflowed at loss scale {made_at:g} and the step was"
                f" skipped; the next one is made at {self.loss_scaler.get_scale():g}. This is how the scale is found.",
            )
            return
        if self._anomaly is not None:
            raise self._anomaly
        if trial:
            self.skips.note_trial(report)
        elif self.skips.wider is None:
            self.skips.answer(report, self._why_not_lower(report))

    def _why_not_lower(self, report: StepReport) -> str:
        if self.scaler is None or self.scaler.loss_scale.dynamic or report.attempts > 1:
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
        return self._may_help(scale) or not self.loss_scaler.loss_scale.dynamic or self.skips.policy is not None
