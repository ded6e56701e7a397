"""DynamicRangeMonitor: which magnitudes pass through each module, against what float16 and bfloat16 hold."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_amp_plus.dynamic_range.recorder import RangeRecorder
from lightning_amp_plus.dynamic_range.stats import DynamicRange
from lightning_amp_plus.monitoring import outputs
from lightning_amp_plus.monitoring.once import LoggedOnce
from lightning_amp_plus.monitoring.sources import RANGE_FILE_NAME
from lightning_amp_plus.scaling.exponents import FLOAT16_SUBNORMAL
from lightning_amp_plus.step.report import StepReport
from lightning_amp_plus.trainer import internals
from lightning_amp_plus.trainer.plugin import AdaptiveMixedPrecisionMixin
from lightning_amp_plus.trainer.run import log_folder, max_of_ranks, plugin_of, sum_of_ranks

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = object  # the binding of a namespace adds the class itself


class DynamicRangeMonitorMixin(Callback):
    """Measures the magnitudes of activations, of their gradients and of the parameters' gradients, module by module.

    Every ``every_n_steps`` it looks on at one optimizer step, with all its micro-batches, and adds to histograms by
    powers of two, on the device. They are summed over all ranks. The step computes what it does without; compiled code
    is run eagerly meanwhile. What a step that was skipped has shown is left out, and so are attempts that have failed.

    The sums are saved in checkpoints and, beside the files of the first logger, in ``amp_dynamic_range.json``;
    ``plot_dynamic_range`` draws them from either, or from the callback. Loggers that hold images (TensorBoard, W&B,
    MLflow) get the picture at the end of a fit if matplotlib is installed.

    Logged metrics, of the last measured step, at the next step that the Trainer logs:
        - ``amp/range/activations_above_fp16``: the share of a module's activations beyond 65504, of the module that has
          most; 0 to 1. Inf and NaN count.
        - ``amp/range/gradients_below_fp16``: the share of the elements other than 0 of the gradients of a module's
          activations that are below 2^-24, float16's smallest number, at the present loss scale; of the module that has
          most. In float16 such elements are 0 already: see ``amp/underflow`` of :class:`AMPMonitor`.
        - ``amp/range/updates_below_bf16``: the share of weight updates that a weight in bfloat16 would not have seen,
          for they are smaller than half an ulp of it; of all weights.

    Args:
        every_n_steps: How many optimizer steps there are from one measured step to the next; at least 1.

    Attributes:
        stats: The sums of the last fit: a :class:`DynamicRange`.

    Raises:
        ValueError: If ``every_n_steps`` is out of its range.
        TypeError: At the start of a run whose Trainer does not use :class:`AdaptiveMixedPrecision`.

    Example:
        >>> from lightning_amp_plus import DynamicRangeMonitor
        >>> DynamicRangeMonitor(every_n_steps=50).stats.steps
        0

    """

    def __init__(self, every_n_steps: int = 100) -> None:
        if not isinstance(every_n_steps, int) or isinstance(every_n_steps, bool) or every_n_steps < 1:
            raise ValueError(
                f"DynamicRangeMonitor(every_n_steps={every_n_steps!r}): it must be an integer of at least 1."
            )
        self.every_n_steps = every_n_steps
        self._stats = DynamicRange.empty(())
        self._end()

    def _end(self) -> None:
        """Hold nothing of a run but its sums."""
        self._recorder: RangeRecorder | None = None
        self._has_stepped = True  # whether the last batch has ended a window
        self._is_whole = True  # whether all steps of the recorded window were applied
        self._measured_at = 0
        self._logged = LoggedOnce()
        self._pending: dict[str, float] = {}  # of the last measured step, for the next one that is logged

    @property
    def stats(self) -> DynamicRange:
        """The sums, on the host."""
        if self._recorder is not None:
            self._stats = self._recorder.total.cpu()
        return self._stats

    # A run ------------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        plugin = plugin_of(trainer, "DynamicRangeMonitor")
        if stage == "fit":
            self._end()
            self._stats = DynamicRange.empty(())
            plugin.observe(self._on_step, at_end=self._give_back)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.barebones:
            return
        plugin = plugin_of(trainer, "DynamicRangeMonitor")
        self._recorder = RangeRecorder(
            pl_module,
            trainer.strategy.root_device,
            scale=partial(_gradient_scale, plugin),
            attempt=partial(_attempt, plugin),
        )

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._leave()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stats": self.stats, "_logged": LoggedOnce(), "_recorder": None}  # of a run

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tell(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._leave()
        if trainer.state.fn == "fit":
            self._tell(trainer)

    def _give_back(self) -> None:
        """Leave nothing on the module, and the compiler as it was."""
        if self._recorder is not None:
            self._recorder.cancel()

    def _leave(self) -> None:
        self._give_back()
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            with outputs.not_in_the_way("DynamicRangeMonitor's stats"):  # on a device that may be broken
                self._stats = recorder.total.cpu()
        self._end()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"stats": self.stats.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "stats" in state_dict:
            self._stats = DynamicRange.from_state(state_dict["stats"])

    # Steps ------------------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._recorder is not None:
            self._recorder.resume(self._stats)  # which some strategies load this late
        self._measured_at = self._last_multiple(trainer)  # of the run that is resumed

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        recorder = self._recorder
        if recorder is None:
            return
        self._logged.withdraw(trainer)
        plugin = plugin_of(trainer, "DynamicRangeMonitor")
        is_due = plugin.counters.steps + 1 - self._measured_at >= self.every_n_steps
        if self._has_stepped and is_due and not recorder.is_recording:
            self._is_whole = True
            recorder.start()
        self._has_stepped = False
        if recorder.is_recording:
            plugin.request_look(recorder.look)

    def _on_step(self, report: StepReport) -> None:
        self._has_stepped = True
        if self._recorder is not None and self._recorder.is_recording:
            self._is_whole = self._is_whole and report.outcome == "applied"
            self._recorder.stepped()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        recorder = self._recorder
        if recorder is not None and recorder.is_recording and self._has_stepped:
            if self._is_whole:
                self._pending = _metrics(recorder.stop(partial(_reduce, trainer)).cpu())
                self._measured_at = self._last_multiple(trainer)
            else:
                recorder.cancel()  # and look on at the next
        if self._pending and internals.logs_this_step(trainer):
            self._logged.log(pl_module, self._pending)
            self._pending = {}

    def _last_multiple(self, trainer: Trainer) -> int:
        steps = plugin_of(trainer, "DynamicRangeMonitor").counters.steps
        return steps - steps % self.every_n_steps

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._recorder is not None:
            self._recorder.is_paused = True

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._recorder is not None:
            self._recorder.is_paused = False

    # The end ----------------------------------------------------------------------------------------------------------

    def _tell(self, trainer: Trainer) -> None:
        stats = self.stats
        if trainer.barebones or not trainer.is_global_zero or stats.steps == 0:
            return
        folder = log_folder(trainer)
        if folder is not None:
            with outputs.not_in_the_way(f"DynamicRangeMonitor's {RANGE_FILE_NAME}"):
                outputs.write_whole(folder / RANGE_FILE_NAME, json.dumps(stats.state_dict(), allow_nan=False))
        draw = partial(outputs.dynamic_range_figure, stats)
        outputs.send_figure(trainer, "DynamicRangeMonitor's picture", "amp/dynamic_range", draw)


def _metrics(step: DynamicRange) -> dict[str, float]:
    made, lost = step.updates.sum(1).tolist()
    return {
        "amp/range/activations_above_fp16": max(step.share_above("activations"), default=0.0),
        "amp/range/gradients_below_fp16": max(step.share_below("activation_gradients", FLOAT16_SUBNORMAL), default=0.0),
        "amp/range/updates_below_bf16": lost / made if made else 0.0,
    }


def stats_of(trainer: Trainer) -> DynamicRange | None:
    """Return what a :class:`DynamicRangeMonitor` of the run has measured; ``None`` if nothing was."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, DynamicRangeMonitorMixin) and callback.stats.steps:
            return callback.stats
    return None


def _gradient_scale(plugin: AdaptiveMixedPrecisionMixin) -> float:
    return plugin.gradient_scale


def _attempt(plugin: AdaptiveMixedPrecisionMixin) -> int:
    return plugin.attempt


def _reduce(trainer: Trainer, step: DynamicRange) -> None:
    if trainer.world_size > 1:
        step.reduce_(partial(sum_of_ranks, trainer), partial(max_of_ranks, trainer))
