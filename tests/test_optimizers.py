"""What the engine asks of an optimizer: its use of a closure, its fused kernel, its float16 parameters."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import ASGD, LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer, Rprop, SparseAdam
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_amp_plus.scaling import optimizers
from lightning_amp_plus.scaling.gradients import collect, parameters_of


class Required(SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


class Optional(SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Swallowing(SGD):
    def step(self, *args: Any, **kwargs: Any) -> Any:
        return super().step(*args, **kwargs)


class Without(SGD):
    def step(self) -> None:  # type: ignore[override]
        super().step()


class OtherArguments(SGD):
    def step(self, factor: float = 1.0) -> None:  # type: ignore[override]
        super().step()


class MildLBFGS(LBFGS):
    """The signature says that it can do without a closure; LBFGS cannot."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "use"),
    [
        (SGD, "none"),
        (AdamW, "none"),
        (SparseAdam, "none"),
        (Rprop, "none"),
        (ASGD, "none"),
        (LBFGS, "required"),
        (MildLBFGS, "required"),
        (Required, "required"),
        (Optional, "optional"),
        (Swallowing, "optional"),
        (Without, "none"),
        (OtherArguments, "none"),
    ],
)
def test_use_of_closure(kind: type[Optimizer], use: str) -> None:
    assert optimizers.use_of_closure(kind) == use
    optimizer = kind([Parameter(torch.ones(2))], lr=0.5)  # type: ignore[call-arg]
    StepLR(optimizer, 1)  # wraps the step of the instance
    assert optimizers.use_of_closure(type(optimizer)) == use


def one(**kwargs: Any) -> tuple[Parameter, SGD]:
    parameter = Parameter(torch.ones(2), **kwargs)
    return parameter, SGD([parameter], lr=1.0)


def test_replay_evaluates_from_the_second_call_on() -> None:
    _, optimizer = one()
    closure = optimizers.replay(optimizer, "first", iter(["second", "third"]).__next__)
    assert [closure(), closure(), closure()] == ["first", "second", "third"]


@pytest.mark.parametrize("requires_grad", [True, False])
def test_replay_evaluates_at_the_first_call_where_parameters_moved_before_it(requires_grad: bool) -> None:
    parameter, optimizer = one(requires_grad=requires_grad)
    closure = optimizers.replay(optimizer, "first", lambda: "again")
    with torch.no_grad():
        parameter.add_(1)
    assert [closure(), closure()] == ["again", "again"]


def test_replay_does_not_come_back_when_the_parameters_move_later() -> None:
    parameter, optimizer = one()
    closure = optimizers.replay(optimizer, "first", lambda: "again")
    answers = [closure()]
    with torch.no_grad():
        parameter.add_(1)
    assert [*answers, closure()] == ["first", "again"]


def test_the_refusal_names_the_optimizer_and_the_remedies() -> None:
    error = optimizers.refusal(LBFGS([Parameter(torch.ones(1))]))
    assert isinstance(error, RuntimeError)
    assert str(error).startswith("LBFGS evaluates its closure again within a step")
    for remedy in ("AdaptiveMixedPrecision('bf16-mixed')", "('32-true')", "AdamW"):
        assert remedy in str(error)


# Fused kernels --------------------------------------------------------------------------------------------------------


class FusedOfTheUsers(SGD):
    """May look at ``.grad`` in its step."""


class Subclass(Tensor):
    pass


FUSED: dict[str, Callable[[list[Parameter]], Optimizer]] = {
    "SGD": partial(SGD, lr=0.5, momentum=0.5, weight_decay=0.25),
    "SGD maximize": partial(SGD, lr=0.5, maximize=True),
    "Adam": partial(Adam, lr=0.5, amsgrad=True),
    "AdamW": partial(AdamW, lr=0.5),
    "Adagrad": partial(Adagrad, lr=0.5),
}


def divides(optimizer: Optimizer) -> bool:
    return optimizers.divides_in_kernel(optimizer, collect(parameters_of(optimizer)))


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("fused", [True, False, None])
def test_fused_optimizers_of_torch_divide(name: str, fused: bool | None) -> None:
    parameter = Parameter(torch.ones(19))
    optimizer = FUSED[name]([parameter], fused=fused)  # type: ignore[call-arg]
    parameter.grad = torch.ones(19)
    assert divides(optimizer) is (fused is True)


