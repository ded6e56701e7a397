"""Dynamic loss scaling: a frozen configuration, and the pure transition from one step's state to the next.

float16 gradients below 2^-24 vanish. Multiplying the loss by a large scale moves them into range, and the scale is
found by trial: lower it when a gradient overflows, double it after a long time without (Micikevicius et al., "Mixed
Precision Training", ICLR 2018, section 3.2). Where the step is run again at lower scales until one works, the best
scale is found between the two by bisection of the exponent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

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
        backoff_factor: What the scale is multiplied by after an overflow whose step is not run again; between 0 and 1,
            both excluded.
        growth_interval: Clean steps in a row before the scale grows; at least 1.
        min_scale: The floor. The scale never falls below it, whatever happens; at least 2^-126.
        max_scale: The ceiling. The scale never grows above it; at most 2^126.
        hysteresis: How many overflowing steps in a row it takes to lower the scale; at least 1. With 2, a single
            overflow is forgiven: its step is run again at a lower scale of its own.
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
        works_at: While the best scale is searched for: the largest scale known to work; ``scale`` is a try above it.
        fails_at: While the best scale is searched for: the smallest scale known to overflow; else infinity.

    """

    scale: float
    growth_tracker: int = 0
    overflows: int = 0
    works_at: float = 0.0
    fails_at: float = math.inf

    @property
    def is_search(self) -> bool:
        """Whether the best scale is being searched for."""
        return self.fails_at < math.inf


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
    if state.is_search:
        return _bisect(config, state.scale, state.fails_at)
    if state.growth_tracker + 1 < config.growth_interval:
        return LossScaleState(state.scale, state.growth_tracker + 1)
    return LossScaleState(min(state.scale * config.growth_factor, config.max_scale))


def state_after_cure(config: LossScale, state: LossScaleState, *, failed: float, worked: float) -> LossScaleState:
    """Return the state after a step that overflowed and was applied when it was run again at a lower scale.

    The best scale lies between the two. The following steps find it by bisection of the exponent: a try that
    overflows is run again at the scale that is known to work.

    Args:
        config: The rules.
        state: The state before the step.
        failed: The smallest scale at which the step overflowed.
        worked: The scale at which it was applied.

    Example:
        >>> state_after_cure(LossScale(), LossScaleState(2.0**24), failed=2.0**20, worked=2.0**16).scale
        262144.0

    """
    if not config.dynamic:
        return state
    overflows = min(state.overflows + 1, config.hysteresis)
    if overflows < config.hysteresis and not state.is_search:
        return LossScaleState(state.scale, 0, overflows)
    return replace(_bisect(config, worked, failed), overflows=overflows)


def retry_scales(config: LossScale, state: LossScaleState, failed: float, retries: int) -> list[float]:
    """Return the scales to run a step at that overflowed at the scale ``failed``, in this order, all below it.

    Example:
        >>> retry_scales(LossScale(), LossScaleState(2.0**16), 2.0**16, retries=5)
        [32768.0, 16384.0, 4096.0, 256.0, 1.0]

    """
    if 0 < state.works_at < failed and retries > 1:
        return [state.works_at, *_lower(config, state.works_at, retries - 1)]
    return _lower(config, failed, retries)


def _lower(config: LossScale, failed: float, count: int) -> list[float]:
    tries = [failed * 0.5 ** (2**k) for k in range(count - 1)]
    last = [config.min_scale] if count > 0 and failed > config.min_scale else []
    return [scale for scale in tries if scale > config.min_scale] + last


def _bisect(config: LossScale, works: float, fails: float) -> LossScaleState:
    """Return the next try between two scales, if there is a power of two between them."""
    steps = max(1, math.floor(math.log2(fails / works) / 2))
    tried = works * 2.0**steps
    if tried >= fails or tried > config.max_scale:
        return LossScaleState(works)
    return LossScaleState(tried, works_at=works, fails_at=fails)


def scale_loss(loss: Tensor, scale: float) -> Tensor:
    """Return ``loss * scale`` in float32 at least, since a float16 product would overflow at 65504."""
    return (loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss) * scale
