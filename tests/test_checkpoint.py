"""State across fits and checkpoint files: exact resume, and both ways between stock's plugin and ours."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from helpers import PRECISIONS, ROW, Exact, factors, make_trainer
from namespace import AdaptiveMixedPrecision, PrecisionFallback, pl
from torch import Tensor, nn

from lightning_amp_plus import LossScale, NonFiniteStepError, StepCounters
from lightning_amp_plus.precisions import PrecisionName

NAN = math.nan
BIG = 64.0
"""Times a scale of 2^10 its gradient overflows float16, times 2^8 it does not."""

RULES: dict[str, Any] = {
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "growth_interval": 7,
    "min_scale": 2.0,
    "max_scale": 2.0**20,
    "hysteresis": 3,
}
"""No default among them."""

OURS = AdaptiveMixedPrecision.__qualname__
STOCK = pl.plugins.MixedPrecision.__qualname__
precisions = pytest.mark.parametrize("precision", PRECISIONS)


class Start(pl.Callback):
    """Keeps the state that a fit starts with."""

    state: dict[str, Any]
    weight: Tensor

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert trainer.precision_plugin is not None
        self.state = trainer.precision_plugin.state_dict()
        self.weight = pl_module.linear.weight.detach().clone().flatten()  # type: ignore[operator, union-attr]


def fit(
    plugin: pl.plugins.Precision | None,
    numbers: Sequence[float],
    *,
    module: pl.LightningModule | None = None,
    start: Start | None = None,
    resume: Path | None = None,
    **kwargs: Any,
) -> pl.Trainer:
    """Train an epoch on these multiples of ``ROW``; ``resume`` from the end of an epoch adds a second one."""
    options = {"max_epochs": 2 if resume else 1, "callbacks": [start] if start else None}
    trainer = make_trainer(plugin, **{**options, **kwargs})
    ours = isinstance(plugin, AdaptiveMixedPrecision)
    expected: AbstractContextManager[object] = nullcontext()
    if ours and any(math.isnan(number) for number in numbers):
        expected = pytest.warns(RuntimeWarning, match="was skipped because")
    with expected:
        trainer.fit(module or Exact(), factors(*numbers), ckpt_path=resume)
    return trainer


def saved(trainer: pl.Trainer, path: Path) -> dict[str, Any]:
    """Save a checkpoint and return its content, read as a careful user reads it."""
    trainer.save_checkpoint(path)
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


def types_in(value: object) -> set[type]:
    found = {type(value)}
    if isinstance(value, dict):
        found.update(*(types_in(item) for pair in value.items() for item in pair))
    elif isinstance(value, (list, tuple)):
        found.update(*(types_in(item) for item in value))
    return found


# From fit to fit -----------------------------------------------------------------------------------------------------


@precisions
@pytest.mark.parametrize("same_trainer", [True, False])
def test_a_second_fit_starts_as_the_first(precision: PrecisionName, same_trainer: bool) -> None:
    plugin = AdaptiveMixedPrecision(precision, LossScale(init_scale=2.0**10, **RULES), retries=0)
    fresh = plugin.state_dict()
    start = Start()
    trainer = fit(plugin, [1, BIG, BIG, BIG, NAN, BIG, BIG], start=start)
    assert start.state == fresh
    after = plugin.state_dict()
    assert after["counters"]["skipped_in_a_row"] != fresh["counters"]["skipped_in_a_row"]
    assert (after["scale"] < fresh["scale"]) == (precision == "16-mixed")

    if same_trainer:
        trainer.fit_loop.max_epochs = 2
        trainer.fit(Exact(), factors(1, 1, 1))
    else:
        fit(plugin, [1, 1, 1], start=start)
    assert start.state == fresh
    assert plugin.counters == StepCounters(applied_steps=3)
    assert plugin.last_step is not None
    assert plugin.last_step.step == 2


def test_a_fit_after_one_that_broke_off_within_a_window() -> None:
    """Half a window was pending: scaled gradients, and a loss that was NaN."""

    class Breaks(Exact):
        broken = False

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            if batch_idx == 1 and not self.broken:
                self.broken = True
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    plugin, module = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=2.0**10)), Breaks()
    with pytest.raises(ZeroDivisionError):
        make_trainer(plugin, accumulate_grad_batches=2).fit(module, factors(NAN, 1))
    fit(plugin, [1, 2, 4, 8], module=module, accumulate_grad_batches=2)
    assert torch.equal(module.weight, -ROW * 7.5)
    assert plugin.counters == StepCounters(applied_steps=2)


def test_evaluation_leaves_the_state_alone(tmp_path: Path) -> None:
    class Validates(Exact):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self(batch)

    plugin = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=2.0**10), retries=0)
    trainer = fit(plugin, [BIG, 1, NAN], module=Validates())
    state = saved(trainer, tmp_path / "a.ckpt")[OURS]
    assert (state["scale"], state["_growth_tracker"]) == (2.0**9, 1)
    for path in (None, tmp_path / "a.ckpt"):
        make_trainer(plugin).validate(Validates(), factors(1), ckpt_path=path, verbose=False)
        assert plugin.state_dict() == state


def test_a_state_loaded_by_hand_is_what_the_first_fit_starts_with() -> None:
    plugin, start = AdaptiveMixedPrecision("16-mixed"), Start()
    plugin.load_state_dict({**plugin.state_dict(), "scale": 2.0**7})
    fit(plugin, [1], start=start)
    assert start.state["scale"] == 2.0**7


def test_learning_rate_finder_leaves_no_trace(tmp_path: Path) -> None:
    class WithRate(Exact):
        lr = 2.0**-10

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    plugin = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=2.0**10, growth_interval=5))
    finder = pl.callbacks.LearningRateFinder(num_training_steps=16, early_stop_threshold=None)
    trainer = make_trainer(plugin, callbacks=[finder], default_root_dir=tmp_path)
    trainer.fit(WithRate(), factors(*[1.0] * 24))
    assert plugin.counters == StepCounters(applied_steps=24)
    assert plugin.state_dict()["scale"] == 2.0**14  # 24 steps of 5 each; with those of the search it would be more


# What a checkpoint holds ---------------------------------------------------------------------------------------------


def test_the_key_is_a_file_format() -> None:
    assert AdaptiveMixedPrecision.__qualname__ == "AdaptiveMixedPrecision"


@precisions
@pytest.mark.parametrize("numbers", [[], [1, BIG, NAN]])
def test_state_holds_builtins_only(tmp_path: Path, precision: PrecisionName, numbers: list[float]) -> None:
    plugin = AdaptiveMixedPrecision(precision, LossScale(init_scale=2.0**10), retries=0)
    if numbers:
        checkpoint = saved(fit(plugin, numbers), tmp_path / "a.ckpt")
        assert checkpoint[OURS] == plugin.state_dict()
        assert set(checkpoint[STOCK]) == set(torch.amp.GradScaler("cpu").state_dict())
        assert types_in(checkpoint[STOCK]) <= {dict, str, int, float}
    state = plugin.state_dict()
    assert types_in(state) <= {dict, list, str, int, float}
    assert state["precision"] == precision
    assert set(state) == {
        *torch.amp.GradScaler("cpu").state_dict(),
        *("precision", "configured_precision", "kept_modules", "fallback", "counters", "by_optimizer"),
        *("hysteresis", "search", "version"),
    }
    assert set(state["fallback"]) == {
        "rescues", "unavailable", "on_trial", "clean_steps", "failed_trials", "is_suspect", "located"
    }  # fmt: skip
    assert {"rescued_steps", "rescued_evaluations"} <= set(state["counters"])


def test_state_holds_builtins_when_the_rules_are_numpy_numbers() -> None:
    """``numpy.float64`` is a float, but ``torch.load(weights_only=True)`` refuses it."""
    numpy = pytest.importorskip("numpy")
    rules = {"init_scale": 2.0**10, "growth_factor": 2.0, "backoff_factor": 0.5, "max_scale": 2.0**12}
    loss_scale = LossScale(**{name: numpy.float64(value) for name, value in rules.items()})
    plugin = AdaptiveMixedPrecision("16-mixed", loss_scale)
    fit(plugin, [BIG, 1])
    assert types_in(plugin.state_dict()) <= {dict, list, str, int, float}


@precisions
def test_checkpoint_of_weights_only(tmp_path: Path, precision: PrecisionName) -> None:
    class Validates(Exact):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("output", self(batch).float().mean())

    callback = pl.callbacks.ModelCheckpoint(tmp_path, filename="a", save_weights_only=True)
    plugin = AdaptiveMixedPrecision(precision, LossScale(init_scale=2.0**10))
    fit(plugin, [1, 2], module=Validates(), callbacks=[callback], enable_checkpointing=True)
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert not {OURS, STOCK} & set(content)
    assert torch.equal(Exact.load_from_checkpoint(tmp_path / "a.ckpt").weight, -3 * ROW)
    trainer = make_trainer(AdaptiveMixedPrecision(precision))
    metrics = trainer.validate(Validates(), factors(1), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert metrics[0]["output"] == -3 * 16


# Resume --------------------------------------------------------------------------------------------------------------

ROUND_TRIPS = {
    "growth": ([BIG, BIG, BIG, 1, 1, NAN], {"scale": 2.0**8, "_growth_tracker": 2, "hysteresis": 0}),
    "hysteresis": ([1, NAN, BIG, BIG], {"scale": 2.0**10, "_growth_tracker": 0, "hysteresis": 2}),
}


@pytest.mark.parametrize("case", ROUND_TRIPS)
def test_every_field_survives_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")  # Lightning reads the file in this way too
    numbers, expected = ROUND_TRIPS[case]
    first = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=2.0**10, **RULES), retries=0)
    state = saved(fit(first, numbers), tmp_path / "a.ckpt")[OURS]
    assert {key: state[key] for key in expected} == expected
    assert {key: state[key] for key in ("growth_factor", "backoff_factor", "growth_interval")} == {
        key: RULES[key] for key in ("growth_factor", "backoff_factor", "growth_interval")
    }

    second, start = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=16.0, **RULES), retries=0), Start()
    fit(second, [NAN], start=start, resume=tmp_path / "a.ckpt")
    assert start.state == state
    skipped = 4 if case == "growth" else 3
    recent = 0b111001 if case == "growth" else 0b0111
    assert second.counters == StepCounters(len(numbers) - skipped, skipped + 1, recent=recent << 1 | 1)
    assert second.last_step is not None
    assert second.last_step.step == len(numbers)


@pytest.mark.parametrize(
    ("case", "more", "scale"),
    [
        ("growth", [1] * 4, 2.0**8),
        ("growth", [1] * 5, 2.0**10),  # 2 of the 7 clean steps were made before
        ("hysteresis", [BIG], 2.0**8),  # the third overflow in a row
        ("hysteresis", [1, BIG, BIG], 2.0**10),
    ],
)
def test_the_scale_goes_on_where_it_was(tmp_path: Path, case: str, more: list[float], scale: float) -> None:
    first = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=2.0**10, **RULES), retries=0)
    fit(first, ROUND_TRIPS[case][0]).save_checkpoint(tmp_path / "a.ckpt")
    second = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=16.0, **RULES), retries=0)
    fit(second, more, resume=tmp_path / "a.ckpt")
    assert second.state_dict()["scale"] == scale


@precisions
def test_skips_in_a_row_go_on_where_they_were(tmp_path: Path, precision: PrecisionName) -> None:
    rules = LossScale(init_scale=2.0**10)
    fit(AdaptiveMixedPrecision(precision, rules), [0, NAN, NAN]).save_checkpoint(tmp_path / "a.ckpt")
    enough = AdaptiveMixedPrecision(precision, max_skipped=4)
    fit(enough, [NAN, 0, NAN, NAN, NAN], resume=tmp_path / "a.ckpt")
    assert enough.counters == StepCounters(2, 6, recent=0b01110111)
    with pytest.raises(NonFiniteStepError, match="4 optimizer steps in a row"):
        fit(AdaptiveMixedPrecision(precision, max_skipped=4), [NAN, NAN, 0], resume=tmp_path / "a.ckpt")


class Batches:
    """A loader that resumes within an epoch."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.position = x, 0

    def __len__(self) -> int:
        return len(self.x)

    def __iter__(self) -> Iterator[Tensor]:
        self.position %= len(self.x)
        while self.position < len(self.x):
            self.position += 1
            yield self.x[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Net(pl.LightningModule):
    """A model with buffers and an optimizer with state; in float16 its first scales overflow."""

    def __init__(self, automatic: bool) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = self.layers(batch).float().square().mean()
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.5, "norm")  # type: ignore[arg-type]
        optimizer.step()  # type: ignore[union-attr]
        optimizer.zero_grad()  # type: ignore[union-attr]
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class SaveAt(pl.Callback):
    def __init__(self, epoch: int, batch_idx: int, path: Path) -> None:
        self.when, self.path = (epoch, batch_idx), path

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (trainer.current_epoch, batch_idx) == self.when:
            trainer.save_checkpoint(self.path)


