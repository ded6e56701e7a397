"""The precisions a run can compute in, from narrow to wide: all that is particular to one of them stands here.

A new precision is one more row of :data:`PRECISIONS` and its name in :data:`PrecisionName`. Strings are for the public
edge: arguments, reports, checkpoints, logs.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import total_ordering
from typing import Any, Literal, get_args

import torch

PrecisionName = Literal["16-mixed", "bf16-mixed", "32-true"]
"""What a user calls a precision, in Lightning's words; from narrow to wide."""

PrecisionArgument = Literal["auto", PrecisionName]
"""A precision, or ``"auto"`` for what the device runs natively."""


@total_ordering
@dataclass(frozen=True, eq=False)
class Precision:
    """One precision. It is wider than another (``>``) if it holds more.

    Attributes:
        name: What a user calls it.
        dtype: What a matrix multiplication computes in.
        short: A short name for tables and the progress bar.
        is_scaled: Whether the loss is scaled, because small gradients would vanish.

    """

    name: PrecisionName
    dtype: torch.dtype
    short: str
    is_scaled: bool = False

    @property
    def mantissa_bits(self) -> int:
        """The bits after the leading one: 10 in float16, 7 in bfloat16, 23 in float32."""
        return round(-math.log2(torch.finfo(self.dtype).eps))

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return torch.finfo(self.dtype).max

    @property
    def is_full(self) -> bool:
        """Whether nothing is computed in a narrower dtype than the weights'."""
        return self.dtype is torch.float32

    @property
    def dtype_name(self) -> str:
        """The name of the dtype without its module, such as ``"float16"``."""
        return str(self.dtype).removeprefix("torch.")

    def autocast(self, device_type: str) -> AbstractContextManager[Any]:
        """Return the context that a forward runs in."""
        if self.is_full:
            return nullcontext()
        # Without the weight cache: it keeps a cast made under no_grad for the forward with grad. Lightning 2.5 has it.
        return torch.autocast(device_type, dtype=self.dtype, cache_enabled=False)

    def __lt__(self, other: Precision) -> bool:
        return PRECISIONS.index(self) < PRECISIONS.index(other)

    def __repr__(self) -> str:
        return repr(self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return precision_of, (self.name,)  # a copy, or one of another process, is the same


FP16 = Precision("16-mixed", torch.float16, "fp16", is_scaled=True)
BF16 = Precision("bf16-mixed", torch.bfloat16, "bf16")
FP32 = Precision("32-true", torch.float32, "fp32")

PRECISIONS: tuple[Precision, ...] = (FP16, BF16, FP32)
"""All of them, from narrow to wide."""

NAMES: tuple[PrecisionName, ...] = get_args(PrecisionName)

_BY_NAME = {precision.name: precision for precision in PRECISIONS}


def precision_of(name: str) -> Precision:
    """Return the precision of a name.

    Raises:
        KeyError: If there is none.

    Example:
        >>> precision_of("bf16-mixed").short, precision_of("32-true") > precision_of("16-mixed")
        ('bf16', True)

    """
    return _BY_NAME[name]  # type: ignore[index]


def scale_text(scale: float) -> str:
    """Return a loss scale as it is always written: a power of two as one.

    Example:
        >>> scale_text(65536.0), scale_text(1.0), scale_text(3000.0)
        ('2^16', '2^0', '3000')

    """
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:.6g}"
