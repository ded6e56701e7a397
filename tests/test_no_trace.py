"""Guarantee G2, no trace: a run with a poisoned window that is skipped equals the run without it, bit for bit."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import PRECISIONS, make_trainer
from hypothesis import given, settings
from hypothesis import strategies as st
from namespace import AdaptiveMixedPrecision, pl
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LinearLR, ReduceLROnPlateau
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric

from lightning_amp_plus import LossScale, StepCounters
from lightning_amp_plus.precisions import PrecisionName

pytestmark = pytest.mark.filterwarnings("ignore:Optimizer step .* was skipped because:RuntimeWarning")

NAN = float("nan")
SCALE = 2.0**10
"""What the clean batches do not overflow at."""
WINDOWS = 4
"""Clean windows of a run."""

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9),
    "adamw": partial(AdamW, lr=0.01),
    "fused": partial(AdamW, lr=0.01, fused=True),
}
CLIPS: dict[str, dict[str, Any]] = {
    "none": {},
    "norm": {"gradient_clip_val": 0.1},
    "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}
INPUTS = {"nan": NAN, "inf": float("inf"), "forward": 6e4}
FAULTS = (*INPUTS, "gradients", "after_backward", "before_step")
"""What is wrong with a batch: its input, the gradients of a finite loss, or what a hook makes of them."""
EXPECTED = {"gradients": "gradients", "after_backward": "hook", "before_step": "hook"}
"""Where each is seen in automatic optimization; ``"loss"`` for the others."""

Batch = tuple[Tensor, str]


@dataclass(frozen=True)
class Case:
    """A run, but for where it is poisoned."""

    precision: PrecisionName = "16-mixed"
    mode: str = "automatic 1"
    """Automatic optimization with so many micro-batches in a window, or manual with so many iterations in it."""
    at: int = 0
    """The micro-batch of the window that is poisoned."""
    fault: str = "nan"
    clip: str = "none"
    optimizer: str = "adamw"
    plateau: bool = False
    scale_is_fixed: bool = False

    @property
    def accumulate(self) -> int:
        return int(self.mode.split()[1])

    @property
    def is_manual(self) -> bool:
        return self.mode.startswith("manual")


class Net(pl.LightningModule):
    """Everything that a step may leave a trace in: BatchNorm, dropout, a metric, logged values, a schedule."""

    net: Any
    mean: Any

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.case = case
        self.automatic_optimization = not case.is_manual
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))
        nn.init.constant_(self.net[0].weight[0], 0.75)  # 4 * 0.75 * 6e4 overflows
        self.mean = MeanMetric(nan_strategy="disable")
        self.fault = ""

    def loss(self, batch: Batch) -> Tensor:
        x, self.fault = batch
        loss = self.net(x).float().pow(2).mean()
        if self.fault == "gradients":
            loss = loss + (self.net[0].weight.sum() * 0).sqrt()  # 0, whose gradient is 0 times infinity
        self.mean.update(loss)
        self.log("mean", self.mean, on_step=False, on_epoch=True, batch_size=len(x))
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(x))
        return loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        if not self.case.is_manual:
            return self.loss(batch)
        optimizer: Any = self.optimizers()
        scheduler: Any = self.lr_schedulers()
        self.manual_backward(self.loss(batch) / self.case.accumulate)
        if (batch_idx + 1) % self.case.accumulate == 0:
            clip = CLIPS[self.case.clip]
            if clip:
                self.clip_gradients(optimizer, clip["gradient_clip_val"], clip.get("gradient_clip_algorithm", "norm"))
            optimizer.step()
            optimizer.zero_grad()
            if not plugin_of(self.trainer).last_step_skipped:
                scheduler.step()
        return None

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.case.optimizer](self.parameters())
        if self.case.plateau:
            scheduler = {"scheduler": ReduceLROnPlateau(optimizer, patience=0, factor=0.5), "monitor": "loss"}
            return [optimizer], [{**scheduler, "interval": "step"}]
        return [optimizer], [{"scheduler": LinearLR(optimizer, 0.1, total_iters=WINDOWS), "interval": "step"}]


class Hooks(pl.Callback):
    """Spoils the gradients of the batches that say so, in the hook that they name."""

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.spoil(pl_module, "after_backward")

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self.spoil(pl_module, "before_step")

    def spoil(self, pl_module: Any, fault: str) -> None:
        if pl_module.fault == fault:
            pl_module.net[-1].weight.grad.fill_(NAN)


def plugin_of(trainer: pl.Trainer) -> AdaptiveMixedPrecision:
    assert isinstance(trainer.precision_plugin, AdaptiveMixedPrecision)
    return trainer.precision_plugin


def batches(case: Case, bad: Sequence[int] = (), windows: int = WINDOWS) -> list[Batch]:
    """Clean windows, and poisoned ones before those of these numbers."""
    x = torch.randn((windows, case.accumulate, 4, 4), generator=torch.Generator().manual_seed(1))
    data: list[Batch] = []
    for window in range(windows + 1):
        for _ in range(list(bad).count(window)):
            poisoned: list[Batch] = [(torch.full((4, 4), 0.5), "") for _ in range(case.accumulate)]
            poisoned[case.at] = (torch.full((4, 4), INPUTS.get(case.fault, 0.5)), case.fault)
            data += poisoned
        if window < windows:
            data += [(micro_batch, "") for micro_batch in x[window]]
    return data


def as_loader(data: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=None)


@dataclass
class Run:
    module: Net
    plugin: AdaptiveMixedPrecision
    trainer: pl.Trainer
    metrics: dict[str, Any] = field(default_factory=dict)
    rng: Tensor = field(default_factory=torch.get_rng_state)

    @property
    def outcome(self) -> dict[str, Any]:
        """All that has to be equal."""
        metrics = {key: value for key, value in self.trainer.callback_metrics.items() if not key.startswith("amp/")}
        return {
            "module": self.module.state_dict(),
            "metric": {name: getattr(self.module.mean, name) for name in ("mean_value", "weight", "_update_count")},
            "optimizers": [optimizer.state_dict() for optimizer in self.trainer.optimizers],
            "schedulers": [numbers_in(config.scheduler.state_dict()) for config in self.trainer.lr_scheduler_configs],
            "global_step": self.trainer.global_step,
            # Of a manual window over several iterations only the last is known to be skipped in time.
            "axis": 0
            if self.module.case.mode == "manual 3"
            else self.trainer.fit_loop.epoch_loop._batches_that_stepped,
            "applied_steps": self.plugin.counters.applied_steps,
            "scale": self.plugin.state_dict()["scale"],
            "callback_metrics": metrics,
            "rng": self.rng,
        }


def numbers_in(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if isinstance(value, (int, float, list))}


def make_run(case: Case, *, exclude_buffers: Sequence[str] = (), retries: int = 2, **kwargs: Any) -> Run:
    rules = LossScale(init_scale=SCALE, growth_interval=10**6, dynamic=not (case.is_manual or case.scale_is_fixed))
    plugin = AdaptiveMixedPrecision(
        case.precision,
        rules,
        retries=retries,
        exclude_buffers=exclude_buffers,
        max_skipped=kwargs.pop("max_skipped", 10),
    )
    if case.fault in ("after_backward", "before_step"):
        kwargs["callbacks"] = [*kwargs.get("callbacks", []), Hooks()]
    if not case.is_manual:
        kwargs = {"accumulate_grad_batches": case.accumulate, **CLIPS[case.clip], **kwargs}
    return Run(Net(case), plugin, make_trainer(plugin, **kwargs))


def fit(run: Run, data: Any, *loaders: Any, **kwargs: Any) -> Run:
    torch.manual_seed(5)
    run.trainer.fit(run.module, as_loader(data), *loaders, **kwargs)
    run.rng = torch.get_rng_state()
    return run


def assert_equal(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@cache
def clean(case: Case) -> dict[str, Any]:
    """What the run without a poisoned window ends with."""
    return fit(make_run(case), batches(case)).outcome


def check(case: Case, bad: Sequence[int], **kwargs: Any) -> Run:
    run = fit(make_run(case, **kwargs), batches(case, bad))
    assert run.plugin.counters.skipped_steps == len(bad)
    assert_equal(run.outcome, clean(case))
    return run


# Each pair of factors -------------------------------------------------------------------------------------------------

FACTORS: dict[str, tuple[Any, ...]] = {
    "precision": PRECISIONS,
    "mode": (("automatic 1", 0), ("automatic 4", 0), ("automatic 4", 3), ("manual 1", 0), ("manual 3", 1)),
    "fault": FAULTS,
    "place": ((0,), (2,), (WINDOWS,)),
    "clip": tuple(CLIPS),
    "optimizer": tuple(OPTIMIZERS),
}
Row = tuple[Any, ...]


def is_possible(row: Row) -> bool:
    """Only float16 overflows in a forward, and a hook that runs once per window sees its last micro-batch."""
    precision, (mode, at), fault = row[:3]
    at_end = at == int(mode.split()[1]) - 1
    return (precision == "16-mixed" or fault != "forward") and (at_end or fault != "before_step")


def pairs_of(row: Row) -> set[tuple[tuple[int, Any], ...]]:
    return set(itertools.combinations(enumerate(row), 2))


def rows_that_cover_all_pairs() -> list[Row]:
    """Greedily: the row that adds most, until none adds any."""
    possible = [(row, pairs_of(row)) for row in itertools.product(*FACTORS.values()) if is_possible(row)]
    missing = set().union(*(pairs for _, pairs in possible))
    rows = []
    while missing:
        row, pairs = max(possible, key=lambda one: len(one[1] & missing))
        rows.append(row)
        missing -= pairs
    return rows


ROWS = rows_that_cover_all_pairs()


def test_the_rows_cover_all_pairs() -> None:
    pairs = set().union(*map(pairs_of, ROWS))
    impossible = 2 + 2  # "forward" in two precisions; "before_step" with two places in a window
    sizes = [len(values) for values in FACTORS.values()]
    assert len(pairs) == sum(a * b for a, b in itertools.combinations(sizes, 2)) - impossible
    assert len(ROWS) < 45


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(str(value).replace(" ", "") for value in row))
def test_a_poisoned_window_leaves_no_trace(row: Row) -> None:
    precision, (mode, at), fault, bad, clip, optimizer = row
    run = check(Case(precision, mode, at, fault, clip, optimizer), bad)
    report = run.plugin.last_step
    assert report is not None
    if bad == (WINDOWS,) and not run.module.case.is_manual:
        assert report.non_finite == EXPECTED.get(fault, "loss")
        assert report.attempts == (3 if precision == "16-mixed" and fault == "gradients" else 1)


def test_clipping_and_schedule_are_at_work() -> None:
    """Else their being equal would say little."""
    outcomes = [clean(Case(optimizer="sgd", clip=clip)) for clip in CLIPS]
    weights = [outcome["module"]["net.0.weight"] for outcome in outcomes]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(weights, 2))
    assert outcomes[0]["schedulers"][0]["last_epoch"] == WINDOWS
    assert outcomes[0]["metric"]["_update_count"] == 0  # reset at the end of the epoch
    assert set(outcomes[0]["callback_metrics"]) == {"loss", "loss_step", "loss_epoch", "mean"}


@pytest.mark.parametrize("mode", ["automatic 1", "automatic 4", "manual 1", "manual 3"])
def test_several_windows_in_a_row(mode: str) -> None:
    check(Case(mode=mode), (0, 0, 2, 2, WINDOWS, WINDOWS))


def test_a_wrong_rollback_is_reported() -> None:
    """With one buffer left out."""
    with pytest.raises(AssertionError, match=r"net\.1\.running_mean"):
        check(Case(), (1,), exclude_buffers=["net.1.running_mean"])


@pytest.mark.parametrize(
    ("broken", "where"),
    [
        ("rollback.transaction.set_rng_state", {"module", "optimizers", "callback_metrics", "rng"}),
        ("rollback.contents.Contents.put_back", {"module", "callback_metrics"}),
        ("trainer.internals.restore_logged", {"callback_metrics"}),
        ("trainer.internals.hold_global_step", {"global_step"}),
    ],
)
def test_a_rollback_that_forgets_something_is_reported(
    monkeypatch: pytest.MonkeyPatch, broken: str, where: set[str]
) -> None:
    case = Case()
    monkeypatch.setattr(f"lightning_amp_plus.{broken}", lambda *args, **kwargs: None)
    outcome, expected = fit(make_run(case), batches(case, (1,))).outcome, clean(case)
    differ = set()
    for key in expected:
        try:
            assert_equal(outcome[key], expected[key])
        except AssertionError:
            differ.add(key)
    assert differ == where


@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(
    case=st.builds(
        Case,
        precision=st.sampled_from(PRECISIONS),
        mode=st.sampled_from(["automatic 1", "automatic 2", "automatic 3", "manual 1", "manual 3"]),
        fault=st.sampled_from([fault for fault in FAULTS if fault != "forward"]),
        clip=st.sampled_from(sorted(CLIPS)),
        optimizer=st.sampled_from(sorted(OPTIMIZERS)),
        plateau=st.just(False),
        at=st.just(-1),
    ),
    bad=st.lists(st.integers(0, WINDOWS), min_size=1, max_size=3),
)
def test_whatever_the_fault(case: Case, bad: list[int]) -> None:
    check(case, bad)


# What counts steps ----------------------------------------------------------------------------------------------------


class Exponential(pl.callbacks.EMAWeightAveraging):
    def __init__(self) -> None:
        super().__init__(decay=0.5)


@pytest.mark.parametrize("mode", ["automatic 1", "automatic 4", "manual 1"])
@pytest.mark.parametrize("averaging", [pl.callbacks.WeightAveraging, Exponential])
def test_averaged_weights(averaging: Callable[[], pl.Callback], mode: str) -> None:
    case = Case(mode=mode)
    runs = [fit(make_run(case, callbacks=[averaging()]), batches(case, bad)) for bad in ((), (0, 2, WINDOWS))]
    assert_equal(runs[1].outcome, runs[0].outcome)
    assert not torch.equal(runs[0].module.net[0].weight, clean(case)["module"]["net.0.weight"])  # they were averaged


def test_stochastic_weight_averaging() -> None:
    """It also passes over the data once more, for BatchNorm: in an epoch that is not poisoned."""

    class Epochs(Net):
        bad: Sequence[int] = ()

        def train_dataloader(self) -> Any:
            return as_loader(batches(self.case, self.bad if self.current_epoch == 1 else ()))

    outcomes = []
    for bad in ((), (0, 2, WINDOWS)):
        averaging = pl.callbacks.StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1)
        run = make_run(Case(), callbacks=[averaging], max_epochs=3, reload_dataloaders_every_n_epochs=1)
        module = Epochs(Case())
        module.bad = bad
        torch.manual_seed(5)
        with pytest.warns(UserWarning, match="SWA is currently only supported every epoch"):
            run.trainer.fit(module)
        assert run.plugin.counters.skipped_steps == len(bad)
        outcomes.append(Run(module, run.plugin, run.trainer).outcome)
    assert_equal(outcomes[1], outcomes[0])


def rows_of(folder: str | None) -> list[dict[str, str]]:
    assert folder is not None
    with Path(folder, "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def logged(case: Case, bad: Sequence[int], every: int, folder: Path) -> list[dict[str, str]]:
    logger = pl.loggers.CSVLogger(folder, version=str(bad))
    fit(make_run(case, logger=logger, log_every_n_steps=every), batches(case, bad))
    return rows_of(logger.log_dir)


@pytest.mark.parametrize("mode", ["automatic 1", "automatic 4", "manual 1"])
@pytest.mark.parametrize("every", [1, 2])
def test_the_step_axis_of_the_loggers(tmp_path: Path, mode: str, every: int) -> None:
    """Each step of the clean run has its row, under the same number."""
    clean_rows, rows = (logged(Case(mode=mode), bad, every, tmp_path) for bad in ((), (0, 2, WINDOWS)))
    steps = [row["step"] for row in clean_rows if row["loss_step"]]
    assert steps == [str(step) for step in range(every - 1, WINDOWS, every)]
    assert [row for row in rows if row in clean_rows] == clean_rows


@pytest.mark.parametrize("mode", ["automatic 1", "automatic 4", "manual 1"])
def test_a_skipped_step_logs_no_row(tmp_path: Path, mode: str) -> None:
    """Without AMPMonitor the loggers get what they get in the clean run."""
    clean_rows, rows = (logged(Case(mode=mode), bad, 1, tmp_path) for bad in ((), (2,)))
    assert rows == clean_rows


@pytest.mark.parametrize("mode", ["automatic 1", "automatic 4", "manual 1"])
def test_max_steps_counts_applied_steps(mode: str) -> None:
    case = Case(mode=mode)
    runs = [fit(make_run(case, max_steps=3, max_epochs=-1), batches(case, bad)) for bad in ((), (0, 2))]
    assert runs[1].plugin.counters == replace(runs[0].plugin.counters, skipped_steps=2, recent=0b10010)
    assert runs[0].trainer.global_step == 3
    assert_equal(runs[1].outcome, runs[0].outcome)


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
@pytest.mark.parametrize("mode", ["automatic 1", "automatic 4", "manual 1"])
def test_checkpoints_every_so_many_steps(tmp_path: Path, mode: str) -> None:
    case, saved = Case(mode=mode), []
    for bad in ((), (0, 2, 2, WINDOWS)):
        folder = tmp_path / str(len(bad))
        saver = pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
        fit(make_run(case, callbacks=[saver], enable_checkpointing=True), batches(case, bad))
        contents = {path.name: torch.load(path, weights_only=True) for path in sorted(folder.iterdir())}
        keys = ("epoch", "global_step", "state_dict", "optimizer_states", "lr_schedulers")
        saved.append({name: {key: content[key] for key in keys} for name, content in contents.items()})
    assert list(saved[0]) == ["epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"]
    assert_equal(saved[1], saved[0])


@pytest.mark.parametrize("mode", ["automatic 1", "automatic 4"])
def test_reduce_on_plateau_at_each_step(mode: str) -> None:
    case = Case(mode=mode, plateau=True)
    check(case, (0, 2, WINDOWS) if mode == "automatic 4" else (1, 2, WINDOWS))
    assert clean(case)["schedulers"][0]["last_epoch"] == WINDOWS


# Within an iteration --------------------------------------------------------------------------------------------------


class Two(pl.LightningModule):
    """Two nets with an optimizer each, stepped in one iteration; a batch may spoil either."""

    nets: Any
    means: Any

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)) for _ in range(2))
        self.means = nn.ModuleList(MeanMetric(nan_strategy="disable") for _ in range(2))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for x, net, mean, optimizer in zip(batch, self.nets, self.means, optimizers, strict=True):
            loss = net(x).float().pow(2).mean()
            mean.update(loss)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [SGD(net.parameters(), lr=0.1, momentum=0.9) for net in self.nets]


def fit_two(data: list[tuple[Tensor, Tensor]], precision: PrecisionName) -> tuple[Two, pl.Trainer]:
    module, plugin = Two(), AdaptiveMixedPrecision(precision, LossScale(init_scale=SCALE, dynamic=False))
    trainer = make_trainer(plugin)
    trainer.fit(module, as_loader(data))
    return module, trainer


@pytest.mark.parametrize("precision", PRECISIONS)
def test_two_optimizers_that_both_skip(precision: PrecisionName) -> None:
    x = torch.randn((3, 2, 4, 4), generator=torch.Generator().manual_seed(1))
    good, bad = [(one, other) for one, other in x], (torch.full((4, 4), NAN),) * 2
    (expected, one), (actual, other) = fit_two(good, precision), fit_two([good[0], bad, *good[1:]], precision)
    assert_equal(actual.state_dict(), expected.state_dict())
    assert_equal([o.state_dict() for o in other.optimizers], [o.state_dict() for o in one.optimizers])
    assert_equal([mean.compute() for mean in actual.means], [mean.compute() for mean in expected.means])
    assert plugin_of(other).counters == StepCounters(6, 2, recent=0b00110000)
    assert (one.global_step, other.global_step) == (6, 6)


@pytest.mark.parametrize("spoilt", [0, 1])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_something_applied_and_something_skipped(precision: PrecisionName, spoilt: int) -> None:
    """What turned non-finite is as before; the rest of the iteration has happened."""
    x = torch.randn((2, 2, 4, 4), generator=torch.Generator().manual_seed(1))
    first, second = [(one, other) for one, other in x]
    nan = torch.full((4, 4), NAN)
    bad = (nan, second[1]) if spoilt == 0 else (second[0], nan)
    before, _ = fit_two([first], precision)
    after, _ = fit_two([first, second], precision)
    actual, trainer = fit_two([first, bad], precision)
    assert plugin_of(trainer).counters.skipped_steps == 1
    other = 1 - spoilt
    assert_equal(actual.nets[other].state_dict(), after.nets[other].state_dict())
    assert_equal(actual.means[other].compute(), after.means[other].compute())
    expected = before.nets[spoilt].state_dict()
    expected["1.num_batches_tracked"] += 1  # an integer does not turn non-finite
    assert_equal(actual.nets[spoilt].state_dict(), expected)
    assert_equal(actual.means[spoilt].mean_value, before.means[spoilt].mean_value)
    assert not torch.equal(after.means[other].mean_value, before.means[other].mean_value)
    assert trainer.global_step == 3


# Beside the window ----------------------------------------------------------------------------------------------------


class Validated(Net):
    """Keeps the best validation, as many projects do."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.best = MaxMetric()
        self.register_buffer("validations", torch.zeros(()))
        self.validations: Tensor

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.net(batch).float().mean())

    def on_validation_epoch_end(self) -> None:
        self.best.update(7.0)
        self.validations += 1