@precisions
@pytest.mark.parametrize("mode", ["plain", "accumulate and clip", "manual"])
@pytest.mark.parametrize("when", [(0, 7), (1, 3)])
@pytest.mark.parametrize("retries", [0, 5])
def test_resume_equals_the_uninterrupted_run(
    tmp_path: Path, precision: PrecisionName, mode: str, when: tuple[int, int], retries: int
) -> None:
    options: dict[str, Any] = {"max_epochs": 2}
    if mode == "accumulate and clip":
        options.update(accumulate_grad_batches=2, gradient_clip_val=0.5)
    x = torch.randn(12, 4, 4, generator=torch.Generator().manual_seed(1))
    x[5, 0, 0] = x[9, 0, 0] = NAN
    rules = LossScale(init_scale=2.0**20, backoff_factor=2.0**-4, growth_interval=3, hysteresis=2)

    def run(resume: Path | None = None, callback: pl.Callback | None = None) -> tuple[Net, pl.Trainer]:
        module, plugin = Net(automatic=mode != "manual"), AdaptiveMixedPrecision(precision, rules, retries=retries)
        trainer = make_trainer(plugin, callbacks=[callback] if callback else None, **options)
        with pytest.warns(RuntimeWarning, match="was skipped because"):
            trainer.fit(module, Batches(x), ckpt_path=resume)
        return module, trainer

    whole, trainer = run(callback=SaveAt(*when, tmp_path / "a.ckpt"))
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)[OURS]
    total = trainer.precision_plugin.state_dict()["counters"]["applied_steps"]
    assert 0 < state["counters"]["applied_steps"] < total
    if precision == "16-mixed":
        assert state["scale"] < 2.0**20

    resumed, resumed_trainer = run(resume=tmp_path / "a.ckpt")
    bitwise: dict[str, Any] = {"rtol": 0, "atol": 0}  # no NaN: the NaN batches left nothing in BatchNorm's buffers
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), **bitwise)
    assert resumed_trainer.precision_plugin.state_dict() == trainer.precision_plugin.state_dict()
    assert resumed_trainer.global_step == trainer.global_step
    states = [run.optimizers[0].state_dict()["state"] for run in (resumed_trainer, trainer)]
    torch.testing.assert_close(*states, **bitwise)


