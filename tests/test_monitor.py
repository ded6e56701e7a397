"""AMPMonitor through a Trainer: every value in the loggers and in ``callback_metrics``, and when it gets there."""

from __future__ import annotations

import copy
import csv
import io
import logging
import math
import pickle
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import PRECISIONS, make_trainer
from namespace import NAMESPACE, AdaptiveMixedPrecision, AMPMonitor, PrecisionFallback, pl
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp_plus import LossScale, NonFiniteStepError, RunHistory
from lightning_amp_plus.monitoring import outputs, underflow
from lightning_amp_plus.monitoring import page as drawn_report
from lightning_amp_plus.monitoring.incidents import read_incidents
from lightning_amp_plus.precisions import PrecisionName
from lightning_amp_plus.scaling import exponents
from lightning_amp_plus.trainer import internals

SCALE = 2.0**10
BITS: dict[PrecisionName, int] = {"16-mixed": 10, "bf16-mixed": 7, "32-true": 23}
ALWAYS = {
    "amp/loss_scale",
    "amp/mantissa_bits",
    "amp/applied_steps",
    "amp/skipped_steps",
    "amp/retried_attempts",
    "amp/overflow_rate",
}
precisions = pytest.mark.parametrize("precision", PRECISIONS)


def batches(count: int, bad: Sequence[int] = ()) -> Tensor:
    """``count`` batches of two rows of small whole numbers, of different means; the ``bad`` ones hold a NaN."""
    x = torch.randint(-8, 9, (count, 2, 3), generator=torch.Generator().manual_seed(0)).float()
    x[:, 0, 0] = 9  # so that no mean is zero
    x[list(bad), 0, 0] = math.nan
    return x


class Rows(pl.LightningModule):
    """Its gradient is the mean of the batch, whatever the weights: exact in float16 and bfloat16 too."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        self.layer = nn.Linear(3, 1, bias=False)
        self.logged_at: list[tuple[int, str]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).float().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.layer(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=2.0**-10, fused=self.fused)

    def log(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.logged_at.append((self.trainer.fit_loop.epoch_loop._batches_that_stepped, name))
        super().log(name, *args, **kwargs)


class ClipsItself(Rows):
    """The override of Lightning's documentation."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


class TwoOptimizers(pl.LightningModule):
    """Manual optimization. The second gradient is twice the first, which ``bad_first`` makes NaN."""

    def __init__(self, bad_first: Sequence[int] = ()) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.bad_first = bad_first
        self.layers = nn.ModuleList(nn.Linear(3, 1, bias=False) for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for factor, layer, optimizer in zip((1, 2), self.layers, self.optimizers(), strict=True):
            x = batch * (math.nan if factor == 1 and batch_idx in self.bad_first else factor)
            optimizer.zero_grad()
            self.manual_backward(layer(x).float().mean())
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(layer.parameters(), lr=2.0**-10) for layer in self.layers]


class FileLogger(pl.loggers.logger.DummyLogger):
    """It has a folder, which it leaves to others."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    @property
    def log_dir(self) -> str:
        return str(self.folder)


class Spy(pl.Callback):
    """Keeps what ``trainer.callback_metrics`` says after each batch and at the end of each validation."""

    def __init__(self) -> None:
        self.after_batch: list[dict[str, float]] = []
        self.after_validation: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.after_batch.append({key: float(value) for key, value in trainer.callback_metrics.items()})

    def on_validation_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.after_validation.append({key: float(value) for key, value in trainer.callback_metrics.items()})


def fit(
    x: Tensor,
    module: pl.LightningModule | None = None,
    *,
    precision: PrecisionName = "16-mixed",
    loss_scale: LossScale | None = None,
    plugin: AdaptiveMixedPrecision | None = None,
    callbacks: Sequence[pl.Callback] | None = None,
    log_to: Path | None = None,
    skips: bool | None = None,
    validate: bool = False,
    ckpt_path: Path | None = None,
    **kwargs: Any,
) -> pl.Trainer:
    """Train on the batches ``x``. That steps are skipped is expected if ``skips``, by default if ``x`` holds a NaN."""
    if log_to is not None:
        kwargs["logger"] = pl.loggers.CSVLogger(log_to, name="", version="")
    trainer = make_trainer(
        plugin or AdaptiveMixedPrecision(precision, loss_scale or LossScale(init_scale=SCALE)),
        callbacks=[AMPMonitor()] if callbacks is None else [*callbacks],
        **kwargs,
    )
    expected: AbstractContextManager[object] = nullcontext()
    if bool(x.isnan().any()) if skips is None else skips:
        expected = pytest.warns(RuntimeWarning, match="was skipped because")
    with expected:
        trainer.fit(module or Rows(), loader(x), loader(x) if validate else None, ckpt_path=ckpt_path)
    return trainer


def loader(x: Tensor) -> DataLoader[Tensor]:
    return DataLoader(list(x), batch_size=None)  # type: ignore[arg-type]


def rows_of(folder: Path) -> list[dict[str, float]]:
    with open(folder / "metrics.csv", newline="") as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


def by_step(rows: Sequence[dict[str, float]]) -> dict[int, dict[str, float]]:
    """The rows by the position of their step among all, skipped ones included: in the x-axis those have no place."""
    return {int(row["amp/applied_steps"] + row["amp/skipped_steps"]) - 1: row for row in rows}


def expected_axis(bad: Sequence[bool]) -> list[int]:
    """Where each step is on the x-axis: a skipped one where the next one will be."""
    return [bad[:i].count(False) for i in range(len(bad))]


def expected_counts(bad: Sequence[bool]) -> list[dict[str, float]]:
    """The counts after each step; ``bad`` says which were skipped."""
    return [
        {
            "amp/applied_steps": bad[: i + 1].count(False),
            "amp/skipped_steps": bad[: i + 1].count(True),
            "amp/retried_attempts": 0,
            "amp/overflow_rate": sum(bad[max(i - 99, 0) : i + 1]) / min(i + 1, 100),
        }
        for i in range(len(bad))
    ]


def true_norms(x: Tensor, accumulate: int = 1) -> list[float]:
    return [float(window.double().mean(1).sum(0).div(accumulate).norm()) for window in x.split(accumulate)]


# What is logged, and where -------------------------------------------------------------------------------------------


@precisions
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("log_every", [1, 3, 50])
def test_csv(tmp_path: Path, precision: PrecisionName, accumulate: int, log_every: int) -> None:
    count = 7 * accumulate + accumulate // 2  # with accumulation, the last window is half as long
    x = batches(count, bad=[1 * accumulate, 5 * accumulate - 1])  # windows 1 and 4
    fit(x, precision=precision, log_to=tmp_path, accumulate_grad_batches=accumulate, log_every_n_steps=log_every)
    norms = true_norms(x, accumulate)
    bad = [math.isnan(norm) for norm in norms]
    counts, axis = expected_counts(bad), expected_axis(bad)
    last = len(norms) - 1
    rows = rows_of(tmp_path)
    logged = {i for i in range(last + 1) if (axis[i] + 1) % log_every == 0}
    assert set(by_step(rows)) == logged | {last}
    for row in rows:
        (step,) = by_step([row])
        assert row["step"] == axis[step]
        assert set(row) >= ALWAYS
        assert row["amp/loss_scale"] == (SCALE if precision == "16-mixed" else 1)
        assert row["amp/mantissa_bits"] == BITS[precision]
        assert {key: row[key] for key in counts[step]} == counts[step]
        if step in logged and not bad[step]:
            assert row["amp/grad_norm"] == pytest.approx(norms[step], rel=1e-6)


@pytest.mark.parametrize("log_every", [1, 3, 50])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_csv_when_max_steps_ends_the_second_epoch_early(tmp_path: Path, accumulate: int, log_every: int) -> None:
    x = batches(4 * accumulate)
    limits: dict[str, Any] = {"max_steps": 6, "max_epochs": -1}  # the first epoch has steps 0 to 3
    fit(x, log_to=tmp_path, accumulate_grad_batches=accumulate, log_every_n_steps=log_every, **limits)
    rows = rows_of(tmp_path)
    logged = {i for i in range(6) if (i + 1) % log_every == 0}
    assert {row["step"] for row in rows} == logged | {3, 5}
    assert all(row["amp/applied_steps"] == row["step"] + 1 for row in rows)
    norms = true_norms(x, accumulate)
    for row in rows:
        if row["step"] in logged:
            assert row["amp/grad_norm"] == pytest.approx(norms[int(row["step"]) % 4], rel=1e-6)


def test_csv_follows_the_scale_down(tmp_path: Path) -> None:
    """Two rows of ones: the float16 gradient of a weight is the scale, and finite from 2^15 down."""
    plugin = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=2.0**20), retries=0)
    fit(torch.ones(8, 2, 3), plugin=plugin, log_to=tmp_path, log_every_n_steps=1)
    rows = by_step(rows_of(tmp_path))
    assert [rows[i]["step"] for i in range(8)] == [0, 0, 0, 0, 0, 0, 1, 2]
    assert [math.log2(rows[i]["amp/loss_scale"]) for i in range(8)] == [19, 18, 17, 16, 15, 15, 15, 15]
    assert [rows[i]["amp/skipped_steps"] for i in range(8)] == [1, 2, 3, 4, 5, 5, 5, 5]
    assert [rows[i]["amp/applied_steps"] for i in range(8)] == [0, 0, 0, 0, 0, 1, 2, 3]


def test_csv_counts_the_attempts_that_found_the_scale(tmp_path: Path) -> None:
    """As above, with retries: at 2^19, 2^18, 2^16 and 2^12 in the first step; then 2^14 and 2^15 are tried."""
    fit(torch.ones(5, 2, 3), loss_scale=LossScale(init_scale=2.0**20), log_to=tmp_path, log_every_n_steps=1)
    rows = by_step(rows_of(tmp_path))
    assert [rows[i]["step"] for i in range(5)] == [0, 1, 2, 3, 4]
    assert [math.log2(rows[i]["amp/loss_scale"]) for i in range(5)] == [14, 15, 15, 15, 15]
    assert [rows[i]["amp/retried_attempts"] for i in range(5)] == [4] * 5
    assert [rows[i]["amp/skipped_steps"] for i in range(5)] == [0] * 5
    assert [rows[i]["amp/overflow_rate"] for i in range(5)] == [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5]


@pytest.mark.parametrize("log_every", [1, 3])
@precisions
def test_csv_of_manual_optimization(tmp_path: Path, precision: PrecisionName, log_every: int) -> None:
    """Each call of an optimizer's ``step`` counts, in the sum and for its optimizer."""
    x = batches(6)
    fit(x, TwoOptimizers(bad_first=[2]), skips=True, precision=precision, log_to=tmp_path, log_every_n_steps=log_every)
    norms = true_norms(x)
    rows = rows_of(tmp_path)
    assert {row["step"] for row in rows} == ({0, 1, 2, 3, 4, 5} if log_every == 1 else {2, 5})
    for row in rows:
        step, skipped = int(row["step"]), int(row["step"] >= 2)
        assert row["amp/applied_steps"] == 2 * (step + 1) - skipped
        assert row["amp/skipped_steps"] == skipped
        assert row["amp/overflow_rate"] == skipped / (2 * (step + 1))
        assert row["amp/grad_norm_1"] == pytest.approx(2 * norms[step], rel=1e-6)
        first_skipped = step == 2
        assert ("amp/grad_norm_0" in row) is not first_skipped
        if not first_skipped:
            assert row["amp/grad_norm_0"] == pytest.approx(norms[step], rel=1e-6)
        counts = {key: value for key, value in row.items() if re.search(r"steps_\d$", key)}
        assert counts == {
            "amp/applied_steps_0": step + 1 - skipped,
            "amp/skipped_steps_0": skipped,
            "amp/applied_steps_1": step + 1,
            "amp/skipped_steps_1": 0,
        }


