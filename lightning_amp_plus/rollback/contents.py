"""The contents of tensors, copied into storage that is allocated once, and put back. Plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy


class Contents:
    """Tensors whose contents are copied, and the storage for it, which is allocated once."""

    def __init__(self) -> None:
        self._followed: list[Any] = []
        self._has_lazy = False
        self._plain: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._special: list[tuple[Tensor, Tensor]] = []
        self._shapes: list[torch.Size] = []
        self._tensors: list[Tensor] = []
        self._copies: list[Tensor] = []

    def remember(self, values: list[Any]) -> None:
        """Copy the tensors among ``values``; it is cheapest with the same list, or the same ones, as last time."""
        self._follow(values)
        copies, tensors = self._plain
        if tensors:
            torch._foreach_copy_(copies, tensors)
        if self._special:
            with torch.no_grad():
                for copy, tensor in self._special:
                    copy.copy_(tensor)

    def _follow(self, values: list[Any]) -> None:
        same = values is self._followed or list(map(id, values)) == list(map(id, self._followed))
        if same and [tensor.shape for tensor in self._tensors] == self._shapes and not self._has_lazy:
            return
        storage = {id(tensor): copy for tensor, copy in zip(self._tensors, self._copies, strict=True)}
        unique = {id(value): value for value in values if isinstance(value, Tensor) and _can_be_written(value)}
        self._followed = values
        self._has_lazy = any(is_lazy(value) for value in values)
        self._tensors = list(unique.values())
        self._shapes = [tensor.shape for tensor in self._tensors]
        self._copies = [_storage_like(tensor, storage.get(key)) for key, tensor in unique.items()]
        pairs = list(zip(self._copies, self._tensors, strict=True))
        plain = [pair for pair in pairs if _is_plain(pair[1])]
        self._plain = [copy for copy, _ in plain], [tensor for _, tensor in plain]
        self._special = [pair for pair in pairs if not _is_plain(pair[1])]

    def copy_of(self, tensor: Tensor) -> Tensor | None:
        """Return the copy of one of the tensors."""
        return next((c for t, c in zip(self._tensors, self._copies, strict=True) if t is tensor), None)

    def put_back(self, choose: Callable[[Tensor, Tensor], bool]) -> None:
        """Put back those that are chosen, given a tensor and its copy."""
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            if not choose(tensor, copy):
                continue
            if (tensor.shape, tensor.dtype, tensor.device) == (copy.shape, copy.dtype, copy.device):
                tensor.copy_(copy)
            else:
                tensor.data = copy.clone()


def _is_plain(tensor: Tensor) -> bool:
    """Tell whether a foreach copy takes it, without recording it: not a DTensor, not one that requires gradients."""
    return type(tensor) in (Tensor, Parameter) and not tensor.requires_grad


def turned_non_finite(now: Tensor, before: Tensor) -> bool:
    """Tell whether an element is inf or NaN that was finite, or NaN that was inf: a mask of -inf is legal."""
    if not (now.is_floating_point() or now.is_complex()) or now.layout is not torch.strided or now.is_meta:
        return False
    if now.itemsize == 1:  # float8 has no comparisons
        now, before = now.float(), before.float()
    if (now.shape, now.device) != (before.shape, before.device):
        return not bool(now.isfinite().all())
    return bool((now.isnan() & ~before.isnan() | now.isinf() & before.isfinite()).any())


def _can_be_written(tensor: Tensor) -> bool:
    """Tell whether a step can change the contents of ``tensor`` in place, and they can be copied."""
    if is_lazy(tensor) or tensor.is_meta or tensor.is_inference() or tensor.is_nested:
        return False
    if tensor.layout is torch.strided:
        return not any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.layout is not torch._mkldnn  # type: ignore[attr-defined]


def _storage_like(tensor: Tensor, old: Tensor | None) -> Tensor:
    if old is not None and (old.shape, old.dtype, old.device) == (tensor.shape, tensor.dtype, tensor.device):
        return old
    return torch.empty_like(tensor)