# Stock's plugin and ours ---------------------------------------------------------------------------------------------

Kind = Literal["ours 16", "ours bf16", "ours 32", "stock 16", "stock bf16", "stock 32"]
KINDS: tuple[Kind, ...] = ("ours 16", "ours bf16", "ours 32", "stock 16", "stock bf16", "stock 32")
NAMES: dict[str, PrecisionName] = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true"}


def make(kind: Kind, init_scale: float) -> pl.plugins.Precision | None:
    who, short = kind.split()
    precision = NAMES[short]
    if who == "ours":
        return AdaptiveMixedPrecision(precision, LossScale(init_scale=init_scale, growth_interval=5), retries=0)
    if precision == "32-true":
        return None
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=5)
    return pl.plugins.MixedPrecision(precision, "cpu", scaler if precision == "16-mixed" else None)


@pytest.mark.parametrize(("saver", "resumer"), [(a, b) for a in KINDS for b in KINDS if "ours" in a or "ours" in b])
def test_every_precision_resumes_every_other(tmp_path: Path, saver: Kind, resumer: Kind) -> None:
    trainer = fit(make(saver, 2.0**12), [16, 1, 1])  # 16 overflows at 2^12 and not at 2^11
    before = trainer.lightning_module.weight
    assert torch.equal(before, -ROW * (2 if saver.endswith(" 16") else 18))  # type: ignore[arg-type]
    trainer.save_checkpoint(tmp_path / "a.ckpt")

    start, module = Start(), Exact()
    plugin = make(resumer, 2.0**14)
    resumed = fit(plugin, [1, 1], module=module, start=start, resume=tmp_path / "a.ckpt")
    assert torch.equal(start.weight, before)  # type: ignore[arg-type]
    assert torch.equal(module.weight, before - 2 * ROW)  # type: ignore[operator]
    assert resumed.global_step == (4 if saver == "ours 16" else 5)  # stock counts the step that it skipped
    if not resumer.endswith(" 16"):
        return
    if saver.endswith(" 16"):
        assert (start.state["scale"], start.state["_growth_tracker"]) == (2.0**11, 2)
    elif saver.startswith("stock"):
        assert start.state["scale"] == 2.0**14  # the file knows of none
    else:
        assert start.state["scale"] == 2.0**12
    if isinstance(plugin, AdaptiveMixedPrecision):
        applied = {"ours 16": 2, "ours bf16": 3, "ours 32": 3}.get(saver, 0)
        assert plugin.counters.applied_steps == applied + 2


