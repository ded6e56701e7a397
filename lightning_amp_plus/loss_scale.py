"""Dynamic loss scaling: a frozen configuration, a pure transition, and the ``GradScaler`` that carries the state.

float16 gradients below 2^-24 vanish. Multiplying the loss by a large scale moves them into range, and the scale is
found by trial: halve it when a gradient overflows, double it after a long time without (Micikevicius et al., "Mixed
Precision Training", ICLR 2018, section 3.2). The state lives on the host, since the outcome of a step is known there
anyway: reading the scale costs no device synchronization.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from lightning_amp_plus import gradients

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


def next_state(config: LossScale, state: LossScaleState, *, overflow: bool) -> LossScaleState:
    """Return the state after one step; nothing else changes.

    Args:
        config: The rules.
        state: The state before the step.
        overflow: Whether the scaled gradients of the step held an inf or NaN.

    Example:
        >>> next_state(LossScale(), LossScaleState(scale=65536.0), overflow=True).scale
        32768.0

    """
    if not config.dynamic:
        return state
    if overflow:
        overflows = min(state.overflows + 1, config.hysteresis)
        lowered = max(state.scale * config.backoff_factor, config.min_scale)
        return LossScaleState(lowered if overflows == config.hysteresis else state.scale, 0, overflows)
    if state.growth_tracker + 1 < config.growth_interval:
        return LossScaleState(state.scale, state.growth_tracker + 1)
    return LossScaleState(min(state.scale * config.growth_factor, config.max_scale))


def scale_loss(loss: Tensor, scale: float) -> Tensor:
    """Return ``loss * scale`` in float32 at least, since a float16 product would overflow at 65504."""
    return (loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss) * scale


class DynamicLossScaler(torch.amp.GradScaler):
    """A :class:`torch.amp.GradScaler` with a floor, a ceiling and hysteresis, whose state is on the host.

    The plugin drives it through :meth:`record`. Driven by hand, as torch documents ``GradScaler``, it works too:
    ``scale``, ``unscale_``, ``step``, ``update``. Under the plugin ``unscale_`` is harmless, for the gradients of a
    ``manual_backward`` are true already: it touches only what ``scale`` was called for by hand.

    Args:
        loss_scale: The rules; the default :class:`LossScale` if ``None``.

    Example:
        >>> scaler = DynamicLossScaler(LossScale(init_scale=8.0))
        >>> scaler.record(overflow=True)
        >>> scaler.get_scale()
        4.0

    """

    def __init__(self, loss_scale: LossScale | None = None) -> None:
        config = LossScale() if loss_scale is None else loss_scale
        # "cpu" whatever the device: torch probes for CUDA otherwise, and no tensor of ours lives on a device.
        super().__init__("cpu", config.init_scale, config.growth_factor, config.backoff_factor, config.growth_interval)
        self.loss_scale = config
        self.restart()

    def restart(self) -> None:
        """Go back to ``init_scale`` and forget all steps."""
        self.state = LossScaleState(self.loss_scale.init_scale)
        self._reset_hand_driven()

    def record(self, *, overflow: bool, at: float | None = None) -> None:
        """Move on by one step.

        Args:
            overflow: Whether the scaled gradients of the step held an inf or NaN.
            at: The scale these gradients were made with, where it was below the present one.

        """
        state = self.state
        if overflow and at is not None and at < state.scale and self.loss_scale.dynamic:
            state = replace(state, scale=self.loss_scale.clamp(at))
        self.state = next_state(self.loss_scale, state, overflow=overflow)

    def get_scale(self) -> float:
        """Return the present scale. It costs no device synchronization."""
        return self.state.scale

    def set_growth_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied by when it grows; above 1."""
        self.loss_scale = replace(self.loss_scale, growth_factor=new_factor)
        super().set_growth_factor(new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied by after an overflow; between 0 and 1."""
        self.loss_scale = replace(self.loss_scale, backoff_factor=new_factor)
        super().set_backoff_factor(new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set how many clean steps in a row it takes to grow; at least 1."""
        self.loss_scale = replace(self.loss_scale, growth_interval=new_interval)
        super().set_growth_interval(new_interval)

    def _get_growth_tracker(self) -> int:
        return self.state.growth_tracker

    def state_dict(self) -> dict[str, Any]:
        """Return the five keys of :class:`torch.amp.GradScaler` and ``hysteresis``, as builtins."""
        return {**super().state_dict(), "hysteresis": self.state.overflows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over scale and counts, from torch's ``GradScaler`` too; the rules stay those of the constructor.

        Raises:
            ValueError: If the saved scale is not a positive finite number.

        """
        scale = float(state_dict["scale"])
        if not 0 < scale < math.inf:
            raise ValueError(f"The saved loss scale is {scale!r}: it must be positive and finite. Nothing was loaded.")
        self.state = LossScaleState(
            self.loss_scale.clamp(scale), int(state_dict["_growth_tracker"]), int(state_dict.get("hysteresis", 0))
        )

    # Driven by hand, without the plugin or beside it.

    def _reset_hand_driven(self) -> None:
        self._scaled_by: float | None = None
        self._unscaled: set[int] = set()
        self._overflows: list[bool] = []

    def scale(self, outputs: Any) -> Any:
        """Return ``outputs``, a tensor or an iterable of tensors, multiplied by the scale, in float32 at least."""
        if isinstance(outputs, Tensor):
            if self._scaled_by is None:
                limit = FLOAT16_LOSS_MAX_SCALE if outputs.dtype is torch.float16 else LARGEST
                self._scaled_by = min(self.get_scale(), limit)
            return scale_loss(outputs, self._scaled_by)
        if isinstance(outputs, Iterable):
            scaled = (self.scale(output) for output in outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
        raise ValueError(f"scale() takes a tensor or an iterable of tensors, but found {type(outputs).__name__}.")

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by what :meth:`scale` multiplied by; a second call does nothing."""
        if self._scaled_by is None or id(optimizer) in self._unscaled:
            return
        gradients.multiply_(gradients.collect(gradients.parameters_of(optimizer)), 1 / self._scaled_by)
        self._unscaled.add(id(optimizer))

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale if need be, and step if the gradients are finite; else return ``None``."""
        self.unscale_(optimizer)
        grads = gradients.collect(gradients.parameters_of(optimizer))
        self._overflows.append(not gradients.all_finite(grads))
        return None if self._overflows[-1] else optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapt the scale to the steps made through :meth:`step` since the last call, or set it to ``new_scale``."""
        if new_scale is not None:
            scale = float(new_scale)
            if not self.loss_scale.min_scale <= scale <= self.loss_scale.max_scale:
                raise ValueError(
                    f"update(new_scale={scale!r}): it must be between min_scale={self.loss_scale.min_scale:g} and"
                    f" max_scale={self.loss_scale.max_scale:g}. Widen the bounds in LossScale(...) if you need it."
                )
            self.state = LossScaleState(scale)
        elif self._overflows:
            self.record(overflow=any(self._overflows), at=self._scaled_by)
        self._reset_hand_driven()
