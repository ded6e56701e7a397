"""Mixed precision for PyTorch Lightning that never loses a run to numerics.

Names are imported when they are first used: ``lightning_amp_plus.step`` and all below it are plain torch, and must not
cost the seconds that ``import lightning`` takes.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_amp_plus.advice.advice import PrecisionAdvice as PrecisionAdvice
    from lightning_amp_plus.advice.finder import find_precision as find_precision
    from lightning_amp_plus.diagnosis.cause import Diagnosis as Diagnosis
    from lightning_amp_plus.dynamic_range.stats import DynamicRange as DynamicRange
    from lightning_amp_plus.lightning_pytorch import AdaptiveMixedPrecision as AdaptiveMixedPrecision
    from lightning_amp_plus.lightning_pytorch import AMPMonitor as AMPMonitor
    from lightning_amp_plus.lightning_pytorch import DynamicRangeMonitor as DynamicRangeMonitor
    from lightning_amp_plus.lightning_pytorch import PrecisionFallback as PrecisionFallback
    from lightning_amp_plus.monitoring.history import RunHistory as RunHistory
    from lightning_amp_plus.monitoring.plotting import plot_dynamic_range as plot_dynamic_range
    from lightning_amp_plus.monitoring.plotting import plot_loss_scale as plot_loss_scale
    from lightning_amp_plus.scaling.loss_scale import LossScale as LossScale
    from lightning_amp_plus.scaling.scaler import DynamicLossScaler as DynamicLossScaler
    from lightning_amp_plus.step.diagnose import diagnose as diagnose
    from lightning_amp_plus.step.report import StepCounters as StepCounters
    from lightning_amp_plus.step.report import StepReport as StepReport
    from lightning_amp_plus.step.skips import NonFiniteStepError as NonFiniteStepError

__version__ = "0.1.0"

_MODULES = {
    "AMPMonitor": "lightning_pytorch",
    "AdaptiveMixedPrecision": "lightning_pytorch",
    "Diagnosis": "diagnosis.cause",
    "DynamicLossScaler": "scaling.scaler",
    "DynamicRange": "dynamic_range.stats",
    "DynamicRangeMonitor": "lightning_pytorch",
    "LossScale": "scaling.loss_scale",
    "NonFiniteStepError": "step.skips",
    "PrecisionAdvice": "advice.advice",
    "PrecisionFallback": "lightning_pytorch",
    "RunHistory": "monitoring.history",
    "StepCounters": "step.report",
    "StepReport": "step.report",
    "diagnose": "step.diagnose",
    "find_precision": "advice.finder",
    "plot_dynamic_range": "monitoring.plotting",
    "plot_loss_scale": "monitoring.plotting",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}.")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