@pytest.mark.parametrize("between", ["ours bf16", "ours 32"])
@pytest.mark.parametrize("last", ["ours 16", "stock 16"])
def test_a_scale_outlives_an_excursion_to_a_wider_precision(tmp_path: Path, between: Kind, last: Kind) -> None:
    fit(make("ours 16", 2.0**12), [16, 1, 1]).save_checkpoint(tmp_path / "a.ckpt")
    fit(make(between, 2.0**14), [1], resume=tmp_path / "a.ckpt").save_checkpoint(tmp_path / "b.ckpt")
    start = Start()
    fit(make(last, 2.0**14), [1], start=start, resume=tmp_path / "b.ckpt", max_epochs=3)
    assert start.state["scale"] == 2.0**11


def test_stock_goes_on_with_our_rules(tmp_path: Path) -> None:
    rules = {**RULES, "hysteresis": 1}
    ours = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=2.0**10, **rules), retries=0)
    fit(ours, [BIG, 1, 1, 1]).save_checkpoint(tmp_path / "a.ckpt")
    stock = pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    fit(stock, [1, 1, 1, 1], resume=tmp_path / "a.ckpt")
    assert stock.scaler is not None
    assert stock.scaler.get_scale() == 2.0**10  # 2^8, and grown by 4 after 3 + 4 clean steps


