"""The search for the best scale: it ends near it, each try costs one retry at most, and it survives a checkpoint."""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_amp_plus import DynamicLossScaler, LossScale
from lightning_amp_plus.scaling.loss_scale import LossScaleState, next_state, retry_scales, state_after_cure
from lightning_amp_plus.step.engine import StepEngine

RETRIES = 5
WIDE = {"min_scale": 1.0, "max_scale": 2.0**30}
EXPONENTS = st.integers(0, 30)
POSITIVE = st.floats(2.0**-126, 2.0**126, allow_nan=False)


@dataclass
class Run:
    """Steps that overflow above a threshold, as the engine makes them."""

    config: LossScale
    threshold: float
    retries: int = RETRIES
    scaler: DynamicLossScaler = field(init=False)
    attempts: list[int] = field(default_factory=list)
    """Of each step; 0 if it was skipped."""
    applied: list[float] = field(default_factory=list)
    """The scales of the steps that were."""

    def __post_init__(self) -> None:
        self.scaler = DynamicLossScaler(self.config)

    @property
    def state(self) -> LossScaleState:
        return self.scaler.state

    @property
    def scale(self) -> float:
        return self.state.scale

    def step(self, *, can_retry: bool = True) -> int:
        """Make one step."""
        tried = [self.scale]
        if self.scale > self.threshold and can_retry:
            for scale in self.scaler.retry_scales(self.scale, self.retries):
                tried.append(scale)
                if scale <= self.threshold:
                    break
        applied = tried[-1] <= self.threshold
        if len(tried) == 1:
            self.scaler.record(overflow=not applied)
        elif applied:
            self.scaler.record_cure(failed=tried[-2], worked=tried[-1])
        self.applied += tried[-1:] if applied else []
        self.attempts.append(len(tried) if applied else 0)
        return self.attempts[-1]

    def steps(self, count: int) -> "Run":
        for _ in range(count):
            self.step()
        return self


@st.composite
def rules(draw: st.DrawFn) -> LossScale:
    low, middle, high = sorted(draw(st.tuples(POSITIVE, POSITIVE, POSITIVE)))
    return LossScale(
        init_scale=middle,
        growth_factor=draw(st.sampled_from([2.0, 16.0, 1.5, 1e300])),
        backoff_factor=draw(st.sampled_from([0.5, 0.0625, 0.7, 1e-300])),
        growth_interval=draw(st.integers(1, 4)),
        min_scale=low,
        max_scale=high,
        hysteresis=draw(st.integers(1, 3)),
        dynamic=draw(st.booleans()),
    )


thresholds = st.lists(st.floats(2.0**-128, 2.0**127), min_size=1, max_size=40)


# How it ends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_200_steps_end_at_the_best_power_of_two(hysteresis: int) -> None:
    for init in range(31):
        config = LossScale(init_scale=2.0**init, hysteresis=hysteresis, min_scale=1.0, max_scale=2.0**30)
        for best in range(31):
            run = Run(config, 1.5 * 2.0**best).steps(200)
            assert run.scale == 2.0 ** min(init, best), (init, best)
            assert not run.state.is_search
            assert 0 not in run.attempts


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_the_first_step_finds_a_scale_and_each_try_costs_one_retry_at_most(hysteresis: int) -> None:
    for init in range(1, 31):
        config = LossScale(init_scale=2.0**init, hysteresis=hysteresis, min_scale=1.0, max_scale=2.0**30)
        for best in range(init):
            run = Run(config, 2.0**best).steps(200)
            assert 2 <= run.attempts[0] <= 1 + RETRIES
            assert max(run.attempts[hysteresis:]) <= 2
            # Bisection of up to 30 exponents, and forgiven steps, each of which is retried from the start:
            assert sum(attempts > 1 for attempts in run.attempts) <= hysteresis + 5
            tries = next(n for n in range(hysteresis, 200) if all(each == 1 for each in run.attempts[n:]))
            assert tries <= hysteresis + 5


@pytest.mark.parametrize(
    ("init", "best", "scales"),
    [
        (2.0**16, 2.0**12, [2.0**16, 2.0**13, 2.0**12, 2.0**12]),  # down by 1, 2, 4; up by 1: it fails
        (2.0**16, 2.0**13, [2.0**16, 2.0**13, 2.0**13]),
        (2.0**24, 2.0**19, [2.0**24, 2.0**18, 2.0**19, 2.0**19]),
        (2.0**24, 2.0**4, [2.0**24, 2.0**8, 2.0**4, 2.0**6, 2.0**5, 2.0**4, 2.0**4]),
    ],
)
def test_scales_of_a_search(init: float, best: float, scales: list[float]) -> None:
    """A step at each scale; by hand."""
    run, seen = Run(LossScale(init_scale=init), best), []
    for _ in scales:
        seen.append(run.scale)
        run.step()
    assert seen[0] == scales[0]
    assert seen[-1] == best
    assert run.scale == best
    assert len(set(seen)) <= 2 + math.log2(math.log2(init))