def test_overflow_rate_forgets_after_100_steps(tmp_path: Path) -> None:
    bad = [*range(0, 20, 2), 50]  # none left to raise: never two in a row
    fit(batches(125, bad=bad), precision="32-true", log_to=tmp_path, log_every_n_steps=1)
    rates = {step: row["amp/overflow_rate"] for step, row in by_step(rows_of(tmp_path)).items()}
    counts = expected_counts([i in bad for i in range(125)])
    assert [rates[i] for i in range(125)] == [count["amp/overflow_rate"] for count in counts]
    assert rates[99] == 0.11
    assert rates[124] == 0.01


def test_counts_beyond_what_float32_holds(tmp_path: Path) -> None:
    plugin = AdaptiveMixedPrecision("bf16-mixed")
    state = plugin.state_dict()
    plugin.load_state_dict({**state, "counters": {**state["counters"], "applied_steps": 2**24}})
    trainer = fit(batches(3), plugin=plugin, log_to=tmp_path, log_every_n_steps=1)
    counts = {row["step"]: row["amp/applied_steps"] for row in rows_of(tmp_path)}
    assert counts == {0: 2**24 + 1, 1: 2**24 + 2, 2: 2**24 + 3}
    assert float(trainer.callback_metrics["amp/applied_steps"]) == 2**24 + 3


def test_a_log_of_the_models_own_in_the_same_hook_keeps_ours(tmp_path: Path) -> None:
    class Logs(Rows):
        def on_train_batch_end(self, *args: Any) -> None:
            super().log("mine", 1.0)

    fit(batches(3), Logs(), log_to=tmp_path, log_every_n_steps=1, max_epochs=3)
    rows = [row for row in rows_of(tmp_path) if "mine" in row]
    assert [row["amp/applied_steps"] for row in rows] == list(range(1, 10))


def test_two_loggers_get_the_same(tmp_path: Path) -> None:
    loggers = [pl.loggers.CSVLogger(tmp_path / name, name="", version="") for name in "ab"]
    fit(batches(5, bad=[2]), logger=loggers, log_every_n_steps=2)
    rows = [rows_of(tmp_path / name) for name in "ab"]
    assert rows[0] == rows[1]
    assert [row["amp/applied_steps"] for row in rows[0]] == [2, 4, 4]  # at steps 1 and 3, and at the end
    assert [row["amp/skipped_steps"] for row in rows[0]] == [0, 1, 1]


def test_a_second_fit_counts_from_zero(tmp_path: Path) -> None:
    plugin, monitor = AdaptiveMixedPrecision("bf16-mixed"), AMPMonitor()
    for name, count in (("a", 5), ("b", 3)):
        x = batches(count, bad=[1])
        fit(x, plugin=plugin, callbacks=[monitor], log_to=tmp_path / name, log_every_n_steps=1)
    last = rows_of(tmp_path / "b")[-1]
    assert (last["amp/applied_steps"], last["amp/skipped_steps"]) == (2, 1)


def test_resumed_counts_go_on(tmp_path: Path) -> None:
    x = batches(4, bad=[1])
    fit(x, log_to=tmp_path / "a").save_checkpoint(tmp_path / "a.ckpt")
    plugin = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=8.0))
    options: dict[str, Any] = {"max_epochs": 2, "log_every_n_steps": 1, "ckpt_path": tmp_path / "a.ckpt"}
    fit(x, plugin=plugin, log_to=tmp_path / "b", **options)
    rows = by_step(rows_of(tmp_path / "b"))
    assert [rows[i]["step"] for i in (4, 5, 6, 7)] == [3, 4, 4, 5]
    assert [rows[i]["amp/applied_steps"] for i in (4, 5, 6, 7)] == [4, 4, 5, 6]
    assert [rows[i]["amp/skipped_steps"] for i in (4, 5, 6, 7)] == [1, 2, 2, 2]
    assert rows[4]["amp/loss_scale"] == SCALE