@precisions
def test_legacy_key(tmp_path: Path, precision: PrecisionName) -> None:
    content = saved(fit(make("stock 16", 2.0**12), [16, 1, 1]), tmp_path / "a.ckpt")
    content["native_amp_scaling_state"] = content.pop(STOCK)
    torch.save(content, tmp_path / "a.ckpt")
    start = Start()
    fit(AdaptiveMixedPrecision(precision, LossScale(growth_interval=5)), [1], start=start, resume=tmp_path / "a.ckpt")
    assert (start.state["scale"], start.state["_growth_tracker"]) == (2.0**11, 2)


# The constructor and the file ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("saver", ["ours 16", "stock 16"])
@pytest.mark.parametrize(
    ("bounds", "start_scale", "end_scale"),
    [((1.0, 2.0**24), 2.0**11, 2.0**14), ((1.0, 2.0**9), 2.0**9, 2.0**9), ((2.0**13, 2.0**15), 2.0**13, 2.0**15)],
)
def test_the_constructors_rules_win(
    tmp_path: Path, saver: Kind, bounds: tuple[float, float], start_scale: float, end_scale: float
) -> None:
    """The file has scale 2^11, growth by 2 every 5 steps, 2 of them made."""
    fit(make(saver, 2.0**12), [16, 1, 1]).save_checkpoint(tmp_path / "a.ckpt")
    low, high = bounds
    rules = LossScale(init_scale=low, growth_factor=8.0, growth_interval=3, min_scale=low, max_scale=high)
    plugin, start = AdaptiveMixedPrecision("16-mixed", rules), Start()
    fit(plugin, [0], start=start, resume=tmp_path / "a.ckpt")
    assert start.state["scale"] == start_scale
    state = plugin.state_dict()
    assert state["scale"] == end_scale
    assert (state["growth_factor"], state["growth_interval"]) == (8.0, 3)


