"""Gradients of every dtype and layout: scale, check, measure and clip them in as few passes as possible.

A pass over the gradients is what an optimizer step costs beside the update itself, so each function here is one pass
(``torch._foreach_*``). None reads the device: what they find is a scalar there.

``collect`` turns whatever hangs on ``.grad`` into dense real tensors that share its memory, so that nothing below it
needs to know of complex or sparse gradients.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_CLIP_EPS = 1e-6
"""What ``torch.nn.utils.clip_grad_norm_`` adds to the norm before it divides by it."""


class Gradients(list[Tensor]):
    """What :func:`collect` returns. It is split into groups for the kernels once, however many use it."""

    @cached_property
    def groups(self) -> list[list[Tensor]]:
        """The gradients by kind, device and dtype, which a foreach kernel wants to be uniform; nearly always one."""
        return _split(self)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of every group of ``optimizer``."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def collect(parameters: Iterable[Tensor]) -> Gradients:
    """Return the gradients of ``parameters`` as dense real tensors that share their memory.

    A sparse gradient is coalesced in place first: only then are its values those of the gradient.
    """
    gradients = Gradients()
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout is not torch.strided:
            gradient = parameter.grad = gradient.coalesce()
            gradient = gradient._values()
        if gradient.is_complex():
            if gradient.is_conj():  # as autograd may leave it: a real view needs the values themselves
                gradient = parameter.grad = gradient.resolve_conj()
            gradient = torch.view_as_real(gradient)
        gradients.append(gradient)
    return gradients


@torch.no_grad()
def multiply_(gradients: list[Tensor], factor: float) -> None:
    """Multiply in place by a number on the host. One pass, no device read."""
    for group in _groups(gradients):
        torch._foreach_mul_(group, factor)


def rescale_(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply the gradients of ``parameters``, those with a graph (``create_graph=True``) out of place."""
    multiply_(collect(_without_graph(parameters, factor)), factor)


def rescale_and_check_(parameters: Iterable[Tensor], factor: float) -> Tensor:
    """Do as :func:`rescale_`, and return what :func:`unscale_` returns for the gradients without a graph."""
    return unscale_(collect(_without_graph(parameters, factor)), factor)


def _without_graph(parameters: Iterable[Tensor], factor: float) -> Iterator[Tensor]:
    """Yield the parameters whose gradients may be changed in place, and multiply those of the others."""
    for parameter in parameters:
        if parameter.grad is None or not parameter.grad.requires_grad:
            yield parameter
        else:
            with torch.enable_grad():
                parameter.grad = parameter.grad * factor


@torch.no_grad()
def unscale_(gradients: list[Tensor], inverse_scale: float) -> Tensor:
    """Multiply in place and find out whether every element is finite. One pass, no device read.

    Returns:
        A float32 scalar on the device of the first gradient: 0 if every element is finite, else inf.

    """
    flags = []
    for group in _groups(gradients):
        device = group[0].device
        found_inf = torch.zeros((), dtype=torch.float32, device=device)
        # torch's own kernel: the one that GradScaler.unscale_ runs.
        torch._amp_foreach_non_finite_check_and_unscale_(
            group, found_inf, torch.full((), inverse_scale, dtype=torch.float32, device=device)
        )
        flags.append(found_inf)
    if not flags:
        return torch.zeros(())
    found_inf = flags[0] if len(flags) == 1 else torch.stack([flag.to(flags[0].device) for flag in flags]).amax()
    return found_inf.atanh_()  # 0 stays 0, and 1 becomes inf


