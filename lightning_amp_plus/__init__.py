"""Mixed precision for PyTorch Lightning that never loses a run to numerics.

Names are imported when they are first used: ``lightning_amp_plus.engine`` and all below it are plain torch, and must
not cost the seconds that ``import lightning`` takes.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_amp_plus.advice import PrecisionAdvice as PrecisionAdvice
    from lightning_amp_plus.diagnosis import Diagnosis as Diagnosis
    from lightning_amp_plus.finder import find_precision as find_precision
    from lightning_amp_plus.grad_scaler import DynamicLossScaler as DynamicLossScaler
    from lightning_amp_plus.lightning_pytorch import AdaptiveMixedPrecision as AdaptiveMixedPrecision
    from lightning_amp_plus.lightning_pytorch import AMPMonitor as AMPMonitor
    from lightning_amp_plus.lightning_pytorch import DynamicRangeMonitor as DynamicRangeMonitor
    from lightning_amp_plus.lightning_pytorch import PrecisionFallback as PrecisionFallback
    from lightning_amp_plus.loss_scale import LossScale as LossScale
    from lightning_amp_plus.monitoring.dynamic_range import DynamicRange as DynamicRange
    from lightning_amp_plus.monitoring.history import RunHistory as RunHistory
    from lightning_amp_plus.plotting import plot_dynamic_range as plot_dynamic_range
    from lightning_amp_plus.plotting import plot_loss_scale as plot_loss_scale
    from lightning_amp_plus.report import StepCounters as StepCounters
    from lightning_amp_plus.report import StepReport as StepReport
    from lightning_amp_plus.skips import NonFiniteStepError as NonFiniteStepError
    from lightning_amp_plus.standalone import diagnose as diagnose

__version__ = "0.1.0"

_MODULES = {
    "AMPMonitor": "lightning_pytorch",
    "AdaptiveMixedPrecision": "lightning_pytorch",
    "Diagnosis": "diagnosis",
    "DynamicLossScaler": "grad_scaler",
    "DynamicRange": "monitoring.dynamic_range",
    "DynamicRangeMonitor": "lightning_pytorch",
    "LossScale": "loss_scale",
    "NonFiniteStepError": "skips",
    "PrecisionAdvice": "advice",
    "PrecisionFallback": "lightning_pytorch",
    "RunHistory": "monitoring.history",
    "StepCounters": "report",
    "StepReport": "report",
    "diagnose": "standalone",
    "find_precision": "finder",
    "plot_dynamic_range": "plotting",
    "plot_loss_scale": "plotting",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}.")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
