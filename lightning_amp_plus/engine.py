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
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_amp_plus import gradients, optimizers
from lightning_amp_plus.loss_scale import FLOAT16_LOSS_MAX_SCALE, DynamicLossScaler, LossScale, scale_loss
from lightning_amp_plus.report import Outcome, Place, Precision, StepCounters, StepReport

_log = logging.getLogger(__name__)


class NonFiniteStepError(FloatingPointError):
    """Too many optimizer steps in a row had a loss or gradients that hold inf or NaN, and no lower scale can help."""


@dataclass(frozen=True)
class Clipping:
    """Clipping that the engine does itself: by the 2-norm of all gradients, or element by element."""

    threshold: float
    algorithm: Literal["norm", "value"] = "norm"


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
        self._made_at: dict[int, float] = {}  # per optimizer: the scale of the first backward since its last step
        self._loss: Tensor | None = None  # the sum of the losses since the last step: finite only if all are
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
        self._remember(loss.detach())
        if self.scaler is None:
            yield loss
            return
        scale = self.scaler.get_scale()
        if loss.dtype is torch.float16:
            scale = min(scale, FLOAT16_LOSS_MAX_SCALE)
        # A parameter that is frozen now gets no gradient in this backward: what it holds stays as it is.
        reached = [p for optimizer in among for p in gradients.parameters_of(optimizer) if p.requires_grad]
        if len(among) > 1 or others:
            reached = list({id(p): p for p in (*reached, *others)}.values())
        self._hold_at(scale, reached)
        for index in range(len(among)):
            self._made_at.setdefault(index, scale)
        try:
            yield scale_loss(loss, scale)
        finally:
            if keep_true:
                self._hold_at(1.0, reached)

    def _hold_at(self, scale: float, parameters: list[Tensor]) -> None:
        if scale != self.held_scale:
            gradients.rescale_(parameters, scale / self.held_scale)
            self.held_scale = scale

    def _remember(self, loss: Tensor) -> None:
        loss = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
        loss = loss.sum() if loss.ndim else loss
        self._loss = loss if self._loss is None or self._loss_is_old else self._loss + loss.to(self._loss.device)
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
        made_at = self._made_at.pop(index, None)
        verdict = self._finish_gradients(optimizer, automatic, hooks, clipping)
        if verdict.non_finite is None:
            if use != "none":
                again = partial(self._evaluate_again, optimizer, rerun or closure)
                kwargs["closure"] = optimizers.replay(optimizer, output, again)
            output = optimizers.apply(optimizer, verdict.divisor, kwargs)
        elif automatic:
            for parameter in gradients.parameters_of(optimizer):
                parameter.grad = None
            self.held_scale = 1.0
        self._conclude(index, verdict, made_at)
        if automatic:
            self.end_iteration()
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

    def _finish_gradients(
        self, optimizer: Optimizer, automatic: bool, hooks: Callable[[], None] | None, clipping: Clipping | None
    ) -> _Verdict:
        """Check the gradients and make them what the optimizer is to see, in as few passes as possible."""
        if hooks is None:
            return self._check_and_clip(optimizer, automatic, clipping)
        grads = gradients.collect(gradients.parameters_of(optimizer))
        _, bad = self._read(self._unscale(grads), automatic)
        if bad is not None:
            return _Verdict(bad)
        hooks()
        verdict = self._check_and_clip(optimizer, automatic, clipping)
        return verdict if verdict.non_finite is None else _Verdict("hook")

    def _check_and_clip(self, optimizer: Optimizer, automatic: bool, clipping: Clipping | None) -> _Verdict:
        grads = gradients.collect(gradients.parameters_of(optimizer))
        by_norm = clipping is not None and clipping.algorithm == "norm"
        by_value = clipping is not None and not by_norm
        in_kernel = self.held_scale != 1 and not by_value and optimizers.divides_in_kernel(optimizer, grads)
        norm: float | None = None
        if self.norm_requested or by_norm or in_kernel or self.held_scale == 1:
            norm, bad = self._read(gradients.total_norm(grads), automatic)
            if bad == "gradients":  # or finite gradients whose squares are not: look at each element
                _, bad = self._read(self._unscale(grads), automatic)
                norm = None if bad else float(gradients.total_norm(grads, torch.float64))
        else:
            _, bad = self._read(self._unscale(grads), automatic)
        self.norm_requested = False
        if bad is not None:
            return _Verdict(bad)

        true_norm = None if norm is None else norm / self.held_scale
        coefficient = 1.0
        if clipping is not None and true_norm is not None and by_norm:
            coefficient = gradients.clip_coefficient(true_norm, clipping.threshold)
        factor, self.held_scale = coefficient / self.held_scale, 1.0
        in_kernel = in_kernel and factor > optimizers.SMALLEST_FACTOR
        if factor != 1 and not in_kernel:
            gradients.multiply_(grads, factor)
        if clipping is not None and by_value:
            gradients.clip_value_(grads, clipping.threshold)
        return _Verdict(None, true_norm, coefficient < 1 if by_norm else None, 1 / factor if in_kernel else 1.0)

    def _unscale(self, grads: list[Tensor]) -> Tensor:
        inverse, self.held_scale = 1 / self.held_scale, 1.0
        return gradients.unscale_(grads, inverse)

    def _read(self, evidence: Tensor, automatic: bool) -> tuple[float, Place | None]:
        """Read ``evidence`` and the loss in one transfer; all ranks get the same answer to what is not finite.

        The ranks exchange flags of 0 and 1 and never the numbers, since a maximum may drop a NaN.

        Args:
            evidence: A scalar that is finite if the gradients are.
            automatic: Whether the loss is the engine's: then its inf or NaN alone is an overflow.

        """
        loss = torch.zeros_like(evidence) if self._loss is None else self._loss.to(evidence.device)
        dtype = torch.promote_types(evidence.dtype, loss.dtype)
        numbers = torch.stack([evidence.to(dtype), loss.to(dtype)])
        if self.agree is None:
            value, loss_value = numbers.tolist()
            bad_gradients, bad_loss = not math.isfinite(value), not math.isfinite(loss_value)
        else:
            flags = self.agree((~numbers.isfinite()).float())
            value, _, bad_gradients, bad_loss = torch.cat([numbers, flags.to(numbers)]).tolist()
        if not (bad_gradients or (bad_loss and automatic)):
            return value, None
        return value, "loss" if bad_loss else "gradients"

    # Outcome ----------------------------------------------------------------------------------------------------------

    def _conclude(self, index: int, verdict: _Verdict, made_at: float | None) -> None:
        outcome: Outcome = "applied" if verdict.non_finite is None else "skipped"
        self.last_step = StepReport(
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
        if outcome == "applied":
            self.skipped_in_a_row[index] = 0
            if self._iteration_is_clean is None and made_at is not None:
                self._iteration_is_clean = True
        else:
            self._iteration_is_clean = False
            self._answer_skip(self.last_step, made_at)

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
        """Lower the scale once for all gradients that were made with it; tell whether a lower one is to be tried."""
        scaler = self.loss_scaler
        before = scaler.state
        if made_at > before.scale:  # lowered since: another optimizer failed on the same backward
            return True
        scaler.record(overflow=True, at=made_at)
        return scaler.state.scale < min(before.scale, made_at) or scaler.state.overflows > before.overflows

    def _say(self, kind: str, level: int, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self.notify(level, text)


_WHAT: dict[Place, str] = {
    "loss": "the loss held inf or NaN",
    "gradients": "the gradients held inf or NaN",
    "hook": "a hook or a clipping of yours turned finite gradients into inf or NaN",
}