def test_a_search_by_hand() -> None:
    config, state = LossScale(), LossScaleState(2.0**24, growth_tracker=7)
    state = state_after_cure(config, state, failed=2.0**16, worked=2.0**8)
    assert state == LossScaleState(2.0**12, 0, 1, works_at=2.0**8, fails_at=2.0**16)
    assert state.is_search
    assert retry_scales(config, state, 2.0**12, 3) == [2.0**8, 2.0**7, 1.0]
    state = next_state(config, state, overflow=False)
    assert state == LossScaleState(2.0**14, works_at=2.0**12, fails_at=2.0**16)
    state = state_after_cure(config, state, failed=2.0**14, worked=2.0**12)
    assert state == LossScaleState(2.0**13, 0, 1, works_at=2.0**12, fails_at=2.0**14)
    state = next_state(config, state, overflow=False)
    assert state == LossScaleState(2.0**13)
    assert not state.is_search


def test_an_overflow_that_is_not_run_again_ends_the_search() -> None:
    state = LossScaleState(2.0**12, works_at=2.0**8, fails_at=2.0**16)
    assert next_state(LossScale(), state, overflow=True) == LossScaleState(2.0**11, 0, 1)
    assert next_state(LossScale(hysteresis=2), state, overflow=True) == LossScaleState(2.0**12, 0, 1)


def test_a_cure_below_what_worked_starts_anew_from_there() -> None:
    """The gradients grew in the middle of a search: what had worked does not any more."""
    state = LossScaleState(2.0**12, works_at=2.0**8, fails_at=2.0**16)
    after = state_after_cure(LossScale(), state, failed=2.0**6, worked=2.0**2)
    assert after == LossScaleState(2.0**4, 0, 1, works_at=2.0**2, fails_at=2.0**6)


@pytest.mark.parametrize("init", [3.0, 10000.0, 65504.0, 1e6, 2.0**30 - 64])
@pytest.mark.parametrize("min_scale", [1.0, 0.3])
def test_within_a_factor_of_4_of_a_best_that_is_no_power_of_two(init: float, min_scale: float) -> None:
    for exponent in range(121):
        run = Run(LossScale(init_scale=init, min_scale=min_scale, max_scale=2.0**30), 2.0 ** (exponent / 4)).steps(200)
        assert min(init, run.threshold) / 4 < run.scale <= run.threshold


@pytest.mark.parametrize("init", [10000.0, 65504.0, 1e6, 2.0**30 - 64])
def test_within_a_factor_of_2_of_a_best_that_is_no_power_of_two(init: float) -> None:
    for exponent in range(121):
        run = Run(LossScale(init_scale=init, min_scale=1.0, max_scale=2.0**30), 2.0 ** (exponent / 4)).steps(200)
        assert min(init, run.threshold) / 2 < run.scale <= run.threshold


def test_a_power_of_two_in_between_is_tried() -> None:
    """As the docstring has it."""
    after = state_after_cure(LossScale(), LossScaleState(3.0), failed=3.0, worked=1.0)
    assert after.scale == 2


def test_growth_afterwards_tries_twice_the_best_once_per_interval() -> None:
    run = Run(LossScale(init_scale=2.0**20, growth_interval=50), 2.0**10).steps(200)
    assert run.scale == 2.0**10
    run.attempts.clear()
    run.steps(10 * 51)
    assert 9 <= run.attempts.count(2) <= 10
    assert set(run.attempts) == {1, 2}
    run.threshold = 2.0**14  # the gradients became smaller
    run.attempts.clear()
    run.steps(8 * 50)
    assert run.scale == 2.0**14
    assert run.attempts.count(2) >= 1


@pytest.mark.parametrize("growth_factor", [2.0, 4.0, 16.0, 3.0, 1e9])
def test_growth_by_any_factor_is_searched_too(growth_factor: float) -> None:
    config = LossScale(init_scale=2.0**4, growth_interval=20, growth_factor=growth_factor)
    run = Run(config, 2.0**9).steps(600)
    assert 2.0**8 < max(run.applied) <= 2.0**9
    assert max(run.applied[-30:]) > 2.0**8
    assert 0 not in run.attempts
    assert max(run.attempts) <= 1 + RETRIES


