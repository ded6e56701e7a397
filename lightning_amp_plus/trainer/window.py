"""The window of an optimizer step: what its micro-batches change is put back, and they can be run again.

In automatic optimization a window is what lies between two calls of the optimizer: it begins with the micro-batch that
zeroes the gradients. In manual optimization, where only the user's ``training_step`` knows, it begins with the first
iteration after one that has attempted a step, and nothing is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from traceback import walk_tb
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning_amp_plus.diagnosis.finite import non_finite_inputs
from lightning_amp_plus.diagnosis.locate import Locator
from lightning_amp_plus.rollback.batches import Versions, are_unchanged, copy_containers, versions_of
from lightning_amp_plus.rollback.transaction import RngState, StepTransaction, rng_state, set_rng_state
from lightning_amp_plus.step.engine import StepEngine
from lightning_amp_plus.step.recovery import rescue
from lightning_amp_plus.step.report import Outcome
from lightning_amp_plus.trainer import internals

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


@dataclass(slots=True)
class _MicroBatch:
    closure: Callable[[], Any]
    arguments: dict[str, Any]
    batch: Any
    versions: Versions
    rng: RngState

    def run_again(self) -> Any:
        set_rng_state(self.rng)
        self.arguments["batch"] = copy_containers(self.batch)
        return self.closure()


class TrainingWindow:
    """Follows the windows of a fit, from its start to :meth:`end`.

    Args:
        pl: Lightning's namespace.
        trainer: The Trainer of the fit.
        engine: What makes the steps.
        exclude: Patterns of the names of buffers that are let be.

    """

    def __init__(self, pl: ModuleType, trainer: Trainer, engine: StepEngine, *, exclude: Sequence[str]) -> None:
        module = trainer.lightning_module
        self._pl, self._trainer, self._engine = pl, trainer, engine
        devices = {trainer.strategy.root_device, *(parameter.device for parameter in module.parameters())}
        self._transaction = StepTransaction(module, exclude, devices)
        self._micro_batches: list[_MicroBatch] = []
        self._latest: Any = None  # batch, where none are kept
        self._obstacle: str | None = None
        self._marks: dict[Any, Any] = {}
        self._by_attempts: set[Any] = set()
        self._by_others: set[Any] = set()  # hooks and validations between the micro-batches
        self._epoch = -1
        self._passes_before = 0
        self._logged: internals.Logged = {}
        self.is_held = False
        self._end = internals.watch(trainer, self)

    @property
    def is_automatic(self) -> bool:
        """Whether Lightning owns the loop."""
        return self._trainer.lightning_module.automatic_optimization

    def end(self) -> None:
        """Leave the Trainer as it was."""
        self._end()
        self.close()

    def _open(self) -> None:
        self._engine.begin_window()
        self._transaction.begin()
        self._logged = internals.logged_state(self._trainer)
        self._micro_batches = []
        self._obstacle = None
        self._passes_before = self._engine.passes.count
        self._by_attempts, self._by_others = set(), set()
        if self._trainer.accumulate_grad_batches > 1:
            self._marks = self._transaction.fingerprint()
        if self._engine.wants_instruments and self._engine.locator is None:
            self._engine.locator = Locator(self._trainer.lightning_module)

    def close(self) -> None:
        """Forget the window: its step is over."""
        self._transaction.close()
        self._micro_batches, self._latest = [], None
        self._engine.locator = None

    def instruments(self) -> AbstractContextManager[Any]:
        """Return the context that looks on at what is run, if something is to."""
        return nullcontext() if self._engine.locator is None else self._engine.locator

    @property
    def name(self) -> str:
        """What to call it in a sentence."""
        trainer = self._trainer
        batch = trainer.fit_loop.epoch_loop.batch_idx
        count = len(self._micro_batches)
        batches = f"batches {batch - count + 1} to {batch}" if count > 1 else f"batch {batch}"
        return f"{batches} of epoch {trainer.current_epoch}"

    def non_finite_inputs(self) -> list[str]:
        """Return the names of the tensors in its batches that are not finite."""
        batches = [micro_batch.batch for micro_batch in self._micro_batches] or [self._latest]
        return [name for batch in batches for name in non_finite_inputs(batch)]

    def rollback(self, *, partly: bool = False) -> None:
        """Put back what the window has changed, but for parameters and gradients; nothing if none is open.

        What hooks or a validation have changed between its micro-batches stays, unless it has turned inf or NaN.

        Args:
            partly: Whether only what has turned inf or NaN is put back, because some steps were applied.

        """
        if not self._transaction.is_open:
            return
        if partly:
            self._transaction.rollback_non_finite()
        else:
            self._transaction.rollback(keep=self._by_others)
        internals.restore_logged(self._trainer, self._logged, only_non_finite=partly)

    def note_backward(self) -> None:
        """Take note of what a micro-batch has changed, where others may follow; checkpointing computes in backward."""
        if self._trainer.accumulate_grad_batches > 1 and self._transaction.is_open:
            self._by_attempts |= self._changes()

    def _note_others(self) -> None:
        self._by_others |= self._changes()

    def _changes(self) -> set[Any]:
        before, self._marks = self._marks, self._transaction.fingerprint()
        return {key for key in before.keys() | self._marks.keys() if before.get(key) != self._marks.get(key)}

    # Automatic optimization -------------------------------------------------------------------------------------------

    def add(self, closure: Any, arguments: dict[str, Any]) -> None:
        """Take up the next micro-batch, in a new window if it zeroes the gradients."""
        self.is_held = False
        rng = None
        if internals.opens_window(closure):
            internals.note_zeroing(closure)
            self._open()
            rng = self._transaction.rng
        elif not self._transaction.is_open:
            self._open()
            self._obstacle = "the fit was resumed in the middle of its window"
            rng = self._transaction.rng
        else:
            self._note_others()
        self._latest = arguments.get("batch")
        if self._engine.wants_batches and internals.has_backward(closure):
            self._keep(closure, arguments, rng or rng_state(self._transaction.devices))

    def run(self, closure: Any) -> Any:
        """Run a micro-batch, forward and backward; put back what the window has changed if it raises."""
        passes = self._engine.passes.count
        try:
            if self._engine.locator is None:
                return closure()
            with self._engine.locator:
                return closure()
        except Exception as error:
            self.rollback()
            if self.obstacle() is not None or self._is_of_a_callback(error):
                raise
            failed = error
        except BaseException:
            self.rollback()
            raise
        count = self._engine.passes.count
        try:
            return rescue(
                self._engine,
                failed,
                self._trainer.optimizers[0],
                self._run_again_alone,
                alone=count == passes and internals.is_replicated(self._trainer),
                has_gradients=count > self._passes_before,
            )
        finally:
            del failed  # whose traceback holds this frame

    def _is_of_a_callback(self, error: Exception) -> bool:
        """Tell whether an error was raised by a callback, which may want to end the run."""
        callbacks: list[Any] = self._trainer.callbacks  # type: ignore[attr-defined]
        return any(
            frame.f_locals.get("self") is callback
            for frame, _ in walk_tb(error.__traceback__)
            for callback in callbacks
        )

    def _run_again_alone(self) -> Any:
        """Run the micro-batches so far again, while other ranks may wait in the backward of the last."""
        with internals.without_sync_of_forward(self._trainer):
            return self.run_again()

    def _keep(self, closure: Any, arguments: dict[str, Any], rng: RngState) -> None:
        if "batch" not in arguments:
            self._obstacle = "training_step took a dataloader_iter"
            return
        try:
            batch = copy_containers(arguments["batch"])
        except Exception as error:  # of user code, whatever it is: told when it matters
            self._obstacle = f"its batch could not be copied ({type(error).__name__}: {error})"
        else:
            self._micro_batches.append(_MicroBatch(closure, arguments, batch, versions_of(batch), rng))

    def obstacle(self) -> str | None:
        """Return why the window cannot be run again as it was, as a clause; ``None`` if it can."""
        if self._obstacle is not None:
            return self._obstacle
        if self._by_others & self._by_attempts:
            return "a hook or a validation in mid-window changed a buffer or metric that its micro-batches change too"
        if not all(are_unchanged(micro_batch.versions) for micro_batch in self._micro_batches):
            return "training_step wrote to its batch in place"
        return None if self._micro_batches else "its batches were not kept"

    def run_again(self) -> Any:
        """Roll back and run all micro-batches again, with the random numbers they had; return what the last does."""
        self.rollback()
        output = None
        for micro_batch in self._micro_batches:
            internals.let_go(micro_batch.closure)
        for micro_batch in self._micro_batches:
            internals.announce_batch(self._trainer, micro_batch.batch)
            is_last = micro_batch is self._micro_batches[-1]
            blocked = internals.block_sync(self._pl, self._trainer, block=not is_last)
            with blocked, internals.without_zeroing_again(micro_batch.closure):
                output = micro_batch.run_again()
            if not is_last:
                internals.let_go(micro_batch.closure)
        return output

    # Manual optimization ----------------------------------------------------------------------------------------------

    def begin_iteration(self) -> None:
        """Begin a window, unless one is open in this epoch."""
        self.is_held = False
        epoch = self._trainer.current_epoch
        if not self._transaction.is_open or self._epoch != epoch:
            self._open()
            self._epoch = epoch
        else:
            self._note_others()

    def end_iteration(self, outcomes: Sequence[Outcome]) -> None:
        """End the window if there were steps: put back all if none was applied, what is broken if only some were."""
        if not outcomes:
            self._marks = self._transaction.fingerprint()
            return
        if "skipped" in outcomes:
            self.is_held = "applied" not in outcomes
            self.rollback(partly=not self.is_held)
        self.close()