def validated(case: Case, bad: Sequence[int], every: int | None = None) -> Run:
    run = make_run(case, val_check_interval=every)
    run.module = Validated(case)
    return fit(run, batches(case, bad), DataLoader(torch.ones(2, 4, 4), batch_size=None, generator=torch.Generator()))  # type: ignore[arg-type]


def test_validations_in_mid_window() -> None:
    """What was learned is the same. Of the buffers only what turned non-finite is put back: the rest is theirs too."""
    case = Case(mode="automatic 4", at=3)
    plain, actual = validated(case, (), 2), validated(case, (1,), 2)
    weights = dict(plain.module.named_parameters())
    assert_equal(dict(actual.module.named_parameters()), weights)
    assert all(buffer.isfinite().all() for buffer in actual.module.buffers())


def test_a_validation_in_mid_window_is_kept() -> None:
    """It is none of the attempt's: what it has changed in buffers and metrics stays."""
    actual = validated(Case(mode="automatic 4", at=3), (1,), 2)
    assert actual.module.validations == 2 * (WINDOWS + 1)


RAISING = ("training_step", "backward", "on_before_backward", "on_after_backward")


@pytest.mark.parametrize(
    ("where", "mode", "at"),
    [
        ("on_before_optimizer_step", "automatic 2", 1),
        ("on_before_optimizer_step", "manual 2", 1),
        *itertools.product(RAISING, ["manual 2"], [0, 1]),
        *itertools.product(RAISING, ["automatic 2"], [1]),
        *itertools.product(RAISING, ["automatic 2"], [0]),
    ],
)
def test_an_exception_passes_and_leaves_no_trace(where: str, mode: str, at: int) -> None:
    """In either micro-batch of the second window: all but weights and gradients is as after the first."""
    case = Case(mode=mode)
    seen: dict[str, Any] = {}

    class Broken(Net):
        calls = 0

        def look(self) -> dict[str, Any]:
            results = self.trainer._results
            assert results is not None
            logged = {key: value.value.clone() for key, value in results.items() if "loss" in key}
            state = {"buffers": dict(self.named_buffers()), "mean": self.mean.mean_value, "logged": logged}
            return {**deepcopy(state), "rng": torch.get_rng_state()}

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                seen["before"] = self.look()

        def maybe_raise(self, name: str) -> None:
            if name != where:
                return
            self.calls += 1
            # The optimizer's hook was called once in the first window, the others twice.
            if self.calls == (2 if name == "on_before_optimizer_step" else 3 + at):
                raise KeyError("mine")

        def loss(self, batch: Batch) -> Tensor:
            loss = super().loss(batch)
            self.maybe_raise("training_step")
            return loss

        def backward(self, loss: Tensor) -> None:
            self.maybe_raise("backward")
            loss.backward()

        def on_before_backward(self, loss: Tensor) -> None:
            self.maybe_raise("on_before_backward")

        def on_after_backward(self) -> None:
            self.maybe_raise("on_after_backward")

        def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
            self.maybe_raise("on_before_optimizer_step")

        def on_exception_look(self) -> None:
            seen["after"] = self.look()

    class Look(pl.Callback):
        def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
            pl_module.on_exception_look()

    run = make_run(case, callbacks=[Look()])
    run.module = Broken(case)
    with pytest.raises(KeyError) as raised:
        fit(run, batches(case))
    assert raised.value.args == ("mine",)
    assert run.plugin.counters == StepCounters(applied_steps=1)
    assert_equal(seen["after"], seen["before"])
    assert seen["before"]["buffers"]["net.1.num_batches_tracked"] == 2