def test_a_static_scale_stays_that_of_the_constructor(tmp_path: Path) -> None:
    """``dynamic=False`` "keeps the scale at ``init_scale``": it is the user's, not a state."""
    fit(make("ours 16", 2.0**12), [16, 1, 1]).save_checkpoint(tmp_path / "a.ckpt")
    plugin = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=2.0**9, dynamic=False))
    fit(plugin, [1], resume=tmp_path / "a.ckpt")
    assert plugin.state_dict()["scale"] == 2.0**9


def busy_plugin() -> AdaptiveMixedPrecision:
    plugin = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=2.0**10, **RULES), retries=0)
    fit(plugin, ROUND_TRIPS["growth"][0])
    return plugin


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    plugin = busy_plugin()
    before = plugin.state_dict()
    newer = {**before, "version": before["version"] + 1, "scale": 2.0**5, "counters": {"new": 1}}
    with pytest.raises(ValueError, match=r"version 2.*up to 1.*update the package"):
        plugin.load_state_dict(newer)
    assert plugin.state_dict() == before

    content = saved(fit(make("ours 16", 2.0**12), [1]), tmp_path / "a.ckpt")
    content[OURS] = newer
    torch.save(content, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="update the package"):
        fit(make("ours 16", 2.0**12), [1], resume=tmp_path / "a.ckpt")


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, NAN])
@pytest.mark.parametrize("key", [OURS, STOCK, "native_amp_scaling_state"])
def test_a_corrupt_scale_is_refused(tmp_path: Path, key: str, scale: float) -> None:
    plugin = busy_plugin()
    before = plugin.state_dict()
    other = saved(fit(make("ours 16", 2.0**12), [1]), tmp_path / "a.ckpt")
    corrupt = {**other.pop(OURS), "scale": scale}
    with pytest.raises(ValueError, match=f"scale is {scale}"):
        plugin.load_state_dict(corrupt)
    assert plugin.state_dict() == before

    del other[STOCK]
    torch.save({**other, key: corrupt}, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=f"scale is {scale}.*positive and finite"):
        fit(make("ours 16", 2.0**12), [1], resume=tmp_path / "a.ckpt")


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_a_collapsed_scale_does_not_keep_a_run_from_a_wider_precision(tmp_path: Path, precision: PrecisionName) -> None:
    """Stock's scale of 0 is what drives users away from float16; nothing here is multiplied by it."""
    content = saved(fit(make("stock 16", 2.0**12), [1]), tmp_path / "a.ckpt")
    content[STOCK]["scale"] = 0.0
    torch.save(content, tmp_path / "a.ckpt")
    module = Exact()
    trainer = fit(AdaptiveMixedPrecision(precision), [1], module=module, resume=tmp_path / "a.ckpt")
    assert torch.equal(module.weight, -2 * ROW)
    assert saved(trainer, tmp_path / "b.ckpt")[STOCK]["scale"] > 0


# What the fallback has come to ---------------------------------------------------------------------------------------


class Hot(Net):
    """The first layer puts out more than float16 holds, in the batches whose numbers are ``hot``."""

    def __init__(self, automatic: bool = True, hot: Sequence[int] = (1, 3, 5)) -> None:
        super().__init__(automatic)
        self.hot = hot
        self.dtypes: list[torch.dtype] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        factor = 2.0**17 if batch_idx in self.hot else 1.0
        hidden = self.layers[0](batch * factor)
        self.dtypes.append(hidden.dtype)
        loss = (self.layers[3](hidden.float() / factor).float() - 1).square().mean()
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None


