"""What the plugin is asked for, and what outlives a run: in checkpoints, in copies, and from worker processes."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only
from typing_extensions import override

from lightning_amp_plus.precisions import PrecisionName
from lightning_amp_plus.scaling.finish import Look
from lightning_amp_plus.scaling.loss_scale import LossScale
from lightning_amp_plus.scaling.scaler import DynamicLossScaler
from lightning_amp_plus.step.engine import StepEngine
from lightning_amp_plus.step.report import StepCounters, StepReport
from lightning_amp_plus.step.rules import FallbackRules
from lightning_amp_plus.trainer import internals
from lightning_amp_plus.trainer.checkpoint import had_moved, load_state, state_of, stock_state_of
from lightning_amp_plus.trainer.mailbox import Mailbox
from lightning_amp_plus.trainer.window import TrainingWindow

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins import MixedPrecision as _MixedPrecision
else:
    _MixedPrecision = object  # the binding of a namespace adds the class itself


class StatefulPrecision(_MixedPrecision):
    """Holds the engine, shows what it has done, and hands its state on.

    Args:
        engine: What makes the steps.
        asked_for: The precision that the user asked for.

    """

    def __init__(self, engine: StepEngine, asked_for: Literal["auto"] | PrecisionName) -> None:
        self._engine = engine
        self._asked_for = asked_for
        self._chosen_for: str | None = None  # the device that "auto" was decided for
        self._is_new = True  # no fit yet
        self._mailbox = Mailbox()
        self._window: TrainingWindow | None = None  # during a fit
        self._is_running = self._posts = self._evaluates = self._searches = False
        self._at_end: list[Callable[[], object]] = []

    @property
    def precision(self) -> Literal["auto"] | PrecisionName:  # type: ignore[override]
        """What the run computes in now; ``"auto"`` until a run has started."""
        engine = self._up_to_date()
        return "auto" if self._asked_for == "auto" and self._chosen_for is None else engine.precision

    @property
    def scaler(self) -> DynamicLossScaler | None:  # type: ignore[override]
        """The loss scaler of a run that was started in ``"16-mixed"``; switched off once the run has moved on."""
        engine = self._up_to_date()
        return engine.loss_scaler if engine.configured_precision == "16-mixed" else None

    @property
    def counters(self) -> StepCounters:
        """How many steps were applied and skipped since the run began."""
        return self._up_to_date().counters

    @property
    def steps_by_optimizer(self) -> dict[int, tuple[int, int]]:
        """How many steps of each optimizer were applied and skipped since the run began, by its position."""
        return {index: (applied, skipped) for index, (applied, skipped) in self._up_to_date().by_optimizer.items()}

    @property
    def last_step(self) -> StepReport | None:
        """What the last optimizer step did; ``None`` before the first."""
        return self._up_to_date().last_step

    @property
    def loss_scale(self) -> LossScale:
        """The rules of loss scaling."""
        return self._engine.loss_scaler.loss_scale

    @property
    def max_skipped(self) -> int:
        """How many steps of one optimizer may be skipped in a row."""
        return self._engine.skips.max_skipped

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last optimizer step was skipped: in manual optimization, hold your LR schedules then."""
        return self.last_step is not None and self.last_step.outcome == "skipped"

    @property
    def kept_modules(self) -> tuple[str, ...]:
        """The names of the modules that were found to need float32, and compute in it."""
        return self._up_to_date().kept.found

    @property
    def rules(self) -> FallbackRules | None:
        """When the run goes on in a wider precision; ``None`` for never.

        A callback sets them in its ``setup``, for one run: they are gone when that ends.
        With them, a checkpoint of a run that has moved on is resumed in the precision it had moved to.
        """
        return self._engine.fallback.rules

    @rules.setter
    def rules(self, rules: FallbackRules | None) -> None:
        self._engine.fallback.rules = rules

    def request_grad_norm(self) -> None:
        """Ask for ``last_step.grad_norm`` of the next step: in manual optimization, of the steps of the next iteration.

        On every rank, or on none. It costs one reading pass in float16 where nothing is clipped, and nothing elsewhere.
        """
        self._engine.request_grad_norm()

    def request_look(self, look: Look) -> None:
        """Have the next step show its gradients; in manual optimization, the steps of the next iteration.

        Args:
            look: Called with the optimizer, what its finite gradients are multiplied by, and the loss scale that they
                were made with, ``None`` without one. It may read them, before hooks and clipping, and change nothing. A
                step whose backward overflows shows none, one that is run again those of the attempt that counts.

        """
        self._engine.request_look(look)

    @property
    def gradient_scale(self) -> float:
        """What gradients are multiplied by in the backward that is running; 1 outside of one, or without scaling."""
        return self._engine.passes.running_at

    @property
    def attempt(self) -> int:
        """A number that differs from attempt to attempt of a step."""
        return self._engine.passes.attempt

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Have nothing told of what happens in a run that is only a rehearsal."""
        skips = self._engine.skips
        before, skips.notify = skips.notify, _tell_nobody
        try:
            yield
        finally:
            skips.notify = before

    def observe(self, observer: Callable[[StepReport], None], at_end: Callable[[], object] | None = None) -> None:
        """Have ``observer`` called with the report of each step, when all that follows from it is done.

        A callback does so in its ``setup``, for one run. It is called for a step that ends the fit as well.

        Args:
            observer: What is called; it must not raise.
            at_end: Called when the run is over, whatever has ended it.

        """
        self._engine.observers.append(observer)
        if at_end is not None:
            self._at_end.append(at_end)

    # Runs -------------------------------------------------------------------------------------------------------------

    def _begin_run(self, pl: ModuleType, trainer: Trainer) -> None:
        self._up_to_date()
        self._is_running = True
        self._posts = trainer.local_rank == 0 and internals.is_spawned(pl, trainer)
        self._evaluates = trainer.state.fn != "fit"
        self._searches = internals.searches(pl, trainer)

    def _begin_anew(self) -> None:
        if not self._is_new:
            self._engine.restart()
        self._is_new = False

    def _end_run(self) -> None:
        at_end, self._at_end = self._at_end, []
        for function in at_end:
            function()
        if self._posts:
            self._mailbox.post((state_of(self._engine), self._engine.last_step, self._chosen_for, self._is_new))
        self._is_running = self._posts = self._evaluates = self._searches = False

    def _up_to_date(self) -> StepEngine:
        """Return the engine, which holds what a worker process has left in the meantime."""
        if not self._is_running and (message := self._mailbox.news()) is not None:
            state, last_step, self._chosen_for, self._is_new = message
            self._engine.configured_precision = state["configured_precision"]
            load_state(self._engine, state, keeps_fallback=True)
            self._engine.last_step = last_step
        return self._engine

    def __getstate__(self) -> dict[str, Any]:
        self._up_to_date()
        of_a_run: dict[str, Any] = {
            "_window": None,
            "_hooks": None,
            "_evaluation": None,
            "_at_end": [],
        }  # which belong to its Trainer
        return {**self.__dict__, **of_a_run}

    # Checkpoints ------------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        return state_of(self._up_to_date())

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over scale and counters, from stock's ``MixedPrecision`` too; arguments of the constructor stay.

        With a callback that decides on the precision, a run that had moved to a wider one goes on in it; that is all
        that is loaded for an evaluation.

        Raises:
            ValueError: If the state was written by a later version of the package.

        """
        load_state(
            self._up_to_date(),
            state_dict,
            keeps_fallback=self.rules is not None or self._searches,
            only_precision=self._evaluates,
        )
        self._is_new = self._is_new and not self._evaluates
        if (names := state_dict.get("kept_modules")) and not self._engine.kept.found:
            notify(
                logging.WARNING,
                f"The run of this checkpoint kept {', '.join(names)} in float32, which float16 could not hold. Add the"
                f" PrecisionFallback callback to go on so, or keep_fp32={list(names)} to the plugin.",
            )
        if had_moved(state_dict, self._engine.precision):
            notify(
                logging.WARNING,
                f"The run of this checkpoint had moved to {state_dict['precision']!r} and is now computed in"
                f" {self._engine.precision!r}, which could not hold it. Add the PrecisionFallback callback to go on"
                " where it was.",
            )

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # So that a user can go back to stock.
        checkpoint["MixedPrecision"] = stock_state_of(self._up_to_date())
        if self._window is not None and self._window.is_held:
            internals.hold_axis_of_checkpoint(checkpoint)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        names = (type(self).__qualname__, "AdaptiveMixedPrecision", "MixedPrecision")
        name = next((name for name in names if name in checkpoint), names[0])
        if name != names[0]:  # Lightning loads the first itself, but not that of a subclass, or of stock
            self.load_state_dict(checkpoint[name])


def _tell_nobody(level: int, text: str) -> None:
    """Nobody is to know."""


@rank_zero_only
def notify(level: int, text: str) -> None:
    """Tell rank zero: as information, or as a warning once for each run."""
    if level < logging.WARNING:
        rank_zero_info(text)
    else:  # with a registry of its own, since that of a module is for the whole process
        warnings.warn_explicit(text, RuntimeWarning, __file__, 1, module=__name__, registry={})
