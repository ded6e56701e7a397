"""The scale stays within its bounds, moves as documented, and can be driven as torch documents ``GradScaler``."""

import copy
import math
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp_plus import DynamicLossScaler, LossScale
from lightning_amp_plus.scaling.loss_scale import LossScaleState, next_state, scale_loss

POWERS = st.integers(-126, 126).map(lambda exponent: 2.0**exponent)
OUTCOMES = st.lists(st.booleans(), max_size=60)
# Every field differs from its default, and from every other field.
CHANGED = LossScale(
    init_scale=2.0**10,
    growth_factor=4.0,
    backoff_factor=0.125,
    growth_interval=3,
    min_scale=2.0**-3,
    max_scale=2.0**20,
    hysteresis=2,
)


@st.composite
def rules(draw: st.DrawFn) -> LossScale:
    low, middle, high = sorted(draw(st.tuples(POWERS, POWERS, POWERS)))
    return LossScale(
        init_scale=middle,
        growth_factor=draw(st.sampled_from([2.0, 16.0, 1.5, 1e300])),
        backoff_factor=draw(st.sampled_from([0.5, 0.0625, 0.7, 1e-300])),
        growth_interval=draw(st.integers(1, 4)),
        min_scale=low,
        max_scale=high,
        hysteresis=draw(st.integers(1, 4)),
        dynamic=draw(st.booleans()),
    )


def history(config: LossScale, overflows: Sequence[bool]) -> list[LossScaleState]:
    """The states before the first step and after each."""
    states = [LossScaleState(config.init_scale)]
    for overflow in overflows:
        states.append(next_state(config, states[-1], overflow=overflow))
    return states


def reference(config: LossScale, overflows: Sequence[bool]) -> list[float]:
    """The same scales, from the position of each step in its run of equal outcomes and without a state."""
    scales = [config.init_scale]
    for i, overflow in enumerate(overflows):
        same = next((n for n in range(1, i + 1) if overflows[i - n] != overflow), i + 1)
        scale = scales[-1]
        if config.dynamic and overflow and same >= config.hysteresis:
            scale *= config.backoff_factor
        if config.dynamic and not overflow and same % config.growth_interval == 0:
            scale *= config.growth_factor
        scales.append(sorted((config.min_scale, scale, config.max_scale))[1])
    return scales


def scale_sequence(scaler: torch.amp.GradScaler, overflows: Sequence[bool]) -> list[tuple[float, int, float]]:
    """Scale, growth tracker and weight after each step of a loop as in torch's documentation."""
    weight = Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    seen = []
    for overflow in overflows:
        optimizer.zero_grad()
        scaler.scale(weight * (math.inf if overflow else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), scaler.state_dict()["_growth_tracker"], weight.item()))
    return seen


