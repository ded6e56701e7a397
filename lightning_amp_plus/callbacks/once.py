"""Metrics that are true of one step, logged for that step alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from lightning_amp_plus import _lightning

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_HOOK = "on_train_batch_end"


class LoggedOnce:
    """Logs metrics from ``on_train_batch_end``, or from ``on_train_epoch_end``, as values of their own."""

    def __init__(self) -> None:
        self._keys: list[str] = []

    def log(self, module: LightningModule, metrics: Mapping[str, float], *, on_epoch: bool = False) -> None:
        """Log metrics that all ranks have alike."""
        self._keys = [] if on_epoch else list(metrics)
        for key, value in metrics.items():
            module.log(
                key,
                # In float64, which holds every count, and on the host, where it costs no copy to a device and back.
                torch.tensor(value, dtype=torch.float64),
                on_step=not on_epoch,
                on_epoch=on_epoch,
                # All ranks have the same values. Together the two mean: no reduction, and no advice to ask for one.
                sync_dist=True,
                rank_zero_only=True,
            )

    def withdraw(self, trainer: Trainer) -> None:
        """Have the next step not log again what was true of the last one."""
        if self._keys:
            _lightning.forget_logged(trainer, _HOOK, self._keys)
            self._keys = []