# The gradient norm ---------------------------------------------------------------------------------------------------


@precisions
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("module", "algorithm"),
    [(Rows, None), (Rows, "norm"), (Rows, "value"), (ClipsItself, "norm"), (ClipsItself, "value")],
)
def test_grad_norm_is_that_before_clipping(
    tmp_path: Path, precision: PrecisionName, fused: bool, module: type[Rows], algorithm: str | None
) -> None:
    x = batches(4)
    clip: dict[str, Any] = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": algorithm} if algorithm else {}
    fit(x, module(fused), precision=precision, log_to=tmp_path, log_every_n_steps=1, **clip)
    norms = {int(row["step"]): row["amp/grad_norm"] for row in rows_of(tmp_path)}
    assert min(true_norms(x)) > 1  # clipping to 0.5 is seen
    assert [norms[i] for i in range(4)] == pytest.approx(true_norms(x), rel=1e-6)


@precisions
def test_clipped_tells_which_steps_were(tmp_path: Path, precision: PrecisionName) -> None:
    x = batches(6)
    norms = true_norms(x)
    threshold = sorted(norms)[3] * 0.999
    fit(x, precision=precision, log_to=tmp_path, log_every_n_steps=1, gradient_clip_val=threshold)
    clipped = {int(row["step"]): row["amp/clipped"] for row in rows_of(tmp_path)}
    assert [clipped[i] for i in range(6)] == [float(norm > threshold) for norm in norms]
    assert sum(clipped.values()) == 3


@precisions
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_skipped_step_has_no_grad_norm(tmp_path: Path, precision: PrecisionName, clip: float | None) -> None:
    """Nor that of the step before it, which Lightning would log again."""
    x = batches(4, bad=[0, 2])
    fit(x, precision=precision, log_to=tmp_path, log_every_n_steps=1, gradient_clip_val=clip)
    rows = by_step(rows_of(tmp_path))
    assert [rows[i]["step"] for i in range(4)] == [0, 0, 1, 1]
    assert not any(math.isnan(value) for row in rows.values() for value in row.values())
    assert {step: "amp/grad_norm" in row for step, row in rows.items()} == {0: False, 1: True, 2: False, 3: True}


def test_grad_norm_that_float32_cannot_square(tmp_path: Path) -> None:
    """Gradients of 3e20 are finite and so is their norm, but not the sum of their squares in float32."""
    x = torch.ones(2, 2, 3)
    x[0] = 3e20
    fit(x, precision="32-true", log_to=tmp_path, log_every_n_steps=1)
    rows = rows_of(tmp_path)
    assert rows[0]["amp/grad_norm"] == pytest.approx(3e20 * math.sqrt(3), rel=1e-6)
    assert rows[-1]["amp/skipped_steps"] == 0


# Callbacks that monitor ----------------------------------------------------------------------------------------------


@precisions
@pytest.mark.parametrize("key", [*sorted(ALWAYS), "amp/grad_norm", "amp/clipped"])
@pytest.mark.parametrize("log_every", [1, 50])
def test_model_checkpoint_monitors(tmp_path: Path, precision: PrecisionName, key: str, log_every: int) -> None:
    """Every key, with the value of the epoch's last step, also in an epoch shorter than the logging interval."""
    x = batches(4, bad=[1])
    checkpoint = pl.callbacks.ModelCheckpoint(tmp_path, monitor=key, save_top_k=1)
    fit(
        x,
        precision=precision,
        callbacks=[AMPMonitor(), checkpoint],
        enable_checkpointing=True,
        log_every_n_steps=log_every,
        gradient_clip_val=1.0 if key == "amp/clipped" else None,
    )
    assert checkpoint.best_model_score is not None
    score = float(checkpoint.best_model_score)
    if key == "amp/grad_norm" and log_every == 50:  # of which step is not said: it is measured where it is asked for
        assert any(score == pytest.approx(norm, rel=1e-6) for norm in true_norms(x))
        return
    expected = {
        **expected_counts([False, True, False, False])[-1],
        "amp/loss_scale": SCALE if precision == "16-mixed" else 1,
        "amp/mantissa_bits": BITS[precision],
        "amp/grad_norm": true_norms(x)[-1],
        "amp/clipped": 1,
    }
    assert score == pytest.approx(expected[key], rel=1e-6)


@pytest.mark.parametrize("monitor_first", [True, False])
@pytest.mark.parametrize("accumulate", [1, 4])
@precisions
def test_early_stopping_monitors(precision: PrecisionName, accumulate: int, monitor_first: bool) -> None:
    """The skip happens in the second epoch of four, which is then the last."""

    class BadSecondEpoch(Rows):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            bad = self.trainer.current_epoch == 1 and batch_idx == accumulate
            return super().training_step(batch * (math.nan if bad else 1), batch_idx)

    stopping = pl.callbacks.EarlyStopping("amp/skipped_steps", mode="min", patience=10, divergence_threshold=0.5)
    callbacks = [AMPMonitor(), stopping] if monitor_first else [stopping, AMPMonitor()]
    trainer = fit(
        batches(3 * accumulate),
        BadSecondEpoch(),
        precision=precision,
        callbacks=callbacks,
        skips=True,
        max_epochs=4,
        log_every_n_steps=50,
        accumulate_grad_batches=accumulate,
    )
    assert stopping.stopped_epoch == 1
    assert trainer.current_epoch == 2  # how many epochs were made


@pytest.mark.parametrize("key", [*sorted(ALWAYS), "amp/grad_norm"])
@pytest.mark.parametrize("monitor_first", [True, False])
def test_early_stopping_finds_the_key(key: str, monitor_first: bool) -> None:
    monitor = AMPMonitor()
    for _ in range(2):  # the second Trainer gets the same monitor
        stopping = pl.callbacks.EarlyStopping(key, mode="min", patience=10, strict=True)
        callbacks = [monitor, stopping] if monitor_first else [stopping, monitor]
        trainer = fit(batches(3), callbacks=callbacks, max_epochs=2, log_every_n_steps=50)
        assert trainer.current_epoch == 2
        assert math.isfinite(float(stopping.best_score))


@precisions
@pytest.mark.parametrize("accumulate", [1, 4])
def test_callback_metrics_know_of_a_skip_at_once(precision: PrecisionName, accumulate: int) -> None:
    spy = Spy()
    x = batches(6 * accumulate, bad=[2 * accumulate, 4 * accumulate])
    callbacks = [AMPMonitor(), spy]
    fit(x, precision=precision, callbacks=callbacks, accumulate_grad_batches=accumulate, log_every_n_steps=50)
    after_step = spy.after_batch[accumulate - 1 :: accumulate]
    assert [metrics["amp/skipped_steps"] for metrics in after_step] == [0, 0, 1, 1, 2, 2]
    assert after_step[4]["amp/overflow_rate"] == 2 / 5


@precisions
def test_callback_metrics_know_of_a_skip_of_the_first_of_two_optimizers(precision: PrecisionName) -> None:
    spy = Spy()
    callbacks = [AMPMonitor(), spy]
    fit(
        batches(4),
        TwoOptimizers(bad_first=[2]),
        skips=True,
        precision=precision,
        callbacks=callbacks,
        log_every_n_steps=50,
    )
    assert [metrics["amp/skipped_steps"] for metrics in spy.after_batch] == [0, 0, 1, 1]


