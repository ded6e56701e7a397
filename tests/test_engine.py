"""The rules of a step, without a Trainer: what reaches the optimizer, what does not, and what becomes of the scale."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any, TypeVar, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import LBFGS, SGD, Adagrad, AdamW, Optimizer, SparseAdam
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp_plus.precisions import PrecisionName
from lightning_amp_plus.scaling.finish import Clipping
from lightning_amp_plus.scaling.gradients import parameters_of
from lightning_amp_plus.scaling.loss_scale import LossScale, LossScaleState, next_state
from lightning_amp_plus.step.engine import StepEngine
from lightning_amp_plus.step.skips import NonFiniteStepError

INF, NAN = math.inf, math.nan
PRECISIONS: tuple[PrecisionName, ...] = get_args(PrecisionName)
T = TypeVar("T")
MakeOptimizer = Callable[[Iterable[Tensor]], Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": partial(SGD, lr=0.5, momentum=0.5, foreach=True),
    "SGD fused": partial(SGD, lr=0.5, momentum=0.5, fused=True),
    "AdamW": partial(AdamW, lr=0.5, foreach=True),
    "AdamW fused": partial(AdamW, lr=0.5, fused=True),
    "Adagrad fused": partial(Adagrad, lr=0.5, fused=True),
}
each_precision = pytest.mark.parametrize("precision", PRECISIONS)
each_optimizer = pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
plain_and_fused = pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])


def engine_of(
    precision: PrecisionName = "16-mixed", scale: float = 2.0**16, max_skipped: int = 10, **rules: Any
) -> StepEngine:
    rules = {"max_scale": max(scale, 2.0**24), **rules}
    return StepEngine(precision, LossScale(init_scale=scale, **rules), max_skipped, notify=lambda level, text: None)


def same(actual: Any, expected: Any) -> None:
    """Bit for bit, NaN included."""
    assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def close(actual: Any, expected: Any) -> None:
    """Up to the rounding of a clipping coefficient, which is not a power of two."""
    assert_close(actual, expected, rtol=2e-6, atol=1e-7)


def scale_of(engine: StepEngine) -> float:
    return engine.loss_scaler.state.scale


class _WithGradient(torch.autograd.Function):
    """Zero, whose gradient is a given one times whatever comes from above: in float32, as that of a float32 loss."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient * upstream, None


def loss_of(*pairs: tuple[Tensor, Tensor | float], value: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """A loss of that value, whose gradient for each parameter is what it is paired with."""
    gradients = [torch.full_like(p, g) if isinstance(g, float) else g for p, g in pairs]
    terms = [_WithGradient.apply(p, g) for (p, _), g in zip(pairs, gradients, strict=True)]
    return (torch.stack(terms).sum() + value).to(dtype)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Parameter:
    return Parameter(torch.ones(*shape, dtype=dtype))


def sgd(*parameters: Tensor, lr: float = 1.0, **kwargs: Any) -> SGD:
    return SGD(parameters, lr=lr, **kwargs)


def automatic(engine: StepEngine, optimizer: Optimizer, *losses: Tensor, **kwargs: Any) -> Any:
    """One step as Lightning makes it: the last backward of the window is the closure's."""

    def backward(loss: Tensor) -> Tensor:
        with engine.backward(loss, [optimizer], keep_true=False) as scaled:
            scaled.backward()
        return loss.detach()

    optimizer.zero_grad()
    for loss in losses[:-1]:
        backward(loss)
    return engine.step(optimizer, lambda: backward(losses[-1]) if losses else None, **kwargs)


def manual(engine: StepEngine, loss: Tensor, optimizers: Sequence[Optimizer], **kwargs: Any) -> None:
    with engine.backward(loss, optimizers, keep_true=True, **kwargs) as scaled:
        scaled.backward()


def manual_step(engine: StepEngine, optimizer: Optimizer, index: int = 0, **kwargs: Any) -> bool:
    """Whether it was applied."""
    engine.step(optimizer, lambda: None, index=index, automatic=False, **kwargs)
    return outcome(engine)[0] == "applied"


def outcome(engine: StepEngine) -> tuple[str, str | None]:
    assert engine.last_step is not None
    return engine.last_step.outcome, engine.last_step.non_finite


# True gradients, automatic --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("clipping", [None, Clipping(0.5), Clipping(0.25, "value"), Clipping(1e6)], ids=str)
@each_optimizer
@each_precision
def test_steps_are_those_of_a_plain_loop(
    precision: PrecisionName, optimizer_name: str, clipping: Clipping | None, micro_batches: int
) -> None:
    random = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=random) for shape in ((19,), (3, 5), ())]
    ours, reference = ([Parameter(tensor.clone()) for tensor in start] for _ in range(2))
    engine = engine_of(precision)
    optimizer, plain = OPTIMIZERS[optimizer_name](ours), OPTIMIZERS[optimizer_name](reference)
    compare = close if clipping == Clipping(0.5) else same

    for _ in range(3):
        gradients = [[torch.randn(p.shape, generator=random) for p in ours] for _ in range(micro_batches)]
        automatic(engine, optimizer, *(loss_of(*zip(ours, g, strict=True)) for g in gradients), clipping=clipping)
        plain.zero_grad()
        for g in gradients:
            loss_of(*zip(reference, g, strict=True)).backward()
        if clipping is not None:
            clip = clip_grad_norm_ if clipping.algorithm == "norm" else clip_grad_value_
            clip(reference, clipping.threshold)
        plain.step()

        compare([p.grad for p in ours], [p.grad for p in reference])
        assert engine.last_step is not None
        assert engine.last_step.clipped is {0.5: True, 1e6: False}.get(clipping.threshold if clipping else 0)
    compare(ours, reference)
    compare(optimizer.state_dict()["state"], plain.state_dict()["state"])
    assert engine.counters.applied_steps == 3


def test_a_float16_forward_gives_small_gradients_that_float16_alone_loses() -> None:
    model = nn.Linear(4, 1, bias=False)
    engine, optimizer = engine_of(), SGD(model.parameters(), lr=1.0)
    batch = torch.full((1, 4), 2.0**-10)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return model(batch).float().sum() * 2.0**-20

    loss().backward()
    same(model.weight.grad, torch.zeros(1, 4))
    before = model.weight.detach().clone()
    automatic(engine, optimizer, loss())
    same(model.weight.grad, torch.full((1, 4), 2.0**-30))
    same(model.weight, before - 2.0**-30)


@pytest.mark.parametrize("measured", [False, True])
@plain_and_fused
@each_precision
def test_hooks_see_and_may_change_true_gradients(precision: PrecisionName, fused: bool, measured: bool) -> None:
    a, b, c = ones(2), ones(2), ones(2)
    engine, optimizer = engine_of(precision), sgd(a, b, c, fused=fused)
    if measured:
        engine.request_grad_norm()
    seen: list[Tensor] = []

    def hooks() -> None:
        assert a.grad is not None
        seen.append(a.grad.clone())
        a.grad.mul_(2)  # edited
        b.grad = torch.full((2,), 16.0)  # replaced
        c.grad = None  # taken away

    automatic(engine, optimizer, loss_of((a, 4.0), (b, 4.0), (c, 4.0)), hooks=hooks)
    same(seen, [torch.full((2,), 4.0)])
    same([a, b, c], [torch.full((2,), w) for w in (-7.0, -15.0, 1.0)])
    automatic(engine, optimizer, loss_of((a, 4.0)), hooks=optimizer.zero_grad)
    same(a, torch.full((2,), -7.0))
    assert outcome(engine) == ("applied", None)


@plain_and_fused
def test_hooks_come_before_clipping(fused: bool) -> None:
    a = ones(4)
    engine, optimizer = engine_of(), sgd(a, fused=fused)

    def hooks() -> None:
        assert a.grad is not None
        a.grad.mul_(8)

    automatic(engine, optimizer, loss_of((a, 2.0**20)), hooks=hooks, clipping=Clipping(2.0))
    same(a, torch.zeros(4))  # a norm of 2 over four elements: 1 each
    assert engine.last_step is not None
    assert engine.last_step.grad_norm == 2.0**24


@pytest.mark.parametrize("when", ["pre", "post"])
@plain_and_fused
def test_hooks_of_the_optimizer_see_true_clipped_gradients(fused: bool, when: str) -> None:
    a, seen = ones(4), list[Tensor | None]()
    engine, optimizer = engine_of(), sgd(a, fused=fused)

    def hook(*_: Any) -> None:
        seen.append(None if a.grad is None else a.grad.clone())

    (optimizer.register_step_pre_hook if when == "pre" else optimizer.register_step_post_hook)(hook)
    automatic(engine, optimizer, loss_of((a, 2.0**20)), clipping=Clipping(2.0))
    same(seen, [torch.ones(4)])


