"""Whether what a step is computed from is finite: batches, parameters, buffers. It reads the device. Plain torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from lightning_amp_plus.rollback.batches import tensors_in


def is_finite(tensor: Tensor) -> bool:
    """Tell whether all elements are finite; it reads the device."""
    return bool(values_of(tensor).isfinite().all())


def values_of(tensor: Tensor) -> Tensor:
    """Return what there is to look at in a tensor of any layout and dtype."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()
    return tensor.float() if tensor.itemsize == 1 else tensor  # float8 has no comparisons


def largest(tensor: Tensor) -> float:
    """Return the largest finite magnitude; 0 if there is none."""
    magnitudes = values_of(tensor).abs()
    finite = magnitudes[magnitudes.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def non_finite_inputs(batch: Any, name: str = "batch") -> list[str]:
    """Return the names of the tensors in a batch that are not finite, such as ``batch[0]``; it reads the device."""
    return [path for path, tensor in _named(batch, name) if not _is_sound(tensor)]


def _named(batch: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(batch, Tensor):
        yield name, batch
    elif isinstance(batch, dict):
        for key, value in batch.items():
            yield from _named(value, f"{name}[{key!r}]")
    elif isinstance(batch, (list, tuple)):
        for index, value in enumerate(batch):
            yield from _named(value, f"{name}[{index}]")
    else:
        yield from ((f"{name}.{type(batch).__name__}", tensor) for tensor in tensors_in(batch))


def non_finite_state(module: Module, known: Collection[str] = ()) -> list[str]:
    """Return the names of the parameters and buffers that are not finite, but for those ``known`` to be."""
    state = (*module.named_parameters(), *module.named_buffers())
    return [name for name, tensor in state if name not in known and not _is_sound(tensor)]


def _is_sound(tensor: Tensor) -> bool:
    if is_lazy(tensor):
        return True
    tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta or tensor.numel() == 0:
        return True
    if tensor.is_complex() or tensor.layout is not torch.strided or tensor.itemsize == 1:
        return is_finite(tensor)
    return all(extreme.isfinite() for extreme in tensor.detach().aminmax())  # no temporary of its size
