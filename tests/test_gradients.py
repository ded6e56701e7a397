"""Every dtype and layout is scaled, checked, measured and clipped in place, against a float64 reference."""

import gc
import math
import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from lightning_amp_plus.scaling import gradients


def all_finite(tensors: list[Tensor]) -> bool:
    return bool(gradients.unscale_(tensors, 1.0).isfinite())


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]
# Of a product or a sum of a few dozen elements: rounding to 53, 24, 11 and 8 bits.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
TOLERANCE |= {torch.complex64: TOLERANCE[torch.float32], torch.complex128: TOLERANCE[torch.float64]}
NON_FINITE = [math.inf, -math.inf, math.nan]


def leaf(gradient: Tensor) -> Parameter:
    """A parameter with ``gradient`` on it."""
    parameter = Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
    parameter.grad = gradient
    return parameter


def dense(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=wide).to(dtype)


def sparse(dtype: torch.dtype = torch.float32) -> Tensor:
    """Uncoalesced: its rows 0, 1, 2 are [0, 0], [4, 6], [5, -7]; the two values of row 1 are not its gradient."""
    values = torch.tensor([[1, 2], [5, -7], [3, 4]], dtype=dtype)
    values = values * (1 - 2j) if dtype.is_complex else values
    return torch.sparse_coo_tensor(torch.tensor([[1, 2, 1]]), values, (3, 2), is_coalesced=False, check_invariants=True)


def everything() -> list[Parameter]:
    """All dtypes and layouts in one list, scalars, empty tensors and tensors that are not contiguous among them."""
    parameters = [leaf(dense(dtype, 3, 4, seed=i)) for i, dtype in enumerate(DTYPES)]
    parameters += [leaf(sparse()), leaf(sparse(torch.bfloat16)), leaf(sparse(torch.complex64))]
    parameters += [leaf(dense(torch.float32)), leaf(torch.zeros(0)), leaf(dense(torch.float32, 4, 3).t()[:, ::2])]
    without = Parameter(torch.ones(2))
    return [without, *parameters]


def values(parameters: list[Parameter]) -> list[Tensor]:
    """What is on ``.grad``, as dense complex128 tensors: the reference computes with these."""
    return [p.grad.to_dense().to(torch.complex128, copy=True) for p in parameters if p.grad is not None]


def flat_norm(tensors: list[Tensor]) -> float:
    return math.sqrt(math.fsum(abs(x) ** 2 for tensor in tensors for x in tensor.flatten().tolist()))


def assert_gradients(parameters: list[Parameter], expected: list[Tensor], at_least: float = 0.0) -> None:
    present = [p.grad for p in parameters if p.grad is not None]
    assert len(present) == len(expected)
    for gradient, value in zip(present, expected, strict=True):
        tolerance = max(TOLERANCE[gradient.dtype], at_least)
        torch.testing.assert_close(gradient.to_dense().to(torch.complex128), value, rtol=tolerance, atol=0)


# collect --------------------------------------------------------------------------------------------------------------


def test_collect_is_in_order_and_leaves_out_what_has_no_gradient() -> None:
    one, two = torch.ones(1), torch.ones(2)
    collected = gradients.collect([leaf(two), Parameter(torch.ones(3)), leaf(one)])
    assert [tensor is gradient for tensor, gradient in zip(collected, (two, one), strict=True)] == [True, True]
    assert gradients.collect([]) == []


@pytest.mark.parametrize("index", range(1, 13))
def test_collected_tensors_are_dense_real_and_share_the_memory_of_the_gradient(index: int) -> None:
    parameter = everything()[index]
    before = values([parameter])[0]
    (collected,) = gradients.collect([parameter])
    assert collected.layout is torch.strided
    assert not collected.is_complex()
    collected.mul_(-2)
    assert_gradients([parameter], [before * -2])


def test_a_sparse_gradient_is_summed_over_its_duplicates() -> None:
    parameter = leaf(sparse())
    (collected,) = gradients.collect([parameter])
    assert collected.tolist() == [[4, 6], [5, -7]]
    assert parameter.grad is not None
    assert parameter.grad.is_coalesced()
    assert parameter.grad.layout is torch.sparse_coo
    assert gradients.collect([parameter])[0].data_ptr() == collected.data_ptr()


def test_duplicates_may_overflow_only_as_a_sum() -> None:
    rows = torch.tensor([[0, 0]])
    finite = torch.sparse_coo_tensor(rows, torch.tensor([60000.0, 60000.0]).half(), (2,), check_invariants=True)
    cancelled = torch.sparse_coo_tensor(rows, torch.tensor([3e38, -3e38]), (2,), check_invariants=True)
    assert not all_finite(gradients.collect([leaf(finite)]))
    assert gradients.total_norm(gradients.collect([leaf(cancelled)])).item() == 0