def test_validation_within_an_epoch(tmp_path: Path) -> None:
    spy, checkpoint = (
        Spy(),
        pl.callbacks.ModelCheckpoint(tmp_path, monitor="amp/applied_steps", mode="max", save_top_k=-1),
    )
    fit(
        batches(6),
        callbacks=[AMPMonitor(), spy, checkpoint],
        log_to=tmp_path,
        log_every_n_steps=1,
        enable_checkpointing=True,
        val_check_interval=2,
        validate=True,
    )
    assert [metrics["amp/applied_steps"] for metrics in spy.after_validation] == [2, 4, 6]
    assert sorted(float(score) for score in checkpoint.best_k_models.values()) == [2, 4, 6]
    assert {row["step"]: row["amp/applied_steps"] for row in rows_of(tmp_path)} == {i: i + 1 for i in range(6)}


@pytest.mark.parametrize("monitor_first", [True, False])
def test_early_stopping_after_validation_within_an_epoch(monitor_first: bool) -> None:
    stopping = pl.callbacks.EarlyStopping("amp/skipped_steps", mode="min", patience=10, divergence_threshold=0.5)
    callbacks = [AMPMonitor(), stopping] if monitor_first else [stopping, AMPMonitor()]
    trainer = fit(batches(8, bad=[2]), callbacks=callbacks, log_every_n_steps=50, val_check_interval=2, validate=True)
    assert trainer.fit_loop.epoch_loop.batch_idx == 3  # the validation after batch 3 saw the skip of batch 2


# What it costs, and when it is silent --------------------------------------------------------------------------------


@precisions
@pytest.mark.parametrize("accumulate", [1, 4])
def test_nothing_is_logged_or_asked_for_between_the_logged_steps(
    monkeypatch: pytest.MonkeyPatch, precision: PrecisionName, accumulate: int
) -> None:
    plugin = AdaptiveMixedPrecision(precision, LossScale(init_scale=SCALE))
    asked_at: set[int] = set()
    module, ask = Rows(), plugin.request_grad_norm

    def request_grad_norm() -> None:
        asked_at.add(module.trainer.fit_loop.epoch_loop._batches_that_stepped)
        ask()

    def log_again(trainer: pl.Trainer, key: str, *args: Any) -> None:
        module.logged_at.append((trainer.fit_loop.epoch_loop._batches_that_stepped, key.partition(".")[2]))
        again(trainer, key, *args)

    again = internals.log_again
    monkeypatch.setattr(internals, "log_again", log_again)
    monkeypatch.setattr(plugin, "request_grad_norm", request_grad_norm)
    fit(
        batches(12 * accumulate),
        module,
        plugin=plugin,
        max_epochs=2,
        log_every_n_steps=5,
        accumulate_grad_batches=accumulate,
    )
    logged, ends = {4, 9, 14, 19}, {11, 12, 23, 24}  # where an epoch ends or begins the keys may be set for others
    assert {step for step, _ in module.logged_at} - {0, *ends} == logged
    assert {step for step, name in module.logged_at if name == "amp/grad_norm"} >= logged
    assert asked_at - {0, *ends} == logged


def test_silent_under_barebones(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=SCALE))
    asked: list[None] = []
    monkeypatch.setattr(plugin, "request_grad_norm", lambda: asked.append(None))
    module = Rows()
    trainer = pl.Trainer(barebones=True, accelerator="cpu", max_epochs=1, plugins=[plugin], callbacks=[AMPMonitor()])
    with pytest.warns(RuntimeWarning, match="was skipped because"):
        trainer.fit(module, loader(batches(4, bad=[1])))
    assert module.logged_at == []
    assert asked == []
    assert not trainer.callback_metrics
    assert (plugin.counters.applied_steps, plugin.counters.skipped_steps) == (3, 1)


class Bar(pl.callbacks.ProgressBar):
    """Keeps what a progress bar would show after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[dict[str, Any]] = []

    def disable(self) -> None: ...

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.shown.append(self.get_metrics(trainer, pl_module))


@pytest.mark.parametrize("prog_bar", [True, False])
def test_progress_bar_shows_precision_and_scale_in_short(prog_bar: bool) -> None:
    bar, monitor = Bar(), AMPMonitor(prog_bar=prog_bar)
    plugin = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=SCALE, growth_interval=2))
    fit(batches(3), plugin=plugin, callbacks=[bar, monitor], log_every_n_steps=1, enable_progress_bar=True)
    shown = [metrics.get("amp") for metrics in bar.shown]
    assert shown == (["fp16 scale 2^10", "fp16 scale 2^11", "fp16 scale 2^11"] if prog_bar else [None] * 3)
    assert "get_metrics" not in vars(bar)


@pytest.mark.parametrize(("precision", "text"), [("bf16-mixed", "bf16"), ("32-true", "fp32")])
def test_progress_bar_shows_no_scale_where_there_is_none(precision: PrecisionName, text: str) -> None:
    bar = Bar()
    fit(batches(2), precision=precision, callbacks=[bar, AMPMonitor()], enable_progress_bar=True)
    assert [metrics["amp"] for metrics in bar.shown] == [text, text]


def test_progress_bar_is_given_back_after_an_error() -> None:
    class Fails(Rows):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            raise ValueError("mine")

    bar = Bar()
    with pytest.raises(ValueError, match="mine"):
        fit(batches(2), Fails(), callbacks=[bar, AMPMonitor()], enable_progress_bar=True)
    assert "get_metrics" not in vars(bar)


@precisions
def test_without_a_logger(precision: PrecisionName) -> None:
    x = batches(4, bad=[1])
    trainer = fit(x, precision=precision, logger=False, log_every_n_steps=1)
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    assert {key: metrics[key] for key in ALWAYS} == {
        **expected_counts([False, True, False, False])[-1],
        "amp/loss_scale": SCALE if precision == "16-mixed" else 1,
        "amp/mantissa_bits": BITS[precision],
    }
    assert metrics["amp/grad_norm"] == pytest.approx(true_norms(x)[-1], rel=1e-6)


@pytest.mark.parametrize("fn", ["fit", "validate"])
@pytest.mark.parametrize(
    "plugin", [pl.plugins.MixedPrecision("16-mixed", "cpu"), pl.plugins.MixedPrecision("bf16-mixed", "cpu"), None]
)
def test_error_with_another_plugin_says_what_to_do(plugin: pl.plugins.MixedPrecision | None, fn: str) -> None:
    trainer = make_trainer(plugin, callbacks=[AMPMonitor()])
    with pytest.raises(TypeError) as info:
        getattr(trainer, fn)(Rows(), loader(batches(2)))
    text = str(info.value)
    assert f"the Trainer uses {type(plugin).__name__ if plugin else 'Precision'}" in text
    assert "Trainer(plugins=[AdaptiveMixedPrecision(...)])" in text
    assert "drop AMPMonitor" in text


# Underflow ------------------------------------------------------------------------------------------------------------


class Wide(pl.LightningModule):
    """Its gradient is the batch, which float16 does not touch: the mean of a window's."""

    def __init__(self, elements: int = 400) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.weight * batch).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def wide_batches(count: int, bad: Sequence[int] = ()) -> Tensor:
    """Magnitudes from 2^-40 to 1, a tenth of them zeros."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 400, generator=generator) * 2.0 ** torch.randint(-40, 0, (count, 400), generator=generator)
    x[:, ::10] = 0
    x[list(bad), 0] = math.nan
    return x


def underflow_of(gradient: Tensor, scale: float) -> dict[str, float]:
    """What is to be logged, counted in float64."""
    size = gradient.double().abs() * scale
    return {
        "amp/underflow": float((size < 2.0**-14).double().mean()),
        "amp/underflow_added_at_half_scale": float(((size >= 2.0**-14) & (size / 2 < 2.0**-14)).double().mean()),
        "amp/zero_gradients": float((size == 0).double().mean()),
    }


def underflow_in(row: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in row.items() if "underflow" in key or "zero" in key}


def count_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of elements of the gradients that are counted from now on."""
    passes: list[int] = []
    count = exponents.counts_of

    def counted(gradient: Tensor, factor: float) -> Tensor:
        passes.append(gradient.numel())
        return count(gradient, factor)

    monkeypatch.setattr(underflow, "counts_of", counted)
    return passes


