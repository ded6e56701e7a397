"""What the monitors ask of a run: its plugin, its loss scale, sums and maxima over its ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_amp_plus.precision import AdaptiveMixedPrecisionMixin
from lightning_amp_plus.report import Precision

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def plugin_of(trainer: Trainer, name: str) -> AdaptiveMixedPrecisionMixin:
    """Return the plugin of a run.

    Args:
        trainer: The Trainer of the run.
        name: Who asks.

    Raises:
        TypeError: If the Trainer uses another one than :class:`AdaptiveMixedPrecision`.

    """
    plugin = trainer.precision_plugin
    if not isinstance(plugin, AdaptiveMixedPrecisionMixin):
        raise TypeError(
            f"{name} reads what AdaptiveMixedPrecision does, but the Trainer uses {type(plugin).__name__}. Pass"
            f" `Trainer(plugins=[AdaptiveMixedPrecision(...)])` without `precision=`, or drop {name}."
        )
    return plugin


def scale_of(plugin: AdaptiveMixedPrecisionMixin) -> float:
    """Return the loss scale; 1 without loss scaling."""
    return 1.0 if plugin.scaler is None else plugin.scaler.get_scale()


def precision_of(plugin: AdaptiveMixedPrecisionMixin) -> Precision:
    """Return what a run computes in."""
    precision = plugin.precision
    return "32-true" if precision == "auto" else precision  # which is resolved before the first step


def sum_of_ranks(trainer: Trainer, tensor: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks, which all call this."""
    return _reduced(trainer, tensor, torch.distributed.ReduceOp.SUM)


def max_of_ranks(trainer: Trainer, tensor: Tensor) -> Tensor:
    """Return the maximum of a tensor over all ranks, which all call this."""
    return _reduced(trainer, tensor, torch.distributed.ReduceOp.MAX)


def _reduced(trainer: Trainer, tensor: Tensor, operation: torch.distributed.ReduceOp.RedOpType) -> Tensor:
    if trainer.world_size > 1:
        tensor = tensor.to(trainer.strategy.root_device)
        torch.distributed.all_reduce(tensor, operation)
    return tensor