class NoOperation(TorchDispatchMode):
    """Raises at any operation on a tensor, reading it on the host included."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")


# Configuration --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "legal"),
    [
        ("min_scale", 2.0**-127, "between 2**-126 and 2**126"),
        ("min_scale", 0.0, "between 2**-126 and 2**126"),
        ("min_scale", -1.0, "between 2**-126 and 2**126"),
        ("min_scale", math.nan, "between 2**-126 and 2**126"),
        ("max_scale", 2.0**127, "between min_scale and 2**126"),
        ("max_scale", 0.5, "between min_scale and 2**126"),
        ("max_scale", math.inf, "between min_scale and 2**126"),
        ("max_scale", math.nan, "between min_scale and 2**126"),
        ("init_scale", 0.5, "between min_scale=1 and max_scale=1.67772e+07"),
        ("init_scale", 2.0**25, "between min_scale=1 and max_scale=1.67772e+07"),
        ("init_scale", math.nan, "between min_scale=1 and max_scale=1.67772e+07"),
        ("growth_factor", 1.0, "finite and above 1"),
        ("growth_factor", math.inf, "finite and above 1"),
        ("growth_factor", math.nan, "finite and above 1"),
        ("backoff_factor", 0.0, "between 0 and 1, both excluded"),
        ("backoff_factor", 1.0, "between 0 and 1, both excluded"),
        ("backoff_factor", math.nan, "between 0 and 1, both excluded"),
        ("growth_interval", 0, "at least 1"),
        ("hysteresis", 0, "at least 1"),
        ("init_scale", "65536", "of type float"),
        ("init_scale", None, "of type float"),
        ("init_scale", True, "of type float"),
        ("growth_interval", 2000.0, "of type int"),
        ("growth_interval", True, "of type int"),
        ("hysteresis", 1.5, "of type int"),
        ("dynamic", 1, "of type bool"),
    ],
)
def test_illegal_values_are_named_with_what_is_legal(field: str, value: object, legal: str) -> None:
    arguments: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=re.escape(f"LossScale({field}={value!r}): it must be {legal}")):
        LossScale(**arguments)


def test_bounds_themselves_are_legal() -> None:
    low, high = LossScale(init_scale=2.0**-126, min_scale=2.0**-126), LossScale(2.0**126, max_scale=2.0**126)
    assert (low.init_scale, high.init_scale) == (2.0**-126, 2.0**126)
    assert LossScale(1.0, min_scale=1.0, max_scale=1.0).max_scale == 1


def test_a_replaced_field_is_validated_too() -> None:
    with pytest.raises(ValueError, match=r"init_scale=65536\.0.*max_scale=4"):
        replace(LossScale(), max_scale=4.0)


def test_whole_numbers_are_scales_too() -> None:
    """YAML has 65536, and ``2**70`` as a Python int is too large for a tensor."""
    scaler = DynamicLossScaler(LossScale(init_scale=2**70, max_scale=2**71, growth_interval=1))
    assert scale_sequence(scaler, [False] * 2) == [(2.0**71, 0, -0.5), (2.0**71, 0, -1.0)]
    assert type(scaler.get_scale()) is float


# The transition -------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(config=rules(), overflows=OUTCOMES)
def test_scales_are_those_of_the_reference(config: LossScale, overflows: list[bool]) -> None:
    states = history(config, overflows)
    assert [state.scale for state in states] == reference(config, overflows)
    assert all(config.min_scale <= state.scale <= config.max_scale for state in states)
    if not config.dynamic:
        assert set(states) == {LossScaleState(config.init_scale)}


@settings(deadline=None)
@given(config=rules(), tracker=st.integers(0, 5000), overflows=st.integers(0, 9), overflow=st.booleans())
def test_any_state_is_left_within_the_bounds(config: LossScale, tracker: int, overflows: int, overflow: bool) -> None:
    """Counts beyond the rules too: they come from a run whose rules were others."""
    state = LossScaleState(config.init_scale, tracker, overflows)
    after = next_state(config, state, overflow=overflow)
    assert state == LossScaleState(config.init_scale, tracker, overflows)
    assert config.min_scale <= after.scale <= config.max_scale
    if config.dynamic:
        assert after.growth_tracker < config.growth_interval
        assert 0 <= after.overflows <= config.hysteresis
        assert after.scale <= state.scale if overflow else after.scale >= state.scale
    else:
        assert after == state


@pytest.mark.parametrize("hysteresis", [1, 2, 5])
def test_the_first_consecutive_overflows_are_forgiven(hysteresis: int) -> None:
    config = LossScale(init_scale=2.0**10, hysteresis=hysteresis)
    forgiven = [True] * (hysteresis - 1)
    assert {state.scale for state in history(config, [*forgiven, False] * 5)} == {2.0**10}
    assert [state.scale for state in history(config, [*forgiven, True, True])][-3:] == [2.0**10, 2.0**9, 2.0**8]
    refilled = history(config, [*forgiven, True, False, *forgiven, True])
    assert [state.scale for state in refilled[hysteresis:]] == [2.0**9] * (hysteresis + 1) + [2.0**8]


@pytest.mark.parametrize("interval", [1, 2, 2000])
def test_growth_comes_exactly_after_the_interval(interval: int) -> None:
    config = LossScale(init_scale=4.0, growth_interval=interval)
    scales = [state.scale for state in history(config, [False] * (2 * interval))]
    assert scales == [4.0] * interval + [8.0] * interval + [16.0]
    broken = [False] * (interval - 1) + [True] + [False] * interval
    assert [state.scale for state in history(config, broken)] == [4.0] * interval + [2.0] * interval + [4.0]


def test_a_forgiven_overflow_starts_the_wait_for_growth_anew() -> None:
    config = LossScale(init_scale=4.0, growth_interval=3, hysteresis=2)
    scales = [state.scale for state in history(config, [False, False, True, False, False, False])]
    assert scales == [4.0] * 6 + [8.0]


def test_a_lower_scale_of_one_backward_spends_hysteresis_as_any_other() -> None:
    """DESIGN: the first k-1 consecutive overflows do not lower the lasting scale. A float16 loss caps its own."""
    scaler = DynamicLossScaler(LossScale(init_scale=2.0**16, hysteresis=2))
    scaler.record(overflow=True, at=2.0**15)
    assert scaler.get_scale() == 2.0**16
    scaler.record(overflow=True, at=2.0**15)
    assert scaler.get_scale() == 2.0**14  # half of what failed


# The bounds, with weights ---------------------------------------------------------------------------------------------


def test_400_growths_stay_at_the_ceiling() -> None:
    scaler = DynamicLossScaler(LossScale(growth_interval=1, max_scale=2.0**126))
    seen = scale_sequence(scaler, [False] * 400)
    assert [scale for scale, _, _ in seen] == [2.0 ** min(16 + n, 126) for n in range(1, 401)]
    assert seen[-1][2] == -200  # each of 400 steps took exactly lr * 1


@pytest.mark.parametrize("floor", [2.0**-126, 1.0])
def test_a_clean_step_after_1000_overflows_is_exact(floor: float) -> None:
    scaler = DynamicLossScaler(LossScale(min_scale=floor, growth_interval=2))
    seen = scale_sequence(scaler, [True] * 1000 + [False] * 2)
    assert {scale for scale, _, _ in seen[150:1000]} == {floor}
    assert [weight for _, _, weight in seen[999:]] == [0, -0.5, -1]
    assert seen[-1][0] == 2 * floor


# The scaler -----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(
    init=st.integers(-20, 20),
    growth=st.integers(1, 3),
    backoff=st.integers(-3, -1),
    interval=st.integers(1, 3),
    overflows=st.lists(st.booleans(), min_size=1, max_size=20),
)
def test_scale_and_weights_are_those_of_torch_within_the_bounds(
    init: int, growth: int, backoff: int, interval: int, overflows: list[bool]
) -> None:
    arguments = (2.0**init, 2.0**growth, 2.0**backoff, interval)
    ours = DynamicLossScaler(LossScale(*arguments, min_scale=2.0**-100, max_scale=2.0**100))
    stock = torch.amp.GradScaler("cpu", *arguments)
    assert scale_sequence(ours, overflows) == scale_sequence(stock, overflows)


def test_it_is_a_grad_scaler_with_the_getters_of_one() -> None:
    scaler = DynamicLossScaler(CHANGED)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.is_enabled()
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (4.0, 0.125, 3)
    assert DynamicLossScaler().get_scale() == 2.0**16


def test_setters_change_the_rules_and_are_validated() -> None:
    scaler = DynamicLossScaler(LossScale(init_scale=2.0**10))
    scaler.set_growth_factor(8.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(1)
    scaler.record(overflow=True)
    assert scaler.get_scale() == 2.0**8
    scaler.record(overflow=False)
    assert scaler.get_scale() == 2.0**11
    assert list(scaler.state_dict().values())[1:4] == [8.0, 0.25, 1]
    for setter, illegal in [
        (scaler.set_growth_factor, 1.0),
        (scaler.set_backoff_factor, 1.0),
        (scaler.set_growth_interval, 0),
    ]:
        with pytest.raises(ValueError, match=f"={illegal}"):
            setter(illegal)  # type: ignore[arg-type]
    assert list(scaler.state_dict().values())[1:4] == [8.0, 0.25, 1]


def test_scale_and_state_are_on_the_host() -> None:
    scaler = DynamicLossScaler(CHANGED)
    scaler.scale(torch.ones(()))
    with NoOperation():
        scaler.record(overflow=False)
        assert scaler.get_scale() == 2.0**10
        assert scaler.state_dict()["scale"] == 2.0**10
        scaler.load_state_dict(scaler.state_dict())
    tensor = torch.ones(())
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoOperation():
        tensor.item()


def test_restart_forgets_all_steps() -> None:
    scaler = DynamicLossScaler(CHANGED)
    scale_sequence(scaler, [True, True, False])
    scaler.scale(torch.ones(()))
    scaler.restart()
    assert scaler.state_dict() == DynamicLossScaler(CHANGED).state_dict()
    assert scaler.scale(torch.ones(())).item() == 2.0**10


# Its state ------------------------------------------------------------------------------------------------------------


def changed_scaler() -> DynamicLossScaler:
    """Its state differs from that of a new scaler, and each number in it from all others."""
    scaler = DynamicLossScaler(replace(CHANGED, hysteresis=4))
    scaler.load_state_dict({"scale": 2.0**7, "_growth_tracker": 2, "hysteresis": 3})
    return scaler


STATE = {
    "scale": 2.0**7,
    "growth_factor": 4.0,
    "backoff_factor": 0.125,
    "growth_interval": 3,
    "_growth_tracker": 2,
    "hysteresis": 3,
    "search": [],
}


def test_state_holds_every_number_as_a_builtin() -> None:
    state = changed_scaler().state_dict()
    assert state == STATE
    assert {type(value) for value in state.values()} == {int, float, list}


@pytest.mark.parametrize(
    "clone",
    [
        lambda scaler: pickle.loads(pickle.dumps(scaler)),  # noqa: S301
        copy.deepcopy,
        lambda scaler: through_state_dict(scaler),
    ],
    ids=["pickle", "deepcopy", "state_dict"],
)
def test_a_copy_goes_on_as_the_original(clone: Callable[[DynamicLossScaler], DynamicLossScaler]) -> None:
    original = changed_scaler()
    copied = clone(original)
    assert copied.state_dict() == STATE
    overflows = [True, False, False, False, True, True, True, True, True, False, False, False]
    expected = scale_sequence(copied, overflows)
    assert original.state_dict() == STATE  # the copy shares nothing
    assert scale_sequence(original, overflows) == expected
    # The overflow at hand was the fourth in a row, and the clean step forgave: both counts came along.
    assert [scale for scale, _, _ in expected] == [2.0**n for n in (4, 4, 4, 6, 6, 6, 6, 3, 0, 0, 0, 2)]


def test_a_search_goes_on_from_a_state_dict() -> None:
    """Between 2^0, which works, and 2^16, which does not, the next clean steps try 2^8, 2^12, 2^14 and 2^15."""
    scaler = DynamicLossScaler(LossScale())
    scaler.record_cure(failed=2.0**16, worked=1.0)
    assert scaler.state_dict()["search"] == [1.0, 2.0**16]
    copied = through_state_dict(scaler)
    assert copied.state == scaler.state
    for exponent in (8, 12, 14, 15, 15):
        assert copied.get_scale() == 2.0**exponent
        copied.record(overflow=False)
    assert copied.state_dict()["search"] == []


def through_state_dict(scaler: DynamicLossScaler) -> DynamicLossScaler:
    """Through a state dict and back, with rules that are those of ``scaler``."""
    fresh = DynamicLossScaler(scaler.loss_scale)
    fresh.load_state_dict(dict(scaler.state_dict()))
    return fresh


def test_torch_reads_our_state_and_we_read_that_of_torch() -> None:
    stock = torch.amp.GradScaler("cpu")
    stock.load_state_dict(changed_scaler().state_dict())
    assert stock.state_dict() == {key: STATE[key] for key in stock.state_dict()}
    assert [scale for scale, _, _ in scale_sequence(stock, [False, True])] == [2.0**9, 2.0**6]

    stock = torch.amp.GradScaler("cpu", 2.0**7, 4.0, 0.125, 3)
    scale_sequence(stock, [False, False])
    ours = DynamicLossScaler(replace(CHANGED, hysteresis=1))
    ours.load_state_dict(stock.state_dict())
    assert ours.state_dict() == {**STATE, "hysteresis": 0}
    overflows = [False, True, False, False, False]
    assert [step[:2] for step in scale_sequence(ours, overflows)] == [
        step[:2] for step in scale_sequence(stock, overflows)
    ]


def test_rules_of_the_constructor_win_over_saved_ones() -> None:
    config = LossScale(growth_factor=2.0, backoff_factor=0.25, growth_interval=5, min_scale=2.0, hysteresis=1)
    scaler = DynamicLossScaler(config)
    scaler.load_state_dict(STATE)
    assert scaler.loss_scale == config
    assert scaler.state_dict() == {
        "scale": 2.0**7,
        "growth_factor": 2.0,
        "backoff_factor": 0.25,
        "growth_interval": 5,
        "_growth_tracker": 2,
        "hysteresis": 3,
        "search": [],
    }
    assert [scale for scale, _, _ in scale_sequence(scaler, [False] * 3 + [True])] == [2.0**7, 2.0**7, 2.0**8, 2.0**6]


def test_a_tracker_beyond_a_shorter_interval_grows_at_once() -> None:
    scaler = DynamicLossScaler(LossScale(init_scale=1.0, growth_interval=2))
    scaler.load_state_dict({"scale": 4.0, "_growth_tracker": 1999})
    assert [step[:2] for step in scale_sequence(scaler, [False] * 3)] == [(8.0, 0), (8.0, 1), (16.0, 0)]


@pytest.mark.parametrize(("saved", "loaded"), [(2.0**30, 2.0**20), (2.0**-9, 2.0**-3), (3.0, 3.0)])
def test_a_loaded_scale_is_brought_within_the_bounds(saved: float, loaded: float) -> None:
    scaler = DynamicLossScaler(CHANGED)
    scaler.load_state_dict({**STATE, "scale": saved})
    assert scaler.get_scale() == loaded


@pytest.mark.parametrize("saved", [0.0, -1.0, math.inf, math.nan])
def test_a_broken_saved_scale_is_refused(saved: float) -> None:
    scaler = changed_scaler()
    with pytest.raises(ValueError, match=rf"{saved!r}.*positive and finite.*Nothing was loaded"):
        scaler.load_state_dict({"scale": saved, "_growth_tracker": 0})
    assert scaler.state_dict() == STATE


# Driven by hand -------------------------------------------------------------------------------------------------------


def model_and_data() -> tuple[torch.nn.Module, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model, [torch.randn(4, 3, generator=generator) for _ in range(6)]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_documented_loop_is_the_one_in_float32(accumulate: int, fused: bool) -> None:
    """Scale, unscale, clip, step, update: bitwise, since the scale is a power of two."""

    def run(scaler: torch.amp.GradScaler | None) -> list[Tensor]:
        model, batches = model_and_data()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        for i, batch in enumerate(batches, 1):
            loss = model(batch).square().mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
            if i % accumulate:
                continue
            if scaler is not None:
                scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            assert norm > 0.5  # it does clip
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        return list(model.parameters())

    torch.testing.assert_close(run(DynamicLossScaler()), run(None), rtol=0, atol=0)


def test_one_of_two_optimizers_overflows() -> None:
    """As torch's ``GradScaler``: the other is stepped, and the scale is lowered once."""
    scaler = DynamicLossScaler()
    weights = [Parameter(torch.ones(())) for _ in range(3)]
    optimizers = [torch.optim.SGD([weight], lr=0.5) for weight in weights]
    for loss in (weights[0] * math.nan, weights[1] * 2, weights[2] * math.inf):
        scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [weight.item() for weight in weights] == [1, 0, 1]
    assert scaler.get_scale() == 2.0**15


