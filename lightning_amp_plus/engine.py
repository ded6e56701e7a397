"""The flow of an optimizer step, in one place: scale, check, clip, then apply or skip. Plain torch.

    loss = closure()                        # forward and scaled backward, through ``StepEngine.backward``
    check loss and gradients                # one pass, one host read; all ranks agree
    finite:      hooks; clip; optimizer.step(); the scale grows when due
    not finite:  clear the gradients; lower the scale if it is to blame; report

What the gradients are multiplied by at any moment is one number, ``StepEngine.held_scale``. Everything else follows
from it: a backward at another scale first brings what is pending to that scale, user code is shown gradients at 1, and
the optimizer gets them at 1. Powers of two make all of it exact.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_amp_plus import gradients, optimizers
from lightning_amp_plus.grad_scaler import DynamicLossScaler
from lightning_amp_plus.loss_scale import FLOAT16_LOSS_MAX_SCALE, LossScale, scale_loss
from lightning_amp_plus.report import Outcome, Place, Precision, StepCounters, StepReport

_log = logging.getLogger(__name__)


class NonFiniteStepError(FloatingPointError):
    """Too many optimizer steps in a row had a loss or gradients that hold inf or NaN, and no lower scale can help."""


@dataclass(frozen=True)
class Clipping:
    """Clipping that the engine does itself: by the 2-norm of all gradients, or element by element."""

    threshold: float
    algorithm: Literal["norm", "value"] = "norm"


@dataclass
class _Pending:
    """What is known of the gradients that an optimizer has collected since its last step."""

    scale: float
    """The largest scale that they were made with."""
    evidence: Tensor | None = None
    """A scalar that is finite if the gradients were, as each backward left them, before user code could touch them."""


@dataclass(frozen=True)
class _Also:
    """What is looked at along with the gradients as they are."""

    loss: Tensor | None
    loss_counts: bool
    """Whether an inf or NaN in the loss alone is an overflow: where the engine owns the loop."""
    evidence: Tensor | None
    """See :class:`_Pending`."""


@dataclass(frozen=True)
class _Verdict:
    """What the check of a step found, and what is left to do to its gradients."""

    non_finite: Place | None = None
    norm: float | None = None
    clipped: bool | None = None
    divisor: float = 1.0  # what the kernel of a fused optimizer is still to divide by


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
        agree: Callable[[Tensor], Tensor] | None = None,
        notify: Callable[[int, str], None] = _notify,
    ) -> None:
        self.precision = precision
        self.loss_scaler = DynamicLossScaler(loss_scale)
        self.max_skipped = max_skipped
        self.agree = agree
        self.notify = notify
        self.restart()

    def restart(self) -> None:
        """Forget all steps: scale, counters and reports are as in a new engine."""
        self.loss_scaler.restart()
        self.counters = StepCounters()
        self.last_step: StepReport | None = None
        self.norm_requested = False
        self.held_scale = 1.0
        self.skipped_in_a_row: dict[int, int] = {}
        self._pending: dict[int, _Pending] = {}  # per optimizer
        self._holders: Sequence[Optimizer] = ()  # whose gradients are at ``held_scale`` in mid-window
        self._blamed = False  # whether an overflow of the last backward is recorded: once is enough
        self._loss: Tensor | None = None  # finite if all losses since the last step are
        self._loss_is_old = False
        self._iteration_is_clean: bool | None = None  # None: no step yet whose gradients were scaled
        self._said: set[str] = set()

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
        others: Iterable[Tensor] = (),
    ) -> Generator[Tensor, None, None]:
        """Yield what to call ``backward`` on.

        Args:
            loss: The loss, of any floating dtype.
            among: All optimizers; which of them the backward reaches need not be known.
            keep_true: Bring the gradients back to their true values afterwards. Without it they stay multiplied by the
                scale until the optimizer step, which saves a pass.
            others: Parameters of no optimizer whose gradients are to be kept true as well.

        """
        fresh = [not _has_gradients(optimizer) for optimizer in among]
        self._remember(loss.detach(), alone=all(fresh))
        if self.scaler is None:
            yield loss
            return
        self.scaler.begin_backward(loss)
        scale = self.scaler.get_scale()
        if loss.dtype is torch.float16:
            scale = min(scale, FLOAT16_LOSS_MAX_SCALE)
        self._hold_at(scale, among, others, frozen_too=not keep_true)
        for index, is_fresh in enumerate(fresh):
            if is_fresh or index not in self._pending:
                self._pending[index] = _Pending(scale)
            self._pending[index].scale = max(self._pending[index].scale, scale)
        self._blamed = False
        try:
            yield scale_loss(loss, scale)
        finally:
            if keep_true:
                self._hold_at(1.0, among, others, frozen_too=False)
            else:
                self._holders = among

    def release(self) -> None:
        """Leave true gradients behind, also where a window was not finished."""
        self._hold_at(1.0, self._holders, (), frozen_too=True)
        self._holders = ()

    def _hold_at(self, scale: float, among: Sequence[Optimizer], others: Iterable[Tensor], *, frozen_too: bool) -> None:
        """Bring all gradients to ``scale``, and remember what of them is not finite.

        A parameter that is frozen gets nothing from the backward between two such calls: it may stay as it is.
        """
        if scale == self.held_scale:
            return
        factor, self.held_scale = scale / self.held_scale, scale
        seen: set[int] = set()  # a parameter may belong to two optimizers
        for index, parameters in enumerate([*map(gradients.parameters_of, among), list(others)]):
            mine = [p for p in parameters if (frozen_too or p.requires_grad) and id(p) not in seen]
            seen.update(map(id, mine))
            evidence = gradients.rescale_(mine, factor)
            if scale == 1 and (pending := self._pending.get(index)) is not None:
                pending.evidence = evidence if pending.evidence is None else pending.evidence + evidence

    def _remember(self, loss: Tensor, *, alone: bool) -> None:
        loss = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
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
        pending = self._pending.pop(index, None)
        made_at = None if pending is None else pending.scale
        self.loss_scaler.begin_step(optimizer, counted=made_at is not None)
        verdict = self._finish_gradients(optimizer, self._also(pending, automatic), hooks, clipping)
        if verdict.non_finite is None:
            if use != "none":
                again = partial(self._evaluate_again, optimizer, rerun or closure)
                kwargs["closure"] = optimizers.replay(optimizer, output, again)
            output = optimizers.apply(optimizer, verdict.divisor, kwargs)
        elif automatic:
            for parameter in gradients.parameters_of(optimizer):
                parameter.grad = None
            self.held_scale = 1.0
        report = self._conclude(index, verdict, made_at)
        if automatic:
            self.end_iteration()
        if report.outcome == "skipped":
            self._answer_skip(report, made_at)
        return output

    def end_iteration(self) -> None:
        """Let the scale grow when it is due, if all steps of the iteration were applied."""
        if self._iteration_is_clean and self.scaler is not None:
            self.scaler.record(overflow=False)
        self._iteration_is_clean = None

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

    def _also(self, pending: _Pending | None, automatic: bool) -> _Also:
        # A hook or a clipping may have replaced an inf that backward left. It is an overflow all the same, as long as a
        # lower scale may help; where none can, the gradients are what the user made of them, as in fp32.
        evidence = pending.evidence if pending is not None and self._may_help(pending.scale) else None
        loss = None if automatic and self._loss_is_old else self._loss
        return _Also(loss, automatic, evidence)

    def _finish_gradients(
        self, optimizer: Optimizer, also: _Also, hooks: Callable[[], None] | None, clipping: Clipping | None
    ) -> _Verdict:
        """Check the gradients and make them what the optimizer is to see, in as few passes as possible."""
        wants_norm, self.norm_requested = self.norm_requested, False
        if hooks is None:
            return self._check_and_clip(optimizer, also, clipping, wants_norm)
        shown = self._check_and_clip(optimizer, also, None, wants_norm)
        if shown.non_finite is not None:
            return shown
        if shown.divisor != 1:
            gradients.multiply_(gradients.collect(gradients.parameters_of(optimizer)), 1 / shown.divisor)
        hooks()
        verdict = self._check_and_clip(optimizer, also, clipping, False)
        if verdict.non_finite is not None:
            return _Verdict("hook")
        return replace(verdict, norm=shown.norm if wants_norm else verdict.norm)

    def _check_and_clip(
        self, optimizer: Optimizer, also: _Also, clipping: Clipping | None, wants_norm: bool
    ) -> _Verdict:
        grads = gradients.collect(gradients.parameters_of(optimizer))
        max_norm = clipping.threshold if clipping is not None and clipping.algorithm == "norm" else None
        max_value = clipping.threshold if clipping is not None and max_norm is None else None
        in_kernel = self.held_scale != 1 and max_value is None and optimizers.divides_in_kernel(optimizer, grads)
        norm: float | None = None
        # A norm only reads. So it is the cheaper check wherever the unscaling that the other does is not needed.
        if wants_norm or max_norm is not None or in_kernel or self.held_scale == 1:
            norm, bad = self._check_by_norm(grads, also)
        else:
            _, bad = self._read(self._unscale(grads), also)
        if bad is not None:
            return _Verdict(bad)

        clipped, factor = None, 1 / self.held_scale
        if max_norm is not None and norm is not None:
            coefficient = gradients.clip_coefficient(norm, max_norm, gradients.norm_dtype(grads))
            clipped, factor = coefficient < 1, factor * coefficient
        self.held_scale = 1.0
        in_kernel = in_kernel and factor > optimizers.SMALLEST_FACTOR
        if factor != 1 and not in_kernel:
            gradients.multiply_(grads, factor)
        if max_value is not None:
            gradients.clip_value_(grads, max_value)
        return _Verdict(None, norm, clipped, 1 / factor if in_kernel else 1.0)

    def _check_by_norm(self, grads: list[Tensor], also: _Also) -> tuple[float, Place | None]:
        """Return the norm of the true gradients, and what is not finite."""
        norm, bad = self._read(gradients.total_norm(grads), also)
        if bad is not None:  # or the gradients are finite and only their squares are not: look at each element
            _, bad = self._read(self._unscale(grads), also)
            norm = float(gradients.total_norm(grads, torch.float64)) if bad is None else norm
        return norm / self.held_scale, bad

    def _unscale(self, grads: list[Tensor]) -> Tensor:
        inverse, self.held_scale = 1 / self.held_scale, 1.0
        return gradients.unscale_(grads, inverse)

    def _read(self, evidence: Tensor, also: _Also) -> tuple[float, Place | None]:
        """Read ``evidence``, finite if the gradients are, and what else there is, in one transfer.

        All ranks get the same answer to what is not finite. They exchange flags of 0 and 1 and never the numbers, since
        a maximum may drop a NaN.
        """
        if also.evidence is not None:
            evidence = evidence + also.evidence.to(evidence.device)
        loss = torch.zeros_like(evidence) if also.loss is None else also.loss.to(evidence.device)
        dtype = torch.promote_types(evidence.dtype, loss.dtype)
        numbers = torch.stack([evidence.to(dtype), loss.to(dtype)])
        if self.agree is None:
            value, loss_value = numbers.tolist()
            bad_gradients, bad_loss = not math.isfinite(value), not math.isfinite(loss_value)
        else:
            flags = self.agree((~numbers.isfinite()).float())
            value, _, bad_gradients, bad_loss = torch.cat([numbers, flags.to(numbers)]).tolist()
        if not (bad_gradients or (bad_loss and also.loss_counts)):
            return value, None
        return value, "loss" if bad_loss else "gradients"

    # Outcome ----------------------------------------------------------------------------------------------------------

    def _conclude(self, index: int, verdict: _Verdict, made_at: float | None) -> StepReport:
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
        self.skipped_in_a_row[index] = 0
        if self._iteration_is_clean is None and made_at is not None:
            self._iteration_is_clean = True
        return report

    def _answer_skip(self, report: StepReport, made_at: float | None) -> None:
        """Lower the scale if it may be to blame; otherwise count, and stop after ``max_skipped``."""
        if report.non_finite == "gradients" and made_at is not None and self._lower_scale(made_at):
            self._say(
                "scale",
                logging.INFO,
                f"Optimizer step {report.step}: the gradients overflowed at loss scale {made_at:g} and the step was"
                f" skipped; the scale is now {self.loss_scaler.get_scale():g}. This is how the scale is found.",
            )
            return
        skipped = self.skipped_in_a_row.get(report.optimizer, 0) + 1
        self.skipped_in_a_row[report.optimizer] = skipped
        what = _WHAT[report.non_finite or "gradients"]
        if skipped >= self.max_skipped:
            self.skipped_in_a_row[report.optimizer] = 0
            raise NonFiniteStepError(
                f"{skipped} optimizer steps in a row were skipped because {what} (precision {report.precision!r}, last"
                f" loss scale {report.scale:g}); the last one was step {report.step}. A lower loss scale cannot help."
                " The weights are those of the last applied step. Look for inf or NaN in the batches; try a lower"
                " learning rate or `Trainer(gradient_clip_val=1.0)`; try a wider precision ('bf16-mixed' or '32-true')."
                f" `max_skipped` (now {self.max_skipped}) sets how many skips in a row are allowed."
            )
        self._say(
            what,
            logging.WARNING,
            f"Optimizer step {report.step} was skipped because {what} (precision {report.precision!r}). After"
            f" {self.max_skipped} in a row the fit stops.",
        )

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

    def _say(self, kind: str, level: int, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self.notify(level, text)


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for parameter in gradients.parameters_of(optimizer))


_WHAT: dict[Place, str] = {
    "loss": "the loss held inf or NaN",
    "gradients": "the gradients held inf or NaN",
    "hook": "a hook or a clipping of yours turned finite gradients into inf or NaN",
}