def test_a_scale_that_is_not_dynamic_stays_and_its_steps_are_run_again() -> None:
    run = Run(LossScale(init_scale=2.0**16, dynamic=False), 2.0**10).steps(50)
    assert run.state == LossScaleState(2.0**16)
    assert set(run.attempts) == {5}  # 2**16, 15, 14, 12, 8


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_single_overflows_are_forgiven_and_still_run_again(hysteresis: int) -> None:
    run = Run(LossScale(init_scale=2.0**16, hysteresis=hysteresis), 2.0**10)
    states = []
    for _ in range(4 * hysteresis):
        run.threshold = 2.0**10
        for _ in range(hysteresis - 1):
            assert run.step() > 1
        run.threshold = 2.0**20
        run.step()
        states.append(run.scale)
    assert set(states) == {2.0**16}
    run.threshold = 2.0**10
    for _ in range(hysteresis):
        assert run.scale == 2.0**16
        run.step()
    assert run.scale < 2.0**16


def test_at_the_floor_there_is_nothing_left_to_try() -> None:
    run = Run(LossScale(init_scale=4.0, min_scale=4.0), 2.0)
    assert run.scaler.retry_scales(4.0, 5) == []
    assert run.steps(3).attempts == [0, 0, 0]
    assert run.scale == 4


def test_the_floor_may_be_what_works() -> None:
    run = Run(LossScale(init_scale=2.0**30, max_scale=2.0**30), 1.0).steps(100)
    assert run.scale == 1
    assert 0 not in run.attempts


# What holds always ----------------------------------------------------------------------------------------------------


def check(config: LossScale, state: LossScaleState) -> None:
    assert config.min_scale <= state.scale <= config.max_scale
    assert math.isfinite(state.scale)
    assert 0 <= state.overflows <= config.hysteresis
    assert 0 <= state.growth_tracker < config.growth_interval
    if state.is_search:
        assert config.min_scale <= state.works_at < state.scale < state.fails_at <= config.max_scale
        assert math.log2(state.scale / state.works_at) == pytest.approx(
            round(math.log2(state.scale / state.works_at)), abs=1e-9
        )
        assert state.growth_tracker == 0
    else:
        assert (state.works_at, state.fails_at) == (0, math.inf)
    if not config.dynamic:
        assert state == LossScaleState(config.init_scale)


@settings(deadline=None, max_examples=300)
@given(config=rules(), above=thresholds, retries=st.integers(0, 8), blind=st.integers(0, 5))
def test_scales_and_searches_stay_within_the_bounds(
    config: LossScale, above: list[float], retries: int, blind: int
) -> None:
    """Whatever threshold each step has, and where some cannot be run again."""
    run = Run(config, 1.0, retries)
    for step, threshold in enumerate(above):
        run.threshold = threshold
        before = run.state
        attempts = run.step(can_retry=blind == 0 or step % (blind + 1) > 0)
        assert attempts <= 1 + retries
        check(config, run.state)
        if attempts > 1 and config.dynamic:
            assert run.scale < before.scale or run.state.overflows < config.hysteresis
        if attempts == 1:
            assert run.scale >= before.scale


@settings(deadline=None, max_examples=300)
@given(config=rules(), exponent=st.floats(0, 252), retries=st.integers(0, 30))
def test_scales_to_retry_fall_to_the_floor(config: LossScale, exponent: float, retries: int) -> None:
    failed = min(config.min_scale * 2.0**exponent, config.max_scale)
    scales = retry_scales(config, LossScaleState(config.init_scale), failed, retries)
    assert len(scales) <= retries
    assert all(high > low for high, low in zip([failed, *scales], scales, strict=False))
    assert all(math.isfinite(scale) for scale in scales)
    if retries and failed > config.min_scale:
        assert scales[-1] == config.min_scale
    else:
        assert scales == []
    steps = [math.log2(failed / scale) for scale in scales[:-1]]
    assert steps == pytest.approx([2**k for k in range(len(steps))])


@st.composite
def searches(draw: st.DrawFn) -> tuple[LossScale, LossScaleState]:
    """A search in its middle."""
    works = 2.0 ** draw(st.integers(-20, 20))
    scale = works * 2.0 ** draw(st.integers(1, 10))
    fails = scale * 2.0 ** draw(st.integers(1, 10))
    config = LossScale(
        init_scale=draw(st.sampled_from([works, scale, fails])),
        min_scale=works * 2.0 ** -draw(st.integers(0, 10)),
        max_scale=fails * 2.0 ** draw(st.integers(0, 10)),
        hysteresis=draw(st.integers(1, 3)),
    )
    return config, LossScaleState(scale, 0, draw(st.integers(0, config.hysteresis)), works, fails)


