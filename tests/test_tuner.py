"""Lightning's Tuner: a search for the learning rate or the batch size sees true steps, and leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from helpers import PRECISIONS, make_trainer
from namespace import NAMESPACE, AdaptiveMixedPrecision, AMPMonitor, PrecisionFallback, pl
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp_plus import LossScale, NonFiniteStepError, StepCounters
from lightning_amp_plus.precisions import PrecisionName

tuner: Any = import_module(f"{NAMESPACE}.tuner")

# torch says so where the first steps are skipped, stock's too.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


@pytest.fixture(autouse=True)
def without_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes most of the time of a search for a batch size."""
    monkeypatch.setattr(tuner.batch_size_scaling, "garbage_collection_cuda", lambda: None)


Fault = Literal["none", "nan", "inf", "gradients"]
FAULTS: tuple[Fault, ...] = ("nan", "inf", "gradients")
LIMIT = 2.0**-4
"""A faulty model fails at learning rates above it."""
BATCHES = 32

ALL = ("auto", *PRECISIONS)
every_precision = pytest.mark.parametrize("precision", ALL)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate and clip": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def computes_in_float16() -> bool:
    return torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.float16


class Tunes(pl.LightningModule):
    """A small regression, with buffers and an optimizer with state; in float16 its first scales overflow."""

    def __init__(self, fault: Fault = "none", limit: float = LIMIT, out_of_memory_at: float = math.inf) -> None:
        super().__init__()
        self.fault, self.limit, self.out_of_memory_at = fault, limit, out_of_memory_at
        self.lr, self.batch_size = 2.0**-7, 4
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.seen: list[tuple[float, str]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if len(batch) >= self.out_of_memory_at and batch_idx % 2:
            raise RuntimeError("CUDA out of memory.")
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.seen.append((rate, str(self.trainer.precision_plugin.precision)))
        output = self.layers(batch)
        loss = (output.float() - 3).square().mean()
        if rate > self.limit:
            if self.fault == "gradients":
                output.register_hook(lambda grad: grad * math.inf)
            elif self.fault != "none":
                loss = loss * float(self.fault)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("eps", torch.finfo(self.layers(batch).dtype).eps)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.5)

    def train_dataloader(self) -> DataLoader[Tensor]:
        rows: Any = torch.randn(BATCHES * 4, 4, generator=torch.Generator().manual_seed(1))
        return DataLoader(rows, batch_size=self.batch_size)

    val_dataloader = train_dataloader


def make(
    precision: str = "16-mixed", max_skipped: int = 10, init_scale: float = 2.0**22, retries: int = 5
) -> AdaptiveMixedPrecision:
    rules = LossScale(init_scale=init_scale, growth_interval=5)
    return AdaptiveMixedPrecision(precision, rules, max_skipped, retries)  # type: ignore[arg-type]


def trainer_of(plugin: pl.plugins.Precision | None, path: Path, **kwargs: Any) -> pl.Trainer:
    if isinstance(plugin, AdaptiveMixedPrecision) and "callbacks" not in kwargs:
        kwargs["callbacks"] = [PrecisionFallback(patience=1), AMPMonitor()]
    return make_trainer(plugin, default_root_dir=path, log_every_n_steps=1, limit_val_batches=0, **kwargs)


def find_rate(trainer: pl.Trainer, module: pl.LightningModule, **kwargs: Any) -> Any:
    options = {"min_lr": 1e-4, "max_lr": 1.0, "num_training": 16, "early_stop_threshold": None, "update_attr": False}
    return tuner.Tuner(trainer).lr_find(module, **{**options, **kwargs})


def find_batch_size(trainer: pl.Trainer, module: pl.LightningModule, **kwargs: Any) -> Any:
    """It finds what the model has already."""
    return tuner.Tuner(trainer).scale_batch_size(module, **{"init_val": 2, "max_trials": 2, **kwargs})


