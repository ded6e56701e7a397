"""The magnitudes that pass through the modules of a model: histograms, kept as sums, and what they say. Plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_amp_plus.scaling.exponents import BINS, HIGHEST, LOWEST, share_below

Kind = Literal["activations", "activation_gradients", "parameter_gradients"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_VERSION = 1


@dataclass(eq=False)
class DynamicRange:
    """What was measured of each module, over all measured steps. Gradients are true ones, without the loss scale.

    Attributes:
        modules: The names of the modules, as in ``named_modules``, in their order.
        counts: How many elements there were of each exponent, an int64 tensor of shape ``(3, modules, BINS)``, in the
            order of ``KINDS``; see ``exponents.py`` for the bins.
        largest: The largest finite magnitudes, a float32 tensor of shape ``(3, modules)``.
        largest_input: The largest finite magnitude that a module was called with, of shape ``(modules,)``.
        above: How many elements were beyond float16's 65504 as they were computed, with the loss scale, an int64 tensor
            of shape ``(3, modules)``; inf and NaN count.
        updates: How many weights a step has changed, and for how many of them by less than half of a bfloat16 ulp of
            the weight, so that a bfloat16 weight would not have changed: an int64 tensor of shape ``(2, modules)``.
        steps: How many optimizer steps were measured.
        loss_scale: That of the last measured step; 1 without loss scaling.

    """

    modules: tuple[str, ...]
    counts: Tensor
    largest: Tensor
    largest_input: Tensor
    above: Tensor
    updates: Tensor
    steps: int = 0
    loss_scale: float = 1.0

    @classmethod
    def empty(cls, modules: Sequence[str], device: torch.device | str = "cpu") -> DynamicRange:
        """Return the sums of no step."""
        kinds, count = len(KINDS), len(modules)
        return cls(
            tuple(modules),
            torch.zeros(kinds, count, BINS, dtype=torch.int64, device=device),
            torch.zeros(kinds, count, device=device),
            torch.zeros(count, device=device),
            torch.zeros(kinds, count, dtype=torch.int64, device=device),
            torch.zeros(2, count, dtype=torch.int64, device=device),
        )

    def add_(self, other: DynamicRange) -> None:
        """Add what was measured of the same modules."""
        self.counts += other.counts
        self.above += other.above
        self.updates += other.updates
        self.largest = torch.maximum(self.largest, other.largest)
        self.largest_input = torch.maximum(self.largest_input, other.largest_input)
        self.steps += other.steps
        self.loss_scale = other.loss_scale

    def reduce_(self, add_up: Callable[[Tensor], Tensor], maximum: Callable[[Tensor], Tensor]) -> None:
        """Have it be that of all ranks, which all call this: in two reductions, of all integers and of all others."""
        for dtype, reduce in ((torch.int64, add_up), (torch.float32, maximum)):
            fields = {name: value for name, value in vars(self).items() if getattr(value, "dtype", None) is dtype}
            reduced = reduce(torch.cat([tensor.flatten() for tensor in fields.values()]))
            parts = reduced.split([tensor.numel() for tensor in fields.values()])
            for (name, tensor), part in zip(fields.items(), parts, strict=True):
                setattr(self, name, part.reshape(tensor.shape).to(tensor.device))

    def to(self, device: torch.device | str) -> DynamicRange:
        """Return a copy on a device."""
        fields: dict[str, Any] = vars(self)
        moved: dict[str, Any] = {
            name: value.to(device, copy=True) for name, value in fields.items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)

    def cpu(self) -> DynamicRange:
        """Return a copy on the host, in one transfer from a device: a float32 travels as the bits of an integer."""
        tensors: dict[str, Any] = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        packed = torch.cat([_as_integers(tensor.flatten()) for tensor in tensors.values()]).cpu()
        parts = packed.split([tensor.numel() for tensor in tensors.values()])
        fields: dict[str, Any] = {
            name: (part if tensor.dtype is torch.int64 else part.int().view(torch.float32)).reshape(tensor.shape)
            for (name, tensor), part in zip(tensors.items(), parts, strict=True)
        }
        return replace(self, **fields)

    # Shares -----------------------------------------------------------------------------------------------------------

    def share_above(self, kind: Kind) -> list[float]:
        """Return for each module the share of elements beyond float16's 65504 as they were computed; 0 without any."""
        row = KINDS.index(kind)
        totals = self.counts[row].sum(1).tolist()
        return [above / total if total else 0.0 for above, total in zip(self.above[row].tolist(), totals, strict=True)]

    def share_below(self, kind: Kind, exponent: int) -> list[float]:
        """Return for each module the share of the elements other than 0 that are below ``2**exponent``.

        Gradients are compared as they are computed at :attr:`loss_scale`, multiplied by it.
        """
        if kind != "activations":
            exponent -= round(torch.tensor(self.loss_scale).log2().item())
        exponent = min(max(exponent, LOWEST), HIGHEST)
        return [share_below(row, exponent) for row in self.counts[KINDS.index(kind)]]

    def share_lost(self) -> list[float]:
        """Return for each module the share of weight updates below half of a bfloat16 ulp of the weight."""
        made, lost = self.updates.tolist()
        return [small / total if total else 0.0 for small, total in zip(lost, made, strict=True)]

    # State ------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return it as builtins, for checkpoints and JSON: histograms begin at their first full bin."""
        host = self.cpu()
        return {
            "version": _VERSION,
            "modules": list(host.modules),
            "counts": [[_packed(row.tolist()) for row in kind] for kind in host.counts],
            "largest": host.largest.tolist(),
            "largest_input": host.largest_input.tolist(),
            "above": host.above.tolist(),
            "updates": host.updates.tolist(),
            "steps": host.steps,
            "loss_scale": host.loss_scale,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> DynamicRange:
        """Return what :meth:`state_dict` has described.

        Raises:
            ValueError: If the state was written by a later version of the package.

        """
        if state["version"] > _VERSION:
            raise ValueError(
                f"The dynamic range has version {state['version']}, and this lightning_amp_plus reads up to {_VERSION}:"
                " update the package. Nothing was loaded."
            )
        modules = tuple(state["modules"])
        counts = [[_unpacked(row) for row in kind] for kind in state["counts"]]
        return cls(
            modules,
            torch.tensor(counts, dtype=torch.int64).reshape(len(KINDS), len(modules), BINS),
            torch.tensor(state["largest"], dtype=torch.float32).reshape(len(KINDS), len(modules)),
            torch.tensor(state["largest_input"], dtype=torch.float32),
            torch.tensor(state["above"], dtype=torch.int64).reshape(len(KINDS), len(modules)),
            torch.tensor(state["updates"], dtype=torch.int64).reshape(2, len(modules)),
            state["steps"],
            state["loss_scale"],
        )


def _as_integers(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.int64 else tensor.view(torch.int32).long()


def _packed(row: list[int]) -> list[Any]:
    full = [index for index, count in enumerate(row) if count]
    return [full[0], row[full[0] : full[-1] + 1]] if full else []


def _unpacked(packed: list[Any]) -> list[int]:
    first, counts = packed or (0, [])
    return [*[0] * first, *counts, *[0] * (BINS - first - len(counts))]
