"""Histograms of magnitudes by powers of two, counted on the device, and what number formats hold. Plain torch.

A bin holds the numbers of one exponent: bin ``e`` those with ``2^e <= |x| < 2^(e+1)``, as far as float32 reaches. So
the share below a power of two is exact, and a loss scale, which is one, moves a histogram by whole bins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

LOWEST, HIGHEST = -149, 127
"""The exponents of float32's smallest subnormal and of its largest number; smaller and larger ones are put there."""

BINS = HIGHEST - LOWEST + 3
"""How many bins there are: the first counts zeros, the last inf and NaN."""

FLOAT16_MAX = 65504.0
FLOAT16_NORMAL = -14
"""The exponent of float16's smallest normal number."""
FLOAT16_SUBNORMAL = -24
"""The exponent of float16's smallest subnormal number: what is below half of it becomes zero."""

_CHUNK = 2**22  # elements at a time: a bound on the memory
_BIAS = 127  # of the exponents in the bits of a float32


@torch.no_grad()
def counts_of(numbers: Tensor, factor: float = 1.0) -> Tensor:
    """Count numbers by the exponents of their magnitudes.

    Args:
        numbers: In float32 and one dimension, of a device: a piece of :func:`chunks_of`.
        factor: What they are multiplied by first.

    Returns:
        An int64 tensor of shape ``(BINS,)`` on the same device.

    Example:
        >>> counts = counts_of(torch.tensor([0.0, 1.0, -1.5, 2.0]))
        >>> counts[0].item(), counts[bin_of(0)].item(), counts[bin_of(1)].item()
        (1, 2, 1)

    """
    numbers = numbers if factor == 1 else numbers * factor
    # The field in the bits, which is the bin but for subnormal numbers. Not frexp, which Metal does not have.
    field = numbers.view(torch.int32).bitwise_right_shift(23).bitwise_and_(255)
    normal = (numbers * 2.0**24).view(torch.int32).bitwise_right_shift(23).bitwise_and_(255)  # for those that are not
    index = torch.where(field > 0, field - _BIAS - LOWEST + 1, (normal - _BIAS - LOWEST - 23) * (normal > 0))
    return torch.bincount(index, minlength=BINS)


def chunks_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield what there is to count in a tensor, piece by piece, in float32: all that is copied at a time."""
    for chunk in elements_of(tensor).split(_CHUNK):
        yield chunk.float() if chunk.dtype is not torch.float64 else _within_float32(chunk)


def joined_chunks_of(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the same of many tensors of a device, small ones together."""
    waiting: list[Tensor] = []
    for tensor in tensors:
        for chunk in chunks_of(tensor):
            if waiting and (sum(map(len, waiting)) + len(chunk) > _CHUNK or chunk.device != waiting[0].device):
                yield torch.cat(waiting)
                waiting = []
            waiting.append(chunk)
    if waiting:
        yield torch.cat(waiting)


def _within_float32(chunk: Tensor) -> Tensor:
    """Return numbers of float64 in float32, with those beyond its range at its ends; signs do not count."""
    numbers = chunk.float()
    is_beyond = ((numbers == 0) & (chunk != 0)) | (numbers.isinf() & chunk.isfinite())
    ends = chunk.abs().clamp(2.0**LOWEST, torch.finfo(torch.float32).max).float()
    return torch.where(is_beyond, ends, numbers)


def elements_of(tensor: Tensor) -> Tensor:
    """Return what there is to count in a tensor of any layout and dtype, in one dimension; this rank's part of it."""
    tensor = tensor.detach()
    tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg().reshape(-1)


def bin_of(exponent: int) -> int:
    """Return the index of the bin of an exponent, between ``LOWEST`` and ``HIGHEST``."""
    return exponent - LOWEST + 1


def share_below(counts: Tensor, exponent: int) -> float:
    """Return the share of the finite numbers that are not zero and are below ``2**exponent``; 0 if there are none.

    Args:
        counts: Of shape ``(BINS,)``.
        exponent: From ``LOWEST`` to ``HIGHEST``.

    """
    numbers = int(counts[1:-1].sum())
    return int(counts[1 : bin_of(exponent)].sum()) / numbers if numbers else 0.0