def test_a_fused_optimizer_of_the_users_sees_true_gradients() -> None:
    seen = list[Tensor | None]()

    class Looking(SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append(next(iter(parameters_of(self))).grad)
            return super().step(closure)

    a = ones(4)
    automatic(engine_of(), Looking([a], lr=1.0, fused=True), loss_of((a, 4.0)))
    same(seen, [torch.full((4,), 4.0)])
    same(a, torch.full((4,), -3.0))


@pytest.mark.parametrize("clipping", [None, Clipping(1e6)], ids=str)
@plain_and_fused
@each_precision
def test_gradients_that_nobody_cleared_are_added_to(precision: PrecisionName, fused: bool, clipping: Any) -> None:
    a = ones(2)
    engine, optimizer = engine_of(precision), sgd(a, fused=fused)
    for expected in (4.0, 8.0):
        with engine.backward(loss_of((a, 4.0)), [optimizer], keep_true=False) as scaled:
            scaled.backward()
        engine.step(optimizer, lambda: None, clipping=clipping)
        same(a.grad, torch.full((2,), expected))
    same(a, torch.full((2,), -11.0))


def test_a_scale_that_is_no_power_of_two_is_divided_out_as_well() -> None:
    a = ones(4)
    automatic(engine_of(scale=3.0), sgd(a), loss_of((a, 6.0)))
    assert_close(a, torch.full((4,), -5.0))


def test_an_exception_of_the_users_leaves_an_engine_that_works() -> None:
    a = ones(2)
    engine, optimizer = engine_of(), sgd(a)

    def hooks() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        automatic(engine, optimizer, loss_of((a, 1.0)), hooks=hooks)
    same([a, a.grad], [torch.ones(2), torch.ones(2)])
    automatic(engine, optimizer, loss_of((a, 1.0)))
    same(a, torch.zeros(2))
    assert engine.counters.applied_steps == 1


# Gradients of every kind ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clipping", [None, Clipping(2.0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.complex128], ids=str)
@each_precision
def test_dtypes(precision: PrecisionName, dtype: torch.dtype, clipping: Clipping | None) -> None:
    a, b = ones(4, dtype=dtype), ones(4)
    engine, optimizer = engine_of(precision), sgd(a, b)
    automatic(engine, optimizer, loss_of((a, 2.0**40), (b, 0.0)), clipping=clipping)
    same(a, torch.full((4,), 1 - (2.0**40 if clipping is None else 1.0), dtype=dtype))
    same(b, torch.ones(4))
    for bad in (INF, -INF, NAN):
        automatic(engine, optimizer, loss_of((a, bad), (b, 1.0)), clipping=clipping)
        assert outcome(engine) == ("skipped", "gradients")
    same(b, torch.ones(4))


@plain_and_fused
@each_precision
def test_float64_gradients_are_clipped_in_float64(precision: PrecisionName, fused: bool) -> None:
    ours, reference = ones(5, dtype=torch.float64), ones(5, dtype=torch.float64)
    gradient = torch.arange(1, 6, dtype=torch.float64)
    automatic(engine_of(precision), sgd(ours, fused=fused), loss_of((ours, gradient)), clipping=Clipping(0.1))
    reference.grad = gradient
    clip_grad_norm_([reference], 0.1)
    assert_close(ours.grad, reference.grad, rtol=1e-12, atol=0)


@each_precision
def test_float64_gradients_beyond_float32_are_applied(precision: PrecisionName) -> None:
    a, b = ones(2, dtype=torch.float64), ones(2)
    engine = engine_of(precision)
    automatic(engine, sgd(a, b), loss_of((a, 2.0**300), (b, 1.0)))
    same(a, torch.full((2,), -(2.0**300), dtype=torch.float64))
    automatic(engine, sgd(a, b), loss_of((a, 2.0**300), (b, 1.0)), clipping=Clipping(1.0))
    assert a.grad is not None
    assert_close(a.grad.norm().item(), 1.0)


@each_precision
def test_gradients_with_a_pending_conjugation(precision: PrecisionName) -> None:
    """``p.conj()`` leaves a lazy conjugate on ``.grad``, which has no view as real numbers."""
    a = ones(3, dtype=torch.complex64)
    engine, optimizer = engine_of(precision), sgd(a)
    loss = (a.conj() * torch.tensor([1j, 2, 4])).real.sum()
    assert torch.autograd.grad(loss, a, retain_graph=True)[0].is_conj()
    automatic(engine, optimizer, loss)
    same(a, torch.tensor([1 - 1j, -1, -3], dtype=torch.complex64))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("clipping", [None, Clipping(2.0), Clipping(1.0, "value")], ids=str)
@each_precision
def test_sparse_gradients(precision: PrecisionName, clipping: Clipping | None) -> None:
    ours, reference = ones(5, 4), ones(5, 4)
    engine = engine_of(precision)
    optimizer, plain = SparseAdam([ours], lr=0.5), SparseAdam([reference], lr=0.5)
    rows = torch.tensor([[0, 3, 0]])  # row 0 twice: 8 and 24 are one gradient of 32
    values = torch.tensor([8.0, 0.0, 24.0])[:, None].expand(3, 4)
    clipped = {None: 32.0, Clipping(2.0): 1.0, Clipping(1.0, "value"): 1.0}[clipping]
    for _ in range(2):
        automatic(engine, optimizer, loss_of((ours, torch.sparse_coo_tensor(rows, values, (5, 4)))), clipping=clipping)
        reference.grad = torch.sparse_coo_tensor(rows[:, :2], torch.tensor([[clipped] * 4, [0.0] * 4]), (5, 4))
        plain.step()
        assert ours.grad is not None
        same(ours.grad.to_dense(), reference.grad.to_dense())
    same(ours, reference)
    same(optimizer.state_dict()["state"], plain.state_dict()["state"])

    halves = torch.full((2, 4), 2.0**127)  # each finite, their sum is not
    gradient = torch.sparse_coo_tensor(rows[:, ::2], halves, (5, 4))
    automatic(engine_of(precision, 1.0), optimizer, loss_of((ours, gradient)))
    same(ours, reference)


@each_optimizer
@each_precision
@pytest.mark.parametrize("backward", ["of nothing", "of another parameter"])
def test_no_gradients_are_a_step_of_nothing(precision: PrecisionName, optimizer_name: str, backward: str) -> None:
    a, other = ones(3), ones(3)
    optimizer, called = OPTIMIZERS[optimizer_name]([a]), list[int]()
    engine = engine_of(precision)
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    losses = [] if backward == "of nothing" else [loss_of((other, 1.0))]
    for clipping in (None, Clipping(1.0), Clipping(1.0, "value")):
        automatic(engine, optimizer, *losses, clipping=clipping)
        losses = losses and [loss_of((other, 1.0))]
    same(a, torch.ones(3))
    assert (len(called), engine.counters.applied_steps) == (3, 3)


@plain_and_fused
def test_an_optimizer_without_gradients_and_without_hooks_of_its_own(fused: bool) -> None:
    """No hook on the optimizer here: a fused one would take the scale into its kernel."""
    a, other = ones(3), ones(3)
    engine = engine_of()
    automatic(engine, sgd(a, fused=fused), loss_of((other, 1.0)))
    assert outcome(engine) == ("applied", None)


def test_a_step_without_backward_is_no_evidence_for_the_scale() -> None:
    engine = engine_of(growth_interval=1)
    automatic(engine, sgd(ones(2)))
    assert scale_of(engine) == 2.0**16


@pytest.mark.parametrize("clipping", [None, Clipping(1.0), Clipping(1.0, "value")], ids=str)
@each_optimizer
@each_precision
@pytest.mark.parametrize(("exponent", "scale"), [(66, 2.0**16), (100, 2.0**16), (127, 1.0)])
def test_finite_gradients_with_an_infinite_norm_are_applied(
    precision: PrecisionName, optimizer_name: str, clipping: Clipping | None, exponent: int, scale: float
) -> None:
    a, reference = ones(4), ones(4)
    engine, optimizer = engine_of(precision, scale), OPTIMIZERS[optimizer_name]([a])
    automatic(engine, optimizer, loss_of((a, 2.0**exponent)), clipping=clipping)
    reference.grad = torch.full((4,), {None: 2.0**exponent, Clipping(1.0): 0.5}.get(clipping, 1.0))
    same(a.grad, reference.grad)
    OPTIMIZERS[optimizer_name]([reference]).step()
    same(a, reference)
    if clipping == Clipping(1.0):
        assert engine.last_step is not None
        assert engine.last_step.grad_norm == 2.0 ** (exponent + 1)


@plain_and_fused
@each_precision
def test_gradients_that_clipping_divides_by_more_than_float32_holds(precision: PrecisionName, fused: bool) -> None:
    a = ones(4)
    engine, optimizer = engine_of(precision, 2.0), sgd(a, fused=fused)
    automatic(engine, optimizer, loss_of((a, 2.0**126)), clipping=Clipping(2.0**-10))  # by 2^137
    same(a, torch.full((4,), 1 - 2.0**-11))


# No trace -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clipping", [None, Clipping(0.5), Clipping(0.5, "value")], ids=str)
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("hooks", [None, lambda: None], ids=["", "hooks"])
@each_optimizer
@each_precision
def test_one_bad_element_leaves_no_trace(
    precision: PrecisionName, optimizer_name: str, hooks: Any, bad: float, clipping: Clipping | None
) -> None:
    a, b = ones(19), ones(5)
    engine, optimizer = engine_of(precision), OPTIMIZERS[optimizer_name]([a, b])
    step = partial(automatic, engine, optimizer, clipping=clipping, hooks=hooks)
    step(loss_of((a, 0.25), (b, 0.5)))
    before = [a.detach().clone(), b.detach().clone()]
    state = {key: dict(value) for key, value in optimizer.state_dict()["state"].items()}
    state = {key: {name: tensor.clone() for name, tensor in value.items()} for key, value in state.items()}
    for victim, position in ((a, 0), (a, 18), (b, 4)):
        gradients = [torch.ones(19), torch.ones(5)]
        gradients[victim is b][position] = bad
        returned = step(loss_of((a, gradients[0]), (b, gradients[1])))
        assert outcome(engine) == ("skipped", "gradients")
        assert returned == 1.0  # what the closure returned
        assert (a.grad, b.grad) == (None, None)
    same([a, b], before)
    same(optimizer.state_dict()["state"], state)
    step(loss_of((a, 0.25), (b, 0.5)))
    assert outcome(engine) == ("applied", None)
    assert not torch.equal(a, before[0])


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("position", [0, 1])
@each_precision
def test_a_bad_loss_skips_automatic_steps_only(precision: PrecisionName, position: int, bad: float) -> None:
    a = ones(2)
    engine, optimizer = engine_of(precision), sgd(a)
    values = [1.0, 1.0]
    values[position] = bad
    automatic(engine, optimizer, *(loss_of((a, 1.0), value=value) for value in values))
    assert outcome(engine) == ("skipped", "loss")
    same(a, torch.ones(2))
    manual(engine, loss_of((a, 1.0), value=bad), [optimizer])
    assert manual_step(engine, optimizer)
    same(a, torch.zeros(2))


@each_precision
def test_a_bad_loss_and_an_infinite_norm_in_manual_steps(precision: PrecisionName) -> None:
    a = ones(4)
    engine, optimizer = engine_of(precision), sgd(a)
    manual(engine, loss_of((a, 2.0**100), value=INF), [optimizer])
    assert manual_step(engine, optimizer)
    same(a, torch.full((4,), -(2.0**100)))


@each_precision
def test_a_bad_loss_is_not_held_against_a_later_step(precision: PrecisionName) -> None:
    """A step without a backward, whose ``training_step`` returned None, is the no-op that it is in fp32."""
    a = ones(2)
    engine, optimizer = engine_of(precision, max_skipped=2), sgd(a)
    automatic(engine, optimizer, loss_of((a, 1.0), value=NAN))
    automatic(engine, optimizer)
    assert outcome(engine) == ("applied", None)
    assert (engine.counters.applied_steps, engine.counters.skipped_steps) == (1, 1)


@each_precision
def test_finite_losses_whose_sum_is_not_are_finite(precision: PrecisionName) -> None:
    a = ones(2)
    engine = engine_of(precision)
    automatic(engine, sgd(a), loss_of((a, 0.5), value=2.0**127), loss_of((a, 0.5), value=2.0**127))
    same(a, torch.zeros(2))


@pytest.mark.parametrize("bad", [INF, NAN])
@pytest.mark.parametrize("clipping", [None, Clipping(1.0), Clipping(1.0, "value")], ids=str)
@plain_and_fused
@each_precision
def test_what_hooks_make_non_finite_never_reaches_the_weights(
    precision: PrecisionName, fused: bool, clipping: Clipping | None, bad: float
) -> None:
    a = ones(5)
    engine, optimizer = engine_of(precision, growth_interval=2), sgd(a, fused=fused)
    automatic(engine, optimizer, loss_of((a, 0.0)))

    def hooks() -> None:
        assert a.grad is not None
        a.grad[3] = bad

    automatic(engine, optimizer, loss_of((a, 1.0)), hooks=hooks, clipping=clipping)
    assert outcome(engine) == ("skipped", "hook")
    same(a, torch.ones(5))
    assert a.grad is None
    assert scale_of(engine) == 2.0**16
    automatic(engine, optimizer, loss_of((a, 0.0)))
    assert scale_of(engine) == (2.0**17 if precision == "16-mixed" else 2.0**16)  # the second clean step: untouched


# Loss scale -----------------------------------------------------------------------------------------------------------


def test_the_scale_falls_until_the_gradients_fit_and_no_further() -> None:
    a = ones(2)
    engine, optimizer = engine_of(scale=2.0**16), sgd(a)
    scales = list[float]()
    for _ in range(8):
        automatic(engine, optimizer, loss_of((a, 2.0**117)))
        assert engine.last_step is not None
        scales.append(engine.last_step.scale)
    assert scales == [2.0**e for e in (16, 15, 14, 13, 12, 11, 10, 10)]
    assert (engine.counters.skipped_steps, engine.counters.applied_steps) == (6, 2)
    same(a, torch.full((2,), -(2.0**118)))


@pytest.mark.parametrize("fault", ["loss", "hook"])
def test_only_gradients_lower_the_scale(fault: str) -> None:
    a = ones(2)
    engine, optimizer = engine_of(), sgd(a)

    def hooks() -> None:
        a.grad = torch.full((2,), NAN)

    for _ in range(3):
        loss = loss_of((a, NAN if fault == "loss" else 1.0), value=NAN if fault == "loss" else 1.0)
        automatic(engine, optimizer, loss, hooks=hooks)
        assert outcome(engine) == ("skipped", fault)
    assert scale_of(engine) == 2.0**16


def test_growth_after_the_interval_and_up_to_the_ceiling() -> None:
    a = ones(2)
    engine, optimizer = engine_of(scale=2.0, growth_interval=3, max_scale=8.0), sgd(a)
    scales = list[float]()
    for _ in range(10):
        automatic(engine, optimizer, loss_of((a, 1.0)))
        scales.append(scale_of(engine))
    assert scales == [2, 2, 4, 4, 4, 8, 8, 8, 8, 8]
    same(a, torch.full((2,), -9.0))


def test_an_overflow_starts_the_growth_interval_again() -> None:
    a = ones(2)
    engine, optimizer = engine_of(scale=4.0, growth_interval=2), sgd(a)
    for gradient, scale in ((1.0, 4), (INF, 2), (1.0, 2), (1.0, 4)):
        automatic(engine, optimizer, loss_of((a, gradient)))
        assert scale_of(engine) == scale


@pytest.mark.parametrize("floor", [2.0**-126, 0.5, 1.0])
def test_the_floor_holds_and_the_next_clean_step_is_exact(floor: float) -> None:
    a = ones(2)
    engine, optimizer = engine_of(scale=floor * 4, min_scale=floor, max_skipped=100), sgd(a)
    for _ in range(20):
        automatic(engine, optimizer, loss_of((a, INF)))
    assert scale_of(engine) == floor
    automatic(engine, optimizer, loss_of((a, 2.0)))
    same(a, torch.full((2,), -1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_hysteresis_forgives_single_overflows(dtype: torch.dtype) -> None:
    a = ones(2)
    engine, optimizer = engine_of(hysteresis=2, max_skipped=1), sgd(a)
    for gradient, scale in ((INF, 16), (1.0, 16), (INF, 16), (INF, 15 if dtype is torch.float32 else 14)):
        automatic(engine, optimizer, loss_of((a, gradient), dtype=dtype))
        assert scale_of(engine) == 2.0**scale


def test_a_scale_that_is_not_dynamic_stays_and_its_overflows_count() -> None:
    a = ones(2)
    engine, optimizer = engine_of(scale=8.0, dynamic=False, growth_interval=1, max_skipped=2), sgd(a)
    for gradient in (1.0, INF, 1.0, INF):
        automatic(engine, optimizer, loss_of((a, gradient)))
        assert scale_of(engine) == 8.0
    with pytest.raises(NonFiniteStepError, match=r"^2 optimizer steps .* last loss scale 8\)"):
        automatic(engine, optimizer, loss_of((a, INF)))


@pytest.mark.parametrize("dtypes", [["half"], ["float", "half"], ["half", "float"], ["bfloat16"], ["double"]], ids=str)
@pytest.mark.parametrize("exponent", [16, 24])
@pytest.mark.parametrize("keep_true", [False, True])
def test_losses_of_every_dtype_train_from_the_first_step(keep_true: bool, exponent: int, dtypes: list[str]) -> None:
    a = ones(2)
    engine, optimizer = engine_of(scale=2.0**exponent), sgd(a)
    scales = list[float]()
    for dtype in dtypes:
        loss = loss_of((a, 4.0), dtype=getattr(torch, dtype))
        with engine.backward(loss, [optimizer], keep_true=keep_true) as scaled:
            scaled.backward()
            assert a.grad is not None
            scales.append(scaled.item())
    engine.step(optimizer, lambda: None)
    assert outcome(engine) == ("applied", None)
    same(a, torch.full((2,), 1 - 4.0 * len(dtypes)))
    assert scales == [2.0**15 if dtype == "half" else 2.0**exponent for dtype in dtypes]
    assert scale_of(engine) == 2.0**exponent
    assert engine.last_step is not None
    assert engine.last_step.scale == max(scales)


def test_a_float16_loss_of_a_float16_forward_trains_from_the_first_step() -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.full((1, 2), 0.25)).sum()
    assert loss.dtype is torch.float16
    automatic(engine_of(scale=2.0**24), SGD(model.parameters(), lr=1.0), loss)
    same(model.weight, torch.full((1, 2), 0.75))


def test_overflows_of_a_float16_loss_lower_the_scale_from_where_it_was_capped() -> None:
    a = ones(2)
    engine, optimizer = engine_of(scale=2.0**24), sgd(a)
    automatic(engine, optimizer, loss_of((a, 2.0**114), dtype=torch.float16))
    assert scale_of(engine) == 2.0**14
    automatic(engine, optimizer, loss_of((a, 2.0**113), dtype=torch.float16))
    assert outcome(engine) == ("applied", None)


@pytest.mark.parametrize("first", [torch.float16, torch.float32])
def test_the_micro_batch_at_the_higher_scale_is_the_one_that_overflowed(first: torch.dtype) -> None:
    """The scale falls step by step, whichever loss of the window was made at a lower one."""
    a = ones(2)
    engine, optimizer = engine_of(scale=2.0**24), sgd(a)
    second = torch.float32 if first is torch.float16 else torch.float16
    gradient = {torch.float16: 1.0, torch.float32: 2.0**106}
    automatic(engine, optimizer, *(loss_of((a, gradient[d]), dtype=d) for d in (first, second)))
    assert outcome(engine) == ("skipped", "gradients")
    assert scale_of(engine) == 2.0**23


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_without_loss_scaling_the_loss_is_handed_on(precision: PrecisionName) -> None:
    a = ones(2)
    engine, loss = engine_of(precision), loss_of((a, 1.0))
    assert engine.scaler is None
    with engine.backward(loss, [sgd(a)], keep_true=True) as scaled:
        assert scaled is loss


# max_skipped ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_skipped", [1, 3])
@pytest.mark.parametrize("fault", ["loss", "gradients", "hook"])
@each_precision
def test_it_stops_at_exactly_the_nth_skip(precision: PrecisionName, fault: str, max_skipped: int) -> None:
    a = ones(2)
    engine, optimizer = engine_of(precision, 4.0, max_skipped, min_scale=4.0), sgd(a, momentum=0.5)

    def hooks() -> None:
        if fault == "hook":
            a.grad = torch.full((2,), NAN)

    def bad() -> None:
        loss = loss_of((a, INF if fault == "gradients" else 1.0), value=INF if fault == "loss" else 1.0)
        automatic(engine, optimizer, loss, hooks=hooks)

    automatic(engine, optimizer, loss_of((a, 1.0)))
    for _ in range(2):  # it can be caught, and counts from the start
        for _ in range(max_skipped - 1):
            bad()
        with pytest.raises(NonFiniteStepError) as error:
            bad()
    assert isinstance(error.value, FloatingPointError)
    text = str(error.value)
    assert text.startswith(f"{max_skipped} optimizer steps in a row were skipped")
    assert f"last loss scale {4 if precision == '16-mixed' else 1}" in text
    assert {"loss": "the loss", "gradients": "the gradients", "hook": "a hook"}[fault] in text
    for advice in ("batches", "learning rate", "gradient_clip_val", "precision", "max_skipped"):
        assert advice in text

    same([a, optimizer.state[a]["momentum_buffer"]], [torch.zeros(2), torch.ones(2)])
    assert engine.counters.skipped_steps == 2 * max_skipped
    automatic(engine, optimizer, loss_of((a, 1.0)))
    same(a, torch.full((2,), -1.5))


def test_after_the_error_a_clean_step_counts_for_growth() -> None:
    a = ones(2)
    engine, optimizer = engine_of(scale=4.0, min_scale=4.0, max_skipped=1, growth_interval=1), sgd(a)
    with pytest.raises(NonFiniteStepError):
        automatic(engine, optimizer, loss_of((a, INF)))
    automatic(engine, optimizer, loss_of((a, 1.0)))
    assert scale_of(engine) == 8.0


def test_skips_that_lower_the_scale_do_not_count_and_those_at_the_floor_do() -> None:
    a = ones(2)
    engine, optimizer = engine_of(scale=2.0**5, max_skipped=2), sgd(a)
    for _ in range(6):  # 5 to the floor of 1, and one there
        automatic(engine, optimizer, loss_of((a, NAN)))
    assert scale_of(engine) == 1.0
    with pytest.raises(NonFiniteStepError, match=r"^2 optimizer steps"):
        automatic(engine, optimizer, loss_of((a, NAN)))


def test_a_clean_step_resets_the_count() -> None:
    a = ones(2)
    engine, optimizer = engine_of("32-true", max_skipped=2), sgd(a)
    for gradient in (INF, 1.0, INF, 1.0):
        automatic(engine, optimizer, loss_of((a, gradient)))
    assert (engine.counters.applied_steps, engine.counters.skipped_steps) == (2, 2)


def test_each_optimizer_is_counted_for_itself() -> None:
    a, b = ones(2), ones(2)
    engine, optimizers = engine_of("32-true", max_skipped=3), [sgd(a), sgd(b)]
    for iteration in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        manual(engine, loss_of((a, NAN), (b, 1.0)), optimizers)
        assert manual_step(engine, optimizers[1], 1)  # clean steps of one do not reset the other
        if iteration < 2:
            assert not manual_step(engine, optimizers[0])
    with pytest.raises(NonFiniteStepError, match=r"^3 optimizer steps"):
        manual_step(engine, optimizers[0])
    same([a, b], [torch.ones(2), torch.full((2,), -2.0)])


def test_restart_forgets_everything() -> None:
    a = ones(2)
    engine, optimizer = engine_of(scale=4.0, max_skipped=2, hysteresis=2), sgd(a)
    automatic(engine, optimizer, loss_of((a, 1.0)))
    automatic(engine, optimizer, loss_of((a, NAN), value=NAN))
    with engine.backward(loss_of((a, 1.0), value=NAN), [optimizer], keep_true=False):
        engine.request_grad_norm()
    engine.kept.find(["a"])
    engine.fallback.load_state_dict({"rescues": [1], "unavailable": ["32-true"], "on_trial": "bf16-mixed"})
    engine.restart()
    new = engine_of(scale=4.0, max_skipped=2, hysteresis=2)

    parts = ("passes", "kept", "fallback", "skips")
    others = ("loss_scaler", "scaler", "notify", "agree", "checkpoint", "_skips", "_held", *parts)

    def fields(owner: object) -> dict[str, Any]:
        return {k: v for k, v in vars(owner).items() if k not in others}

    assert fields(engine) == fields(new)
    for part in parts:
        assert fields(getattr(engine, part)) == fields(getattr(new, part)), part
    assert engine.loss_scaler.state == new.loss_scaler.state


# What is said ---------------------------------------------------------------------------------------------------------


def test_each_kind_of_incident_is_said_once() -> None:
    said = list[tuple[int, str]]()
    a = ones(2)
    engine, optimizer = engine_of(), sgd(a)
    engine.skips.notify = lambda level, text: said.append((level, text))
    for _ in range(2):
        automatic(engine, optimizer, loss_of((a, INF)))
        automatic(engine, optimizer, loss_of((a, 1.0), value=NAN))
    assert [level for level, _ in said] == [logging.INFO, logging.WARNING]
    assert "overflowed at loss scale 65536" in said[0][1]
    assert "the next one is made at 32768" in said[0][1]
    assert "Optimizer step 1 was skipped because the loss" in said[1][1]


def test_by_default_an_incident_is_a_warning_and_the_search_for_the_scale_is_not() -> None:
    a = ones(2)
    engine = StepEngine("16-mixed")
    automatic(engine, sgd(a), loss_of((a, INF)))  # warnings are errors here
    with pytest.warns(UserWarning, match="skipped because the loss held inf or NaN"):
        automatic(engine, sgd(a), loss_of((a, 1.0), value=NAN))


# Manual optimization --------------------------------------------------------------------------------------------------


@each_precision
def test_grad_is_true_after_every_backward(precision: PrecisionName) -> None:
    a, b, alone = ones(2), ones(2), ones(2)
    engine, optimizers = engine_of(precision, growth_interval=1), [sgd(a), sgd(b, fused=True)]
    backward = partial(manual, engine, optimizers=optimizers, others=[alone])
    backward(loss_of((a, 1.0), (b, 2.0), (alone, 4.0)))
    same([a.grad, b.grad, alone.grad], [torch.full((2,), g) for g in (1.0, 2.0, 4.0)])
    loss_of((a, 8.0), (alone, 8.0)).backward()  # the user's own
    backward(loss_of((b, 16.0), (alone, 16.0), dtype=torch.float16))
    same([a.grad, b.grad, alone.grad], [torch.full((2,), g) for g in (9.0, 18.0, 28.0)])
    if engine.scaler is not None:
        engine.scaler.unscale_(optimizers[0])  # people's work-around
    same(a.grad, torch.full((2,), 9.0))
    assert manual_step(engine, optimizers[0])
    engine.end_iteration()  # the scale grows, with gradients pending
    same([a, b.grad], [torch.full((2,), -8.0), torch.full((2,), 18.0)])
    backward(loss_of((b, 2.0)))
    assert manual_step(engine, optimizers[1], 1, clipping=Clipping(1.0, "value"))
    same(b, torch.zeros(2))


def test_different_rates() -> None:
    """One optimizer steps at every iteration, the other at every fourth."""
    a, b = ones(2), ones(2)
    engine, optimizers = engine_of(growth_interval=1, scale=2.0), [sgd(a), sgd(b)]
    for iteration in range(8):
        manual(engine, loss_of((a, 1.0), (b, 0.5)), optimizers)
        assert manual_step(engine, optimizers[0])
        optimizers[0].zero_grad()
        if iteration % 4 == 3:
            assert manual_step(engine, optimizers[1], 1)
            optimizers[1].zero_grad()
        engine.end_iteration()
    same([a, b], [torch.full((2,), -7.0), torch.full((2,), -3.0)])
    assert scale_of(engine) == 2.0**9  # once per iteration, though two of them made two steps


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_one_of_two_optimizers_overflows(order: tuple[int, int]) -> None:
    a, b = ones(2), ones(2)
    engine, optimizers = engine_of(growth_interval=1), [sgd(a), sgd(b)]
    manual(engine, loss_of((a, INF), (b, 2.0)), optimizers)
    applied = {index: manual_step(engine, optimizers[index], index) for index in order}
    engine.end_iteration()
    assert applied == {0: False, 1: True}
    same([a, b, a.grad], [torch.ones(2), torch.full((2,), -1.0), torch.full((2,), INF)])
    assert scale_of(engine) == 2.0**15  # lowered once, and the clean step of the other is no growth


def test_two_optimizers_that_overflow_on_one_backward_lower_the_scale_once() -> None:
    a, b = ones(2), ones(2)
    engine, optimizers = engine_of(max_skipped=1), [sgd(a), sgd(b)]
    for scale in (2.0**15, 2.0**14):
        for optimizer in optimizers:
            optimizer.zero_grad()
        manual(engine, loss_of((a, INF), (b, INF)), optimizers)
        assert not any(manual_step(engine, optimizer, index) for index, optimizer in enumerate(optimizers))
        engine.end_iteration()
        assert scale_of(engine) == scale


def test_two_optimizers_that_overflow_on_one_backward_are_one_overflow_to_hysteresis() -> None:
    a, b = ones(2), ones(2)
    engine, optimizers = engine_of(hysteresis=2), [sgd(a), sgd(b)]
    manual(engine, loss_of((a, INF), (b, INF)), optimizers)
    assert not any(manual_step(engine, optimizer, index) for index, optimizer in enumerate(optimizers))
    assert scale_of(engine) == 2.0**16


def test_gradients_of_an_earlier_scale_do_not_lower_the_present_one() -> None:
    """Both overflow in the first iteration, and the second optimizer steps at every other only."""
    a, b = ones(2), ones(2)
    engine, optimizers = engine_of(), [sgd(a), sgd(b)]
    manual(engine, loss_of((a, INF), (b, INF)), optimizers)
    assert not manual_step(engine, optimizers[0])
    optimizers[0].zero_grad()
    engine.end_iteration()
    manual(engine, loss_of((a, 1.0), (b, 1.0)), optimizers)
    assert manual_step(engine, optimizers[0])
    assert not manual_step(engine, optimizers[1], 1)
    assert scale_of(engine) == 2.0**15


def test_a_backward_of_its_own_after_the_scale_fell_can_lower_it_again() -> None:
    """As in a GAN: the second optimizer's gradients are of a backward that knew of the lower scale."""
    a, b = ones(2), ones(2)
    engine, optimizers = engine_of(), [sgd(a), sgd(b)]
    for index, parameter in enumerate((a, b)):
        manual(engine, loss_of((parameter, INF)), optimizers)
        assert not manual_step(engine, optimizers[index], index)
        assert scale_of(engine) == 2.0 ** (15 - index)


def test_shared_parameters_are_scaled_once() -> None:
    shared, a, b = ones(2), ones(2), ones(2)
    engine, optimizers = engine_of(), [sgd(shared, a), sgd(shared, b)]
    for expected in (4.0, 8.0):
        manual(engine, loss_of((shared, 4.0), (a, 1.0), (b, 2.0)), optimizers, others=[shared])
        same(shared.grad, torch.full((2,), expected))
    assert manual_step(engine, optimizers[0])
    assert manual_step(engine, optimizers[1], 1)
    same([shared, a, b], [torch.full((2,), w) for w in (-15.0, -1.0, -3.0)])


@pytest.mark.parametrize("owner", ["optimizer", "nobody"])
@pytest.mark.parametrize("pending", [0.1, 2.0**120, 2.0**-149])
def test_pending_gradients_of_frozen_parameters_are_not_touched(pending: float, owner: str) -> None:
    a, frozen = ones(2), ones(2)
    frozen.grad = torch.full((2,), pending)
    frozen.requires_grad_(False)
    engine = engine_of()
    optimizer = sgd(a, frozen) if owner == "optimizer" else sgd(a)
    manual(engine, loss_of((a, 1.0)), [optimizer], others=[] if owner == "optimizer" else [frozen])
    same([a.grad, frozen.grad], [torch.ones(2), torch.full((2,), pending)])


@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("keep_true", [False, True])
def test_automatic_steps_apply_pending_gradients_of_frozen_parameters_as_they_are(keep_true: bool, when: str) -> None:
    a, frozen = ones(2), ones(2)
    engine, optimizer = engine_of(scale=2.0**24), sgd(a, frozen)
    if when == "before":
        frozen.grad = torch.full((2,), 4.0)
    else:
        with engine.backward(loss_of((frozen, 4.0)), [optimizer], keep_true=False) as scaled:
            scaled.backward()
    frozen.requires_grad_(False)
    with engine.backward(loss_of((a, 2.0), dtype=torch.float16), [optimizer], keep_true=keep_true) as scaled:
        scaled.backward()
    engine.step(optimizer, lambda: None)
    same([a, frozen], [torch.full((2,), -1.0), torch.full((2,), -3.0)])


@pytest.mark.parametrize("pending", [False, True])
def test_an_exception_in_backward_leaves_true_gradients(pending: bool) -> None:
    a, b = ones(2), ones(2)
    engine, optimizer = engine_of(), sgd(a, b)

    def fail(gradient: Tensor) -> None:
        raise KeyError("mine")

    if pending:
        manual(engine, loss_of((a, 2.0), (b, 2.0)), [optimizer])
    between = b * 1
    between.register_hook(fail)
    with pytest.raises(KeyError, match="mine"):
        manual(engine, loss_of((between, 1.0)), [optimizer])
    same([a.grad, b.grad], [torch.full((2,), 2.0) if pending else None] * 2)
    manual(engine, loss_of((a, 2.0), (b, 2.0)), [optimizer])
    assert manual_step(engine, optimizer)
    same(a, torch.full((2,), -3.0 if pending else -1.0))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@each_precision
def test_create_graph_gives_true_gradients_that_can_be_differentiated(precision: PrecisionName) -> None:
    a = ones(2)
    engine, optimizer = engine_of(precision), sgd(a)
    for count in (1, 2):
        with engine.backward((a**3).sum(), [optimizer], keep_true=True) as scaled:
            scaled.backward(create_graph=True)
        same(a.grad, torch.full((2,), 3.0 * count))
    assert a.grad is not None
    penalty = a.grad.square().sum()  # (2 * 3 a^2)^2, whose slope is 4 * 36 a^3
    a.grad = None
    manual(engine, penalty, [optimizer])
    same(a.grad, torch.full((2,), 144.0))


@each_precision
def test_losses_of_several_elements_with_their_own_gradients(precision: PrecisionName) -> None:
    a = ones(2)
    engine, optimizer = engine_of(precision), sgd(a)
    for loss, gradient in ((a * 4, torch.tensor([1.0, 2.0])), (a[:, None] * 2, torch.ones(2, 1))):
        with engine.backward(loss, [optimizer], keep_true=True) as scaled:
            scaled.backward(gradient)
    same(a.grad, torch.tensor([6.0, 10.0]))
    assert manual_step(engine, optimizer)
    same(a, torch.tensor([-5.0, -9.0]))


@each_precision
def test_gradients_that_the_user_threw_away_are_forgotten(precision: PrecisionName) -> None:
    """A batch whose gradients the user's own check found non-finite."""
    a = ones(2)
    engine, optimizer = engine_of(precision), sgd(a)
    manual(engine, loss_of((a, NAN), value=NAN), [optimizer])
    optimizer.zero_grad()
    engine.end_iteration()
    manual(engine, loss_of((a, 1.0)), [optimizer])
    assert manual_step(engine, optimizer)
    same(a, torch.zeros(2))


def test_a_loss_that_the_user_threw_away_is_not_blamed() -> None:
    a = ones(2)
    engine, optimizer = engine_of(), sgd(a)
    manual(engine, loss_of((a, NAN), value=NAN), [optimizer])
    optimizer.zero_grad()
    manual(engine, loss_of((a, INF)), [optimizer])
    assert not manual_step(engine, optimizer)
    assert (outcome(engine)[1], scale_of(engine)) == ("gradients", 2.0**15)


@pytest.mark.parametrize(
    ("precision", "floor", "applied"), [("16-mixed", 1.0, False), ("16-mixed", 4.0, True), ("32-true", 1.0, True)]
)
def test_an_overflow_that_the_user_clips_away_is_one_as_long_as_a_lower_scale_may_help(
    precision: PrecisionName, floor: float, applied: bool
) -> None:
    a = ones(2)
    engine, optimizer = engine_of(precision, 4.0, min_scale=floor), sgd(a)
    manual(engine, loss_of((a, INF)), [optimizer])
    clip_grad_value_([a], 0.25)
    manual(engine, loss_of((a, 0.25)), [optimizer])
    assert manual_step(engine, optimizer) is applied
    same(a, torch.full((2,), 0.5 if applied else 1.0))


def test_gradients_that_the_user_spoilt_after_a_backward_are_no_matter_of_the_scale() -> None:
    a = ones(2)
    engine, optimizer = engine_of(), sgd(a)
    manual(engine, loss_of((a, 1.0)), [optimizer])
    a.grad = torch.full((2,), NAN)
    assert not manual_step(engine, optimizer)
    assert (outcome(engine)[1], scale_of(engine)) == ("hook", 2.0**16)


def test_clipping_twice_with_torchs_own_functions() -> None:
    a, reference = ones(4), ones(4)
    engine, optimizer = engine_of(), sgd(a, fused=True)
    manual(engine, loss_of((a, 3.0)), [optimizer])
    reference.grad = torch.full((4,), 3.0)
    for threshold in (2.0, 1.0):
        assert clip_grad_norm_([a], threshold) == clip_grad_norm_([reference], threshold)
    assert manual_step(engine, optimizer)
    assert reference.grad is not None
    same(a, 1 - reference.grad)


@pytest.mark.parametrize("fault", [None, "loss", "gradients"])
def test_growth_counts_iterations(fault: str | None) -> None:
    a, b = ones(2), ones(2)
    engine, optimizers = engine_of(scale=4.0, growth_interval=2), [sgd(a), sgd(b)]
    for _ in range(2):
        manual(engine, loss_of((a, 1.0)), optimizers)  # no step: no evidence
        engine.end_iteration()
    for _ in range(2):
        manual(engine, loss_of((a, 1.0)), optimizers)
        assert manual_step(engine, optimizers[0])
        if fault is not None:
            manual(engine, loss_of((b, NAN), value=NAN if fault == "loss" else 1.0), optimizers)
            assert not manual_step(engine, optimizers[1], 1)
        engine.end_iteration()
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert scale_of(engine) == {None: 8.0, "loss": 4.0, "gradients": 1.0}[fault]


# All ranks agree ------------------------------------------------------------------------------------------------------


class TwoRanks:
    """Two engines in two threads; the reduction waits for both, as a collective does, or raises."""

    def __init__(self, precision: PrecisionName) -> None:
        self.engines = [engine_of(precision, growth_interval=1, max_skipped=2) for _ in range(2)]
        self.calls = [0, 0]
        self._flags = [torch.zeros(0)] * 2
        self._barrier = Barrier(2, timeout=2)
        for rank, engine in enumerate(self.engines):
            engine.agree = partial(self._maximum, rank)

    def _maximum(self, rank: int, flags: Tensor) -> Tensor:
        assert flags.dtype is torch.float32
        assert set(flags.tolist()) <= {0.0, 1.0}
        self.calls[rank] += 1
        self._flags[rank] = flags
        self._barrier.wait()
        largest = torch.maximum(*self._flags)
        self._barrier.wait()
        return largest

    def run(self, work: Callable[[int, StepEngine], T]) -> list[T]:
        with ThreadPoolExecutor(2) as pool:
            return [f.result() for f in [pool.submit(work, rank, engine) for rank, engine in enumerate(self.engines)]]


PATHS: dict[str, dict[str, Any]] = {
    "check": {},
    "norm": {"clipping": Clipping(1.0)},
    "value": {"clipping": Clipping(1.0, "value")},
    "hooks": {"hooks": lambda: None},
    "hooks and norm": {"hooks": lambda: None, "clipping": Clipping(1.0)},
    "fused": {},
    "asked for the norm": {},
}
MICRO_BATCHES: dict[str, tuple[float | None, float]] = {  # gradient, loss
    "clean": (1.0, 1.0),
    "inf": (INF, 1.0),
    "nan": (NAN, 1.0),
    "bad loss": (1.0, NAN),
    "infinite norm": (2.0**100, 1.0),
    "nothing reached": (None, 1.0),
}
PAIRS: dict[tuple[str, str], tuple[str, str | None]] = {
    ("clean", "clean"): ("applied", None),
    ("inf", "clean"): ("skipped", "gradients"),
    ("nan", "clean"): ("skipped", "gradients"),
    ("bad loss", "clean"): ("skipped", "loss"),
    ("bad loss", "inf"): ("skipped", "loss"),
    ("infinite norm", "clean"): ("applied", None),
    ("infinite norm", "inf"): ("skipped", "gradients"),
    ("nothing reached", "clean"): ("applied", None),
    ("nothing reached", "inf"): ("skipped", "gradients"),
    ("nothing reached", "infinite norm"): ("applied", None),
}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("path", PATHS)
@each_precision
def test_a_fault_on_one_rank_is_one_on_both(
    precision: PrecisionName, path: str, pair: tuple[str, str], first: int
) -> None:
    ranks = TwoRanks(precision)

    def work(rank: int, engine: StepEngine) -> None:
        a, other = ones(4), ones(4)
        optimizer = sgd(a, fused=path == "fused")
        gradient, value = MICRO_BATCHES[pair[rank != first]]
        if path == "asked for the norm":
            engine.request_grad_norm()
        loss = loss_of((other, 1.0) if gradient is None else (a, gradient), value=value)
        automatic(engine, optimizer, loss, **PATHS[path])
        assert outcome(engine) == PAIRS[pair]
        if outcome(engine)[0] == "skipped":
            same(a, torch.ones(4))
        automatic(engine, optimizer, loss_of((a, 1.0)), **PATHS[path])
        assert outcome(engine) == ("applied", None)

    ranks.run(work)
    assert ranks.calls[0] == ranks.calls[1] >= 2
    one, two = ranks.engines
    assert one.loss_scaler.state == two.loss_scaler.state
    assert (one.counters, one.skips.in_a_row) == (two.counters, two.skips.in_a_row)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("looks", ["hooks", "norm"])
@pytest.mark.parametrize("first", [0, 1])
@each_precision
def test_one_rank_may_look_at_its_gradients_where_the_other_does_not(
    precision: PrecisionName, first: int, looks: str, pair: tuple[str, str]
) -> None:
    """A callback on rank 0 only has a hook, or asks for the norm."""
    ranks = TwoRanks(precision)

    def work(rank: int, engine: StepEngine) -> None:
        a, other = ones(4), ones(4)
        gradient, value = MICRO_BATCHES[pair[rank != first]]
        loss = loss_of((other, 1.0) if gradient is None else (a, gradient), value=value)
        hooks = (lambda: None) if rank == 0 and looks == "hooks" else None
        if rank == 0 and looks == "norm":
            engine.request_grad_norm()
        automatic(engine, sgd(a), loss, hooks=hooks)
        assert outcome(engine) == PAIRS[pair]

    ranks.run(work)
    assert ranks.calls[0] == ranks.calls[1]
    assert ranks.engines[0].loss_scaler.state == ranks.engines[1].loss_scaler.state


@pytest.mark.parametrize("faulty", [0, 1])
@each_precision
def test_a_hook_that_makes_nan_on_one_rank(precision: PrecisionName, faulty: int) -> None:
    ranks = TwoRanks(precision)

    def work(rank: int, engine: StepEngine) -> Tensor:
        a = ones(4)

        def hooks() -> None:
            if rank == faulty:
                a.grad = torch.full((4,), NAN)

        automatic(engine, sgd(a), loss_of((a, 1.0)), hooks=hooks)
        assert outcome(engine) == ("skipped", "hook")
        return a

    same(ranks.run(work), [torch.ones(4), torch.ones(4)])


@pytest.mark.parametrize("faulty", [0, 1])
def test_both_ranks_stop_at_the_same_step(faulty: int) -> None:
    ranks = TwoRanks("32-true")

    def work(rank: int, engine: StepEngine) -> Tensor:
        a = ones(4)
        optimizer = sgd(a)
        automatic(engine, optimizer, loss_of((a, NAN if rank == faulty else 1.0)))
        with pytest.raises(NonFiniteStepError, match=r"^2 optimizer steps"):
            automatic(engine, optimizer, loss_of((a, NAN if rank == faulty else 1.0)))
        return a

    same(ranks.run(work), [torch.ones(4), torch.ones(4)])


@pytest.mark.parametrize("faulty", [0, 1])
def test_ranks_agree_in_manual_optimization(faulty: int) -> None:
    ranks = TwoRanks("16-mixed")

    def work(rank: int, engine: StepEngine) -> Tensor:
        a, b = ones(4), ones(4)
        optimizers = [sgd(a), sgd(b)]
        manual(engine, loss_of((a, INF if rank == faulty else 1.0), (b, 2.0), value=NAN), optimizers)
        assert not manual_step(engine, optimizers[0])
        assert manual_step(engine, optimizers[1], 1)
        engine.end_iteration()
        return torch.stack([a, b]).detach()

    same(ranks.run(work), [torch.tensor([1.0, -1.0])[:, None].expand(2, 4)] * 2)
    assert ranks.engines[0].loss_scaler.state == ranks.engines[1].loss_scaler.state


# Closures -------------------------------------------------------------------------------------------------------------


class Required(SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


class Twice(SGD):
    """Evaluates its closure twice."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        return super().step(closure)


class Perturbing(SGD):
    """Takes the gradient one step away from its weights, as SAM does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        torch._foreach_add_(list(parameters_of(self)), 1.0)
        with torch.enable_grad():
            loss = closure()
        torch._foreach_sub_(list(parameters_of(self)), 1.0)
        super().step()
        return loss


class WithoutClosure(SGD):
    def step(self) -> None:  # type: ignore[override]
        super().step()


def square_closure(engine: StepEngine, a: Tensor, optimizer: Optimizer) -> tuple[Callable[[], Tensor], list[float]]:
    """A closure of the loss ``a^2``, and where it was evaluated."""
    places = list[float]()

    def closure() -> Tensor:
        places.append(a.item())
        optimizer.zero_grad()
        loss = (a**2).sum()
        with engine.backward(loss, [optimizer], keep_true=False) as scaled:
            scaled.backward()
        return loss.detach()

    return closure, places


@pytest.mark.parametrize("kind", [LBFGS, Required])
def test_float16_refuses_optimizers_that_need_their_closure(kind: type[Optimizer]) -> None:
    a = ones(1)
    engine, optimizer = engine_of(), kind([a], lr=1.0)  # type: ignore[call-arg]
    closure, places = square_closure(engine, a, optimizer)
    with pytest.raises(RuntimeError, match=f"^{kind.__name__} .*'bf16-mixed'.*'32-true'.*AdamW"):
        engine.step(optimizer, closure)
    assert (places, a.grad, engine.counters.applied_steps) == ([], None, 0)
    same(a, torch.ones(1))


@pytest.mark.parametrize("kind", [Twice, Perturbing])
def test_float16_refuses_a_second_evaluation(kind: type[SGD]) -> None:
    a = ones(1)
    engine, optimizer = engine_of(), kind([a], lr=1.0)
    closure, places = square_closure(engine, a, optimizer)
    with pytest.raises(RuntimeError, match=f"^{kind.__name__} .*'bf16-mixed'"):
        engine.step(optimizer, closure)
    assert places == [1.0]


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_lbfgs_is_passed_through(precision: PrecisionName) -> None:
    said = list[int]()
    engine = StepEngine(precision, notify=lambda level, text: said.append(level))
    ours, reference = (Parameter(torch.tensor([-1.0, 2.0])) for _ in range(2))

    def closure(x: Tensor, optimizer: Optimizer, among: list[Optimizer]) -> Tensor:
        optimizer.zero_grad()
        loss = 100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2  # Rosenbrock
        with engine.backward(loss, among, keep_true=False) as scaled:
            scaled.backward()
        return loss

    optimizer, plain = (LBFGS([x], lr=0.5, max_iter=4) for x in (ours, reference))
    for _ in range(3):
        expected = plain.step(partial(closure, reference, plain, [plain]))
        actual = engine.step(optimizer, partial(closure, ours, optimizer, [optimizer]))
        same(actual, expected)
    same(ours, reference)
    assert not torch.equal(ours, torch.tensor([-1.0, 2.0]))
    assert said == [logging.INFO]  # once
    assert engine.counters.applied_steps == 3


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_lbfgs_is_not_asked_where_the_first_evaluation_is_not_finite(precision: PrecisionName) -> None:
    a = ones(1)
    engine, optimizer = engine_of(precision), LBFGS([a])
    automatic(engine, optimizer, loss_of((a, INF)))
    assert outcome(engine) == ("skipped", "gradients")
    same(a, torch.ones(1))


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
@pytest.mark.parametrize(
    ("kind", "places", "weight"),
    [(SGD, [1.0], 0.5), (Required, [1.0], 0.5), (Twice, [1.0, 1.0], 0.5), (Perturbing, [1.0, 2.0], 0.0)],
)
def test_evaluations(precision: PrecisionName, kind: type[SGD], places: list[float], weight: float) -> None:
    a = ones(1)
    engine, optimizer = engine_of(precision), kind([a], lr=0.25)
    closure, evaluated = square_closure(engine, a, optimizer)
    loss = engine.step(optimizer, closure)
    assert evaluated == places
    same(a, torch.full((1,), weight))
    same(loss, torch.tensor(places[-1] ** 2))


def test_further_evaluations_are_those_of_rerun() -> None:
    a = ones(1)
    engine, optimizer = engine_of("32-true"), Twice([a], lr=0.25)
    closure, evaluated = square_closure(engine, a, optimizer)
    reruns = list[int]()
    engine.step(optimizer, closure, rerun=lambda: reruns.append(1))
    assert (len(evaluated), len(reruns)) == (1, 1)


@each_precision
def test_an_optimizer_that_takes_no_closure(precision: PrecisionName) -> None:
    a = ones(1)
    engine, optimizer = engine_of(precision), WithoutClosure([a], lr=0.25)
    closure, _ = square_closure(engine, a, optimizer)
    engine.step(optimizer, closure)
    same(a, torch.full((1,), 0.5))


@each_precision
def test_arguments_of_step_are_handed_on(precision: PrecisionName) -> None:
    class Factor(SGD):
        def step(self, closure: Any = None, *, factor: float = 1.0) -> Any:
            return factor

    a = ones(1)
    assert automatic(engine_of(precision), Factor([a]), loss_of((a, 1.0)), factor=4.0) == 4.0


# Norm on request, and what a step costs -------------------------------------------------------------------------------


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("clipping", [None, Clipping(1.0), Clipping(1.0, "value")], ids=str)
@each_optimizer
@each_precision
def test_the_norm_asked_for_is_the_true_one_before_clipping(
    precision: PrecisionName, optimizer_name: str, clipping: Clipping | None, hooked: bool
) -> None:
    a = ones(4)
    engine = engine_of(precision)
    engine.request_grad_norm()
    hooks = partial(clip_grad_value_, [a], 2.0) if hooked else None  # clipping of the user's own
    automatic(engine, OPTIMIZERS[optimizer_name]([a]), loss_of((a, 8.0)), clipping=clipping, hooks=hooks)
    assert engine.last_step is not None
    assert engine.last_step.grad_norm == 16.0


@pytest.mark.parametrize("hooks", [None, lambda: None], ids=["", "hooks"])
@pytest.mark.parametrize("gradient", [8.0, INF])
def test_the_norm_is_asked_for_one_step(gradient: float, hooks: Any) -> None:
    a = ones(4)
    engine = engine_of()
    engine.request_grad_norm()
    automatic(engine, sgd(a), loss_of((a, gradient)), hooks=hooks)
    automatic(engine, sgd(a), loss_of((a, 8.0)), hooks=hooks)
    assert outcome(engine) == ("applied", None)
    assert engine.last_step is not None
    assert engine.last_step.grad_norm is None


class Kernels(TorchDispatchMode):
    """Counts the kernels that go over many tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "foreach" in name or "fused" in name:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


CHECK, NORM, MULTIPLY = "_amp_foreach_non_finite_check_and_unscale_", "_foreach_norm", "_foreach_mul_"
PLAIN, FUSED = {"_foreach_add_": 1}, {"_fused_sgd_": 1}


@pytest.mark.parametrize(
    ("precision", "fused", "clipping", "kernels"),
    [
        ("16-mixed", False, None, {CHECK: 1, **PLAIN}),
        ("16-mixed", False, Clipping(1.0), {NORM: 1, MULTIPLY: 1, **PLAIN}),
        (
            "16-mixed",
            False,
            Clipping(1.0, "value"),
            {CHECK: 1, "_foreach_clamp_min_": 1, "_foreach_clamp_max_": 1, **PLAIN},
        ),
        ("16-mixed", True, None, {NORM: 1, **FUSED}),  # its kernel unscales, so reading is enough
        ("16-mixed", True, Clipping(1.0), {NORM: 1, **FUSED}),
        ("32-true", False, None, {CHECK: 1, **PLAIN}),  # few and small: the quicker kernel
        ("32-true", False, Clipping(1.0), {NORM: 1, MULTIPLY: 1, **PLAIN}),
        ("32-true", False, Clipping(1e6), {NORM: 1, **PLAIN}),
        ("32-true", True, None, {CHECK: 1, **FUSED}),
        ("32-true", True, Clipping(1e6), {NORM: 1, **FUSED}),
    ],
)
def test_passes_over_the_gradients(
    precision: PrecisionName, fused: bool, clipping: Clipping | None, kernels: dict[str, int]
) -> None:
    parameters = [ones(4), ones(3)]
    engine, optimizer = engine_of(precision), sgd(*parameters, fused=fused, foreach=not fused)
    with Kernels() as counted:  # over both micro-batches
        automatic(engine, optimizer, *(loss_of(*((p, 8.0) for p in parameters)) for _ in range(2)), clipping=clipping)
    assert counted.seen == kernels


def test_passes_over_the_gradients_in_manual_optimization() -> None:
    """One after a backward, and one more before it where gradients are pending: the price of gradients always true."""
    a = ones(4)
    engine, optimizer = engine_of(), sgd(a, foreach=True)
    for passes in (1, 2, 2):
        with Kernels() as counted:
            manual(engine, loss_of((a, 8.0)), [optimizer])
        assert counted.seen.total() == passes
    with Kernels() as counted:
        manual_step(engine, optimizer)
    assert counted.seen == {CHECK: 1, **PLAIN}


@pytest.mark.parametrize("shapes", [[(2**16,), (1,)], [(1,)] * 65], ids=["large", "many"])
def test_gradients_that_are_not_small_are_only_read(shapes: list[tuple[int]]) -> None:
    parameters = [torch.ones(shape, requires_grad=True) for shape in shapes]
    engine, optimizer = engine_of("32-true"), sgd(*parameters, foreach=True)
    with Kernels() as counted:
        automatic(engine, optimizer, loss_of(*((p, 8.0) for p in parameters)))
    assert counted.seen == {NORM: 1, **PLAIN}


# Any sequence of steps ------------------------------------------------------------------------------------------------

FAULTY = {"inf": "gradients", "nan": "gradients", "overflow": "gradients", "loss": "loss", "hook": "hook"}
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["clean", "clean", *FAULTY]),
        st.sampled_from([None, Clipping(2.0), Clipping(0.75, "value")]),
        st.booleans(),  # hooks
        st.integers(1, 3),  # micro-batches
    ),
    max_size=20,
)
RULES = st.builds(
    LossScale,
    init_scale=st.sampled_from([2.0, 4.0]),  # near the floor and the ceiling
    max_scale=st.just(8.0),
    min_scale=st.sampled_from([1.0, 2.0]),
    growth_interval=st.integers(1, 2),
    hysteresis=st.integers(1, 2),
)


@settings(deadline=None, max_examples=100)
@given(
    precision=st.sampled_from((*PRECISIONS, "16-mixed")),
    name=st.sampled_from(sorted(OPTIMIZERS)),
    steps=STEPS,
    rules=RULES,
)
def test_any_run_is_the_run_without_its_faulty_steps(
    precision: PrecisionName, name: str, steps: list[tuple[str, Clipping | None, bool, int]], rules: LossScale
) -> None:
    ours, reference = ([ones(5), ones(2, 2)] for _ in range(2))
    engine = StepEngine(precision, rules, max_skipped=3, notify=lambda level, text: None)
    optimizer, plain = OPTIMIZERS[name](ours), OPTIMIZERS[name](reference)
    state, in_a_row, compare = LossScaleState(rules.init_scale), 0, same

    def poison() -> None:
        ours[1].grad = torch.full((2, 2), NAN)

    for number, (fault, clipping, hooked, micro_batches) in enumerate(steps, 1):
        if fault == "overflow" and (precision != "16-mixed" or state.scale == 1):
            fault = "clean"  # there is nothing to overflow by
        size = {"inf": INF, "nan": NAN, "overflow": 2.0**128 / state.scale}.get(fault, 4.0 * number)
        losses = [loss_of((ours[0], 1.0), (ours[1], 4.0 * number)) for _ in range(micro_batches - 1)]
        losses.append(loss_of((ours[0], 1.0), (ours[1], size), value=NAN if fault == "loss" else 1.0))
        hooks = poison if fault == "hook" else (lambda: None) if hooked else None
        raised = False
        try:
            automatic(engine, optimizer, *losses, clipping=clipping, hooks=hooks)
        except NonFiniteStepError:
            raised = True

        before, place = state, FAULTY.get(fault)
        assert outcome(engine) == ("skipped" if place else "applied", place)
        if precision == "16-mixed" and place in (None, "gradients"):
            state = next_state(rules, state, overflow=place == "gradients")
        assert engine.loss_scaler.state == state
        if place is not None:
            assert [p.grad for p in ours] == [None, None]
            in_a_row += not (precision == "16-mixed" and place == "gradients" and before.scale > rules.min_scale)
            assert raised == (in_a_row == 3)
            in_a_row %= 3
        else:
            in_a_row = 0
        assert engine.skips.in_a_row.get(0, 0) == in_a_row
        if place is not None:
            continue
        plain.zero_grad()
        for _ in range(micro_batches):
            loss_of((reference[0], 1.0), (reference[1], 4.0 * number)).backward()
        if clipping is not None:
            (clip_grad_norm_ if clipping.algorithm == "norm" else clip_grad_value_)(reference, clipping.threshold)
            compare = close if clipping.algorithm == "norm" else compare
        plain.step()
    compare(ours, reference)
    compare(optimizer.state_dict()["state"], plain.state_dict()["state"])
    skipped = engine.counters.skipped_steps
    assert engine.counters.applied_steps + skipped == len(steps)
    assert engine.counters.recent.bit_count() == skipped


# What a review found --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient", [1.0, INF])
@pytest.mark.parametrize("unlike", [{"hooks": lambda: None}, {"norm": True}], ids=["hooks", "norm"])
def test_ranks_that_look_differently_do_not_wait_for_each_other(unlike: dict[str, Any], gradient: float) -> None:
    """As with a callback that only rank 0 has."""
    ranks = TwoRanks("16-mixed")

    def work(rank: int, engine: StepEngine) -> Tensor:
        a = ones(4)
        if rank == 0 and "norm" in unlike:
            engine.request_grad_norm()
        hooks = unlike.get("hooks") if rank == 0 else None
        automatic(engine, sgd(a), loss_of((a, gradient)), hooks=hooks)
        return a

    expected = torch.zeros(4) if gradient == 1 else torch.ones(4)
    same(ranks.run(work), [expected, expected])
    assert ranks.calls[0] == ranks.calls[1]


def test_a_user_who_begins_to_look_in_mid_window_sees_frozen_parameters_true_too() -> None:
    a, frozen = ones(2), ones(2)
    engine, optimizer = engine_of(scale=2.0**10), sgd(a, frozen)
    with engine.backward(loss_of((a, 1.0), (frozen, 1.0)), [optimizer], keep_true=False) as scaled:
        scaled.backward()
    frozen.requires_grad_(False)
    manual(engine, loss_of((a, 1.0)), [optimizer])
    same([a.grad, frozen.grad], [torch.full((2,), 2.0), torch.ones(2)])
    engine.step(optimizer, lambda: None)
    same([a, frozen], [-torch.ones(2), torch.zeros(2)])


def test_what_was_scaled_by_hand_is_unscaled_after_another_optimizer_failed() -> None:
    a, b = ones(2), ones(2)
    engine, optimizers = engine_of(scale=2.0**10), [sgd(a), sgd(b)]
    assert engine.scaler is not None
    by_hand = engine.scaler.scale(loss_of((a, INF), (b, 1.0)))
    manual(engine, by_hand, optimizers)
    for index, optimizer in enumerate(optimizers):
        engine.scaler.unscale_(optimizer)
        manual_step(engine, optimizer, index)
    same([a, b], [torch.ones(2), torch.zeros(2)])


@pytest.mark.parametrize("threshold", [0.0, -1.0, NAN])
def test_clipping_needs_a_positive_threshold(threshold: float) -> None:
    with pytest.raises(ValueError, match=r"threshold=.*above 0"):
        Clipping(threshold)


def test_a_rank_that_is_alone_in_a_wider_precision_scales_as_the_others_do() -> None:
    """Their float16 loss limits the scale to 2^15; its own would not, and the gradients are summed over the ranks."""
    a = ones(1)
    engine, optimizer = engine_of(scale=2.0**18), sgd(a)
    scales = []
    for loss, raised in ((a.sum().half(), False), (a.sum(), True), (a.sum(), False)):
        engine.passes.has_raised = raised
        with engine.backward(loss, [optimizer], keep_true=False) as scaled:
            scales.append(scaled.item())
    assert scales == [2.0**15, 2.0**15, 2.0**18]


def test_a_window_begins_without_what_an_error_has_left_of_the_last() -> None:
    engine = engine_of()
    engine.attempt_precision, engine.passes.has_raised = "32-true", True
    engine.begin_window()
    assert (engine.attempt_precision, engine.passes.has_raised, engine.raised) == ("16-mixed", False, None)
