"""What a step has to know of the optimizer it serves: closures, fused kernels, parameters that cannot be scaled."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from lightning_amp_plus.scaling import gradients

SMALLEST_FACTOR = 2.0**-100
"""Below it a division in float32 by the reciprocal is no longer safe."""


def use_of_closure(optimizer: type[Optimizer]) -> Literal["none", "optional", "required"]:
    """Tell what ``optimizer.step`` does with a closure, by its signature; torch's own only call it first, but LBFGS."""
    if issubclass(optimizer, LBFGS):
        return "required"
    if optimizer.__module__.startswith("torch.optim."):
        return "none"
    return _use_by_signature(optimizer.step)


@cache
def _use_by_signature(step: Callable[..., Any]) -> Literal["none", "optional", "required"]:
    parameters = inspect.signature(step).parameters
    if "closure" in parameters:
        return "required" if parameters["closure"].default is inspect.Parameter.empty else "optional"
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return "optional" if takes_any else "none"


def replay(optimizer: Optimizer, output: Any, again: Callable[[], Any]) -> Callable[[], Any]:
    """Return a closure for ``optimizer`` whose first call returns ``output``, computed already, the others ``again()``.

    Where the optimizer changes parameters before its first call, that one is an evaluation too.
    """
    version = _version(optimizer)
    fresh = True

    def closure() -> Any:
        nonlocal fresh
        if fresh and version == _version(optimizer):
            fresh = False
            return output
        return again()

    return closure


def refusal(optimizer: Optimizer) -> RuntimeError:
    """Return the error for an optimizer that needs its closure in float16."""
    return RuntimeError(
        f"{type(optimizer).__name__} evaluates its closure again within a step, and with '16-mixed' the loss scale"
        " cannot be kept right there. Use AdaptiveMixedPrecision('bf16-mixed') or ('32-true'), which pass the closure"
        " through, or an optimizer that needs one evaluation only, such as AdamW."
    )


def _version(optimizer: Optimizer) -> int:
    """Return a number that moves when a parameter is changed in place."""
    return sum(parameter._version for parameter in gradients.parameters_of(optimizer))


def _divides(gradient: Tensor) -> bool:
    return gradient.dtype is not torch.float64 and gradient.device.type in ("cpu", "cuda")


def divides_in_kernel(optimizer: Optimizer, grads: gradients.Gradients) -> bool:
    """Tell whether the kernel of ``optimizer`` can divide the gradients, and nobody looks at them before it does.

    It divides by a float32 number, too coarse for float64 gradients. On other devices it may not divide at all.
    """
    return (
        type(optimizer).__module__.startswith("torch.optim.")
        and getattr(optimizer, "_step_supports_amp_scaling", False)
        and all(group.get("fused") for group in optimizer.param_groups)
        and all(type(group[0]) is Tensor and _divides(group[0]) for group in grads.groups)
        and not (optimizer._optimizer_step_pre_hooks or _global_optimizer_pre_hooks)
    )


def apply(optimizer: Optimizer, divisor: float, kwargs: dict[str, Any]) -> Any:
    """Run ``optimizer.step(**kwargs)`` on the gradients divided by ``divisor``, and outside of autocast.

    In manual optimization the user calls it from within ``training_step``, where its products would be float16.
    """
    first = next(iter(gradients.parameters_of(optimizer)), None)
    device = torch.device("cpu") if first is None else first.device
    if torch.is_autocast_enabled(device.type):
        with torch.autocast(device.type, enabled=False):
            return apply(optimizer, divisor, kwargs)
    if divisor == 1:
        return optimizer.step(**kwargs)
    # The kernel of torch's fused optimizers divides by it, and writes the quotient back to ``.grad``.
    optimizer.grad_scale = torch.full((), divisor, dtype=torch.float32, device=device)  # type: ignore[attr-defined]
    try:
        return optimizer.step(**kwargs)
    finally:
        del optimizer.grad_scale  # type: ignore[attr-defined]


def require_scalable(optimizers: Iterable[Optimizer], names: Mapping[Any, str]) -> None:
    """Refuse float16 parameters, whose gradients cannot be unscaled.

    Raises:
        TypeError: Naming the first such parameter.

    """
    for optimizer in optimizers:
        for parameter in gradients.parameters_of(optimizer):
            if parameter.dtype is torch.float16 and parameter.requires_grad:
                name = names.get(parameter, "without a name")
                raise TypeError(
                    f"Parameter {name!r} is float16. With '16-mixed' parameters are float32 and only the forward runs"
                    " in float16: their gradients could not be unscaled and their updates would be lost to rounding."
                    " Call `.float()` on the module that holds it (a checkpoint loaded in float16?), or freeze it."
                )