@pytest.mark.parametrize("scale", [2.0**10, 1000.0, 1.0])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_underflow_is_what_float64_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: float, clip: float | None
) -> None:
    """Every second step; the fourth is skipped and the one after it looked at instead; no pass in between."""
    passes = count_passes(monkeypatch)
    x = wide_batches(8, bad=[3])
    monitor = AMPMonitor(underflow=True, every_n_steps=2)
    rules = LossScale(init_scale=scale)
    options: dict[str, Any] = {"log_to": tmp_path, "log_every_n_steps": 1, "gradient_clip_val": clip}
    fit(x, Wide(), loss_scale=rules, callbacks=[monitor], **options)
    rows = by_step(rows_of(tmp_path)[:-1])
    looked_at = [1, 4, 5, 7]
    assert [step for step, row in rows.items() if underflow_in(row)] == looked_at
    assert passes == [400] * len(looked_at)
    for step in looked_at:
        assert underflow_in(rows[step]) == pytest.approx(underflow_of(x[step], scale), abs=1e-12)
    assert 0.2 < rows[1]["amp/underflow"] < 0.8
    assert rows[1]["amp/underflow_added_at_half_scale"] > 0
    assert rows[1]["amp/zero_gradients"] == 0.1


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_underflow_is_not_measured_without_loss_scaling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: PrecisionName
) -> None:
    passes = count_passes(monkeypatch)
    monitor = AMPMonitor(underflow=True, every_n_steps=1)
    fit(wide_batches(3), Wide(), precision=precision, callbacks=[monitor], log_to=tmp_path, log_every_n_steps=1)
    assert not any(underflow_in(row) for row in rows_of(tmp_path))
    assert passes == []


def test_underflow_of_a_window_is_that_of_its_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = count_passes(monkeypatch)
    x = wide_batches(8)
    monitor = AMPMonitor(underflow=True, every_n_steps=2)
    fit(x, Wide(), callbacks=[monitor], log_to=tmp_path, log_every_n_steps=1, accumulate_grad_batches=2)
    rows = by_step(rows_of(tmp_path)[:-1])
    means = x.double().view(4, 2, 400).mean(1)
    assert {step: underflow_in(row) for step, row in rows.items() if underflow_in(row)} == {
        step: pytest.approx(underflow_of(means[step], SCALE), abs=1e-12) for step in (1, 3)
    }
    assert len(passes) == 2


@pytest.mark.parametrize(
    ("rules", "made_at"),
    [(LossScale(init_scale=2.0**13), 2.0**9), (LossScale(init_scale=2.0**6, growth_interval=1), 2.0**6)],
)
def test_underflow_is_that_at_the_loss_scale_of_the_attempt_that_was_applied(
    tmp_path: Path, rules: LossScale, made_at: float
) -> None:
    """The step overflows in float16 at more than 2^10, or lets the scale grow: the lasting one is another."""

    class Overflows(Wide):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) + (self.weight[1:2].half() * batch[1:2].half()).sum() * 64

    x = wide_batches(1)
    x[:, 1] = 1
    monitor = AMPMonitor(underflow=True, every_n_steps=1)
    fit(x, Overflows(), loss_scale=rules, callbacks=[monitor], log_to=tmp_path, log_every_n_steps=1)
    row = rows_of(tmp_path)[0]
    assert row["amp/loss_scale"] == 2 * made_at
    assert underflow_in(row) == pytest.approx(underflow_of(x[0], made_at), abs=1e-12)


def test_underflow_reaches_the_next_logged_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = count_passes(monkeypatch)
    x = wide_batches(12)
    monitor = AMPMonitor(underflow=True, every_n_steps=4)
    fit(x, Wide(), callbacks=[monitor], log_to=tmp_path, log_every_n_steps=5)
    found = {row["step"]: underflow_in(row) for row in rows_of(tmp_path) if underflow_in(row)}
    # of step 3, then of step 7; that of step 11 at the end of the epoch
    of = {4: 3, 9: 7, 11: 11}
    assert found == {step: pytest.approx(underflow_of(x[i], SCALE), abs=1e-12) for step, i in of.items()}
    assert len(passes) == 3


def test_underflow_is_that_of_all_optimizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = count_passes(monkeypatch)
    monitor = AMPMonitor(underflow=True, every_n_steps=4)  # steps, of which an iteration makes two
    fit(batches(6), TwoOptimizers(), callbacks=[monitor], log_to=tmp_path, log_every_n_steps=1)
    rows = {row["step"]: underflow_in(row) for row in rows_of(tmp_path) if underflow_in(row)}
    assert list(rows) == [2, 4]  # the first iterations that begin when four steps have been made
    assert passes == [3] * 4
    assert rows[2] == {"amp/underflow": 0, "amp/underflow_added_at_half_scale": 0, "amp/zero_gradients": 0}


def test_a_checkpoint_can_be_monitored_by_the_underflow(tmp_path: Path) -> None:
    x = wide_batches(4)
    checkpoint = pl.callbacks.ModelCheckpoint(tmp_path, monitor="amp/underflow")
    callbacks = [AMPMonitor(underflow=True, every_n_steps=3), checkpoint]
    fit(x, Wide(), callbacks=callbacks, enable_checkpointing=True, log_every_n_steps=50)
    assert float(checkpoint.best_model_score or -1) == pytest.approx(underflow_of(x[2], SCALE)["amp/underflow"])


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", None])
def test_every_n_steps_is_a_number_of_steps(value: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"AMPMonitor(every_n_steps={value!r}): it must be an integer of")):
        AMPMonitor(every_n_steps=value)


# Several optimizers ---------------------------------------------------------------------------------------------------


def test_an_optimizer_that_steps_rarely_is_logged_when_it_does(tmp_path: Path) -> None:
    class Rarely(TwoOptimizers):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            for layer, optimizer in list(zip(self.layers, self.optimizers(), strict=True))[: 1 + (batch_idx % 3 == 1)]:
                optimizer.zero_grad()
                self.manual_backward(layer(batch).float().mean())
                optimizer.step()

    x = batches(5)
    fit(x, Rarely(), log_to=tmp_path, log_every_n_steps=1)
    rows = {row["step"]: row for row in rows_of(tmp_path)}
    norms = true_norms(x)
    assert [rows[i]["amp/grad_norm_0"] for i in range(5)] == pytest.approx(norms, rel=1e-6)
    assert {i: row["amp/grad_norm_1"] for i, row in rows.items() if "amp/grad_norm_1" in row} == {
        i: pytest.approx(norms[i], rel=1e-6) for i in (1, 4)
    }
    assert [rows[i]["amp/applied_steps_0"] for i in range(5)] == [1, 2, 3, 4, 5]
    assert [rows[i].get("amp/applied_steps_1", 0) for i in range(5)] == [0, 1, 1, 1, 2]
    assert [rows[i]["amp/applied_steps"] for i in range(5)] == [1, 3, 4, 5, 7]


# Fallback -------------------------------------------------------------------------------------------------------------