def test_a_gradient_that_autograd_left_conjugated_is_one_too() -> None:
    """The backward of ``conj`` marks its result as conjugated, and leaves the memory as it was."""
    parameter = Parameter(torch.tensor([1 + 2j, 3j]))
    (parameter.conj() * torch.tensor([1j, 2.0])).real.sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.is_conj()  # or this tests nothing
    (expected,) = values([parameter])
    gradients.multiply_(gradients.collect([parameter]), 4.0)
    assert_gradients([parameter], [expected * 4])


def test_parameters_of_every_group() -> None:
    one, two, three = (Parameter(torch.ones(1)) for _ in range(3))
    optimizer = torch.optim.SGD([{"params": [one, two]}, {"params": [three]}], lr=1.0)
    assert [id(p) for p in gradients.parameters_of(optimizer)] == [id(one), id(two), id(three)]


# multiply, unscale, rescale -------------------------------------------------------------------------------------------


def by_multiply(parameters: list[Parameter], factor: float) -> None:
    gradients.multiply_(gradients.collect(parameters), factor)


def by_unscale(parameters: list[Parameter], factor: float) -> None:
    assert gradients.unscale_(gradients.collect(parameters), factor).item() == 0


def by_rescale(parameters: list[Parameter], factor: float) -> None:
    gradients.rescale_(parameters, factor)


SCALINGS = [by_multiply, by_unscale, by_rescale]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("factor", [1.0, 0.125, 15 / 4])
def test_every_element_is_multiplied_once(scaling: Callable[[list[Parameter], float], None], factor: float) -> None:
    parameters = everything()
    addresses = [p.grad.data_ptr() for p in parameters if p.grad is not None and not p.grad.is_sparse]
    expected = [value * factor for value in values(parameters)]
    scaling(parameters, factor)
    assert_gradients(parameters, expected)
    assert addresses == [p.grad.data_ptr() for p in parameters if p.grad is not None and not p.grad.is_sparse]
    assert parameters[0].grad is None


@pytest.mark.parametrize("scaling", SCALINGS)
def test_nothing_to_multiply(scaling: Callable[[list[Parameter], float], None]) -> None:
    scaling([], 2.0)
    scaling([Parameter(torch.ones(1))], 2.0)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("exponent", [16, 24, 126])
def test_a_scale_and_its_inverse_are_exact(scaling: Callable[[list[Parameter], float], None], exponent: int) -> None:
    """A subnormal gradient too: scaled it is normal, and it comes back bit by bit."""
    tiny = torch.tensor([2.0**-149, -3 * 2.0**-149, 2.0**-127, 0.0, 1.5 * 2.0**-120])
    parameter = leaf(tiny * 2.0**exponent)
    scaling([parameter], 2.0**-exponent)
    torch.testing.assert_close(parameter.grad, tiny, rtol=0, atol=0)


def test_a_float64_gradient_keeps_its_range_and_its_bits() -> None:
    gradient = torch.tensor([1e300, 1 / 3, 1e-300], dtype=torch.float64)
    scaled = gradient * 2.0**16
    assert gradients.unscale_([scaled], 2.0**-16).item() == 0
    torch.testing.assert_close(scaled, gradient, rtol=0, atol=0)


@pytest.mark.parametrize("create_graph", [False, True])
def test_rescaled_gradients_keep_their_graph(create_graph: bool) -> None:
    """A gradient penalty: with w = 3, loss w^3 and penalty grad^2, ``.grad`` ends as 3 w^2 + 36 w^3 = 999."""
    weight, plain = Parameter(torch.tensor(3.0)), leaf(torch.tensor(8.0))
    (weight.grad,) = torch.autograd.grad(weight**3 * 2.0**10, weight, create_graph=create_graph)
    gradients.rescale_([weight, plain], 2.0**-10)
    assert weight.grad.item() == 27
    assert weight.grad.requires_grad is create_graph
    assert plain.grad is not None
    assert plain.grad.item() == 2.0**-7
    assert not plain.grad.requires_grad
    if create_graph:
        weight.grad.square().backward()
        assert weight.grad.item() == 999
        weight.grad = None  # a graph that holds its own leaf would live on


def test_rescaling_a_gradient_with_a_graph_leaves_the_graph_of_others_alone() -> None:
    """The saved values of the graph must not change in place."""
    weight = Parameter(torch.tensor(3.0))
    (weight.grad,) = torch.autograd.grad(weight**3 * 4, weight, create_graph=True)
    penalty = weight.grad.square()  # of the scaled gradient: (12 w^2)^2
    gradients.rescale_([weight], 0.25)
    (slope,) = torch.autograd.grad(penalty, weight)
    assert slope.item() == 4 * 144 * 27
    weight.grad = None


