"""What the processes of a run agree on. Plain torch.

Ranks exchange flags of 0 and 1, counts and sums, never numbers that may be NaN: gloo's maximum drops a NaN, depending
on the order of the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run. Each method but :attr:`alone` is a collective: all ranks call it, or none.

    Args:
        size: How many there are.
        device: What this rank's collectives run on.

    Example:
        >>> Ranks().alone, Ranks().any(True), Ranks().sum(torch.ones(2)).tolist()
        (True, True, [1.0, 1.0])

    """

    size: int = 1
    device: torch.device = _CPU

    @property
    def alone(self) -> bool:
        """Whether there is one rank only."""
        return self.size == 1

    def any(self, flag: bool) -> bool:
        """Tell whether something is true on any rank."""
        return flag if self.alone else self.max(torch.tensor([float(flag)])).item() > 0

    def max(self, tensor: Tensor) -> Tensor:
        """Return the maximum over all ranks, element by element, of what holds no NaN."""
        return self._reduced(tensor, torch.distributed.ReduceOp.MAX)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks, element by element."""
        return self._reduced(tensor, torch.distributed.ReduceOp.SUM)

    def _reduced(self, tensor: Tensor, operation: torch.distributed.ReduceOp.RedOpType) -> Tensor:
        if self.alone:
            return tensor
        tensor = tensor.to(self.device)
        torch.distributed.all_reduce(tensor, operation)
        return tensor


ALONE = Ranks()
"""One process."""
