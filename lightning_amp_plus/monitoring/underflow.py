"""How much of the gradients float16 is too coarse for at the present loss scale: whether it is too LOW. Plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_amp_plus.scaling.exponents import FLOAT16_NORMAL, bin_of, counts_of, joined_chunks_of
from lightning_amp_plus.scaling.gradients import collect, parameters_of


class UnderflowShares(NamedTuple):
    """Shares of all gradient elements, 0 to 1.

    Attributes:
        underflow: What is zero or subnormal in float16, multiplied by the loss scale: it has lost bits, or all.
        added_at_half_scale: What a loss scale half as high would add to that.
        zero: What is exactly zero: what has vanished, but also what no gradient reaches, as rows of an embedding.

    """

    underflow: float
    added_at_half_scale: float
    zero: float


def _alone(counts: Tensor) -> Tensor:
    return counts


class UnderflowMeter:
    """Sees the gradients of a step, of all its optimizers, and counts them."""

    def __init__(self) -> None:
        self.counts: Tensor | None = None

    def look(self, optimizer: Optimizer, scale: float, made_at: float | None) -> None:
        """Count the gradients of ``optimizer``, multiplied by ``scale``, as they were made at a loss scale.

        Not those of a step that was rescued in a wider precision: ``None`` is their loss scale.
        """
        if made_at is None:
            return
        for gradients in joined_chunks_of(collect(parameters_of(optimizer))):
            counts = counts_of(gradients, made_at / scale)
            self.counts = counts if self.counts is None else self.counts + counts.to(self.counts.device)

    def take(self, add_up: Callable[[Tensor], Tensor] = _alone) -> UnderflowShares | None:
        """Return what was seen since it was last asked, in one transfer; ``None`` if there were no finite gradients.

        Args:
            add_up: Sums a tensor over all ranks.

        """
        counts, self.counts = self.counts, None
        if counts is None:
            return None
        counts = add_up(counts)
        normal = bin_of(FLOAT16_NORMAL)
        parts = [counts[:-1].sum(), counts[:normal].sum(), counts[normal], counts[0]]
        total, underflow, added, zero = torch.stack(parts).tolist()
        return UnderflowShares(underflow / total, added / total, zero / total) if total else None