class Hot(Rows):
    """Its activations are beyond 65504; the gradient is 1."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(torch.ones(2, 3) * 2.0**17).float().mean() * 2.0**-17


HOT_ROWS = torch.zeros(6, 2, 3)


def fit_hot(**kwargs: Any) -> tuple[pl.Trainer, AMPMonitor]:
    """Two rescues, of which the second moves the run to bfloat16, and four clean steps."""
    module = Hot()
    nn.init.ones_(module.layer.weight)
    monitor = kwargs.pop("monitor", None) or AMPMonitor()
    callbacks = [PrecisionFallback(patience=2), monitor]
    with pytest.warns(RuntimeWarning, match="'bf16-mixed'"):
        trainer = fit(HOT_ROWS, module, callbacks=callbacks, log_every_n_steps=1, **kwargs)
    return trainer, monitor


def test_a_fallback_is_seen_in_every_key(tmp_path: Path) -> None:
    fit_hot(log_to=tmp_path)
    rows = by_step(rows_of(tmp_path))
    assert [rows[i]["amp/rescued_steps"] for i in range(6)] == [1, 2, 2, 2, 2, 2]
    assert [rows[i]["amp/skipped_steps"] for i in range(6)] == [0] * 6
    assert [rows[i]["amp/overflow_rate"] for i in range(6)] == [1, 1, 2 / 3, 2 / 4, 2 / 5, 2 / 6]
    assert [rows[i]["amp/loss_scale"] for i in range(6)] == [SCALE, 1, 1, 1, 1, 1]
    assert [rows[i]["amp/mantissa_bits"] for i in range(6)] == [23, 7, 7, 7, 7, 7]
    assert rows[1]["amp/grad_norm"] == pytest.approx(math.sqrt(3))


def test_the_history_of_a_fallback(tmp_path: Path) -> None:
    history = fit_hot(log_to=tmp_path)[1].history
    assert history.points == [(0, SCALE, "16-mixed"), (1, 1.0, "bf16-mixed")]
    assert history.events == [(0, "rescued"), (1, "rescued"), (1, "fallback")]
    assert (history.moves, history.last_step) == ([(1, "bf16-mixed")], 5)
    assert (history.lowest_scale, history.highest_scale) == (SCALE, SCALE)
    assert (history.causes, history.places) == ({"forward": 2}, {"layer": 2})
    found = [(i["step"], i["batch_idx"], i["kinds"], i["module"], i["moves_to"]) for i in read_incidents(tmp_path)]
    assert found == [
        (0, 0, ["rescued"], "layer", None),
        (1, 1, ["rescued", "fallback"], "layer", "bf16-mixed"),
    ]


def test_metrics_csv_tells_of_a_rescue_as_the_history_does(tmp_path: Path) -> None:
    """``amp/mantissa_bits`` is that of the step: 23 for one rescued step is no fallback to float32 and back."""
    module = Hot()
    nn.init.ones_(module.layer.weight)
    monitor = AMPMonitor()
    fit(HOT_ROWS[:2], module, callbacks=[PrecisionFallback(), monitor], log_to=tmp_path, log_every_n_steps=1)
    read = RunHistory.from_metrics(tmp_path)
    assert monitor.history.events == [(0, "rescued"), (1, "rescued")]
    assert (read.events, read.moves) == (monitor.history.events, [])
    assert (read.lowest_scale, read.highest_scale) == (SCALE, SCALE)


@pytest.mark.filterwarnings("ignore:Optimizer step 0 was skipped")
def test_a_move_of_two_optimizers_is_one_move() -> None:
    """In manual optimization the run moves when the iteration ends, in which each optimizer has made a step."""

    class HotPair(TwoOptimizers):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            for layer, optimizer in zip(self.layers, self.optimizers(), strict=True):
                optimizer.zero_grad()
                self.manual_backward(layer(torch.ones(2, 3) * 2.0**17).float().mean() * 2.0**-17)
                optimizer.step()

    module, monitor = HotPair(), AMPMonitor()
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    with pytest.warns(RuntimeWarning, match="'bf16-mixed'"):
        fit(HOT_ROWS, module, callbacks=[PrecisionFallback(patience=1), monitor])
    assert [precision for _, precision in monitor.history.moves] == ["bf16-mixed"]
    assert [kind for _, kind in monitor.history.events].count("fallback") == 1


# Resuming, and other runs ---------------------------------------------------------------------------------------------


class Resumable:
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


def test_a_run_resumed_in_mid_epoch_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    """The sixth of eight steps of the first of two epochs is saved; an overflow and a NaN before, a NaN after it."""
    x = batches(8, bad=[2, 6])

    def run(name: str, ckpt_path: Path | None = None) -> AMPMonitor:
        monitor = AMPMonitor(underflow=True, every_n_steps=3)
        folder = tmp_path / "checkpoints"
        checkpoint = pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=5, save_top_k=-1)
        rules = LossScale(init_scale=2.0**20, growth_interval=4)
        trainer = make_trainer(
            AdaptiveMixedPrecision("16-mixed", rules),
            callbacks=[monitor, checkpoint],
            logger=pl.loggers.CSVLogger(tmp_path / name, name="", version=""),
            enable_checkpointing=True,
            max_epochs=2,
            log_every_n_steps=1,
        )
        with pytest.warns(RuntimeWarning, match="was skipped because"):
            trainer.fit(Rows(), Resumable(x), ckpt_path=ckpt_path)
        return monitor

    whole = run("a")
    path = tmp_path / "checkpoints" / "step=5.ckpt"
    saved = torch.load(path, weights_only=True)["callbacks"]["AMPMonitor"]["history"]
    assert (saved["last_step"], sum(kind == "skipped" for _, kind in saved["events"])) == (5, 1)
    resumed = run("b", ckpt_path=path)
    assert resumed.history == whole.history
    assert whole.history.last_step == 15
    rows = [by_step(rows_of(tmp_path / name)) for name in "ab"]
    assert list(rows[1]) == list(range(6, 16))
    assert {step: rows[0][step] for step in rows[1]} == rows[1]


def test_a_second_fit_of_a_trainer_tells_of_itself_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitor, x = AMPMonitor(), batches(5, bad=[1])
    trainer = fit(x, callbacks=[monitor], log_to=tmp_path)
    trainer.fit_loop.epoch_progress.reset()
    capsys.readouterr()
    with pytest.warns(RuntimeWarning, match="was skipped because"):
        trainer.fit(Rows(), loader(batches(3, bad=[2])))
    assert (monitor.history.last_step, monitor.history.events) == (2, [(2, "skipped")])
    assert re.search(r"skipped steps +│ 1 \(33.33%\)", capsys.readouterr().out)
    assert [incident["step"] for incident in read_incidents(tmp_path)] == [1, 2]


@pytest.mark.parametrize("fn", ["validate", "test", "predict"])
def test_evaluating_alone_does_nothing(tmp_path: Path, fn: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Not even after a fit, whose history stays, and with its checkpoint."""

    class All(Rows):
        def forward(self, batch: Tensor) -> Tensor:
            return self.layer(batch)

        def test_step(self, batch: Tensor, batch_idx: int) -> None: ...

    monitor, module = AMPMonitor(), All()
    fit(batches(3, bad=[1]), module, callbacks=[monitor]).save_checkpoint(tmp_path / "a.ckpt")
    before = monitor.history.state_dict()
    capsys.readouterr()
    logger = pl.loggers.CSVLogger(tmp_path / "logs", name="", version="")
    plugin = AdaptiveMixedPrecision("16-mixed")
    trainer = make_trainer(plugin, logger=logger, callbacks=[monitor])
    getattr(trainer, fn)(
        module, loader(batches(2)), ckpt_path=tmp_path / "a.ckpt", **({} if fn == "predict" else {"verbose": False})
    )
    assert monitor.history.state_dict() == before
    assert capsys.readouterr().out == ""
    assert not list((tmp_path / "logs").rglob("amp*"))
    assert not any("amp/" in key for key in trainer.callback_metrics)