# all_finite -----------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(data=st.data(), bad=st.sampled_from([*NON_FINITE, 1.0]))
def test_one_element_anywhere_is_found(data: st.DataObject, bad: float) -> None:
    parameters = everything()
    collected = gradients.collect(parameters)
    tensor = data.draw(st.sampled_from([tensor for tensor in collected if tensor.numel()]))
    position = [data.draw(st.integers(0, size - 1)) for size in tensor.shape]
    tensor[tuple(position)] = bad
    assert all_finite(collected) is math.isfinite(bad)
    assert gradients.unscale_(collected, 0.5).item() == (0 if math.isfinite(bad) else math.inf)
    assert math.isfinite(gradients.total_norm(collected).item()) is math.isfinite(bad)


@pytest.mark.parametrize("bad", NON_FINITE)
@pytest.mark.parametrize("size", [1, 7, 8, 1000, 70_000])
def test_the_last_element_is_found_whatever_the_size(size: int, bad: float) -> None:
    gradient = torch.ones(size)
    assert all_finite([gradient])
    gradient[-1] = bad
    assert not all_finite([gradient])


def test_looking_changes_no_bit() -> None:
    parameters = [
        leaf(torch.tensor([2.0**-149, -0.0, 3e38, math.nan, math.inf])),
        leaf(torch.tensor([1 / 3]).bfloat16()),
    ]
    before = [p.grad.clone() for p in parameters if p.grad is not None]
    all_finite(gradients.collect(parameters))
    gradients.total_norm(gradients.collect(parameters))
    for parameter, value in zip(parameters, before, strict=True):
        assert parameter.grad is not None
        integer = torch.int16 if value.dtype is torch.bfloat16 else torch.int32
        assert parameter.grad.view(integer).tolist() == value.view(integer).tolist()


def test_nothing_is_finite() -> None:
    assert all_finite([])
    assert all_finite([torch.zeros(0)])
    assert gradients.unscale_([], 0.5).item() == 0
    assert gradients.total_norm([]).item() == 0


def test_a_finite_gradient_of_infinite_norm_is_finite() -> None:
    collected = [torch.full((4,), 3e19), torch.ones(2)]
    assert gradients.total_norm(collected).item() == math.inf
    assert all_finite(collected)
    norm = gradients.total_norm(collected, torch.float64)
    torch.testing.assert_close(norm, torch.tensor(6e19, dtype=torch.float64), rtol=1e-7, atol=0)


# total_norm -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_one_dtype(dtype: torch.dtype) -> None:
    parameters = [leaf(dense(dtype, 5, 7)), leaf(dense(dtype, 3, seed=1)), leaf(dense(dtype))]
    norm = gradients.total_norm(gradients.collect(parameters))
    wide = dtype in (torch.float64, torch.complex128)
    assert norm.dtype is (torch.float64 if wide else torch.float32)  # of bfloat16 too, where 8 bits are not enough
    assert norm.shape == ()
    assert norm.item() == pytest.approx(flat_norm(values(parameters)), rel=1e-14 if wide else 1e-6)


def test_norm_of_bfloat16_is_not_rounded() -> None:
    """3000 ones have norm 54.772; bfloat16 next to it has 54.75, and summed in bfloat16 it is 16."""
    assert gradients.total_norm([torch.ones(3000).bfloat16()]).item() == pytest.approx(math.sqrt(3000), rel=1e-6)


def test_norm_of_everything_at_once() -> None:
    parameters = everything()
    expected = flat_norm(values(parameters))
    collected = gradients.collect(parameters)
    for order in (collected, collected[::-1]):
        assert gradients.total_norm(order).item() == pytest.approx(expected, rel=1e-6)
        assert gradients.total_norm(order, torch.float64).item() == pytest.approx(expected, rel=1e-12)


def test_norm_in_float64_when_a_gradient_is() -> None:
    collected = [torch.tensor([3.0]), torch.tensor([1e100], dtype=torch.float64)]
    assert gradients.total_norm(collected).item() == 1e100
    assert gradients.total_norm(collected[::-1]).item() == 1e100


def test_norm_of_subnormal_gradients() -> None:
    """Their squares vanish in float32; in float64 they do not."""
    collected = [torch.full((4,), 2.0**-149)]
    assert gradients.total_norm(collected, torch.float64).item() == 2.0**-148