SEARCHES = {"rate": find_rate, "batch size": find_batch_size}
every_search = pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
Search = Callable[..., Any]


def state_of(module: pl.LightningModule) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def amp_metrics(trainer: pl.Trainer) -> dict[str, float]:
    """Not those of the validation, which Lightning's search switches on."""
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("amp/")}


def assert_same_run(found: tuple[pl.Trainer, Tunes], expected: tuple[pl.Trainer, Tunes]) -> None:
    bitwise: dict[str, Any] = {"rtol": 0, "atol": 0}
    torch.testing.assert_close(found[1].state_dict(), expected[1].state_dict(), **bitwise)
    plugins = [run[0].precision_plugin for run in (found, expected)]
    assert plugins[0].state_dict() == plugins[1].state_dict()
    assert plugins[0].precision == plugins[1].precision
    assert plugins[0].last_step == plugins[1].last_step  # type: ignore[attr-defined]
    assert found[0].global_step == expected[0].global_step
    metrics = [amp_metrics(run[0]) for run in (found, expected)]
    assert metrics[0]["amp/applied_steps"] > 0
    assert metrics[0] == metrics[1]
    states = [run[0].optimizers[0].state_dict()["state"] for run in (found, expected)]
    torch.testing.assert_close(*states, **bitwise)


def fit(plugin: AdaptiveMixedPrecision, path: Path, **kwargs: Any) -> tuple[pl.Trainer, Tunes]:
    trainer, module = trainer_of(plugin, path, **kwargs), Tunes()
    trainer.fit(module)
    return trainer, module


# Before the first fit, and after one ----------------------------------------------------------------------------------


@every_precision
@every_search
@every_option
def test_the_first_fit_is_as_without_a_search(
    tmp_path: Path, precision: str, search: Search, options: dict[str, Any]
) -> None:
    expected = fit(make(precision), tmp_path, **options)
    plugin, module = make(precision), Tunes()
    scaler, fresh = plugin.scaler, make("bf16-mixed" if precision == "auto" else precision).state_dict()
    weights = state_of(module)
    trainer = trainer_of(plugin, tmp_path, **options)
    result = search(trainer, module)
    assert result == 4 if search is find_batch_size else result.suggestion() is not None

    assert plugin.state_dict() == fresh
    assert plugin.precision == ("bf16-mixed" if precision == "auto" else precision)
    assert plugin.rules is None
    assert plugin.scaler is scaler
    torch.testing.assert_close(module.state_dict(), weights, rtol=0, atol=0)
    assert len(module.seen) > 5

    trainer.fit(module)
    assert_same_run((trainer, module), expected)
    steps = BATCHES // options.get("accumulate_grad_batches", 1)
    assert plugin.counters.applied_steps == steps
    assert (plugin.counters.retried_attempts > 0) == (precision == "16-mixed")


@pytest.mark.parametrize("precision", ["16-mixed", "32-true"])
@every_search
@every_option
def test_a_search_after_a_fit_leaves_all_as_it_was(
    tmp_path: Path, precision: str, search: Search, options: dict[str, Any]
) -> None:
    plugin = make(precision)
    _, module = fit(plugin, tmp_path, **options)
    state, weights, scaler = plugin.state_dict(), state_of(module), plugin.scaler
    seen = len(module.seen)
    search(trainer_of(plugin, tmp_path, **options), module)
    assert len(module.seen) > seen
    assert plugin.state_dict() == state
    assert (plugin.rules, plugin.scaler) == (None, scaler)
    torch.testing.assert_close(module.state_dict(), weights, rtol=0, atol=0)

    again = fit(plugin, tmp_path, **options)
    assert_same_run(again, fit(make(precision), tmp_path, **options))


@every_search
@pytest.mark.parametrize("after_a_fit", [False, True])
def test_last_step_is_not_one_of_the_search(tmp_path: Path, search: Search, after_a_fit: bool) -> None:
    plugin = make()
    if after_a_fit:
        fit(plugin, tmp_path)
    search(trainer_of(plugin, tmp_path), Tunes())
    assert plugin.last_step is None


