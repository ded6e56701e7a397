"""The flow of an optimizer step, in one place: scale, check, clip, then apply or skip. Plain torch.

    loss = closure()                        # forward and scaled backward, through ``StepEngine.backward``
    check loss and gradients                # one pass, one host read; all ranks agree
    while the gradients are not finite, the loss is, and a lower scale is left to try:
        clear the gradients; roll back; run the window again at the lower scale; check
    still not finite, and there are wider precisions:
        run the window again in the widest; there it is finite, or nothing helps     # see ``proof.py``
    finite:      hooks; clip; optimizer.step(); the scale grows when due
    not finite:  clear the gradients; roll back; report; count

What is tried is in ``recovery.py``, what follows in ``aftermath.py``.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_amp_plus.diagnosis.cause import Diagnosis, of_parameters
from lightning_amp_plus.diagnosis.finite import non_finite_state
from lightning_amp_plus.diagnosis.fp32_modules import KeptModules
from lightning_amp_plus.diagnosis.lines import parts_of
from lightning_amp_plus.diagnosis.locate import Fault, Locator
from lightning_amp_plus.precisions import PrecisionName
from lightning_amp_plus.scaling import optimizers
from lightning_amp_plus.scaling.checks import Agree
from lightning_amp_plus.scaling.finish import Clipping, Look
from lightning_amp_plus.scaling.held import has_gradients
from lightning_amp_plus.scaling.loss_scale import LossScale
from lightning_amp_plus.scaling.passes import BackwardPasses, Request
from lightning_amp_plus.scaling.scaler import DynamicLossScaler
from lightning_amp_plus.step.aftermath import after_proof, after_skip
from lightning_amp_plus.step.fallback import Fallback
from lightning_amp_plus.step.proof import Attempt, Proof
from lightning_amp_plus.step.recovery import try_again
from lightning_amp_plus.step.report import Outcome, StepCounters, StepReport, is_wider
from lightning_amp_plus.step.skips import NonFiniteStepError, Notify, Skips
from lightning_amp_plus.step.tries import Window, is_out_of_memory

_log = logging.getLogger(__name__)


def _no_checkpoint() -> None:
    """There is none."""


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
        keep_fp32: Patterns of the names of modules that compute in float32 in every precision.

    Attributes:
        fallback: When the run goes on in a wider precision, and in which.
        exempt: Kinds of errors that end a run on purpose, and are never put to the proof.
        checkpoint: Returns what a broken model can be restored from, if there is something.
        by_optimizer: For each optimizer, by its position, how many steps were applied and how many skipped.
        observers: Called with the report of each step, when all that follows from it is done.

    """

    def __init__(
        self,
        precision: PrecisionName,
        loss_scale: LossScale | None = None,
        max_skipped: int = 10,
        retries: int = 5,
        agree: Agree | None = None,
        notify: Notify = _notify,
        keep_fp32: Sequence[str] = (),
    ) -> None:
        self.configured_precision = precision
        self.loss_scaler = DynamicLossScaler(loss_scale)
        self.passes = BackwardPasses(self.loss_scaler)
        self.skips = Skips(max_skipped, notify)
        self.kept = KeptModules(keep_fp32)
        self.fallback = Fallback(self.skips)
        self.module: Module | None = None
        self.known: tuple[str, ...] | None = None
        self.exempt: tuple[type[Exception], ...] = ()
        self.checkpoint: Callable[[], str | None] = _no_checkpoint
        self.observers: list[Callable[[StepReport], None]] = []
        self.retries = retries
        self.agree = agree
        self.restart()

    @property
    def agree(self) -> Agree | None:
        """Reduces a small float32 tensor over all ranks by its maximum; ``None`` on one process."""
        return self.passes.agree

    @agree.setter
    def agree(self, agree: Agree | None) -> None:
        self.passes.agree = agree

    def configure(self, precision: PrecisionName) -> None:
        """Compute in ``precision`` after every :meth:`restart`, and now, unless the run has moved to a wider one."""
        has_moved = self.precision != self.configured_precision
        if not (has_moved and is_wider(self.precision, precision)):
            self.precision = precision
        self.configured_precision = precision

    @property
    def precision(self) -> PrecisionName:
        """What the run computes in now."""
        return self._precision

    @precision.setter
    def precision(self, precision: PrecisionName) -> None:
        self._precision = precision
        self.attempt_precision = precision
        self.loss_scaler.set_enabled(precision == "16-mixed")
        self.scaler: DynamicLossScaler | None = self.loss_scaler if precision == "16-mixed" else None

    def restart(self) -> None:
        """Forget all steps: precision, scale, counters and reports are as in a new engine."""
        self.precision = self.configured_precision
        self.loss_scaler.restart()
        self.counters = StepCounters()
        self.by_optimizer: dict[int, list[int]] = {}
        self.last_step: StepReport | None = None
        self.skips.restart()
        self.kept.find(())
        self.fallback.restart()
        self._norm_requested = False
        self._looks: tuple[Look, ...] = ()
        self.release()

    def release(self) -> None:
        """Leave true gradients behind, also where a window was not finished, and hold no tensor."""
        self.passes.release()
        self.fallback.next_precision = None
        self.attempt_precision = self.precision
        self.iteration: list[Outcome] = []  # of the steps since the last iteration ended
        self._iteration_is_clean: bool | None = None  # None: no step yet whose gradients were scaled
        self.raised: Diagnosis | None = None  # of what the window has raised in the run's precision
        self.tried_lower = False  # whether the step was run at lower scales
        self.locator: Locator | None = None  # what looks on

    def request_grad_norm(self) -> None:
        """Have the steps until :meth:`end_iteration` measure ``last_step.grad_norm``; on every rank, or on none."""
        self._norm_requested = True

    def request_look(self, look: Look) -> None:
        """Have ``look`` see the gradients of the steps until :meth:`end_iteration`, before any hook and clipping."""
        if look not in self._looks:
            self._looks = (*self._looks, look)

    def watch(self, module: Module, device_type: str) -> None:
        """Take up a run of ``module``, whose kept modules compute in float32 from now on, until :meth:`unwatch`."""
        self.module = module
        self.known = None
        self._tell_missing(self.kept.attach(module, device_type))

    def keep(self, names: Iterable[str]) -> None:
        """Keep exactly these modules in float32, besides those that were asked for."""
        self._tell_missing(self.kept.find(names))

    def _tell_missing(self, names: Sequence[str]) -> None:
        if names:
            text = f"Not there is what was found to need float32, and is left out: {', '.join(names)}."
            self.skips.notify(logging.WARNING, text)

    def unwatch(self) -> None:
        """Leave nothing on the module."""
        self.kept.detach()
        self.module, self.known, self.checkpoint = None, None, _no_checkpoint
        self.observers, self._looks = [], ()

    def begin_window(self) -> None:
        """Begin a window in the run's precision, whatever the last one has ended in.

        When a fit begins, take note of the buffers and frozen parameters that hold inf or NaN: they are meant.
        """
        self.attempt_precision, self.raised, self.passes.has_raised = self._precision, None, False
        if self.known is None and self.module is not None:
            trained = {name for name, parameter in self.module.named_parameters() if parameter.requires_grad}
            self.known = tuple(non_finite_state(self.module, trained))

    def __getstate__(self) -> dict[str, Any]:
        of_a_run: dict[str, Any] = {"module": None, "known": None, "locator": None, "checkpoint": _no_checkpoint}
        of_a_run |= {"observers": [], "_looks": ()}
        return {**self.__dict__, **of_a_run}

    # What may be tried ------------------------------------------------------------------------------------------------

    @property
    def rungs(self) -> tuple[PrecisionName, ...]:
        """The wider precisions that steps may be tried in, from narrow to wide; none without rules."""
        return self.fallback.rungs(self.precision)

    @property
    def wants_batches(self) -> bool:
        """Whether windows may be run again, for which their batches are to be kept."""
        if self.scaler is not None and self.retries > 0:
            return True
        return bool(self.rungs) or self.fallback.on_trial is not None or self.skips.is_near_last

    @property
    def wants_instruments(self) -> bool:
        """Whether the next window is to be looked on at, because the last one failed and cannot be run again."""
        return self.fallback.is_suspect and (bool(self.rungs) or self.skips.is_near_last)

    def can_run_again(self, window: Window) -> bool:
        """Tell whether all ranks can run a window again, and the first time that one cannot, say why."""
        fresh = self.passes.began_fresh
        why = window.obstacle() if fresh else "the optimizer had gradients before its first micro-batch"
        if not self.on_any_rank(why is not None):
            return True
        self.skips.say(
            "again",
            logging.WARNING,
            f"A step that was not finite cannot be run again: {why or 'another rank cannot'}. Such steps are skipped,"
            " and lower the loss scale if their gradients overflowed; retries=0 does so from the start, without this"
            " warning.",
        )
        return False

    def on_any_rank(self, true: bool) -> bool:
        """Tell whether something is true on any rank."""
        return true if self.agree is None else self.agree(torch.tensor([float(true)])).item() > 0

    def can_be_cured(self, scale: float) -> bool:
        """Tell whether a lower scale or a wider precision may help gradients that were made at ``scale``."""
        return self.may_lower(scale) or not self.loss_scaler.loss_scale.dynamic or bool(self.rungs)

    def passes_through(self, error: Exception) -> bool:
        """Tell whether an error is never put to the proof: memory, and what ends a fit on purpose."""
        return is_out_of_memory(error) or isinstance(error, (NonFiniteStepError, StopIteration, *self.exempt))

    def diagnose_state(self) -> Diagnosis | None:
        """Look for parameters and buffers that are not finite, on all ranks; ``None`` if there are none."""
        names = [] if self.module is None else non_finite_state(self.module, self.known or ())
        if not self.on_any_rank(bool(names)):
            return None
        return of_parameters(names or ["on another rank"], self.checkpoint())

    # Backward ---------------------------------------------------------------------------------------------------------

    def backward(
        self, loss: Tensor, among: Sequence[Optimizer], *, keep_true: bool, others: Sequence[Tensor] = ()
    ) -> AbstractContextManager[Tensor]:
        """Return the context that yields what to call ``backward`` on.

        Args:
            loss: The loss, of any floating dtype.
            among: All optimizers; which of them the backward reaches need not be known.
            keep_true: Bring the gradients back to their true values afterwards. Without it they stay multiplied by the
                scale until the optimizer step, which saves a pass.
            others: Parameters of no optimizer whose gradients are to be kept true as well.

        """
        return self.passes.backward(loss, among, keep_true=keep_true, others=others)

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
            NonFiniteStepError: After ``max_skipped`` skipped steps in a row, or as soon as parameters are not finite.
                State and weights are as they were.
            RuntimeError: If the optimizer needs to call its closure again and the precision is float16.

        """
        use = optimizers.use_of_closure(type(optimizer))
        if use == "required" and self.scaler is not None:
            raise optimizers.refusal(optimizer)
        output = closure()
        request = Request(optimizer, index, automatic, hooks, clipping, self._norm_requested, self._looks)
        attempt, proof = self.check(request, output), None
        self.tried_lower = False
        if window is not None and not attempt.is_clean:
            attempt, proof = try_again(self, request, window, attempt, trial=trial)
        last = attempt if proof is None else proof.attempt
        applied = last if last is not None and last.is_finite else None
        if applied is not None:
            attempt, output = applied, applied.output
            if use != "none":
                again = partial(self._evaluate_again, optimizer, rerun or closure)
                kwargs["closure"] = optimizers.replay(optimizer, output, again)
            result = optimizers.apply(optimizer, attempt.verdict.divisor, kwargs)
            output = output if result is None else result
        elif automatic:
            self.passes.clear(optimizer)
            if window is not None:
                window.rollback()
        self.passes.stepped()
        report = self._conclude(request, attempt, proof, is_applied=applied is not None)
        moved_to = self.fallback.next_precision  # after another step of the iteration
        try:
            if report.outcome == "skipped":
                after_skip(self, report, attempt.made_at, trial=trial)
            elif proof is not None:
                after_proof(self, report, proof)
            elif automatic:
                self.fallback.note_clean(self.precision, self.configured_precision)
        finally:
            self.passes.anomaly = self.raised = None
            self.attempt_precision = self.precision
            report = self.last_step or report
            if self.fallback.next_precision != moved_to:
                self.last_step = report = replace(report, moves_to=self.fallback.next_precision)
            if automatic:
                self.end_iteration()
            if not trial:
                for observer in self.observers:
                    observer(report)
        return output

    def end_iteration(self) -> None:
        """Let the scale grow when due, if all steps of the iteration were applied; move on to another precision."""
        if self._iteration_is_clean and self.scaler is not None:
            self.scaler.record(overflow=False)
        if self.iteration and "skipped" not in self.iteration:
            goes_on = any(self.skips.in_a_row.values()) or bool(self.fallback.located)  # of an optimizer at rest
            self.fallback.is_suspect = self.fallback.is_suspect and goes_on
        self._iteration_is_clean = None
        self._norm_requested, self._looks = False, ()
        self.iteration.clear()
        if self.fallback.next_precision is not None:
            self.precision, self.fallback.next_precision = self.fallback.next_precision, None
            self.skips.in_a_row.clear()
            self.fallback.located.clear()
            self.passes.forget_pending()

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

    # Outcome ----------------------------------------------------------------------------------------------------------

    def check(self, request: Request, output: Any) -> Attempt:
        """Check what the last run of the window has left."""
        is_half = self.attempt_precision == "16-mixed"
        verdict, made_at = self.passes.check(request, self.can_be_cured, is_half=is_half)
        return Attempt(output, verdict, made_at, self.attempt_precision)

    def _conclude(self, request: Request, attempt: Attempt, proof: Proof | None, *, is_applied: bool) -> StepReport:
        """Report and count a step, from its last attempt and what was tried before that."""
        outcome: Outcome = "applied" if is_applied else "skipped"
        tried = () if proof is None or len(proof.tried) == 1 else proof.tried
        attempts = len(tried) or 1
        rescued = proof is not None and proof.rescued
        self.last_step = report = StepReport(
            step=self.counters.steps,
            optimizer=request.index,
            precision=attempt.precision,
            scale=1.0 if attempt.made_at is None else attempt.made_at,
            attempts=attempts,
            outcome=outcome,
            non_finite=attempt.verdict.non_finite,
            grad_norm=attempt.verdict.norm,
            clipped=attempt.verdict.clipped,
            rescued=rescued,
            diagnosis=None if proof is None else proof.diagnosis,
            tried=tried,
            kept=() if proof is None else proof.found,
        )
        self.counters = self.counters.after(outcome, attempts, rescued=rescued)
        self.by_optimizer.setdefault(request.index, [0, 0])[not is_applied] += 1
        self.iteration.append(outcome)
        if not is_applied or attempts > 1:
            self._iteration_is_clean = False
        if not is_applied:
            return report
        if has_gradients(request.optimizer):  # a step without gradients shows nothing
            self.skips.in_a_row[request.index] = 0
            self.fallback.located.pop(request.index, None)
        if self._iteration_is_clean is None and attempt.made_at is not None:
            self._iteration_is_clean = True
        return report

    def agreed(self, fault: Fault | None) -> Fault | None:
        """Return a fault in the same module on all ranks, although only one may have seen it."""
        if self.agree is None or self.module is None:
            return fault
        names = list(parts_of(self.module))
        mine = -1 if fault is None or fault.module not in names else names.index(fault.module)
        found = int(self.agree(torch.tensor([float(mine if fault is None else mine + 1)])).item())
        if found < 0:
            return None
        if fault is not None and found in (0, mine + 1):
            return fault
        return Fault("forward" if fault is None else fault.phase, names[found - 1] if found > 0 else None)

    def may_lower(self, scale: float | None) -> bool:
        """Tell whether a scale below ``scale`` can be had."""
        rules = self.loss_scaler.loss_scale
        return scale is not None and rules.dynamic and scale > rules.min_scale