def test_step_hands_on_arguments_and_result() -> None:
    class Recorder(torch.optim.SGD):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            return args, kwargs

    weight = Parameter(torch.ones(()))
    optimizer = Recorder([weight], lr=1.0)
    scaler = DynamicLossScaler()
    scaler.scale(weight * 2).backward()
    assert scaler.step(optimizer, 1, a=2) == ((1,), {"a": 2})
    scaler.update()
    scaler.scale(weight * math.inf).backward()
    assert scaler.step(optimizer, 1, a=2) is None


def test_a_closure_is_refused_as_in_torch() -> None:
    """The gradients of a second evaluation would reach the optimizer multiplied by the scale."""
    weight = Parameter(torch.ones(()))
    optimizer = torch.optim.LBFGS([weight])
    scaler = DynamicLossScaler()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weight.square()
        scaler.scale(loss).backward()
        return loss

    closure()
    with pytest.raises(RuntimeError, match=r"(?i)closure"):
        scaler.step(optimizer, closure=closure)
    assert weight.item() == 1


def test_unscaling_twice_or_what_was_never_scaled_changes_nothing() -> None:
    weight = Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = DynamicLossScaler()
    (weight * 3).backward()
    scaler.unscale_(optimizer)
    assert weight.grad is not None
    assert weight.grad.item() == 3
    scaler.step(optimizer)
    scaler.update()
    assert weight.item() == -0.5

    optimizer.zero_grad()
    scaler.scale(weight * 3).backward()
    assert weight.grad.item() == 3 * 2.0**16
    for _ in range(2):
        scaler.unscale_(optimizer)
        assert weight.grad.item() == 3
    scaler.step(optimizer)
    assert weight.item() == -2
    scaler.update()
    scaler.unscale_(optimizer)  # of the next iteration, before anything is scaled
    assert weight.grad.item() == 3


