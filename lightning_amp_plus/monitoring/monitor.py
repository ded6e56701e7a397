"""AMPMonitor: what mixed precision does, in the loggers, in a log of incidents, and in a table at the end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_amp_plus.dynamic_range.monitor import stats_of
from lightning_amp_plus.monitoring import outputs
from lightning_amp_plus.monitoring.bar import show_in_progress_bar
from lightning_amp_plus.monitoring.history import RunHistory
from lightning_amp_plus.monitoring.incidents import time_now
from lightning_amp_plus.monitoring.metrics import (
    metrics_of_optimizers,
    metrics_of_run,
    metrics_of_step,
    metrics_of_underflow,
)
from lightning_amp_plus.monitoring.notes import IncidentNotes
from lightning_amp_plus.monitoring.once import LoggedOnce
from lightning_amp_plus.monitoring.summary import summary_rows
from lightning_amp_plus.monitoring.underflow import UnderflowMeter
from lightning_amp_plus.precisions import PrecisionName, scale_text
from lightning_amp_plus.step.report import StepReport
from lightning_amp_plus.trainer import internals
from lightning_amp_plus.trainer.plugin import AdaptiveMixedPrecisionMixin
from lightning_amp_plus.trainer.run import log_folder, plugin_of, precision_of, scale_of, sum_of_ranks

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = object  # the binding of a namespace adds the class itself

_SHORT: dict[PrecisionName, str] = {"16-mixed": "fp16", "bf16-mixed": "bf16", "32-true": "fp32"}


class AMPMonitorMixin(Callback):
    """Logs the loss scale, what became of the steps, and the gradient norm; keeps a log of incidents.

    It logs at the steps that the Trainer logs (``log_every_n_steps``), and costs next to nothing between them. A
    skipped step reaches ``trainer.callback_metrics`` at once, and the loggers with the next logged step, in the
    cumulative counts. The last values of an epoch are logged at its end, so that ``ModelCheckpoint`` and
    ``EarlyStopping`` can monitor any key. Under ``Trainer(barebones=True)`` it is silent.

    Each step that was run again, rescued or skipped, each fallback, and each validation with rescued batches is a line
    of JSON in ``amp_incidents.jsonl``, beside the files of the first logger. Its ``step`` counts the steps of all
    optimizers, skipped ones too; its ``batch_idx`` is the last of the step's batches.

    At the end of a fit, also one that an error has ended, a table tells what became of the steps, and loggers that hold
    images (TensorBoard, W&B, MLflow) get a picture of the loss scale if matplotlib is installed.

    Logged metrics:
        - ``amp/loss_scale``: the loss scale after the step; 1 without loss scaling.
        - ``amp/mantissa_bits``: the precision of the step: 10 float16, 7 bfloat16, 23 float32.
        - ``amp/applied_steps``, ``amp/skipped_steps``: optimizer steps since the run began.
        - ``amp/retried_attempts``: how often one of them was run again.
        - ``amp/rescued_steps``: applied steps that only a wider precision made finite, with ``PrecisionFallback``.
        - ``amp/overflow_rate``: share of the last 100 steps that met an inf or NaN, 0 to 1.
        - ``amp/grad_norm``: 2-norm of the true gradients before clipping. Not logged for a skipped step.
        - ``amp/clipped``: 1 if clipping by norm made the gradients smaller, else 0. Only where the Trainer clips.
        - ``amp/underflow``, ``amp/underflow_added_at_half_scale``, ``amp/zero_gradients``: with ``underflow=True`` and
          in float16, every ``every_n_steps``: the share of gradient elements that are zero or subnormal in float16 at
          the loss scale of the applied attempt, the share that half of that scale would add, and the share that is
          exactly zero. If the first is high and the second is not near 0, the scale is too low.

        With several optimizers the norm and whether it was clipped are logged for each, with its position behind:
        ``amp/grad_norm_0``, ``amp/clipped_0``, and so are ``amp/applied_steps_0`` and ``amp/skipped_steps_0``, beside
        the sums over all.

    Args:
        prog_bar: Whether the progress bar shows precision and loss scale, such as ``amp=fp16 scale 2^13``.
        underflow: Whether the underflow of gradients is measured: a pass over the gradients of one step in
            ``every_n_steps``.
        every_n_steps: How many optimizer steps there are from one measurement to the next; at least 1.
        incidents: Whether the log of incidents is kept: up to 2 MiB, the newest.
        summary: Whether the table is printed.
        report: Whether ``report.html``, a page with the table, figures, incidents and settings, is written beside the
            logger's files at the end of a fit. It needs the extra ``plot``.

    Attributes:
        history: The loss scale and the incidents of the last fit: a :class:`RunHistory`. After ``ddp_spawn`` it is that
            of the main process, which has not trained.

    Raises:
        ValueError: If ``every_n_steps`` is out of its range.
        ModuleNotFoundError: If ``report`` is asked for without matplotlib.
        TypeError: At the start of a run whose Trainer does not use :class:`AdaptiveMixedPrecision`.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_amp_plus import AdaptiveMixedPrecision, AMPMonitor
        >>> trainer = Trainer(
        ...     plugins=[AdaptiveMixedPrecision("bf16-mixed")], callbacks=[AMPMonitor()], logger=False
        ... )

    """

    def __init__(
        self,
        prog_bar: bool = True,
        underflow: bool = False,
        every_n_steps: int = 50,
        incidents: bool = True,
        summary: bool = True,
        report: bool = False,
    ) -> None:
        if not isinstance(every_n_steps, int) or isinstance(every_n_steps, bool) or every_n_steps < 1:
            raise ValueError(f"AMPMonitor(every_n_steps={every_n_steps!r}): it must be an integer of at least 1.")
        if report and not outputs.has_matplotlib():
            raise ModuleNotFoundError(
                "AMPMonitor(report=True) draws figures, and matplotlib is not installed: pip install"
                ' "lightning_amp_plus[plot]", or leave report=False.'
            )
        self.prog_bar, self.underflow, self.every_n_steps = prog_bar, underflow, every_n_steps
        self.incidents, self.summary, self.report = incidents, summary, report
        self.history = RunHistory()
        self._end()

    def _end(self) -> None:
        """Hold nothing of a run."""
        self._plugin: AdaptiveMixedPrecisionMixin | None = None  # of the run
        self._settings: list[tuple[str, str]] = []
        self._is_limited = False  # by max_steps
        self._logs_this = False  # whether the Trainer logs this step
        self._began = ""  # the time from which incidents are of this run
        self._has_news = False  # that were not told yet
        self._reports: dict[int, StepReport] = {}  # by optimizer, since the last batch that made steps
        self._of_batch = False  # whether the batch has made some of them
        self._is_first = True  # in its epoch
        self._skipped = 0
        self._logged = LoggedOnce()
        self._notes: IncidentNotes | None = None
        self._meter: UnderflowMeter | None = None
        self._measured_at = 0
        self._hide: Callable[[], None] | None = None

    # A run ------------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        plugin = plugin_of(trainer, "AMPMonitor")
        if stage != "fit":
            return
        self._end()
        self.history = RunHistory()
        if trainer.barebones:
            return
        self._began = time_now()
        self._plugin = plugin
        plugin.observe(partial(self._on_step, plugin), at_end=self._give_back)
        if self.incidents:
            self._notes = IncidentNotes(trainer, plugin)
        if self.underflow:
            self._meter = UnderflowMeter()
        if self.prog_bar:
            self._hide = show_in_progress_bar(trainer, "amp", partial(_short_text, plugin))

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._leave()

    def _give_back(self) -> None:
        """Leave the progress bar as it was."""
        if self._hide is not None:
            self._hide()
            self._hide = None

    def _leave(self) -> None:
        self._give_back()
        if self._notes is not None:
            self._notes.close()
        self._end()

    def __getstate__(self) -> dict[str, Any]:
        of_a_run = {"_logged": LoggedOnce(), "_notes": None, "_meter": None, "_hide": None, "_plugin": None}
        return {**self.__dict__, **of_a_run}

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tell(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._tell(trainer)
        self._leave()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "history" in state_dict:
            self.history, self._began = RunHistory.from_state(state_dict["history"]), ""

    # Steps ------------------------------------------------------------------------------------------------------------

    def _on_step(self, plugin: AdaptiveMixedPrecisionMixin, report: StepReport) -> None:
        if not self._of_batch:
            self._reports, self._of_batch = {}, True
        self._reports[report.optimizer], self._has_news = report, True
        self.history.add(report, scale_of(plugin), precision_of(plugin))
        if self._notes is not None and not (report.is_clean and report.moves_to is None):
            self._notes.note_step(report)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._plugin is None:
            return
        if self.report:
            self._settings = outputs.settings_of(trainer, self._plugin)  # some of which end with the run
        self._is_limited = trainer.max_steps > 0
        steps = self._plugin.counters.steps  # of the run that is resumed
        self._measured_at = steps - steps % self.every_n_steps

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_first = True

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._logged.withdraw(trainer)
        plugin = self._plugin
        if plugin is None:
            return
        self._of_batch = False
        self._logs_this = logs_this = internals.logs_this_step(trainer)
        if logs_this or self._is_first or trainer.is_last_batch or (self._is_limited and _is_last_step(trainer)):
            plugin.request_grad_norm()
        if self._meter is not None and self._meter.counts is None:
            is_due = plugin.counters.steps + 1 - self._measured_at >= self.every_n_steps
            if is_due and plugin.precision == "16-mixed":
                plugin.request_look(self._meter.look)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        plugin = self._plugin
        if plugin is None or not self._of_batch:
            return
        counters = plugin.counters
        if self._meter is not None and self._meter.counts is not None:
            self._measured_at = counters.steps - counters.steps % self.every_n_steps
        is_first, self._is_first = self._is_first, False
        skipped, self._skipped = self._skipped, counters.skipped_steps
        if is_first or self._skipped > skipped or self._logs_this or trainer.should_stop:
            self._logged.log(pl_module, self._metrics(trainer, plugin))

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._notes is not None:
            self._notes.begin_validation()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._notes is not None:
            self._notes.end_validation(self.history.last_step)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._plugin is not None and not self._is_first and self._reports:
            self._logged.log(pl_module, self._metrics(trainer, self._plugin), on_epoch=True)

    def _metrics(self, trainer: Trainer, plugin: AdaptiveMixedPrecisionMixin) -> dict[str, float]:
        latest = next(reversed(self._reports.values()))
        values = metrics_of_run(plugin.counters, latest, scale_of(plugin))
        if len(trainer.optimizers) == 1:
            values |= metrics_of_step(latest)
        else:
            for index, report in self._reports.items():
                values |= metrics_of_step(report, index)
            values |= metrics_of_optimizers(plugin.steps_by_optimizer)
        if self._meter is not None and (shares := self._meter.take(partial(sum_of_ranks, trainer))) is not None:
            values |= metrics_of_underflow(shares)
        return values

    # The end ----------------------------------------------------------------------------------------------------------

    def _tell(self, trainer: Trainer) -> None:
        plugin = self._plugin
        if plugin is None or not self._has_news or not trainer.is_global_zero:
            return
        self._has_news = False
        rows = summary_rows(self.history, plugin.counters, precision_of(plugin), scale_of(plugin))
        if self.summary:
            with outputs.not_in_the_way("AMPMonitor's summary"):
                outputs.show_summary(rows)
        draw = partial(outputs.loss_scale_figure, self.history)
        outputs.send_figure(trainer, "AMPMonitor's picture of the loss scale", "amp/loss_scale_history", draw)
        if self.report:
            with outputs.not_in_the_way("AMPMonitor's report.html"):
                keeps = self.incidents and log_folder(trainer) is not None
                stats = stats_of(trainer)
                outputs.write_report(
                    trainer, rows, self._settings, self.history, stats, self._began, keeps_incidents=keeps
                )


def _is_last_step(trainer: Trainer) -> bool:
    return trainer.global_step + 1 == trainer.max_steps


def _short_text(plugin: AdaptiveMixedPrecisionMixin) -> str:
    precision = precision_of(plugin)
    return f"{_SHORT[precision]} scale {scale_text(scale_of(plugin))}" if precision == "16-mixed" else _SHORT[precision]
