"""The window of a step, run again: at lower loss scales, in wider precisions, with instruments. Plain torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import Module

from lightning_amp_plus.diagnosis.cause import Diagnosis, of_batch, of_model
from lightning_amp_plus.diagnosis.finite import largest
from lightning_amp_plus.diagnosis.lines import parts_of
from lightning_amp_plus.diagnosis.locate import Fault, Locator, Phase
from lightning_amp_plus.precisions import PrecisionName
from lightning_amp_plus.rollback.batches import tensors_in
from lightning_amp_plus.scaling.passes import Request
from lightning_amp_plus.step.proof import Attempt
from lightning_amp_plus.step.report import Try

if TYPE_CHECKING:
    from lightning_amp_plus.step.engine import StepEngine


class Window(Protocol):
    """The micro-batches whose gradients a step sums, as the engine sees them."""

    def obstacle(self) -> str | None:
        """Return why :meth:`run_again` would not do what the first attempt did, as a clause; ``None`` if it would."""

    def run_again(self) -> Any:
        """Roll back and run all micro-batches again, through :meth:`StepEngine.backward`; return what the last does."""

    def rollback(self) -> None:
        """Put back what the attempts have changed, but for gradients."""

    def non_finite_inputs(self) -> list[str]:
        """Return the names of the tensors in its batches that are not finite."""

    @property
    def name(self) -> str:
        """What to call it in a sentence, such as ``"batch 3 of epoch 0"``."""


class StepTries:
    """Makes the attempts of one step.

    Args:
        engine: What makes the step.
        request: What is asked of it.
        window: What it is computed from; ``None`` if that cannot be run again.
        tried: The attempts that it has had.

    Attributes:
        tried: The precision and the loss scale of each attempt, beginning with the first.
        holds_at_floor: Whether the run's precision holds the window at the lowest loss scale, as :meth:`locate` found.

    """

    def __init__(self, engine: StepEngine, request: Request, window: Window | None, tried: Sequence[Try] = ()) -> None:
        self._engine, self._request, self._window = engine, request, window
        self.tried = list(tried)
        self.holds_at_floor = False
        self._can_run: bool | None = None

    @property
    def index(self) -> int:
        """The position of the optimizer among all."""
        return self._request.index

    @property
    def precision(self) -> PrecisionName:
        """What the run computes in."""
        return self._engine.precision

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of the modules that were found to need float32."""
        return self._engine.kept.found

    def keep(self, names: Sequence[str]) -> None:
        """Keep these modules in float32, and no others that were found."""
        self._engine.kept.find(names)

    @property
    def can_run(self) -> bool:
        """Whether all ranks can run the window again; the first reason why not is told, once."""
        if self._can_run is None:
            self._can_run = self._window is not None and self._engine.can_run_again(self._window)
        return self._can_run

    def run_at(self, scale: float, *, is_final: bool = True) -> Attempt:
        """Run the window at a loss scale.

        Args:
            scale: The scale.
            is_final: Whether the step is applied if this is finite. Else the user's hooks are not called.

        """
        return self._check(self._run(scale), is_final=is_final)

    def _check(self, output: Any, *, is_final: bool) -> Attempt:
        return self._engine.check(self._request if is_final else self._request.as_a_test(), output)

    def attempt(self, precision: PrecisionName, measure: str | None = None, *, is_final: bool = True) -> Attempt | None:
        """Run the window, and measure what a module puts out; ``None`` if it raises, or does not fit into memory."""
        self._engine.attempt_precision = precision
        scales = [1.0]
        if precision == "16-mixed":
            scaler = self._engine.loss_scaler
            scales = [scaler.get_scale(), *scaler.retry_scales(scaler.get_scale(), self._engine.retries)]
        for scale in scales:
            try:
                with _measured(self._module, measure) as measured:
                    output = self._run(scale)
            except Exception as error:
                if self._ends_the_run(error):
                    raise
                if is_out_of_memory(error):
                    self._engine.fallback.drop(precision)
                self._engine.passes.clear(self._request.optimizer)
                return None
            attempt = self._check(output, is_final=is_final)  # what a hook raises is no failure of the attempt
            if attempt.verdict.non_finite != "gradients":
                break
        attempt.magnitude = measured.get("largest")
        return attempt

    def locate(self, phase: Phase, precision: PrecisionName | None = None) -> Fault | None:
        """Run the window, by default in the run's precision, at the lowest loss scale, and look on."""
        if self._engine.agree is not None and self._engine.passes.has_raised_anywhere:
            return None  # a rank would raise again
        self._engine.attempt_precision = precision or self._engine.precision
        locator = Locator(self._module)
        try:
            with locator:
                self._run(self._engine.loss_scaler.loss_scale.min_scale)
            request = self._request.as_a_test()
            is_static = not self._engine.loss_scaler.loss_scale.dynamic
            self.holds_at_floor = is_static and self._engine.check(request, None).is_finite
        except Exception as error:  # as the first attempt may have: what was seen until then is what is asked for
            if self._ends_the_run(error):
                raise
        self._engine.passes.clear(self._request.optimizer)
        return self._engine.agreed(locator.fault(phase) or locator.fault("backward"))  # or of an inner backward

    def blame(self, phase: Phase) -> Diagnosis:
        """Tell why no precision helps."""
        if self._window is not None:
            self._window.rollback()  # first: the statistics of an attempt that failed are no evidence
        diagnosis = self._engine.diagnose_state()
        if diagnosis is not None:
            return diagnosis
        names = [] if self._window is None else self._window.non_finite_inputs()
        if self._engine.on_any_rank(bool(names)):
            return of_batch("another rank's batch" if self._window is None or not names else self._window.name, names)
        fault = None
        if self._engine.skips.is_last(self._request.index) and self.can_run:
            fault = self.locate(phase, self._engine.attempt_precision)
        return of_model(phase, fault, self._engine.attempt_precision)

    def _ends_the_run(self, error: Exception) -> bool:
        """Tell whether an error of an attempt is not just its failure: on several ranks the others would wait."""
        engine = self._engine
        return engine.agree is not None or (engine.passes_through(error) and not is_out_of_memory(error))

    @property
    def _module(self) -> Module:
        module = self._engine.module
        return Module() if module is None else module

    def _run(self, scale: float) -> Any:
        if self._window is None:
            raise RuntimeError("There is no window to run again.")  # `can_run` is to be asked first
        precision, passes = self._engine.attempt_precision, self._engine.passes
        self.tried.append((precision, scale if precision == "16-mixed" else 1.0))
        passes.clear(self._request.optimizer)  # first: one attempt at a time is what fits into memory
        passes.begin_again(scale)
        try:
            return self._window.run_again()
        finally:
            passes.at_scale = None


@contextmanager
def _measured(module: Module, name: str | None) -> Iterator[dict[Literal["largest"], float]]:
    """Measure the largest magnitude that the submodule of that name puts out."""
    measured: dict[Literal["largest"], float] = {}
    if not name:
        yield measured
        return

    def hook(_: Module, args: Any, output: Any) -> None:
        tensors = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
        measured["largest"] = max([measured.get("largest", 0.0), *map(_largest, tensors)])

    handle = parts_of(module)[name].register_forward_hook(hook)
    try:
        yield measured
    finally:
        handle.remove()


def _largest(tensor: Tensor) -> float:
    return largest(getattr(tensor, "_local_tensor", tensor))


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that memory has run out, on a device or on the host."""
    kinds = tuple(k for k in (getattr(torch, "OutOfMemoryError", None), torch.cuda.OutOfMemoryError) if k is not None)
    return isinstance(error, (MemoryError, *kinds)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
