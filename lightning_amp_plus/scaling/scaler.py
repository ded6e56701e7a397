"""The ``GradScaler`` that carries the state of dynamic loss scaling.

The state lives on the host, since the outcome of a step is known there anyway: reading the scale costs no device
synchronization.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_amp_plus.scaling import gradients
from lightning_amp_plus.scaling.loss_scale import (
    FLOAT16_LOSS_MAX_SCALE,
    LARGEST,
    LossScale,
    LossScaleState,
    next_state,
    retry_scales,
    scale_loss,
    state_after_cure,
)


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
        self.state = next_state(self.loss_scale, self.state, overflow=overflow, at=at)

    def set_enabled(self, enabled: bool) -> None:
        """Switch scaling on or off; off, the scale is 1, and what was found so far is kept."""
        self._enabled = enabled

    def record_cure(self, *, failed: float, worked: float) -> None:
        """Move on by one step that overflowed at the scale ``failed`` and was applied at the lower scale ``worked``."""
        self.state = state_after_cure(self.loss_scale, self.state, failed=failed, worked=worked)

    def retry_scales(self, failed: float, retries: int) -> list[float]:
        """Return the scales to run a step at, in this order, that overflowed at the scale ``failed``."""
        return retry_scales(self.loss_scale, self.state, failed, retries)

    def get_scale(self) -> float:
        """Return what :meth:`scale` multiplies by. It costs no device synchronization."""
        return self._scale_now() if self._scaled_by is None else self._scaled_by

    def _scale_now(self) -> float:
        return self.state.scale if self.is_enabled() else 1.0

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
        """Return the five keys of :class:`torch.amp.GradScaler`, ``hysteresis`` and ``search``, as builtins."""
        return {
            "scale": self.state.scale,
            "growth_factor": self.loss_scale.growth_factor,
            "backoff_factor": self.loss_scale.backoff_factor,
            "growth_interval": self.loss_scale.growth_interval,
            "_growth_tracker": self.state.growth_tracker,
            "hysteresis": self.state.overflows,
            "search": [self.state.works_at, self.state.fails_at] if self.state.is_search else [],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over scale and counts, from torch's ``GradScaler`` too; the rules stay those of the constructor.

        A scale that is not ``dynamic`` is such a rule.

        Raises:
            ValueError: If there is no saved scale, or it is not a positive finite number.

        """
        if "scale" not in state_dict:
            raise ValueError(
                f"This is not the state of a loss scaler: it holds {sorted(state_dict) or 'nothing'} and no 'scale'."
                " A run without loss scaling, or a disabled GradScaler, saves such a state. Nothing was loaded."
            )
        scale = float(state_dict["scale"])
        if not 0 < scale < math.inf:
            raise ValueError(
                f"The saved loss scale is {scale!r}: it must be positive and finite. Nothing was loaded. Resume in"
                " 'bf16-mixed' or '32-true', which need none, or load the weights alone to start at init_scale."
            )
        if self.loss_scale.dynamic:
            tracker, overflows = int(state_dict["_growth_tracker"]), int(state_dict.get("hysteresis", 0))
            search = [float(bound) for bound in state_dict.get("search", [])]
            clamped = self.loss_scale.clamp(scale)
            if search and not (clamped == scale and self.loss_scale.min_scale <= search[0] < scale < search[1]):
                search = []  # of a run with other bounds
            self.state = LossScaleState(clamped, tracker, overflows, *search)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_scaled": None}

    # Driven by hand, without the plugin or beside it.

    def _reset_hand_driven(self) -> None:
        self._overflows: list[bool] = []
        self._forget_scaling()

    def _forget_scaling(self) -> None:
        self._scaled_by: float | None = None
        self._scaled: weakref.ref[Tensor] | None = None
        self._unscaled: dict[int, Tensor] = {}  # and whether all was finite then, before clipping could hide it
        self._stepped = False

    def scale(self, outputs: Any) -> Any:
        """Return ``outputs``, a tensor or an iterable of tensors, multiplied by the scale, in float32 at least."""
        if isinstance(outputs, Tensor):
            if not outputs.requires_grad:  # to look at: no gradient will come of it
                return scale_loss(outputs, self.get_scale())
            if self._stepped:  # a new iteration, although the last one was not ended by update()
                self._forget_scaling()
            if self._scaled_by is None:
                limit = FLOAT16_LOSS_MAX_SCALE if outputs.dtype is torch.float16 else LARGEST
                self._scaled_by = min(self._scale_now(), limit)
            scaled = scale_loss(outputs, self._scaled_by)
            self._scaled = weakref.ref(scaled)
            return scaled
        if isinstance(outputs, Iterable):
            each = (self.scale(output) for output in outputs)
            return type(outputs)(each) if isinstance(outputs, (list, tuple)) else each
        raise ValueError(f"scale() takes a tensor or an iterable of tensors, but found {type(outputs).__name__}.")

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by what :meth:`scale` multiplied by; a second call does nothing."""
        key = id(optimizer.param_groups)  # the same for an optimizer and Lightning's wrapper of it
        if self._scaled_by is None or key in self._unscaled:
            return
        self._unscaled[key] = gradients.rescale_and_check_(gradients.parameters_of(optimizer), 1 / self._scaled_by)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale if need be, and step if the gradients are finite; else return ``None``.

        Raises:
            RuntimeError: If a closure is passed: the gradients it makes could not be unscaled in time.

        """
        if kwargs.get("closure") is not None or any(callable(argument) for argument in args):
            raise RuntimeError(
                "DynamicLossScaler.step() takes no closure: the gradients that it makes would reach the optimizer"
                " multiplied by the scale. Run the closure first, or use 'bf16-mixed' or '32-true', without a scaler."
            )
        self.unscale_(optimizer)
        evidence = gradients.unscale_(gradients.collect(gradients.parameters_of(optimizer)), 1.0)
        if (earlier := self._unscaled.get(id(optimizer.param_groups))) is not None:
            evidence = evidence + earlier
        overflow = not evidence.isfinite()
        self._overflows.append(overflow)
        self._stepped = True
        return None if overflow else optimizer.step(*args, **kwargs)

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
        elif self._overflows and self.is_enabled():
            self.record(overflow=any(self._overflows), at=self._scaled_by)
        self._reset_hand_driven()

    # Driven by hand, but under the plugin.

    def begin_backward(self, loss: Tensor) -> None:
        """Take over from :meth:`scale`, unless ``loss`` is what it returned: then its scale comes on top."""
        if self._scaled is None or self._scaled() is not loss:
            self._forget_scaling()

    def begin_step(self, optimizer: torch.optim.Optimizer, *, counted: bool) -> None:
        """Take over a step, and make up for an :meth:`unscale_` that was forgotten.

        Args:
            optimizer: The optimizer of the step.
            counted: Whether the plugin adapts the scale to this step, so that :meth:`update` must not.

        """
        self.unscale_(optimizer)
        self._stepped = True
        if counted:
            self._overflows.clear()