@settings(deadline=None)
@given(search=searches(), retries=st.integers(2, 20))
def test_a_try_is_run_again_at_what_works_and_at_the_floor_last(
    search: tuple[LossScale, LossScaleState], retries: int
) -> None:
    config, state = search
    scales = retry_scales(config, state, state.scale, retries)
    assert scales[0] == state.works_at
    assert scales[-1] == config.min_scale
    assert all(high > low for high, low in zip([state.scale, *scales], scales, strict=False))
    assert len(scales) <= retries


@given(search=searches())
def test_a_single_retry_is_at_the_floor(search: tuple[LossScale, LossScaleState]) -> None:
    config, state = search
    assert retry_scales(config, state, state.scale, 1) == [config.min_scale]


def test_a_single_retry_gets_out_of_a_search_whose_gradients_grew() -> None:
    run = Run(LossScale(init_scale=2.0**24), 2.0**10, retries=1).steps(3)
    assert run.state.works_at == 2.0**6
    run.threshold = 1.5
    run.steps(50)
    assert run.attempts[-1] > 0
    assert run.scale <= run.threshold


def test_scales_to_retry_are_below_what_failed_in_a_search_too() -> None:
    """A float16 loss is made at 2**15 at most, one in float32 was searched for above that."""
    state = LossScaleState(2.0**20, works_at=2.0**18, fails_at=2.0**22)
    scales = retry_scales(LossScale(), state, 2.0**15, 5)
    assert all(scale < 2.0**15 for scale in scales)


@settings(deadline=None)
@given(search=searches(), overflow=st.booleans())
def test_a_search_halves_what_is_left(search: tuple[LossScale, LossScaleState], overflow: bool) -> None:
    config, state = search

    def left(state: LossScaleState) -> float:
        return math.log2(state.fails_at / state.works_at) if state.is_search else 1.0

    if overflow:
        after = state_after_cure(config, state, failed=state.scale, worked=state.works_at)
        assert after.fails_at in (state.scale, math.inf)
        assert after.overflows == min(state.overflows + 1, config.hysteresis)
        assert left(after) == max(math.log2(state.scale / state.works_at), 1)
    else:
        after = next_state(config, state, overflow=False)
        assert after.works_at in (state.scale, 0)
        assert after.overflows == 0
        assert left(after) == max(math.log2(state.fails_at / state.scale), 1)
    check(config, after)
    if after.is_search:
        assert abs(left(after) - 2 * math.log2(after.scale / after.works_at)) <= 1


def test_transitions_change_no_state() -> None:
    state = LossScaleState(2.0**12, 0, 1, works_at=2.0**8, fails_at=2.0**16)
    known = replace(state)
    config = LossScale(hysteresis=2)
    next_state(config, state, overflow=True)
    next_state(config, state, overflow=False)
    state_after_cure(config, state, failed=2.0**12, worked=2.0**8)
    retry_scales(config, state, 2.0**12, 5)
    assert state == known


# A checkpoint in the middle -------------------------------------------------------------------------------------------


def scaler_in_search(config: LossScale | None = None) -> DynamicLossScaler:
    scaler = DynamicLossScaler(config or LossScale(init_scale=2.0**24, hysteresis=2))
    scaler.load_state_dict({"scale": 2.0**12, "_growth_tracker": 0, "hysteresis": 1, "search": [2.0**8, 2.0**16]})
    return scaler


def test_the_state_of_a_search_is_builtins_that_any_file_can_hold() -> None:
    state = scaler_in_search().state_dict()
    assert (state["scale"], state["hysteresis"], state["search"]) == (2.0**12, 1, [2.0**8, 2.0**16])
    assert json.loads(json.dumps(state)) == state
    assert DynamicLossScaler().state_dict()["search"] == []


@settings(deadline=None, max_examples=200)
@given(config=rules(), above=thresholds, cut=st.integers(0, 40), reload=st.sampled_from([dict, json.dumps]))
def test_a_run_goes_on_exactly_after_a_reload(
    config: LossScale, above: list[float], cut: int, reload: Callable[[Any], Any]
) -> None:
    runs = Run(config, 1.0), Run(config, 1.0)
    for step, threshold in enumerate(above):
        if step == cut % len(above):
            saved = reload(runs[1].scaler.state_dict())
            runs[1].scaler = DynamicLossScaler(config)
            runs[1].scaler.load_state_dict(json.loads(saved) if isinstance(saved, str) else saved)
            assert runs[1].state == runs[0].state
        for run in runs:
            run.threshold = threshold
            run.step()
    assert runs[0].state == runs[1].state
    assert runs[0].attempts == runs[1].attempts


