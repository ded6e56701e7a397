"""Dynamic loss scaling: a frozen configuration, and the pure transition from one step's state to the next.

float16 gradients below 2^-24 vanish. Multiplying the loss by a large scale moves them into range, and the scale is
found by trial: halve it when a gradient overflows, double it after a long time without (Micikevicius et al., "Mixed
Precision Training", ICLR 2018, section 3.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

SMALLEST, LARGEST = 2.0**-126, 2.0**126
"""Scales whose reciprocal is a normal float32 number. Outside of them a finite gradient could become inf, or vanish."""

FLOAT16_LOSS_MAX_SCALE = 2.0**15
"""The gradient of a float16 loss is the scale itself, in float16: the largest power of two below 65504."""


@dataclass(frozen=True)
class LossScale:
    """How the loss is scaled in float16. Powers of two make scaling exact.

    Args:
        init_scale: The scale a fit starts with, between ``min_scale`` and ``max_scale``.
        growth_factor: What the scale is multiplied by after ``growth_interval`` clean steps in a row; above 1.
        backoff_factor: What the scale is multiplied by after an overflow; between 0 and 1, both excluded.
        growth_interval: Clean steps in a row before the scale grows; at least 1.
        min_scale: The floor. The scale never falls below it, whatever happens; at least 2^-126.
        max_scale: The ceiling. The scale never grows above it; at most 2^126.
        hysteresis: How many overflowing steps in a row it takes to lower the scale; at least 1. With 2, a single
            overflow is skipped and forgiven.
        dynamic: ``False`` keeps the scale at ``init_scale``.

    Raises:
        ValueError: If a value is out of its range.

    Example:
        >>> LossScale(init_scale=2.0**12, hysteresis=2).max_scale
        16777216.0

    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    hysteresis: int = 1
    dynamic: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            wanted = {"float": (int, float), "int": (int,), "bool": (bool,)}[str(field.type)]
            if not isinstance(value, wanted) or (field.type != "bool" and isinstance(value, bool)):
                raise ValueError(f"LossScale({field.name}={value!r}): it must be of type {field.type}.")
            if field.type == "float":  # YAML has 65536, numpy a float of its own, and torch no int of 2**70
                object.__setattr__(self, field.name, math.inf if abs(value) >= 2**1000 else float(value))
        self._require(SMALLEST <= self.min_scale <= LARGEST, "min_scale", "between 2**-126 and 2**126")
        self._require(self.min_scale <= self.max_scale <= LARGEST, "max_scale", "between min_scale and 2**126")
        self._require(
            self.min_scale <= self.init_scale <= self.max_scale,
            "init_scale",
            f"between min_scale={self.min_scale:g} and max_scale={self.max_scale:g}",
        )
        self._require(1 < self.growth_factor < math.inf, "growth_factor", "finite and above 1")
        self._require(0 < self.backoff_factor < 1, "backoff_factor", "between 0 and 1, both excluded")
        self._require(self.growth_interval >= 1, "growth_interval", "at least 1")
        self._require(self.hysteresis >= 1, "hysteresis", "at least 1")

    def _require(self, legal: bool, name: str, text: str) -> None:
        if not legal:
            raise ValueError(f"LossScale({name}={getattr(self, name)!r}): it must be {text}.")

    def clamp(self, scale: float) -> float:
        """Return the scale nearest to ``scale`` that lies within the bounds."""
        return min(max(scale, self.min_scale), self.max_scale)


@dataclass(frozen=True)
class LossScaleState:
    """What loss scaling remembers from step to step.

    Attributes:
        scale: The present scale.
        growth_tracker: Clean steps since the scale last changed or overflowed.
        overflows: Overflowing steps in a row, counted up to ``LossScale.hysteresis``.

    """

    scale: float
    growth_tracker: int = 0
    overflows: int = 0


def next_state(config: LossScale, state: LossScaleState, *, overflow: bool, at: float | None = None) -> LossScaleState:
    """Return the state after one step; nothing else changes.

    Args:
        config: The rules.
        state: The state before the step.
        overflow: Whether the scaled gradients of the step held an inf or NaN.
        at: The scale the gradients were made with, where it was below the present one.

    Example:
        >>> next_state(LossScale(), LossScaleState(scale=65536.0), overflow=True).scale
        32768.0

    """
    if not config.dynamic:
        return state
    if overflow:
        overflows = min(state.overflows + 1, config.hysteresis)
        failed = state.scale if at is None else min(at, state.scale)
        lowered = max(failed * config.backoff_factor, config.min_scale)
        return LossScaleState(lowered if overflows == config.hysteresis else state.scale, 0, overflows)
    if state.growth_tracker + 1 < config.growth_interval:
        return LossScaleState(state.scale, state.growth_tracker + 1)
    return LossScaleState(min(state.scale * config.growth_factor, config.max_scale))


def scale_loss(loss: Tensor, scale: float) -> Tensor:
    """Return ``loss * scale`` in float32 at least, since a float16 product would overflow at 65504."""
    return (loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss) * scale