def test_a_search_after_a_fallback_is_made_on_its_rung(tmp_path: Path) -> None:
    plugin, module = moved(tmp_path)
    state = plugin.state_dict()
    for search in (find_rate, find_batch_size):
        module.seen.clear()
        search(trainer_of(plugin, tmp_path), module)
        assert {precision for _, precision in module.seen} == {"bf16-mixed"}
        assert plugin.state_dict() == state
        assert plugin.precision == "bf16-mixed"


@every_search
def test_a_search_without_the_callback_does_not_undo_a_fallback(tmp_path: Path, search: Search) -> None:
    plugin, module = moved(tmp_path)
    search(trainer_of(plugin, tmp_path, callbacks=[]), module)
    assert plugin.precision == "bf16-mixed"


def moved(path: Path) -> tuple[AdaptiveMixedPrecision, Tunes]:
    """A run that has moved on from float16."""

    class Hot(Tunes):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (math.inf if computes_in_float16() else 1)

    plugin, module = make(), Hot()
    with pytest.warns(RuntimeWarning, match="the run computes in 'bf16-mixed'"):
        trainer_of(plugin, path).fit(module)
    assert plugin.precision == "bf16-mixed"
    return plugin, module


def test_a_search_for_the_batch_size_of_an_evaluation(tmp_path: Path) -> None:
    plugin, module = moved(tmp_path)
    state, last_step = plugin.state_dict(), plugin.last_step
    trainer = make_trainer(plugin, default_root_dir=tmp_path, callbacks=[PrecisionFallback()])
    assert find_batch_size(trainer, module, method="validate") == 4
    assert (plugin.state_dict(), plugin.last_step) == (state, last_step)
    assert plugin.precision == "bf16-mixed"
    assert trainer.validate(module, verbose=False)[0]["eps"] == torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("precision", ["16-mixed", "32-true"])
@pytest.mark.parametrize("mode", ["power", "binsearch"])
@every_option
def test_out_of_memory_within_a_window(tmp_path: Path, precision: str, options: dict[str, Any], mode: str) -> None:
    plugin, module = make(precision), Tunes(out_of_memory_at=8)
    trainer = trainer_of(plugin, tmp_path, **options)
    found = find_batch_size(trainer, module, mode=mode, max_trials=9, margin=0)
    assert found == (4 if mode == "power" else 7)
    module.batch_size = 4
    trainer.fit(module)
    assert_same_run((trainer, module), fit(make(precision), tmp_path, **options))


# The callbacks in a real fit ------------------------------------------------------------------------------------------


def rate_finder(**kwargs: Any) -> pl.callbacks.LearningRateFinder:
    options = {"min_lr": 1e-4, "num_training_steps": 16, "early_stop_threshold": None, "update_attr": False}
    return pl.callbacks.LearningRateFinder(**{**options, **kwargs})


FINDERS: dict[str, Callable[[], pl.Callback]] = {
    "rate": rate_finder,
    "batch size": lambda: pl.callbacks.BatchSizeFinder(init_val=2, max_trials=2),
}


@pytest.mark.parametrize("precision", ["auto", "16-mixed"])
@every_option
@pytest.mark.parametrize("finder", FINDERS.values(), ids=FINDERS)
@pytest.mark.parametrize("position", [0, 2])
def test_a_fit_with_a_finder_is_as_one_without(
    tmp_path: Path, precision: str, options: dict[str, Any], finder: Callable[[], pl.Callback], position: int
) -> None:
    callbacks: list[pl.Callback] = [PrecisionFallback(patience=1), AMPMonitor()]
    callbacks.insert(position, finder())
    found = fit(make(precision), tmp_path, callbacks=callbacks, **options)
    assert len(found[1].seen) > BATCHES
    assert_same_run(found, fit(make(precision), tmp_path, **options))


