"""AMPMonitor: what mixed precision does, in the loggers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from lightning_amp_plus import _lightning
from lightning_amp_plus.precision import AdaptiveMixedPrecisionMixin
from lightning_amp_plus.report import Precision, StepReport

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = object  # the binding of a namespace adds the class itself

_MANTISSA_BITS: dict[Precision, int] = {"16-mixed": 10, "bf16-mixed": 7, "32-true": 23}


class AMPMonitorMixin(Callback):
    """Logs the loss scale, what became of the steps, and the gradient norm.

    It logs at the steps that the Trainer logs (``log_every_n_steps``), and costs nothing between them. A skipped step
    reaches ``trainer.callback_metrics`` at once, and the loggers with the next logged step, in the cumulative counts.
    The last values of an epoch are logged at its end, so that ``ModelCheckpoint`` and ``EarlyStopping`` can monitor
    any key. Under ``Trainer(barebones=True)`` it is silent.

    Logged metrics:
        - ``amp/loss_scale``: the loss scale after the step; 1 without loss scaling.
        - ``amp/mantissa_bits``: the precision of the step: 10 float16, 7 bfloat16, 23 float32.
        - ``amp/applied_steps``, ``amp/skipped_steps``: optimizer steps since the run began.
        - ``amp/retried_attempts``: how often one of them was run again.
        - ``amp/rescued_steps``: applied steps that only a wider precision made finite, with ``PrecisionFallback``.
        - ``amp/overflow_rate``: share of the last 100 steps that met an inf or NaN, 0 to 1.
        - ``amp/grad_norm``: 2-norm of the true gradients before clipping. Not logged for a skipped step.
        - ``amp/clipped``: 1 if clipping by norm made the gradients smaller, else 0. Only where the Trainer clips.

    Args:
        prog_bar: Whether ``amp/loss_scale`` is shown in the progress bar.

    Raises:
        TypeError: At the start of a run whose Trainer does not use :class:`AdaptiveMixedPrecision`.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_amp_plus import AdaptiveMixedPrecision, AMPMonitor
        >>> trainer = Trainer(
        ...     plugins=[AdaptiveMixedPrecision("bf16-mixed")], callbacks=[AMPMonitor()], logger=False
        ... )

    """

    def __init__(self, prog_bar: bool = False) -> None:
        self.prog_bar = prog_bar
        self._seen: StepReport | None = None
        self._is_first = True
        self._skipped = 0
        self._logged: list[str] = []

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _plugin_of(trainer)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seen = _plugin_of(trainer).last_step
        self._is_first = True

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._logged:
            _lightning.forget_logged(trainer, "on_train_batch_end", self._logged)
            self._logged = []
        if not trainer.barebones and (self._is_first or _lightning.logs_this_step(trainer)):
            _plugin_of(trainer).request_grad_norm()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        plugin = _plugin_of(trainer)
        report = plugin.last_step
        if trainer.barebones or report is None or report is self._seen:
            return  # no optimizer step in this batch
        is_first, self._is_first, self._seen = self._is_first, False, report
        skipped, self._skipped = self._skipped, plugin.counters.skipped_steps
        if is_first or self._skipped > skipped or _lightning.logs_this_step(trainer):
            self._log(trainer, pl_module, report, on_epoch=False)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.barebones and self._seen is not None and not self._is_first:
            self._log(trainer, pl_module, self._seen, on_epoch=True)

    def _log(self, trainer: Trainer, module: LightningModule, report: StepReport, *, on_epoch: bool) -> None:
        metrics = _metrics(_plugin_of(trainer), report)
        self._logged = [] if on_epoch else list(metrics)
        for key, value in metrics.items():
            module.log(
                key,
                # In float64, which holds every count, and on the host, where it costs no copy to a device and back.
                torch.tensor(value, dtype=torch.float64),
                prog_bar=self.prog_bar and key == "amp/loss_scale",
                on_step=not on_epoch,
                on_epoch=on_epoch,
                # All ranks have the same values. Together the two mean: no reduction, and no advice to ask for one.
                sync_dist=True,
                rank_zero_only=True,
            )


def _metrics(plugin: AdaptiveMixedPrecisionMixin, report: StepReport) -> dict[str, float]:
    counters = plugin.counters
    values = {
        "amp/loss_scale": 1.0 if plugin.scaler is None else plugin.scaler.get_scale(),
        "amp/mantissa_bits": float(_MANTISSA_BITS[report.precision]),
        "amp/applied_steps": float(counters.applied_steps),
        "amp/skipped_steps": float(counters.skipped_steps),
        "amp/retried_attempts": float(counters.retried_attempts),
        "amp/rescued_steps": float(counters.rescued_steps),
        "amp/overflow_rate": counters.overflow_rate,
    }
    if report.grad_norm is not None and math.isfinite(report.grad_norm):
        values["amp/grad_norm"] = report.grad_norm
    if report.clipped is not None:
        values["amp/clipped"] = float(report.clipped)
    return values


def _plugin_of(trainer: Trainer) -> AdaptiveMixedPrecisionMixin:
    plugin = trainer.precision_plugin
    if not isinstance(plugin, AdaptiveMixedPrecisionMixin):
        raise TypeError(
            f"AMPMonitor reads what AdaptiveMixedPrecision does, but the Trainer uses {type(plugin).__name__}. Pass"
            " `Trainer(plugins=[AdaptiveMixedPrecision(...)])` without `precision=`, or drop AMPMonitor."
        )
    return plugin
