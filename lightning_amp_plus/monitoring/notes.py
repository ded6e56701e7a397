"""The incidents of a run, as they happen: by rank zero, to the folder of the first logger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_amp_plus.monitoring.incidents import IncidentLog, evaluation_incident, incident_of
from lightning_amp_plus.monitoring.outputs import not_in_the_way
from lightning_amp_plus.step.report import StepReport
from lightning_amp_plus.trainer.plugin import AdaptiveMixedPrecisionMixin
from lightning_amp_plus.trainer.run import log_folder, precision_of, scale_of

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class IncidentNotes:
    """Notes the steps and validations of a fit that were not clean; an error of it is told, and ends nothing.

    Args:
        trainer: The Trainer of the fit.
        plugin: Its plugin.

    """

    def __init__(self, trainer: Trainer, plugin: AdaptiveMixedPrecisionMixin) -> None:
        self._trainer, self._plugin = trainer, plugin
        self._log: IncidentLog | None = None
        self._rescued_before = 0

    def note_step(self, report: StepReport) -> None:
        """Note a step that was not clean, or after which the run has moved."""
        trainer, plugin = self._trainer, self._plugin
        batch_idx = trainer.fit_loop.epoch_loop.batch_idx
        after = precision_of(plugin), scale_of(plugin)
        self._write(incident_of(report, trainer.current_epoch, batch_idx, trainer.global_step, after))

    def begin_validation(self) -> None:
        """Begin to count the batches that are rescued."""
        self._rescued_before = self._plugin.counters.rescued_evaluations

    def end_validation(self, last_step: int) -> None:
        """Note a validation, if batches were rescued."""
        rescued = self._plugin.counters.rescued_evaluations - self._rescued_before
        if rescued:
            self._write(evaluation_incident(rescued, last_step, self._trainer.current_epoch))

    def close(self) -> None:
        """Let go of the file."""
        if self._log is not None:
            self._log.close()

    def _write(self, incident: dict[str, Any]) -> None:
        if not self._trainer.is_global_zero:
            return
        with not_in_the_way("An incident"):
            if self._log is None:
                folder = log_folder(self._trainer)
                if folder is None:
                    return
                self._log = IncidentLog(folder)
            self._log.add(incident)