@pytest.mark.parametrize("as_callback", [True, False])
@pytest.mark.parametrize("finder", ["rate", "batch size"])
def test_what_a_search_tries_is_no_incident(tmp_path: Path, finder: str, as_callback: bool) -> None:
    """Every step of the search overflows its first scale, or is NaN; the three steps of the fit do not."""

    class Searched(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.lr, self.batch_size, self.is_searched = 1.0, 2, True

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.is_searched = not any(isinstance(c, AMPMonitor) for c in self.trainer.callbacks)  # type: ignore[attr-defined]
            loss = super().training_step(batch, batch_idx)
            return loss * math.nan if self.is_searched and batch_idx == 1 else loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

        def train_dataloader(self) -> DataLoader[Tensor]:
            return DataLoader(list(torch.ones(12, 3)), batch_size=self.batch_size)  # type: ignore[arg-type]

        val_dataloader = train_dataloader

    rate: dict[str, Any] = {"min_lr": 1e-6, "max_lr": 1e-3, "early_stop_threshold": None}
    size: dict[str, Any] = {"init_val": 2, "max_trials": 1, "steps_per_trial": 2}
    monitor, module = AMPMonitor(), Searched()
    callbacks: list[Any] = [monitor]
    if as_callback and finder == "rate":
        callbacks.append(pl.callbacks.LearningRateFinder(num_training_steps=4, **rate))
    elif as_callback:
        callbacks.append(pl.callbacks.BatchSizeFinder("power", **size))
    trainer = make_trainer(
        AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=SCALE)),
        callbacks=callbacks,
        logger=pl.loggers.CSVLogger(tmp_path, name="", version=""),
        default_root_dir=tmp_path,
        log_every_n_steps=1,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not as_callback:
            tuner = import_module(f"{NAMESPACE}.tuner").Tuner(trainer)
            _ = (
                tuner.lr_find(module, num_training=4, **rate)
                if finder == "rate"
                else tuner.scale_batch_size(module, **size)
            )
        trainer.fit(module)
    assert not module.is_searched
    steps = len(module.train_dataloader())
    assert (monitor.history.last_step, monitor.history.events) == (steps - 1, [])
    assert read_incidents(tmp_path) == []
    assert rows_of(tmp_path)[-1]["amp/applied_steps"] == steps


# Copies ---------------------------------------------------------------------------------------------------------------


def test_a_monitor_can_be_copied_and_pickled_in_mid_fit(tmp_path: Path) -> None:
    copies: list[AMPMonitor] = []

    class Copies(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            copies.extend([copy.deepcopy(monitor), pickle.loads(pickle.dumps(monitor))])  # noqa: S301

    bar, monitor = Bar(), AMPMonitor(underflow=True, every_n_steps=1)
    callbacks = [bar, monitor, Copies()]
    fit(batches(4, bad=[1, 3]), callbacks=callbacks, log_to=tmp_path, enable_progress_bar=True)
    assert [len(copied.history.events) for copied in copies] == [0, 0, 1, 1, 1, 1, 2, 2]
    assert [incident["step"] for incident in read_incidents(tmp_path)] == [1, 3]
    fit(batches(3, bad=[0]), callbacks=[copies[5]], log_to=tmp_path / "again")
    assert copies[5].history.events == [(0, "skipped")]
    assert len(read_incidents(tmp_path / "again")) == 1
    assert len(read_incidents(tmp_path)) == 2


# The end of a fit -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rich", [True, False])
def test_the_summary_tells_what_became_of_the_steps(
    rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outputs, "find_spec", lambda name: find_spec(name) if rich or name != "rich" else None)
    with caplog.at_level(logging.INFO):
        fit_hot()
    printed, logged = capsys.readouterr().out, "\n".join(record.getMessage() for record in caplog.records)
    text = printed if rich else logged
    assert ("Mixed precision of this run" in printed) is rich
    assert ("Mixed precision of this run" in logged) is not rich
    rows = [re.sub("[│ ]+", " ", line).strip() for line in text.splitlines()]
    for row in (
        "precision bf16-mixed",
        "applied steps 6",
        "skipped steps 0",
        "rescued steps 2 (33.33%)",
        "fallbacks bf16-mixed after step 1",
        "loss scale 2^10",
        "causes forward (2)",
        "where layer (2)",
    ):
        assert row in rows


@pytest.mark.parametrize("what", ["summary", "barebones"])
def test_no_summary_where_none_is_wanted(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    if what == "summary":
        fit(batches(3), callbacks=[AMPMonitor(summary=False)])
    else:
        plugin = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=SCALE))
        trainer = pl.Trainer(
            barebones=True, accelerator="cpu", max_epochs=1, plugins=[plugin], callbacks=[AMPMonitor()]
        )
        trainer.fit(Rows(), loader(batches(3)))
    assert "steps" not in capsys.readouterr().out


def test_barebones_measures_nothing_and_keeps_no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, monitor = count_passes(monkeypatch), AMPMonitor(underflow=True, every_n_steps=1)
    plugin = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=SCALE))
    trainer = pl.Trainer(barebones=True, accelerator="cpu", max_epochs=1, plugins=[plugin], callbacks=[monitor])
    trainer.fit(Rows(), loader(batches(3)))
    assert (passes, monitor.history, plugin.counters.steps) == ([], RunHistory(), 3)


def test_an_interrupted_fit_still_tells_its_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted(Rows):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == 3:
                raise KeyboardInterrupt
            return super().training_step(batch, batch_idx)

    monitor = AMPMonitor()
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        fit(batches(6, bad=[1]), Interrupted(), callbacks=[monitor], log_to=tmp_path)
    assert re.search(r"skipped steps +│ 1 \(33.33%\)", capsys.readouterr().out)
    assert [incident["step"] for incident in read_incidents(tmp_path)] == [1]


def test_a_fit_that_non_finite_steps_end_logs_the_last_of_them_and_tells_its_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=SCALE), max_skipped=3)
    monitor = AMPMonitor()
    with pytest.raises(NonFiniteStepError):
        fit(batches(6, bad=[1, 2, 3]), plugin=plugin, callbacks=[monitor], log_to=tmp_path)
    assert [(incident["step"], incident["batch_idx"]) for incident in read_incidents(tmp_path)] == [
        (1, 1),
        (2, 2),
        (3, 3),
    ]
    assert monitor.history.last_step == 3
    out = capsys.readouterr().out
    assert len(re.findall(r"skipped steps +│ 3 \(75.00%\)", out)) == 1


def test_an_error_before_the_first_step_tells_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor the summary of the monitor's last fit."""

    class Fails(Rows):
        def on_fit_start(self) -> None:
            raise ValueError("mine")

    monitor = AMPMonitor()
    fit(batches(3), callbacks=[monitor])
    capsys.readouterr()
    with pytest.raises(ValueError, match="mine"):
        fit(batches(3), Fails(), callbacks=[monitor])
    assert "steps" not in capsys.readouterr().out


def test_incidents_can_be_left_out(tmp_path: Path) -> None:
    monitor = AMPMonitor(incidents=False)
    fit(batches(3, bad=[1]), callbacks=[monitor], log_to=tmp_path)
    assert not list(tmp_path.rglob("amp_incidents*"))
    assert monitor.history.events == [(1, "skipped")]


def test_an_incident_tells_epoch_and_batch_under_accumulation(tmp_path: Path) -> None:
    x = batches(6, bad=[2])
    fit(x, log_to=tmp_path, max_epochs=2, accumulate_grad_batches=2)
    found = [(i["step"], i["epoch"], i["batch_idx"], i["cause"]) for i in read_incidents(tmp_path)]
    assert found == [(1, 0, 3, None), (4, 1, 3, None)]