def train_hot(path: Path, save_at: int | None, module: Hot, **rules: Any) -> AdaptiveMixedPrecision:
    """Train 8 steps and save after one of them, or go on from there."""
    plugin = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=4.0))
    callbacks: list[pl.Callback] = [PrecisionFallback(**rules)]
    if save_at is not None:
        callbacks.append(SaveAt(0, save_at, path))
    x = torch.rand(8, 4, 4, generator=torch.Generator().manual_seed(1)) + 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that it moves, which the counters and dtypes tell
        trainer = make_trainer(plugin, callbacks=callbacks)
        trainer.fit(module, Batches(x), ckpt_path=None if save_at is not None else path)
    return plugin


def assert_resumes(path: Path, save_at: int, make_module: Any = Hot, **rules: Any) -> dict[str, Any]:
    """A resumed run does the very same attempts; return the state that it was resumed from."""
    whole, resumed = make_module(), make_module()
    first = train_hot(path, save_at, whole, **rules)
    second = train_hot(path, None, resumed, **rules)
    assert second.state_dict() == first.state_dict()
    assert second.last_step == first.last_step
    assert resumed.dtypes == whole.dtypes[-len(resumed.dtypes) :]
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)
    state: dict[str, Any] = torch.load(path, weights_only=True)[OURS]
    assert types_in(state) <= {dict, list, str, int, float}
    return state


def test_a_run_killed_with_two_of_three_rescues_counted_falls_back_at_the_third(tmp_path: Path) -> None:
    state = assert_resumes(tmp_path / "a.ckpt", save_at=3)
    assert state["fallback"]["rescues"] == [1, 3]
    assert (state["precision"], state["counters"]["rescued_steps"]) == ("16-mixed", 2)
    end = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert end[STOCK]["scale"] == 4.0

    module = Hot()
    plugin = train_hot(tmp_path / "a.ckpt", None, module)
    assert (plugin.precision, plugin.counters.rescued_steps) == ("bf16-mixed", 3)
    assert module.dtypes[-2:] == [torch.bfloat16] * 2  # steps 6 and 7, after the third rescue in step 5


def test_rescues_that_were_too_long_ago_do_not_count_after_a_resume(tmp_path: Path) -> None:
    state = assert_resumes(tmp_path / "a.ckpt", save_at=3, within_steps=4)
    assert state["fallback"]["rescues"] == [1, 3]
    plugin = train_hot(tmp_path / "a.ckpt", None, Hot(), within_steps=4)
    assert (plugin.precision, plugin.counters.rescued_steps) == ("16-mixed", 3)


@pytest.mark.parametrize("save_at", [1, 4])
def test_kept_modules_are_kept_in_a_resumed_run(tmp_path: Path, save_at: int) -> None:
    state = assert_resumes(tmp_path / "a.ckpt", save_at, scope="module", patience=1)
    assert state["kept_modules"] == ["layers.0"]
    module = Hot()
    plugin = train_hot(tmp_path / "a.ckpt", None, module, scope="module", patience=1)
    assert (plugin.precision, plugin.kept_modules) == ("16-mixed", ("layers.0",))
    assert plugin.counters.rescued_steps == 1
    assert module.dtypes == [torch.float32] * (7 - save_at)
    assert "forward" not in vars(module.layers[0])


@pytest.mark.parametrize("save_at", [1, 2, 3, 5])
def test_a_run_that_tries_the_narrow_precision_again_is_resumed_on_trial(tmp_path: Path, save_at: int) -> None:
    """It moves in step 1, and tries float16 in steps 4 (hot again) and no earlier than step 9."""
    state = assert_resumes(tmp_path / "a.ckpt", save_at, lambda: Hot(hot=(1, 4)), patience=1, retry_after=2)
    fallback = state["fallback"]
    assert fallback["clean_steps"] == {1: 0, 2: 1, 3: 2, 5: 1}[save_at]
    assert fallback["failed_trials"] == (save_at == 5)
    assert fallback["on_trial"] == ("bf16-mixed" if save_at == 3 else "")


@pytest.mark.parametrize("save_at", [2, 3, 4, 5])
def test_a_manual_run_killed_between_located_failures_moves_at_the_same_step(tmp_path: Path, save_at: int) -> None:
    def manual() -> Hot:
        return Hot(automatic=False, hot=(1, 2, 3, 4, 5, 6, 7))

    state = assert_resumes(tmp_path / "a.ckpt", save_at, manual)
    assert state["counters"]["skipped_steps"] == min(save_at, 4)