@pytest.mark.parametrize("steps", range(7))
def test_a_reload_at_each_step_of_a_search_changes_nothing(steps: int) -> None:
    """Here a search is certain: the random runs above may have none."""
    run = Run(LossScale(init_scale=2.0**24), 2.0**4).steps(steps)
    again = Run(run.config, 2.0**4)
    again.scaler.load_state_dict(json.loads(json.dumps(run.scaler.state_dict())))
    assert run.state.is_search == (0 < steps < 5)
    run.attempts.clear()
    assert again.steps(20).attempts == run.steps(20).attempts
    assert again.state == run.state
    assert run.scale == 2.0**4


def test_torch_can_go_on_from_the_middle_of_a_search() -> None:
    scaler = scaler_in_search()
    stock = torch.amp.GradScaler("cpu")
    stock.load_state_dict(scaler.state_dict())
    assert stock.get_scale() == 2.0**12
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    stock.scale(weight * 3).backward()
    stock.step(optimizer)
    stock.update()
    assert weight == -3
    back = scaler_in_search()
    back.load_state_dict(stock.state_dict())
    assert back.state == LossScaleState(2.0**12, 1)


def test_a_state_from_before_searches_ends_one() -> None:
    scaler = scaler_in_search()
    scaler.load_state_dict({"scale": 2.0**9, "_growth_tracker": 3})
    assert scaler.state == LossScaleState(2.0**9, 3)


@pytest.mark.parametrize("rules", [{"max_scale": 2.0**12}, {"min_scale": 2.0**10}], ids=str)
def test_the_bounds_of_the_constructor_hold_in_a_search_that_is_loaded(rules: dict[str, float]) -> None:
    config = LossScale(init_scale=2.0**11, **rules)  # type: ignore[arg-type]
    scaler = scaler_in_search(config)
    scales = [*scaler.retry_scales(scaler.get_scale(), 5)]
    for _ in range(5):
        scales.append(scaler.get_scale())
        scaler.record(overflow=False)
    assert config.min_scale <= min(scales) <= max(scales) <= config.max_scale


def test_restart_and_a_new_scale_end_a_search() -> None:
    scaler = scaler_in_search()
    scaler.update(2.0**9)
    assert scaler.state == LossScaleState(2.0**9)
    scaler = scaler_in_search()
    scaler.restart()
    assert scaler.state == LossScaleState(2.0**24)


# The engine -----------------------------------------------------------------------------------------------------------


class Window:
    """One micro-batch, whose gradient overflows in float32 above a threshold."""

    def __init__(self, engine: StepEngine, optimizer: torch.optim.Optimizer, threshold: float) -> None:
        self.engine, self.optimizer, self.threshold = engine, optimizer, threshold
        self.scales: list[float] = []

    def obstacle(self) -> str | None:
        return None

    def rollback(self) -> None: ...

    name = "a window"

    def non_finite_inputs(self) -> list[str]:
        return []

    def run_again(self) -> Any:
        (parameter,) = self.optimizer.param_groups[0]["params"]
        with self.engine.backward(parameter.sum(), [self.optimizer], keep_true=False) as scaled:
            scaled.backward()
        scale = float(scaled.detach() / parameter.detach())
        self.scales.append(scale)
        if scale > self.threshold:
            parameter.grad.fill_(math.inf)


def engine_steps(thresholds: Iterable[float], **kwargs: Any) -> tuple[StepEngine, list[list[float]]]:
    """The scales of the attempts of each step."""
    engine = StepEngine("16-mixed", LossScale(init_scale=2.0**24), notify=lambda level, text: None, **kwargs)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.0)
    seen = []
    for threshold in thresholds:
        optimizer.zero_grad()
        window = Window(engine, optimizer, threshold)
        engine.step(optimizer, window.run_again, window=window)
        seen.append(window.scales)
    return engine, seen


def test_the_engine_makes_the_steps_that_are_simulated_here() -> None:
    engine, seen = engine_steps([2.0**4] * 20)
    run = Run(LossScale(init_scale=2.0**24), 2.0**4).steps(20)
    assert list(map(len, seen)) == run.attempts
    assert engine.loss_scaler.state == run.state
    assert run.scale == 2.0**4


def test_the_engine_with_a_single_retry_gets_out_of_a_search_whose_gradients_grew() -> None:
    engine, _ = engine_steps([2.0**10] * 3 + [1.5] * 20, retries=1)
    assert engine.loss_scaler.state.scale == 1
