"""What the tests with a real Trainer share: the Trainer, tiny data, and a model whose arithmetic is exact."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from namespace import AdaptiveMixedPrecision, pl
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader

from lightning_amp_plus import LossScale
from lightning_amp_plus.precisions import PrecisionName

PRECISIONS: tuple[PrecisionName, ...] = ("16-mixed", "bf16-mixed", "32-true")

ROW = torch.tensor([2.0, 2.0, 2.0, 1.0, -1.0, 1.0, -1.0, 0.0])
"""Its norm is 4, so that multiples of it by powers of two are clipped by norm without rounding."""


def make_trainer(plugin: pl.plugins.Precision | None = None, **kwargs: Any) -> pl.Trainer:
    """A quiet Trainer on the CPU; without a plugin it is stock's in 32-true."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(**{**defaults, **kwargs}, plugins=None if plugin is None else [plugin])


def make_plugin(
    precision: PrecisionName = "16-mixed", scale: float = 2.0**8, max_skipped: int = 10, **rules: Any
) -> AdaptiveMixedPrecision:
    """The plugin with a scale that ``Exact`` does not overflow with, up to batches of 64 times ``ROW``."""
    return AdaptiveMixedPrecision(precision, LossScale(init_scale=scale, **rules), max_skipped, retries=0)


def scale_of(plugin: AdaptiveMixedPrecision) -> float:
    assert plugin.scaler is not None
    return plugin.scaler.get_scale()


def loader(rows: Tensor | Iterable[Tensor], batch_size: int = 1) -> DataLoader[Tensor]:
    """Batches of ``batch_size`` rows, in order."""
    return DataLoader(list(rows), batch_size=batch_size)  # type: ignore[arg-type]


def factors(*numbers: float) -> DataLoader[Tensor]:
    """A batch of one row for each number: that multiple of ``ROW``."""
    return loader([ROW * number for number in numbers])


def sgd(parameters: Iterable[Tensor]) -> Optimizer:
    return SGD(parameters, lr=1.0)


class Exact(pl.LightningModule):
    """The gradient of ``linear.weight`` is the batch, whatever the weights: no rounding if that is exact in float16.

    With SGD of learning rate 1 the weights are minus the sum of the batches.
    """

    def __init__(self, optimizer: Callable[[Iterable[Tensor]], Optimizer] = sgd) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1, bias=False)
        nn.init.zeros_(self.linear.weight)
        self._optimizer = optimizer

    @property
    def weight(self) -> Tensor:
        return self.linear.weight.detach().clone().flatten()

    @property
    def grad(self) -> Tensor | None:
        """What user code sees now, copied."""
        grad = self.linear.weight.grad
        return None if grad is None else grad.detach().clone().flatten()

    def forward(self, batch: Tensor) -> Tensor:
        return self.linear(batch)

    def loss(self, batch: Tensor) -> Tensor:
        return self(batch).float().sum()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return self._optimizer(self.parameters())
