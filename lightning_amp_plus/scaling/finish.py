"""What the gradients go through between the last backward and the optimizer: checked, shown, clipped, in few passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_amp_plus.scaling import gradients, optimizers
from lightning_amp_plus.scaling.checks import Agree, Evidence, Finding, read
from lightning_amp_plus.scaling.held import HeldGradients
from lightning_amp_plus.step.report import Place

Look = Callable[[Optimizer, float, "float | None"], None]
"""Gets an optimizer, what its finite gradients are multiplied by now, and the loss scale that they were made with.

The last is ``None`` for what was made without loss scaling. It may read them, and change nothing.
"""


@dataclass(frozen=True)
class Clipping:
    """Clipping that the engine does itself: by the 2-norm of all gradients, or element by element."""

    threshold: float
    algorithm: Literal["norm", "value"] = "norm"

    def __post_init__(self) -> None:
        if not self.threshold > 0:
            raise ValueError(f"Clipping(threshold={self.threshold!r}): it must be above 0.")


class Verdict(NamedTuple):
    """What the check of a step found, and what is left to do to its gradients."""

    non_finite: Place | None = None
    norm: float | None = None
    clipped: bool | None = None
    divisor: float = 1.0  # what the kernel of a fused optimizer is still to divide by
    has_raised: bool = False  # whether the window has raised on any rank


def finish(
    optimizer: Optimizer,
    held: HeldGradients,
    evidence: Evidence,
    agree: Agree | None,
    hooks: Callable[[], None] | None,
    clipping: Clipping | None,
    *,
    wants_norm: bool,
    looks: Sequence[Look] = (),
    made_at: float | None = None,
) -> Verdict:
    """Check the gradients of ``optimizer``, show them to the user's hooks, and make them what the optimizer is to see.

    Args:
        optimizer: The optimizer.
        held: What its gradients are multiplied by; 1 afterwards, but for what a kernel is still to divide by.
        evidence: What is to be finite beside them.
        agree: Makes the ranks agree; ``None`` on one process.
        hooks: Code of the user's that sees, and may change, the true gradients before clipping.
        clipping: What to clip them to.
        wants_norm: Whether the norm is wanted that ``hooks`` are shown, where it costs a pass.
        looks: What is to see the gradients before ``hooks`` do.
        made_at: The loss scale that they were made with; ``None`` without one.

    """
    max_norm = clipping.threshold if clipping is not None and clipping.algorithm == "norm" else None
    max_value = clipping.threshold if clipping is not None and max_norm is None else None

    grads = gradients.collect(gradients.parameters_of(optimizer))
    in_kernel = hooks is None and max_value is None and (held.scale != 1 or max_norm is not None)
    in_kernel = in_kernel and optimizers.divides_in_kernel(optimizer, grads)
    found = _check(
        grads, held, evidence, agree, by_norm=wants_norm or in_kernel or max_norm is not None, again=hooks is not None
    )
    if found.non_finite is not None:
        return Verdict(found.non_finite, has_raised=found.has_raised)
    shown_norm = found.value
    for look in looks:
        look(optimizer, held.scale, made_at)
    if found.again:
        if held.scale != 1:
            _unscale(grads, held)
        if hooks is not None:
            hooks()
        grads = gradients.collect(gradients.parameters_of(optimizer))
        found = _check(grads, held, evidence, agree, by_norm=True)
        if found.non_finite is not None:
            return Verdict("hook", has_raised=found.has_raised)

    clipped, factor = None, 1 / held.scale
    if max_norm is not None:
        coefficient = gradients.clip_coefficient(found.value, max_norm, gradients.norm_dtype(grads))
        clipped, factor = coefficient < 1, factor * coefficient
    in_kernel = in_kernel and factor > optimizers.SMALLEST_FACTOR
    if factor != 1 and not in_kernel:
        gradients.multiply_(grads, factor)
        held.scale = 1.0
    if max_value is not None:
        gradients.clip_value_(grads, max_value)
    norm = shown_norm if wants_norm or clipping is None else found.value
    divisor = 1 / factor if in_kernel else 1.0
    return Verdict(None, None if math.isnan(norm) else norm, clipped, divisor, found.has_raised)


def _check(
    grads: list[Tensor],
    held: HeldGradients,
    evidence: Evidence,
    agree: Agree | None,
    *,
    by_norm: bool,
    again: bool = False,
) -> Finding:
    """Find out what is not finite; the value found is the norm of the true gradients, or NaN if not measured.

    A norm only reads. So it is the cheaper check of many gradients where the unscaling of the other is not needed.
    """
    by_norm = by_norm or (held.scale == 1 and not gradients.are_small(grads))
    measured = gradients.total_norm(grads) if by_norm else _unscale(grads, held)
    found = read(measured, evidence, agree, again=again)
    norm = found.value / held.scale if by_norm else math.nan
    # Finite gradients may have squares that are not: look at each element. All ranks do, whatever they measured.
    if found.non_finite is not None and (by_norm or agree is not None):
        found = read(_unscale(grads, held), evidence, agree, again=again)
        norm = float(gradients.total_norm(grads, torch.float64)) if found.non_finite is None else math.nan
    return Finding(norm, found.non_finite, found.again, found.has_raised)


def _unscale(grads: list[Tensor], held: HeldGradients) -> Tensor:
    inverse, held.scale = 1 / held.scale, 1.0
    return gradients.unscale_(grads, inverse)