@torch.no_grad()
def total_norm(gradients: list[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Return the 2-norm of all gradients as one vector. One reading pass, no device read.

    It is not finite if an element is not, but also where the square of a finite norm exceeds the dtype.

    Args:
        gradients: What :func:`collect` returned.
        dtype: What to sum in; :func:`norm_dtype` if ``None``, since a norm summed in bfloat16 has 8 bits.

    Returns:
        A scalar on the device of the first gradient.

    """
    if not gradients:
        return torch.zeros(())
    norms = []
    for group in _groups(gradients):
        wide = dtype or (torch.float64 if group[0].dtype is torch.float64 else torch.float32)
        if group[0].dtype is wide:  # with a dtype the kernel of torch 2.14 refuses DTensors
            norms.append(torch.stack(torch._foreach_norm(group)))
        else:
            norms.append(torch.stack([torch.linalg.vector_norm(gradient, dtype=wide) for gradient in group]))
    if len(norms) == 1:
        return whole(torch.linalg.vector_norm(norms[0]))
    widest = dtype or norm_dtype(gradients)
    return torch.linalg.vector_norm(torch.cat([whole(norm).to(gradients[0].device, widest) for norm in norms]))


def are_small(gradients: list[Tensor]) -> bool:
    """Tell whether :func:`unscale_` is the quicker check, although it writes: it is one kernel, a norm is several."""
    return len(gradients) <= 64 and sum(map(Tensor.numel, gradients)) <= 2**16


def norm_dtype(gradients: list[Tensor]) -> torch.dtype:
    """Return what :func:`total_norm` sums in: float64 if a gradient is, else float32."""
    return torch.float64 if any(group[0].dtype is torch.float64 for group in _groups(gradients)) else torch.float32


def clip_coefficient(norm: float, max_norm: float, dtype: torch.dtype = torch.float32) -> float:
    """Return what gradients are to be multiplied by so that their ``norm`` is ``max_norm`` at most; 1 or less.

    Rounded at each step as torch rounds it in ``dtype``, so that a clipped update is bit for bit that of
    ``clip_grad_norm_``; only a norm beyond float32, which makes it 0 there, is not rounded.
    """
    if dtype is torch.float64 or norm > torch.finfo(torch.float32).max:
        return min(1.0, 1 / (norm + _CLIP_EPS) * max_norm)
    return min(1.0, _float32(_float32(1 / _float32(norm + _CLIP_EPS)) * _float32(max_norm)))


def _float32(value: float) -> float:
    return ctypes.c_float(value).value


@torch.no_grad()
def clip_norm_(gradients: list[Tensor], max_norm: float) -> None:
    """Clip in place by norm, as ``torch.nn.utils.clip_grad_norm_``. Two passes, no device read."""
    if gradients:
        norm = total_norm(gradients)
        coefficient = (max_norm / (norm + _CLIP_EPS)).clamp(max=1.0)
        for group in _groups(gradients):
            torch._foreach_mul_(group, coefficient.to(group[0].device))


@torch.no_grad()
def clip_value_(gradients: list[Tensor], max_value: float) -> None:
    """Clamp every element in place to ``[-max_value, max_value]``. No device read."""
    for group in _groups(gradients):
        torch._foreach_clamp_min_(group, -max_value)
        torch._foreach_clamp_max_(group, max_value)


def whole(tensor: Tensor) -> Tensor:
    """Return the tensor over all ranks where ``tensor`` is sharded (a DTensor), else ``tensor`` itself."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _groups(gradients: list[Tensor]) -> list[list[Tensor]]:
    return gradients.groups if isinstance(gradients, Gradients) else _split(gradients)


def _split(gradients: list[Tensor]) -> list[list[Tensor]]:
    if not gradients:
        return []
    device, dtype = gradients[0].device, gradients[0].dtype
    if all(type(other) is Tensor and other.dtype is dtype and other.device == device for other in gradients):
        return [list(gradients)]  # a copy: it is kept by ``gradients``, and a cycle would keep them all alive
    groups: dict[Any, list[Tensor]] = {}
    for gradient in gradients:  # a kernel takes no DTensors of two meshes, nor DTensors with others
        mesh = getattr(gradient, "device_mesh", None)
        groups.setdefault((type(gradient), mesh, gradient.device, gradient.dtype), []).append(gradient)
    return list(groups.values())
