"""Metrics that are true of one step, logged for that step alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from lightning_amp_plus.trainer import internals

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_HOOK = "on_train_batch_end"


class LoggedOnce:
    """Logs metrics from ``on_train_batch_end``, or from ``on_train_epoch_end``, as values of their own."""

    def __init__(self) -> None:
        self._keys: list[str] = []  # that are logged now
        self._withdrawn: dict[str, Any] = {}

    def log(self, module: LightningModule, metrics: Mapping[str, float], *, on_epoch: bool = False) -> None:
        """Log metrics that all ranks have alike."""
        # In float64, which holds every count, and on the host, where it costs no copy to a device and back.
        values = {f"{_HOOK}.{key}": torch.tensor(value, dtype=torch.float64) for key, value in metrics.items()}
        known = {} if on_epoch else {key: self._withdrawn.pop(key) for key in values if key in self._withdrawn}
        if known and module.trainer.fit_loop.epoch_loop.batch_idx == 0:
            known.pop(next(iter(known)))  # the first `log` of an epoch has Lightning reset what came before it
        for key, value in values.items():
            if key not in known:
                # All ranks have the same values: together the last two mean no reduction, and no advice to ask for one.
                module.log(
                    key.removeprefix(f"{_HOOK}."),
                    value,
                    on_step=not on_epoch,
                    on_epoch=on_epoch,
                    sync_dist=True,
                    rank_zero_only=True,
                )
        for key, withdrawn in known.items():
            internals.log_again(module.trainer, key, withdrawn, values[key])
        if not on_epoch:
            self._keys = list(values)

    def withdraw(self, trainer: Trainer) -> None:
        """Have the next step not log again what was true of the last one."""
        if self._keys:
            self._withdrawn |= internals.withdraw_logged(trainer, self._keys)
            self._keys = []