def test_a_folder_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    monitor = AMPMonitor()
    with pytest.warns(RuntimeWarning, match="Incidents are not logged") as told:
        trainer = fit(batches(5, bad=[1, 3]), callbacks=[monitor], logger=FileLogger(tmp_path / "file" / "logs"))
    assert len([warning for warning in told if "Incidents" in str(warning.message)]) == 1
    assert (trainer.state.finished, monitor.history.last_step) == (True, 4)


def test_an_error_at_the_end_of_a_fit_does_not_tell_its_summary_twice(capsys: pytest.CaptureFixture[str]) -> None:
    class Fails(pl.Callback):
        def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fit(batches(3), callbacks=[AMPMonitor(), Fails()])
    assert capsys.readouterr().out.count("Mixed precision of this run") == 1


def test_a_summary_that_cannot_be_printed_ends_no_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As to a terminal that is gone, or a name of a module that the terminal's encoding does not have."""
    pytest.importorskip("rich")
    gone = io.StringIO()
    gone.close()
    monkeypatch.setattr("sys.stdout", gone)
    with pytest.warns(RuntimeWarning, match="summary"):
        trainer = fit(batches(3))
    assert trainer.state.finished


def test_the_report_of_a_second_fit_lists_its_own_incidents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[list[int]] = []

    def render(**parts: Any) -> str:
        listed.append([incident["step"] for incident in parts["incidents"]])
        return ""

    monkeypatch.setattr(drawn_report, "render_report", render)
    trainer = fit(batches(4, bad=[1]), callbacks=[AMPMonitor(report=True)], log_to=tmp_path)
    trainer.fit_loop.epoch_progress.reset()
    with pytest.warns(RuntimeWarning, match="was skipped because"):
        trainer.fit(Rows(), loader(batches(4, bad=[2])))
    assert listed == [[1], [2]]


def test_the_report_of_a_resumed_run_lists_the_incidents_of_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[list[int]] = []

    def render(**parts: Any) -> str:
        listed.append([incident["step"] for incident in parts["incidents"]])
        return ""

    monkeypatch.setattr(drawn_report, "render_report", render)
    x = batches(4, bad=[1])
    options: dict[str, Any] = {"callbacks": [AMPMonitor(report=True)], "logger": FileLogger(tmp_path)}
    fit(x, **options).save_checkpoint(tmp_path / "a.ckpt")
    fit(x, ckpt_path=tmp_path / "a.ckpt", max_epochs=2, **options)
    assert listed == [[1], [1, 5]]


# ---------------------------------------------------------------- what is true at the end


@precisions
@pytest.mark.parametrize("limits", [{}, {"max_steps": 5, "max_epochs": -1}])
def test_the_norm_at_the_end_of_an_epoch_is_that_of_its_last_step(precision: PrecisionName, limits: Any) -> None:
    x = batches(7)
    trainer = fit(x, precision=precision, log_every_n_steps=50, **limits)
    last = true_norms(x)[limits.get("max_steps", 7) - 1]
    assert float(trainer.callback_metrics["amp/grad_norm"]) == pytest.approx(last, rel=1e-6)


def test_the_norm_can_be_monitored_although_the_first_step_is_skipped(tmp_path: Path) -> None:
    checkpoint = pl.callbacks.ModelCheckpoint(tmp_path, monitor="amp/grad_norm")
    fit(batches(4, bad=[0]), callbacks=[AMPMonitor(), checkpoint], enable_checkpointing=True)
    assert checkpoint.best_model_path


class Overflows(Rows):
    """Its first layer's output is beyond float16 if a row is 2^17 times as large."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.layer(batch * 2.0**17) * 2.0**-17).float().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx))


def test_a_rescued_step_tells_nothing_of_the_underflow_in_float16(tmp_path: Path) -> None:
    module = Overflows()
    nn.init.ones_(module.layer.weight)
    monitor = AMPMonitor(underflow=True, every_n_steps=1)
    fallback = PrecisionFallback(patience=10**6, within_steps=10**6)
    fit(batches(3), module, callbacks=[fallback, monitor], log_to=tmp_path, log_every_n_steps=1)
    assert monitor.history.events == [(step, "rescued") for step in range(3)]
    assert not [key for row in rows_of(tmp_path) for key in row if "underflow" in key]


@pytest.mark.filterwarnings("ignore:A batch of the evaluation was not finite")
def test_a_validation_with_rescued_batches_is_an_incident(tmp_path: Path) -> None:
    module = Overflows()
    nn.init.ones_(module.layer.weight)
    callbacks = [PrecisionFallback(patience=10**6, within_steps=10**6), AMPMonitor()]
    fit(batches(2), module, callbacks=callbacks, log_to=tmp_path, validate=True)
    *steps, evaluation = read_incidents(tmp_path)
    assert [incident["kinds"] for incident in steps] == [["rescued"]] * 2
    assert (evaluation["kinds"], evaluation["step"], evaluation["epoch"]) == ([], 1, 0)
    assert evaluation["detail"].startswith("2 batches of the validation were not finite")


def test_the_counts_of_each_optimizer_go_on_from_a_run_without_the_monitor(tmp_path: Path) -> None:
    options: dict[str, Any] = {"precision": "32-true", "log_every_n_steps": 1}
    first = fit(batches(3), TwoOptimizers(), callbacks=[], **options)
    first.save_checkpoint(tmp_path / "a.ckpt")
    fit(batches(3), TwoOptimizers(), log_to=tmp_path / "b", max_epochs=2, ckpt_path=tmp_path / "a.ckpt", **options)
    last = rows_of(tmp_path / "b")[-1]
    assert [last[f"amp/applied_steps{suffix}"] for suffix in ("", "_0", "_1")] == [12, 6, 6]


def test_the_report_tells_the_rules_of_the_fallback(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    fit(batches(2), callbacks=[PrecisionFallback(patience=7), AMPMonitor(report=True)], log_to=tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert re.search(r"fallback\.patience</th><td>7</td>", page)


def test_the_progress_bar_is_given_back_when_the_run_ends_whatever_callbacks_do() -> None:
    class FailsAtTheEnd(pl.Callback):
        def on_fit_end(self, *args: Any) -> None:
            assert "get_metrics" not in vars(bar)  # the Trainer has torn the run down already
            raise RuntimeError("its own")

    bar = Bar()
    with pytest.raises(RuntimeError, match="its own"):
        fit(batches(2), callbacks=[bar, FailsAtTheEnd(), AMPMonitor()], enable_progress_bar=True)
    assert "get_metrics" not in vars(bar)


def test_events_from_a_log_folder_are_exact(tmp_path: Path) -> None:
    monitor = AMPMonitor()
    plugin = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=2.0**20))
    fit(batches(60, bad=[13]), plugin=plugin, callbacks=[monitor], log_to=tmp_path, log_every_n_steps=20)
    read = RunHistory.from_metrics(tmp_path)
    assert monitor.history.events[0] == (0, "retried")
    assert (13, "skipped") in monitor.history.events
    assert read.events == monitor.history.events


def test_a_resumed_run_in_a_log_folder_has_no_events_of_before(tmp_path: Path) -> None:
    x = batches(4, bad=[1])
    fit(x, log_to=tmp_path / "a").save_checkpoint(tmp_path / "a.ckpt")
    callbacks = [AMPMonitor(incidents=False)]
    options: dict[str, Any] = {"max_epochs": 2, "log_every_n_steps": 1, "ckpt_path": tmp_path / "a.ckpt"}
    fit(batches(4), callbacks=callbacks, log_to=tmp_path / "b", **options)
    assert RunHistory.from_metrics(tmp_path / "b").events == []