def test_unscaling_after_the_step_changes_nothing() -> None:
    weight = Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = DynamicLossScaler()
    scaler.scale(weight * 3).backward()
    scaler.step(optimizer)
    scaler.unscale_(optimizer)
    assert weight.grad is not None
    assert weight.grad.item() == 3


def test_update_without_a_step_is_no_clean_step() -> None:
    scaler = DynamicLossScaler(LossScale(init_scale=4.0, growth_interval=1))
    scaler.scale(torch.ones(()))
    scaler.update()
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("new", [8.0, torch.tensor(8.0)])
def test_update_sets_a_new_scale_from_the_next_backward_on(new: float | Tensor) -> None:
    scaler = DynamicLossScaler(LossScale(init_scale=4.0, growth_interval=2))
    scale_sequence(scaler, [False])
    scaler.update(new)
    assert type(scaler.get_scale()) is float
    assert scaler.scale(torch.ones(())).item() == 8


@pytest.mark.parametrize("new", [0.0, -1.0, 0.5, 2.0**25, math.inf, math.nan])
def test_update_refuses_a_scale_out_of_bounds(new: float) -> None:
    scaler = DynamicLossScaler()
    with pytest.raises(ValueError, match=re.escape(f"new_scale={new!r}") + ".*min_scale=1 and max_scale=1.67772e"):
        scaler.update(new)
    assert scaler.get_scale() == 2.0**16