@pytest.mark.parametrize("mode", ["automatic 2", "manual 1"])
def test_the_trainer_holds_nothing_of_ours(mode: str) -> None:
    """After a fit, after one that broke off, and after the next."""

    class Breaks(Net):
        broken = False

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
            if self.broken:
                raise KeyError("mine")
            return super().training_step(batch, batch_idx)

    class During(pl.Callback):
        seen: list[str]

        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.seen = ours_in(trainer, pl_module)

    def ours_in(trainer: pl.Trainer, module: pl.LightningModule) -> list[str]:
        loop = trainer.fit_loop.epoch_loop
        places = (trainer, trainer.fit_loop, loop, loop.automatic_optimization, loop.manual_optimization, module)
        optimizers = list(trainer.optimizers)
        return [
            name
            for place in (*places, *optimizers)
            for name, value in vars(place).items()
            if getattr(value, "__module__", "").startswith("lightning_amp_plus") and value is not run.plugin
        ]

    case, during = Case(mode=mode), During()
    run = make_run(case, callbacks=[during])
    module = Breaks(case)
    for max_epochs in (1, 2, 3):
        run.trainer.fit_loop.max_epochs = max_epochs
        module.broken = max_epochs == 2
        if module.broken:
            with pytest.raises(KeyError):
                run.trainer.fit(module, as_loader(batches(case, (1,))))
        else:
            run.trainer.fit(module, as_loader(batches(case, (1,))))
        assert sorted(during.seen) == ["_make_closure", "update_lr_schedulers"]  # what is looked for can be found
        assert ours_in(run.trainer, module) == []
        assert run.plugin._window is None
    names = ("update_lr_schedulers", "_make_closure")
    loop = run.trainer.fit_loop.epoch_loop
    assert not any(name in vars(place) for name in names for place in (loop, loop.automatic_optimization))


