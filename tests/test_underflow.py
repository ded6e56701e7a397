"""The share of gradients that float16 is too coarse for, against an own count and torch's float16."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from lightning_amp_plus.monitoring.underflow import UnderflowMeter, UnderflowShares

SMALLEST_NORMAL = torch.finfo(torch.float16).tiny


def optimizer(*gradients: Tensor) -> SGD:
    """An optimizer of parameters with these gradients."""
    parameters = [nn.Parameter(torch.zeros_like(gradient.to_dense())) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return SGD(parameters, lr=1.0)


def shares(scale: float, *gradients: Tensor, held: float = 1.0) -> UnderflowShares:
    """What is measured of true gradients that are held multiplied."""
    meter = UnderflowMeter()
    meter.look(optimizer(*[gradient * held for gradient in gradients]), held, scale)
    found = meter.take()
    assert found is not None
    return found


def own_count(scale: float, gradient: Tensor) -> tuple[float, float, float]:
    """The same, from numbers in float64 that are below the smallest normal number of float16."""
    numbers = gradient.double().abs()
    now, at_half = ((numbers * s < SMALLEST_NORMAL).double().mean().item() for s in (scale, scale / 2))
    return now, at_half - now, (numbers == 0).double().mean().item()


def normal(power: int, size: int = 5000) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(size, generator=generator) * 2.0**power
    return gradient.masked_fill_(torch.rand(size, generator=generator) < 0.1, 0.0)


@pytest.mark.parametrize("scale", [1.0, 2.0**4, 2.0**10])
@pytest.mark.parametrize("held", [1.0, 2.0**4, 2.0**10])
def test_shares_are_those_of_an_own_count_however_the_gradients_are_held(scale: float, held: float) -> None:
    gradient = normal(-20)
    found = shares(scale, gradient, held=held)
    assert found == pytest.approx(own_count(scale, gradient), abs=1e-12)
    assert found.zero == pytest.approx(0.1, abs=0.02)
    assert (found.underflow < 0.9) == (scale == 2.0**10)


def test_what_is_subnormal_in_float16_is_what_loses_bits_there() -> None:
    gradient = normal(-22)
    in_half = (gradient * 2.0**6).half()
    is_coarse = (in_half == 0) | (in_half.abs() < SMALLEST_NORMAL)
    rounded_up = (gradient * 2.0**6).abs().lt(SMALLEST_NORMAL) & ~is_coarse
    assert shares(2.0**6, gradient).underflow == (int(is_coarse.sum()) + int(rounded_up.sum())) / 5000
    assert int(rounded_up.sum()) < 5


def test_the_limits_are_exact() -> None:
    gradient = torch.tensor([2.0**-14, 2.0**-14 * (1 - 2.0**-20), 2.0**-13, 2.0**-13 * (1 - 2.0**-20), 0.0])
    assert shares(1.0, gradient) == (2 / 5, 2 / 5, 1 / 5)
    assert shares(2.0, gradient) == (1 / 5, 1 / 5, 1 / 5)


def test_all_optimizers_of_a_step_and_all_their_parameters_are_counted_together() -> None:
    meter = UnderflowMeter()
    meter.look(optimizer(torch.ones(3), torch.zeros(1)), 1.0, 1.0)
    meter.look(optimizer(torch.full((4,), 2.0**-14)), 1.0, 1.0)
    assert meter.take() == (1 / 8, 4 / 8, 1 / 8)


def test_what_was_taken_is_forgotten() -> None:
    meter = UnderflowMeter()
    assert meter.take() is None
    meter.look(optimizer(torch.ones(2)), 1.0, 1.0)
    assert meter.take() == (0, 0, 0)
    assert meter.take() is None


@pytest.mark.parametrize("gradients", [[], [torch.empty(0)], [torch.tensor([math.inf, math.nan])]])
def test_without_finite_gradients_there_are_no_shares(gradients: list[Tensor]) -> None:
    meter = UnderflowMeter()
    meter.look(optimizer(*gradients) if gradients else SGD([nn.Parameter(torch.ones(1))], lr=1.0), 1.0, 1.0)
    assert meter.take() is None


def test_what_is_not_finite_is_no_part_of_the_whole() -> None:
    assert shares(1.0, torch.tensor([math.nan, math.inf, 0.0, 1.0])) == (0.5, 0, 0.5)


def test_of_sparse_and_complex_gradients_what_they_hold_is_counted() -> None:
    assert shares(1.0, torch.tensor([0.0, 1.0, 2.0**-20, 0.0]).to_sparse()) == (1 / 2, 0, 0)
    assert shares(1.0, torch.complex(torch.tensor([1.0, 2.0**-14]), torch.tensor([0.0, 2.0**-30]))) == (
        2 / 4,
        1 / 4,
        1 / 4,
    )


def test_shares_are_of_the_sum_over_ranks() -> None:
    meter = UnderflowMeter()
    other = UnderflowMeter()
    meter.look(optimizer(torch.tensor([0.0, 1.0])), 1.0, 1.0)
    other.look(optimizer(torch.ones(2)), 1.0, 1.0)

    def add_up(counts: Tensor) -> Tensor:
        assert other.counts is not None
        return counts + other.counts

    assert meter.take(add_up) == (1 / 4, 0, 1 / 4)


def test_the_gradients_are_left_as_they_are() -> None:
    gradient = normal(-10, 50)
    seen: Any = optimizer(gradient.clone())
    UnderflowMeter().look(seen, 2.0, 4.0)
    assert torch.equal(seen.param_groups[0]["params"][0].grad, gradient)