def test_whoever_may_look_at_the_gradients_sees_them_divided() -> None:
    a, b = Parameter(torch.ones(2)), Parameter(torch.ones(2))
    a.grad = torch.ones(2)
    assert divides(SGD([a], lr=1.0, fused=True))
    assert not divides(FusedOfTheUsers([a], lr=1.0, fused=True))

    hooked = SGD([a], lr=1.0, fused=True)
    handle = hooked.register_step_pre_hook(lambda *_: None)
    assert not divides(hooked)
    handle.remove()
    assert divides(hooked)

    everywhere = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        assert not divides(hooked)
    finally:
        everywhere.remove()

    groups: list[dict[str, Any]] = [{"params": [a]}, {"params": [b], "fused": False}]
    assert not divides(SGD(groups, lr=1.0, fused=True))
    b.grad = torch.ones(2).as_subclass(Subclass)
    assert not divides(SGD([a, b], lr=1.0, fused=True))


@pytest.mark.parametrize("divisor", [2.0**16, 3.0])
@pytest.mark.parametrize("name", FUSED)
def test_the_kernel_divides_and_leaves_the_quotient(name: str, divisor: float) -> None:
    """The assumption about torch that ``apply`` rests on, with sizes that fill a vector register and that do not."""
    gradients = [torch.linspace(-1, 1, 19), torch.linspace(1, 2, 4)]
    ours, reference = ([Parameter(torch.ones_like(g)) for g in gradients] for _ in range(2))
    optimizer, plain = (FUSED[name](parameters, fused=True) for parameters in (ours, reference))  # type: ignore[call-arg]
    for _ in range(2):
        for a, b, gradient in zip(ours, reference, gradients, strict=True):
            a.grad, b.grad = gradient * divisor, gradient * divisor / divisor
        optimizers.apply(optimizer, divisor, {})
        plain.step()
        for a, b in zip(ours, reference, strict=True):
            torch.testing.assert_close((a, a.grad), (b, b.grad), rtol=0, atol=0)


class Recording(SGD):
    """Keeps what its kernel would divide by."""

    divisors: list[float | None]

    def step(self, closure: Any = None, *, fail: bool = False) -> Any:
        divisor = getattr(self, "grad_scale", None)
        self.divisors.append(None if divisor is None else divisor.item())
        if fail:
            raise KeyError("mine")
        return "stepped"


@contextmanager
def nothing_left_on(optimizer: Optimizer) -> Iterator[None]:
    before = set(vars(optimizer))
    yield
    assert set(vars(optimizer)) == before


def test_apply_hands_over_the_divisor_and_takes_it_back() -> None:
    parameter = Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = Recording([parameter])
    optimizer.divisors = []
    with nothing_left_on(optimizer):
        assert optimizers.apply(optimizer, 1.0, {}) == "stepped"
        assert optimizers.apply(optimizer, 8.0, {"closure": None}) == "stepped"
        with pytest.raises(KeyError, match="mine"):
            optimizers.apply(optimizer, 4.0, {"fail": True})
    assert optimizer.divisors == [None, 8.0, 4.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_apply_computes_outside_of_autocast(dtype: torch.dtype) -> None:
    """The products of an optimizer such as Muon would lose bits in it."""
    dtypes = list[torch.dtype]()

    class Multiplying(SGD):
        def step(self, closure: Any = None) -> Any:
            weight = self.param_groups[0]["params"][0]
            dtypes.append((weight @ weight).dtype)

    with torch.autocast("cpu", dtype):
        optimizers.apply(Multiplying([Parameter(torch.ones(2, 2))]), 1.0, {})
        assert torch.is_autocast_enabled("cpu")
    assert dtypes == [torch.float32]


def test_apply_with_a_divisor_and_no_gradients() -> None:
    """The loss reached none of its parameters: a step of nothing, as in fp32."""
    parameter = Parameter(torch.ones(2))
    optimizers.apply(SGD([parameter], lr=1.0, fused=True), 8.0, {})
    assert torch.equal(parameter, torch.ones(2))


# float16 parameters ---------------------------------------------------------------------------------------------------


def test_float16_parameters_are_refused_by_name() -> None:
    good, bad = Parameter(torch.ones(2)), Parameter(torch.ones(2, dtype=torch.float16))
    first, second = SGD([good]), SGD([{"params": [good]}, {"params": [bad]}])
    names = {good: "head.weight", bad: "encoder.bias"}
    optimizers.require_scalable([first], names)
    with pytest.raises(TypeError, match=r"^Parameter 'encoder\.bias' is float16.*`\.float\(\)`.*freeze it"):
        optimizers.require_scalable([first, second], names)
    with pytest.raises(TypeError, match=r"^Parameter 'without a name' is float16"):
        optimizers.require_scalable([second], {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_other_parameters_are_scalable(dtype: torch.dtype) -> None:
    optimizers.require_scalable([SGD([Parameter(torch.ones(2, dtype=dtype))])], {})


def test_frozen_float16_parameters_are_nobodys_business() -> None:
    frozen = Parameter(torch.ones(2, dtype=torch.float16), requires_grad=False)
    optimizers.require_scalable([SGD([frozen])], {})