# clip -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e6])
def test_clipping_by_norm_is_that_of_torch(dtype: torch.dtype, max_norm: float) -> None:
    shapes: list[tuple[int, ...]] = [(5, 7), (3,), ()]
    ours, stock = ([leaf(dense(dtype, *shape)) for shape in shapes] for _ in range(2))
    gradients.clip_norm_(gradients.collect(ours), max_norm)
    torch.nn.utils.clip_grad_norm_(stock, max_norm)
    exact = dtype in (torch.float32, torch.float64)
    # torch rounds the norm of float16 and bfloat16, and takes the absolute value of complex elements first.
    tolerance = 0 if exact else 4 * TOLERANCE[dtype]
    for mine, theirs in zip(ours, stock, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=tolerance, atol=0)


@pytest.mark.parametrize("share", [0.01, 0.999, 1.001])
def test_clipping_everything_by_norm(share: float) -> None:
    parameters = everything()
    before = values(parameters)
    norm = flat_norm(before)
    gradients.clip_norm_(gradients.collect(parameters), norm * share)
    # The norm of those in float32 has the precision of float32, and it is a factor of all.
    assert_gradients(parameters, [value * min(share, 1.0) for value in before], at_least=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_norm", [1e-3, 0.1, 0.7, 4.9999, 5.0, 5.1, 1e6])
def test_clip_coefficient_is_that_of_clipping(max_norm: float, dtype: torch.dtype) -> None:
    collected = [torch.tensor([3.0, 4.0], dtype=dtype), torch.tensor([1 / 3, 1.0, 1e-3], dtype=dtype)]
    expected = [tensor.clone() for tensor in collected]
    gradients.clip_norm_(expected, max_norm)
    norm = gradients.total_norm(collected)
    coefficient = gradients.clip_coefficient(norm.item(), max_norm, norm.dtype)
    gradients.multiply_(collected, coefficient)
    torch.testing.assert_close(collected, expected, rtol=0, atol=0)
    assert coefficient == pytest.approx(min(1.0, max_norm / norm.item()), rel=1e-6)


def test_clip_coefficient_of_extreme_norms() -> None:
    assert gradients.clip_coefficient(0.0, 1.0) == 1
    beyond_float32 = gradients.clip_coefficient(1e39, 1.0)
    assert beyond_float32 == pytest.approx(1e-39, rel=1e-5, abs=0)  # 0 would make a step of finite gradients vanish


@pytest.mark.parametrize("dtype", DTYPES)
def test_clipping_by_value_is_that_of_torch(dtype: torch.dtype) -> None:
    """Of a complex element, which torch refuses, both parts are clamped."""
    parameter = leaf(dense(dtype, 20))
    gradients.clip_value_(gradients.collect([parameter]), 0.5)
    expected = dense(dtype, 20)
    parts = torch.view_as_real(expected) if expected.is_complex() else expected
    torch.nn.utils.clip_grad_value_([stock := leaf(parts)], 0.5)
    assert parts.abs().max() == 0.5  # it does clamp
    assert stock.grad is parts
    torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=0)


def test_clipping_everything_by_value() -> None:
    parameters = everything()
    expected = [torch.complex(v.real.clamp(-0.75, 0.75), v.imag.clamp(-0.75, 0.75)) for v in values(parameters)]
    gradients.clip_value_(gradients.collect(parameters), 0.75)
    assert_gradients(parameters, expected)


def test_clipping_nothing() -> None:
    for clip in (gradients.clip_norm_, gradients.clip_value_):
        clip([], 1.0)
        clip([torch.zeros(0)], 1.0)


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(-1e6, 1e6, width=32), max_size=5), max_size=5), st.floats(1e-3, 1e3))
def test_no_norm_exceeds_the_threshold(lists: list[list[float]], max_norm: float) -> None:
    collected = [torch.tensor(numbers, dtype=torch.float32) for numbers in lists]
    before = [tensor.double() for tensor in collected]
    norm = gradients.total_norm(before).item()
    gradients.clip_norm_(collected, max_norm)
    assert flat_norm(collected) <= max_norm * (1 + 1e-6)
    for tensor, value in zip(collected, before, strict=True):
        wanted = value * gradients.clip_coefficient(norm, max_norm)
        torch.testing.assert_close(tensor.double(), wanted, rtol=1e-5, atol=1e-40)


def test_collected_gradients_are_freed_at_once() -> None:
    """Not by the garbage collector, which may come after the next backward has filled the memory again."""
    parameter = leaf(torch.ones(3))
    collected = gradients.collect([parameter])
    assert len(collected.groups) == 1
    alive = weakref.ref(parameter.grad)
    gc.disable()
    try:
        del collected
        parameter.grad = None
        assert alive() is None
    finally:
        gc.enable()
