"""What the monitors ask of a run: its plugin, its loss scale, its folder, sums and maxima over its ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_amp_plus.precisions import PrecisionName
from lightning_amp_plus.trainer.plugin import AdaptiveMixedPrecisionMixin

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
    scaler = plugin.scaler
    return 1.0 if scaler is None else scaler.get_scale()


def precision_of(plugin: AdaptiveMixedPrecisionMixin) -> PrecisionName:
    """Return what a run computes in."""
    precision = plugin.precision
    return "32-true" if precision == "auto" else precision  # which is resolved before the first step


def log_folder(trainer: Trainer) -> Path | None:
    """Return where the first logger of the run keeps its files, as ``ModelCheckpoint`` does.

    ``None`` without one, where it is a remote store, and for a ``fast_dev_run``.
    ``trainer.log_dir`` is a collective, and for all but two kinds of loggers the same for all runs.
    """
    is_a_trial: bool = trainer.fast_dev_run  # type: ignore[attr-defined]
    if not trainer.loggers or is_a_trial:
        return None
    logger = trainer.loggers[0]
    folder = getattr(logger, "log_dir", None)
    if folder is None:
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        folder = os.path.join(logger.save_dir or trainer.default_root_dir, str(logger.name), version)
    return None if "://" in str(folder) else Path(folder)


def local_folder(trainer: Trainer) -> Path | None:
    """Return :func:`log_folder` or, without a logger, the Trainer's own; ``None`` where nothing is to be written."""
    root: str = trainer.default_root_dir
    is_a_trial: bool = trainer.fast_dev_run  # type: ignore[attr-defined]
    return log_folder(trainer) or (None if is_a_trial or "://" in root else Path(root))


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