# What is scaled -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "scaled"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_a_loss_is_scaled_in_float32_at_least(dtype: torch.dtype, scaled: torch.dtype) -> None:
    expected = torch.tensor(5.0 * 2.0**24, dtype=scaled)
    torch.testing.assert_close(scale_loss(torch.tensor(5.0, dtype=dtype), 2.0**24), expected, rtol=0, atol=0)


def test_a_float16_loss_trains_from_the_first_step() -> None:
    """Its gradient is the scale itself, in float16, where 2^16 is inf."""
    weight = Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = DynamicLossScaler()
    scaler.scale(weight.half()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.item() == 0.5
    assert scaler.get_scale() == 2.0**16


def test_a_float16_loss_that_overflows_lowers_the_scale_it_had() -> None:
    weight = Parameter(torch.ones(()))
    scaler = DynamicLossScaler()
    scaler.scale(weight.half() * 4).backward()  # 4 * 2^15 is inf in float16
    scaler.step(torch.optim.SGD([weight], lr=0.5))
    scaler.update()
    assert weight.item() == 1
    assert scaler.get_scale() == 2.0**14


def test_float16_and_float32_losses_of_one_step_add_up() -> None:
    for order in ([torch.float16, torch.float32], [torch.float32, torch.float16]):
        weight = Parameter(torch.ones(()))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        scaler = DynamicLossScaler(LossScale(init_scale=2.0**15))
        for dtype in order:
            scaler.scale(weight.to(dtype)).backward()
        scaler.step(optimizer)
        assert weight.item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_get_scale_is_the_inverse_of_what_scale_did(dtype: torch.dtype) -> None:
    """The gradient penalty of torch's documentation divides by it."""
    scaler = DynamicLossScaler()
    weight = torch.ones((), dtype=dtype, requires_grad=True)
    (gradient,) = torch.autograd.grad(scaler.scale(weight * 1.5), weight)
    assert gradient.item() / scaler.get_scale() == 1.5


def test_many_outputs_keep_their_container() -> None:
    scaler = DynamicLossScaler(LossScale(init_scale=4.0))
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    listed: list[Tensor] = scaler.scale([one, two])
    nested: tuple[Tensor, list[Tensor]] = scaler.scale((one, [two]))
    lazy = scaler.scale(output for output in (one, two))
    assert listed == [4, 8]
    torch.testing.assert_close(nested, (torch.tensor(4.0), [torch.tensor(8.0)]))
    assert list(lazy) == [4, 8]
    with pytest.raises(ValueError, match="found float"):
        scaler.scale(1.0)
