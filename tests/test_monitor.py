"""AMPMonitor through a Trainer: every value in the loggers and in ``callback_metrics``, and when it gets there."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import PRECISIONS, make_trainer
from namespace import AdaptiveMixedPrecision, AMPMonitor, pl
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp_plus import LossScale
from lightning_amp_plus.report import Precision

SCALE = 2.0**10
BITS: dict[Precision, int] = {"16-mixed": 10, "bf16-mixed": 7, "32-true": 23}
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
    precision: Precision = "16-mixed",
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
def test_csv(tmp_path: Path, precision: Precision, accumulate: int, log_every: int) -> None:
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
def test_csv_of_manual_optimization(tmp_path: Path, precision: Precision, log_every: int) -> None:
    """Each call of an optimizer's ``step`` counts, and the report of the last one is what is logged."""
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
        assert row["amp/grad_norm"] == pytest.approx(2 * norms[step], rel=1e-6)


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
    tmp_path: Path, precision: Precision, fused: bool, module: type[Rows], algorithm: str | None
) -> None:
    x = batches(4)
    clip: dict[str, Any] = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": algorithm} if algorithm else {}
    fit(x, module(fused), precision=precision, log_to=tmp_path, log_every_n_steps=1, **clip)
    norms = {int(row["step"]): row["amp/grad_norm"] for row in rows_of(tmp_path)}
    assert min(true_norms(x)) > 1  # clipping to 0.5 is seen
    assert [norms[i] for i in range(4)] == pytest.approx(true_norms(x), rel=1e-6)


@precisions
def test_clipped_tells_which_steps_were(tmp_path: Path, precision: Precision) -> None:
    x = batches(6)
    norms = true_norms(x)
    threshold = sorted(norms)[3] * 0.999
    fit(x, precision=precision, log_to=tmp_path, log_every_n_steps=1, gradient_clip_val=threshold)
    clipped = {int(row["step"]): row["amp/clipped"] for row in rows_of(tmp_path)}
    assert [clipped[i] for i in range(6)] == [float(norm > threshold) for norm in norms]
    assert sum(clipped.values()) == 3


@precisions
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_skipped_step_has_no_grad_norm(tmp_path: Path, precision: Precision, clip: float | None) -> None:
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
def test_model_checkpoint_monitors(tmp_path: Path, precision: Precision, key: str, log_every: int) -> None:
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
def test_early_stopping_monitors(precision: Precision, accumulate: int, monitor_first: bool) -> None:
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
def test_callback_metrics_know_of_a_skip_at_once(precision: Precision, accumulate: int) -> None:
    spy = Spy()
    x = batches(6 * accumulate, bad=[2 * accumulate, 4 * accumulate])
    callbacks = [AMPMonitor(), spy]
    fit(x, precision=precision, callbacks=callbacks, accumulate_grad_batches=accumulate, log_every_n_steps=50)
    after_step = spy.after_batch[accumulate - 1 :: accumulate]
    assert [metrics["amp/skipped_steps"] for metrics in after_step] == [0, 0, 1, 1, 2, 2]
    assert after_step[4]["amp/overflow_rate"] == 2 / 5


@precisions
def test_callback_metrics_know_of_a_skip_of_the_first_of_two_optimizers(precision: Precision) -> None:
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
    monkeypatch: pytest.MonkeyPatch, precision: Precision, accumulate: int
) -> None:
    plugin = AdaptiveMixedPrecision(precision, LossScale(init_scale=SCALE))
    asked_at: set[int] = set()
    module, ask = Rows(), plugin.request_grad_norm

    def request_grad_norm() -> None:
        asked_at.add(module.trainer.fit_loop.epoch_loop._batches_that_stepped)
        ask()

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


@pytest.mark.parametrize("prog_bar", [True, False])
def test_progress_bar_shows_the_scale_alone(prog_bar: bool) -> None:
    trainer = fit(batches(3), callbacks=[AMPMonitor(prog_bar=prog_bar)], log_every_n_steps=1)
    shown = {key: value for key, value in trainer.progress_bar_metrics.items() if key.startswith("amp/")}
    assert shown == ({"amp/loss_scale": SCALE} if prog_bar else {})


@precisions
def test_without_a_logger(precision: Precision) -> None:
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
