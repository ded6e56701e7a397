"""The public names for a Trainer of ``lightning.pytorch``: the plugin and the callbacks, over its base classes."""

import lightning.pytorch as pl
from lightning.pytorch.plugins import MixedPrecision

from lightning_amp_plus.advice.advice import PrecisionAdvice as PrecisionAdvice
from lightning_amp_plus.advice.finder import find_precision as find_precision
from lightning_amp_plus.diagnosis.cause import Diagnosis as Diagnosis
from lightning_amp_plus.dynamic_range.monitor import DynamicRangeMonitorMixin
from lightning_amp_plus.dynamic_range.stats import DynamicRange as DynamicRange
from lightning_amp_plus.monitoring.history import RunHistory as RunHistory
from lightning_amp_plus.monitoring.monitor import AMPMonitorMixin
from lightning_amp_plus.monitoring.plotting import plot_dynamic_range as plot_dynamic_range
from lightning_amp_plus.monitoring.plotting import plot_loss_scale as plot_loss_scale
from lightning_amp_plus.scaling.loss_scale import LossScale as LossScale
from lightning_amp_plus.scaling.scaler import DynamicLossScaler as DynamicLossScaler
from lightning_amp_plus.step.diagnose import diagnose as diagnose
from lightning_amp_plus.step.report import StepCounters as StepCounters
from lightning_amp_plus.step.report import StepReport as StepReport
from lightning_amp_plus.step.skips import NonFiniteStepError as NonFiniteStepError
from lightning_amp_plus.trainer.fallback import PrecisionFallbackMixin
from lightning_amp_plus.trainer.plugin import AdaptiveMixedPrecisionMixin


class AdaptiveMixedPrecision(AdaptiveMixedPrecisionMixin, MixedPrecision):
    __doc__ = AdaptiveMixedPrecisionMixin.__doc__
    _pl = pl


class PrecisionFallback(PrecisionFallbackMixin, pl.Callback):
    __doc__ = PrecisionFallbackMixin.__doc__


class AMPMonitor(AMPMonitorMixin, pl.Callback):
    __doc__ = AMPMonitorMixin.__doc__


class DynamicRangeMonitor(DynamicRangeMonitorMixin, pl.Callback):
    __doc__ = DynamicRangeMonitorMixin.__doc__