class Keys(pl.Callback):
    """What has been logged by the end of each batch."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.metrics.append(amp_metrics(trainer))


@pytest.mark.parametrize("finder", FINDERS.values(), ids=FINDERS)
def test_the_monitor_logs_no_step_of_a_search(tmp_path: Path, finder: Callable[[], pl.Callback]) -> None:
    def logged(*more: pl.Callback) -> list[dict[str, float]]:
        keys = Keys()
        fit(make("bf16-mixed"), tmp_path, callbacks=[*more, AMPMonitor(), keys], accumulate_grad_batches=2)
        return keys.metrics

    expected = logged()
    assert not expected[0]  # there was no optimizer step yet
    assert "amp/grad_norm" in expected[1]
    assert logged(finder()) == expected


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended")  # Lightning counts on no held step
def test_a_search_in_mid_run_goes_on_in_what_the_run_moved_to(tmp_path: Path) -> None:
    class InSecondEpoch(pl.callbacks.LearningRateFinder):
        states: tuple[dict[str, Any], dict[str, Any]]

        def on_fit_start(self, *args: Any) -> None:
            pass

        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            if trainer.current_epoch == 1:
                state = trainer.precision_plugin.state_dict()
                self.lr_find(trainer, pl_module)
                self.states = state, trainer.precision_plugin.state_dict()

    class Hot(Tunes):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (math.inf if computes_in_float16() else 1)

    finder = InSecondEpoch(num_training_steps=8, update_attr=False, early_stop_threshold=None)
    plugin, module = make(), Hot()
    with pytest.warns(RuntimeWarning, match="the run computes in 'bf16-mixed'"):
        trainer_of(plugin, tmp_path, callbacks=[PrecisionFallback(patience=1), finder], max_epochs=2).fit(module)
    assert finder.states[0] == finder.states[1]
    assert finder.states[0]["precision"] == "bf16-mixed"
    assert plugin.counters.rescued_steps == 1
    attempts = plugin.counters.retried_attempts + 1  # of the first step; all others are clean
    assert attempts == 4
    assert {precision for _, precision in module.seen[attempts:]} == {"bf16-mixed"}


# What the search sees -------------------------------------------------------------------------------------------------


def stock(precision: PrecisionName, init_scale: float) -> pl.plugins.Precision | None:
    if precision == "32-true":
        return None
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=5) if precision == "16-mixed" else None
    return pl.plugins.MixedPrecision(precision, "cpu", scaler)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("init_scale", "early_stop"),
    # With skipped steps at the start Lightning compares with no best loss, and stops at once.
    [(2.0**8, None), (2.0**8, 1.5), (2.0**22, None)],
)
def test_it_sees_what_it_sees_with_stock(
    tmp_path: Path, precision: PrecisionName, init_scale: float, early_stop: float | None
) -> None:
    results = [
        find_rate(trainer_of(plugin, tmp_path), Tunes(), max_lr=100, early_stop_threshold=early_stop)
        for plugin in (make(precision, init_scale=init_scale, retries=0), stock(precision, init_scale))
    ]
    assert results[0].results == results[1].results
    assert results[0].suggestion() == results[1].suggestion()
    assert (len(results[0].results["loss"]) < 16) == (early_stop is not None)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("precision", ["16-mixed", "32-true"])
@every_option
def test_a_loss_that_diverges_ends_no_search(
    tmp_path: Path, precision: str, options: dict[str, Any], fault: Fault
) -> None:
    """More steps fail than are allowed in a row, and than it takes to fall back."""
    plugin, module = make(precision, max_skipped=2), Tunes(fault)
    weights = state_of(module)
    fresh = make("bf16-mixed" if precision == "auto" else precision).state_dict()
    trainer = trainer_of(plugin, tmp_path, **options)
    steps = BATCHES // options.get("accumulate_grad_batches", 1)
    finder = find_rate(trainer, module, num_training=steps)
    assert len({rate for rate, _ in module.seen if rate > LIMIT}) > 3
    assert len({precision for _, precision in module.seen}) == 1
    assert len(finder.results["lr"]) == len(finder.results["loss"]) == steps
    suggestion = finder.suggestion(skip_begin=4)
    assert suggestion is not None
    assert suggestion <= LIMIT or fault == "gradients"  # the loss is finite then
    assert plugin.state_dict() == fresh
    assert plugin.rules is None
    torch.testing.assert_close(module.state_dict(), weights, rtol=0, atol=0)

    trainer.fit(module)
    assert_same_run((trainer, module), fit(make(precision, max_skipped=2), tmp_path, **options))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_suggestion_of_a_search_that_diverged_is_applied(tmp_path: Path, precision: PrecisionName) -> None:
    plugin, module = make(precision, max_skipped=2), Tunes("inf")
    finder = rate_finder(update_attr=True, num_training_steps=BATCHES)
    trainer = trainer_of(plugin, tmp_path, callbacks=[finder, PrecisionFallback(patience=1)])
    trainer.fit(module)
    assert 1e-4 < module.lr < LIMIT
    assert module.lr == trainer.optimizers[0].param_groups[0]["lr"] == module.seen[-1][0]
    assert plugin.precision == precision
    assert plugin.counters.applied_steps + plugin.counters.skipped_steps == BATCHES
    assert plugin.counters.applied_steps > 4
    assert all(value.isfinite().all() for value in module.state_dict().values())


def test_the_loss_may_diverge_by_itself(tmp_path: Path) -> None:
    class Linear(Tunes):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return (self.layers[0](batch).float() - 3).square().mean()

    plugin = make("32-true", max_skipped=2)
    finder = find_rate(trainer_of(plugin, tmp_path), Linear(), max_lr=1e30, num_training=BATCHES)
    losses = finder.results["loss"]
    assert sum(not math.isfinite(loss) for loss in losses) > 10
    assert finder.suggestion(skip_begin=1) < 1e15
    assert plugin.counters == StepCounters()


@pytest.mark.parametrize("fault", ["nan", "inf"])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_a_loss_that_is_never_finite(tmp_path: Path, precision: str, fault: Fault) -> None:
    plugin, module = make(precision, max_skipped=3), Tunes(fault, limit=0)
    trainer = trainer_of(plugin, tmp_path, callbacks=[])
    finder = find_rate(trainer, module)
    assert finder.suggestion() is None
    assert len(finder.results["loss"]) == 16
    expected = find_rate(trainer_of(None, tmp_path), Tunes(fault, limit=0))
    assert expected.suggestion() is None
    assert len(expected.results["loss"]) == 16

    with (
        pytest.warns(RuntimeWarning, match="Optimizer step 0 was skipped"),
        pytest.raises(NonFiniteStepError, match=r"3 optimizer steps in a row .* the last one was step 2"),
    ):
        trainer.fit(module)


@pytest.mark.filterwarnings("ignore:.* was skipped because")
@pytest.mark.parametrize(
    ("precision", "init_scale"),
    [
        ("bf16-mixed", 2.0**22),
        ("16-mixed", 2.0**8),
        ("16-mixed", 2.0**22),
    ],
)
def test_a_bad_batch_in_a_search_for_the_batch_size_moves_no_run(
    tmp_path: Path, precision: PrecisionName, init_scale: float
) -> None:
    """It goes through the same batches at each size. The first of them is bad."""

    class Bad(Tunes):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (math.nan if batch_idx == 0 else 1)

    plugin, module = make(precision, init_scale=init_scale), Bad()
    trainer = trainer_of(plugin, tmp_path, callbacks=[PrecisionFallback(patience=2)])
    assert find_batch_size(trainer, module, max_trials=4) == 16
    assert {seen for _, seen in module.seen} == {precision}
    assert plugin.state_dict() == make(precision, init_scale=init_scale).state_dict()
