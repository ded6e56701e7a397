"""Lightning's namespace under test: ``lightning.pytorch``, or the other one with ``LIGHTNING_NAMESPACE`` set to it."""

import os
from typing import TYPE_CHECKING

NAMESPACE = os.environ.get("LIGHTNING_NAMESPACE", "lightning.pytorch")

if TYPE_CHECKING or NAMESPACE == "lightning.pytorch":
    import lightning.pytorch as pl

    from lightning_amp_plus import AdaptiveMixedPrecision, AMPMonitor, PrecisionFallback
else:
    import pytorch_lightning as pl

    from lightning_amp_plus.pytorch_lightning import AdaptiveMixedPrecision, AMPMonitor, PrecisionFallback

__all__ = ["NAMESPACE", "AMPMonitor", "AdaptiveMixedPrecision", "PrecisionFallback", "pl"]
