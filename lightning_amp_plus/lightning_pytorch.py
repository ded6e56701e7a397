"""The public names for a Trainer of ``lightning.pytorch``: the plugin and the callbacks, over its base classes."""

import lightning.pytorch as pl
from lightning.pytorch.plugins import MixedPrecision

from lightning_amp_plus.advice import PrecisionAdvice as PrecisionAdvice
from lightning_amp_plus.callbacks.dynamic_range import DynamicRangeMonitorMixin
from lightning_amp_plus.callbacks.fallback import PrecisionFallbackMixin
from lightning_amp_plus.callbacks.monitor import AMPMonitorMixin
from lightning_amp_plus.diagnosis import Diagnosis as Diagnosis
from lightning_amp_plus.finder import find_precision as find_precision
from lightning_amp_plus.grad_scaler import DynamicLossScaler as DynamicLossScaler
from lightning_amp_plus.loss_scale import LossScale as LossScale
from lightning_amp_plus.monitoring.dynamic_range import DynamicRange as DynamicRange
from lightning_amp_plus.monitoring.history import RunHistory as RunHistory
from lightning_amp_plus.plotting import plot_dynamic_range as plot_dynamic_range
from lightning_amp_plus.plotting import plot_loss_scale as plot_loss_scale
from lightning_amp_plus.precision import AdaptiveMixedPrecisionMixin
from lightning_amp_plus.report import StepCounters as StepCounters
from lightning_amp_plus.report import StepReport as StepReport
from lightning_amp_plus.skips import NonFiniteStepError as NonFiniteStepError
from lightning_amp_plus.standalone import diagnose as diagnose


class AdaptiveMixedPrecision(AdaptiveMixedPrecisionMixin, MixedPrecision):
    __doc__ = AdaptiveMixedPrecisionMixin.__doc__
    _pl = pl


class PrecisionFallback(PrecisionFallbackMixin, pl.Callback):
    __doc__ = PrecisionFallbackMixin.__doc__


class AMPMonitor(AMPMonitorMixin, pl.Callback):
    __doc__ = AMPMonitorMixin.__doc__


class DynamicRangeMonitor(DynamicRangeMonitorMixin, pl.Callback):
    __doc__ = DynamicRangeMonitorMixin.__doc__
