"""How fast a device multiplies matrices in a dtype, measured within a fraction of a second.

The matrices grow until a call takes long enough to be measured, and stop growing where a dtype is so slow that one more
call would spoil the wait: the float16 matmul of a CPU takes up to 100 times as long as that of float32.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

_SMALLEST, _LARGEST = 128, 4096  # rows and columns; from 2048 on all tensor cores of a large GPU are busy
_SMALLEST_FLOAT32 = 512  # what a machine that is busy does with smaller ones is the time of its threads
_LONG_ENOUGH = 1e-3  # seconds of a float32 matmul that neither launches nor clocks disturb
_SAMPLE = 5e-3  # seconds between two synchronizations


@dataclass(frozen=True)
class MatmulSpeed:
    """How fast a device multiplies two square matrices.

    Attributes:
        size: Their rows and columns.
        gflops: 1e9 multiplications and additions per second.

    """

    size: int
    gflops: float


def matmul_size(device: torch.device, seconds: float = 0.25) -> int:
    """Return the rows and columns, 512 to 4096, at which one float32 matmul takes about 1 to 8 ms on a device.

    Args:
        device: Where to measure.
        seconds: About how long that may take.

    Raises:
        RuntimeError: What torch raises where the device cannot be used or has no memory left.

    """
    size = _SMALLEST_FLOAT32
    while size < _LARGEST and _seconds_per_matmul(device, torch.float32, size, seconds / 10) < _LONG_ENOUGH:
        size *= 2
    return size


def matmul_speed(
    device: torch.device, dtype: torch.dtype, size: int | None = None, seconds: float = 0.25
) -> MatmulSpeed:
    """Measure how fast a device multiplies two square matrices, as torch is configured: the best of several calls.

    Args:
        device: Where to measure.
        dtype: Of the matrices.
        size: Their rows and columns, at least 1; fewer are taken where two calls would take longer than ``seconds``.
            ``None`` for ``matmul_size(device)``, so that the dtypes of a device are measured alike.
        seconds: About how long that may take, and at most about twice that.

    Raises:
        RuntimeError, TypeError: What torch raises where the device cannot be used, or does not know the dtype.

    """
    limit = matmul_size(device, seconds) if size is None else size
    end = time.perf_counter() + seconds
    size = min(_SMALLEST, limit)
    while size < limit and 16 * _seconds_per_matmul(device, dtype, size, seconds / 10) < seconds:  # 2 calls of 2x size
        size = min(2 * size, limit)
    left = end - time.perf_counter()
    return MatmulSpeed(size, 2e-9 * size**3 / _seconds_per_matmul(device, dtype, size, left))


def _seconds_per_matmul(device: torch.device, dtype: torch.dtype, size: int, seconds: float) -> float:
    end = time.perf_counter() + seconds
    matrix = torch.linspace(-1, 1, size * size, device=device).view(size, size).to(dtype)  # draws no random numbers
    matrix @ matrix  # the first call loads kernels
    samples, calls, best = 0, 1, math.inf
    while samples == 0 or (samples < 3 and best < _SAMPLE) or time.perf_counter() < end:
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            matrix @ matrix
        _synchronize(device)
        best = min(best, max((time.perf_counter() - start) / calls, 1e-9))  # a coarse clock may stand still
        calls = max(1, min(100, int(_SAMPLE / best)))  # so many that synchronizing counts for little
        samples += 1
    return best


def _synchronize(device: torch.device) -> None:
    backend = getattr(torch, device.type)
    backend.synchronize() if device.index is None else backend.synchronize(device)  # that of Metal takes no device
