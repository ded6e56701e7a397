"""Histograms by powers of two, against ``math.frexp`` of every single number."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lightning_amp_plus.scaling import exponents
from lightning_amp_plus.scaling.exponents import (
    BINS,
    HIGHEST,
    LOWEST,
    bin_of,
    chunks_of,
    counts_of,
    elements_of,
    share_below,
)

INF, NAN = math.inf, math.nan
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def exponent_counts(tensor: Tensor, factor: float = 1.0) -> Tensor:
    """The counts of all that there is in a tensor."""
    none = torch.zeros(BINS, dtype=torch.int64, device=tensor.device)
    return sum((counts_of(chunk, factor) for chunk in chunks_of(tensor)), none)


def expected(numbers: Iterable[float]) -> list[int]:
    """What is to be counted, number by number, without torch."""
    bins = Counter(
        0 if x == 0 else BINS - 1 if not math.isfinite(x) else bin_of(min(max(math.frexp(x)[1] - 1, LOWEST), HIGHEST))
        for x in numbers
    )
    return [bins[index] for index in range(BINS)]


def at(counts: Tensor) -> dict[int, int]:
    """The counts other than 0 by exponent; those of zeros and of inf and NaN by -1000 and 1000."""
    names = {0: -1000, BINS - 1: 1000}
    return {names.get(index, index - 1 + LOWEST): int(counts[index]) for index in counts.nonzero().flatten().tolist()}


@pytest.mark.parametrize("dtype", FLOATS)
def test_random_numbers_of_all_magnitudes_are_counted_as_frexp_does_one_by_one(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    powers = torch.randint(-160, 140, (3000,), generator=generator).double()
    tensor = (torch.randn(3000, generator=generator, dtype=torch.float64) * 2**powers).to(dtype)
    tensor = tensor[(tensor != 0) & tensor.isfinite()]
    if dtype is torch.float64:  # which is rounded to float32 first
        tensor = tensor[(tensor.abs() < 2.0**-160) | (tensor.abs() > 2.0**-125)]
    assert len(tensor) > 300
    assert exponent_counts(tensor).tolist() == expected(tensor.double().tolist())


@pytest.mark.parametrize(
    ("dtype", "smallest_normal", "bits", "largest"),
    [(torch.float16, -14, 10, 15), (torch.bfloat16, -126, 7, 127), (torch.float32, -126, 23, 127)],
)
def test_the_limits_of_a_format_are_where_they_belong(
    dtype: torch.dtype, smallest_normal: int, bits: int, largest: int
) -> None:
    smallest = math.ldexp(1.0, smallest_normal - bits)
    just_below_normal = math.ldexp(1.0, smallest_normal) - smallest
    numbers = [smallest, just_below_normal, math.ldexp(1.0, smallest_normal), -torch.finfo(dtype).max]
    counts = exponent_counts(torch.tensor(numbers, dtype=torch.float64).to(dtype))
    assert at(counts) == {smallest_normal - bits: 1, smallest_normal - 1: 1, smallest_normal: 1, largest: 1}


@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_of_both_signs_and_what_is_not_finite_have_bins_of_their_own(dtype: torch.dtype) -> None:
    counts = exponent_counts(torch.tensor([0.0, -0.0, INF, -INF, NAN, 1.0], dtype=dtype))
    assert at(counts) == {-1000: 2, 1000: 3, 0: 1}


def test_just_below_a_power_of_two_is_another_bin_than_the_power_itself() -> None:
    two = np.float32(2.0)
    numbers = [float(np.nextafter(two, np.float32(0))), 2.0, float(np.nextafter(two, np.float32(3)))]
    assert at(exponent_counts(torch.tensor(numbers))) == {0: 1, 1: 2}


def test_of_a_complex_tensor_both_parts_are_counted_conjugated_or_not() -> None:
    tensor = torch.tensor([1 + 4j, 0 - 2j])
    assert at(exponent_counts(tensor)) == at(exponent_counts(tensor.conj())) == {-1000: 1, 0: 1, 1: 1, 2: 1}


def test_the_imaginary_part_of_a_conjugated_tensor_is_counted() -> None:
    assert at(exponent_counts(torch.tensor([1 + 4j, 8j]).conj().imag)) == {2: 1, 3: 1}


@pytest.mark.filterwarnings("ignore:Sparse.*beta state:UserWarning")
@pytest.mark.parametrize("to_sparse", [Tensor.to_sparse_coo, Tensor.to_sparse_csr])
def test_of_a_sparse_tensor_what_it_holds_is_counted(to_sparse: Callable[[Tensor], Tensor]) -> None:
    assert at(exponent_counts(to_sparse(torch.tensor([[0.0, 3.0], [8.0, 0.0]])))) == {1: 1, 3: 1}


def test_elements_of_a_sparse_tensor_that_are_held_twice_are_summed_first() -> None:
    tensor = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([1.0, 3.0]), (4,), check_invariants=False)
    assert at(exponent_counts(tensor)) == {2: 1}


def test_of_nothing_nothing_is_counted() -> None:
    counts = exponent_counts(torch.empty(0, 3))
    assert (counts.dtype, counts.shape, int(counts.sum())) == (torch.int64, (BINS,), 0)


def test_a_scalar_counts_as_one() -> None:
    assert at(exponent_counts(torch.tensor(-0.75))) == {-1: 1}


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_in_chunks_it_counts_the_same(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(64, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(exponents, "_CHUNK", chunk)
    assert exponent_counts(tensor, 3.0).tolist() == expected((tensor * 3).tolist())


@pytest.mark.parametrize(
    "view", [lambda t: t.T, lambda t: t[::2, 1:], lambda t: t[:, :1].expand(-1, 5), lambda t: t.flip(0)]
)
def test_of_a_view_what_it_shows_is_counted(view: Callable[[Tensor], Tensor]) -> None:
    shown = view(torch.randn(6, 4, generator=torch.Generator().manual_seed(2)))
    assert exponent_counts(shown).tolist() == expected(shown.flatten().tolist())


@pytest.mark.parametrize("power", [-20, -3, 5, 16])
def test_a_factor_that_is_a_power_of_two_moves_the_histogram_by_bins(power: int) -> None:
    tensor = torch.tensor([0.0, 1.0, 1.5, -6.0], dtype=torch.float16)
    assert at(exponent_counts(tensor, 2.0**power)) == {-1000: 1, power: 2, power + 2: 1}


def test_a_factor_does_not_round_in_the_dtype_of_the_tensor() -> None:
    assert at(exponent_counts(torch.tensor([2.0**-24], dtype=torch.float16), 2.0**-16)) == {-40: 1}
    assert at(exponent_counts(torch.tensor([6e4], dtype=torch.float16), 2.0**16)) == {31: 1}


def test_a_tensor_of_a_graph_and_of_inference_is_left_as_it_was() -> None:
    leaf = torch.ones(2, requires_grad=True)
    counts = exponent_counts(leaf * 2)
    with torch.inference_mode():
        inferred = torch.full((2,), 2.0)
    assert not counts.requires_grad
    assert at(counts) == at(exponent_counts(inferred)) == {1: 2}
    assert_close(leaf.detach(), torch.ones(2))


@pytest.mark.parametrize("tensor", [torch.ones(2, 3), torch.ones(2, 3, dtype=torch.complex64).conj()])
def test_elements_come_in_one_dimension_without_a_graph(tensor: Tensor) -> None:
    elements = elements_of(tensor.requires_grad_())
    assert elements.ndim == 1
    assert not elements.requires_grad
    assert len(elements) == tensor.numel() * (1 + tensor.is_complex())


def test_share_below_leaves_zeros_and_what_is_not_finite_out_and_is_exact_at_the_power() -> None:
    counts = exponent_counts(torch.tensor([0.0, INF, NAN, 0.25, 0.4999, 0.5, 1.0, 3.0, 7.0, 9.0]))
    assert [share_below(counts, exponent) for exponent in (-2, -1, 0, 4)] == [0, 2 / 7, 3 / 7, 1]


def test_share_below_goes_to_the_ends_of_float32() -> None:
    counts = exponent_counts(torch.tensor([2.0**-149, torch.finfo(torch.float32).max]))
    assert [share_below(counts, exponent) for exponent in (LOWEST, LOWEST + 1, HIGHEST)] == [0, 0.5, 0.5]


@pytest.mark.parametrize("numbers", [[], [0.0, INF]])
def test_the_share_of_nothing_is_zero(numbers: list[float]) -> None:
    assert share_below(exponent_counts(torch.tensor(numbers)), HIGHEST) == 0


def test_there_is_a_bin_for_each_exponent_between_those_for_zeros_and_for_what_is_not_finite() -> None:
    assert [bin_of(LOWEST), bin_of(0), bin_of(HIGHEST)] == [1, 150, BINS - 2]
