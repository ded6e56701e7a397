"""Whether gradients and loss are finite: read in one transfer, and answered alike on all ranks.

What is read are scalars that are finite if, and nearly only if, what they stand for is: a norm, the flag of a kernel,
a loss. Ranks exchange flags of 0 and 1 and never the numbers, since a maximum may drop a NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_amp_plus.step.report import Place

Agree = Callable[[Tensor], Tensor]
"""Reduces a small float32 tensor over all ranks by its maximum."""


class Evidence(NamedTuple):
    """What is looked at along with the gradients as they are.

    Attributes:
        loss: A scalar that is finite if all losses are; ``None`` if there were none.
        loss_counts: Whether an inf or NaN in the loss alone is an overflow.
        backward: A scalar that is finite if the gradients were as backward left them; ``None`` if that is not known.
        backward_counts: Whether an inf or NaN that was there alone, and was replaced since, is an overflow.
        has_raised: Whether the window has raised on this rank, and was run again in a wider precision.

    """

    loss: Tensor | None
    loss_counts: bool
    backward: Tensor | None
    backward_counts: bool
    has_raised: bool = False


class Finding(NamedTuple):
    """What was read.

    Attributes:
        value: The number that stands for the gradients.
        non_finite: What is not finite, on any rank.
        again: Whether any rank is going to look again.
        has_raised: Whether the window has raised on any rank.

    """

    value: float
    non_finite: Place | None
    again: bool
    has_raised: bool = False


def read(gradients: Tensor, evidence: Evidence, agree: Agree | None = None, *, again: bool = False) -> Finding:
    """Read what stands for the gradients, and the evidence beside it, in one device read.

    Args:
        gradients: A scalar that is finite if they are.
        evidence: What else there is.
        agree: Makes the ranks agree; ``None`` on one process.
        again: Whether this rank is going to look again, for user code may change the gradients. All ranks must then.

    """
    if agree is None:
        known = [scalar for scalar in (gradients, evidence.loss, evidence.backward) if scalar is not None]
        value, *others = _stack(known).tolist()
        bad_gradients, bad_others = not math.isfinite(value), [not math.isfinite(other) for other in others]
        bad_loss = evidence.loss is not None and bad_others[0]
        bad_backward = evidence.backward is not None and bad_others[-1]
        has_raised = evidence.has_raised
    else:
        zero = torch.zeros_like(gradients)  # all ranks exchange as many flags
        numbers = _stack(
            [zero if scalar is None else scalar for scalar in (gradients, evidence.loss, evidence.backward)]
        )
        flags = (~numbers.isfinite()).float()
        known = [torch.full_like(flags[:1], value) for value in (again, evidence.has_raised)]
        flags = agree(torch.cat([flags, *known]))
        value, _, _, *flags_read = torch.cat([numbers, flags.to(numbers)]).tolist()
        bad_gradients, bad_loss, bad_backward, again, has_raised = map(bool, flags_read)

    place: Place | None = None
    if bad_gradients or (bad_loss and evidence.loss_counts) or (bad_backward and evidence.backward_counts):
        spoilt_since = evidence.backward is not None and not bad_backward
        place = "loss" if bad_loss else "hook" if spoilt_since else "gradients"
    return Finding(value, place, again, has_raised)


def _stack(scalars: list[Tensor]) -> Tensor:
    first = scalars[0]
    if any(scalar.dtype is not first.dtype or scalar.device != first.device for scalar in scalars):
        dtype = reduce(torch.promote_types, (scalar.dtype for scalar in scalars))
        scalars = [scalar.to(first.device, dtype) for scalar in scalars]
    return torch.stack(scalars)