def test_the_trainer_keeps_what_is_not_ours() -> None:
    run = make_run(Case())
    loop: Any = run.trainer.fit_loop.epoch_loop
    calls: list[str] = []
    original = loop.update_lr_schedulers

    def mine(interval: str, update_plateau_schedulers: bool) -> None:
        calls.append(interval)
        original(interval, update_plateau_schedulers)

    loop.update_lr_schedulers = mine
    fit(run, batches(Case()))
    assert calls.count("step") == 2 * WINDOWS
    assert vars(loop).get("update_lr_schedulers") is mine


# Torch's anomaly mode -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["automatic 1", "automatic 4"])
def test_a_nan_loss_in_anomaly_mode_raises_as_in_float32(mode: str) -> None:
    """It asks to stop at the first NaN. Only an overflow that a lower scale cures goes on: see ``test_retry.py``."""
    case = Case(mode=mode, fault="gradients")
    run = make_run(case, detect_anomaly=True)
    before = deepcopy(run.module.state_dict())
    with pytest.warns(UserWarning, match="Error detected in"), pytest.raises(RuntimeError, match="returned nan values"):
        fit(run, batches(case, (0,)))
    assert_equal(run.module.state_dict(), before)
    assert run.plugin.counters == StepCounters(skipped_steps=1, retried_attempts=2, recent=1)
