"""What became of the steps: points, events, thinning, the way through JSON, and what a CSV file tells."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import loader, make_trainer
from namespace import AdaptiveMixedPrecision, AMPMonitor, PrecisionFallback, pl
from torch import Tensor, nn

from lightning_amp_plus import LossScale
from lightning_amp_plus.diagnosis.cause import Cause, Diagnosis
from lightning_amp_plus.monitoring import history
from lightning_amp_plus.monitoring.events import EVENT_KINDS, kinds_of
from lightning_amp_plus.monitoring.history import Event, Point, RunHistory
from lightning_amp_plus.precisions import PrecisionName, scale_text
from lightning_amp_plus.step.report import StepReport

CLEAN = StepReport(step=0, optimizer=0, precision="16-mixed", scale=8.0, attempts=1, outcome="applied")


def report(step: int, **fields: Any) -> StepReport:
    return replace(CLEAN, step=step, **fields)


def because(cause: Cause, module: str | None = None) -> Diagnosis:
    return Diagnosis(cause, module, "")


def eventful() -> RunHistory:
    """Every field is at a value that is no default."""
    made = RunHistory()
    made.add(report(0), 2.0**10, "16-mixed")
    made.add(report(1, attempts=3, diagnosis=because("scale")), 2.0**9, "16-mixed")
    made.add(report(2, optimizer=1, rescued=True, attempts=2, diagnosis=because("forward", "a.b")), 2.0**9, "16-mixed")
    made.add(report(3, outcome="skipped", diagnosis=because("batch")), 2.0**9, "16-mixed")
    made.add(report(4, rescued=True, attempts=2, kept=("a.b",), diagnosis=because("backward")), 2.0**9, "16-mixed")
    made.add(
        report(5, rescued=True, attempts=2, moves_to="bf16-mixed", diagnosis=because("unsupported", "c")),
        1.0,
        "bf16-mixed",
    )
    return made


# ---------------------------------------------------------------- what a step adds


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({}, []),
        ({"attempts": 2}, ["retried"]),
        ({"attempts": 4, "rescued": True}, ["rescued"]),
        ({"attempts": 4, "outcome": "skipped"}, ["skipped"]),
        ({"attempts": 2, "rescued": True, "moves_to": "32-true"}, ["rescued", "fallback"]),
        ({"attempts": 2, "rescued": True, "kept": ("a",)}, ["rescued", "fallback"]),
        ({"outcome": "skipped", "moves_to": "32-true"}, ["skipped", "fallback"]),
        ({"moves_to": "32-true"}, ["fallback"]),
    ],
)
def test_a_step_is_an_event_of_its_outcome_and_of_what_it_changes(fields: dict[str, Any], kinds: list[str]) -> None:
    made = RunHistory()
    made.add(report(7, **fields), 8.0, "16-mixed")
    assert kinds_of(report(7, **fields)) == kinds
    assert made.events == [(7, kind) for kind in kinds]


def test_all_that_is_known_of_the_steps_is_added_up() -> None:
    made = eventful()
    assert made.points == [(0, 2.0**10, "16-mixed"), (1, 2.0**9, "16-mixed"), (5, 1.0, "bf16-mixed")]
    assert [event.kind for event in made.events] == [
        *("retried", "rescued", "skipped", "rescued", "fallback", "rescued", "fallback")
    ]
    assert {event.kind for event in made.events} == set(EVENT_KINDS)
    assert made.last_step == 5
    assert made.moves == [(5, "bf16-mixed")]
    assert made.kept == ["a.b"]
    assert made.causes == {"scale": 1, "forward": 1, "batch": 1, "backward": 1, "unsupported": 1}
    assert made.places == {"a.b": 1, "": 1, "c": 1}
    assert (made.lowest_scale, made.highest_scale) == (2.0**9, 2.0**10)


def test_a_clean_step_at_the_same_scale_takes_no_room() -> None:
    made = RunHistory()
    for step in range(500):
        made.add(report(step), 8.0, "16-mixed")
    assert (made.points, made.events, made.last_step) == ([(0, 8.0, "16-mixed")], [], 499)


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_without_loss_scaling_there_is_no_range_of_scales(precision: PrecisionName) -> None:
    made = RunHistory()
    made.add(report(0, precision=precision), 1.0, precision)
    assert (made.lowest_scale, made.highest_scale) == (None, None)


def test_the_range_of_scales_is_that_of_float16_only() -> None:
    made = RunHistory()
    for step, (scale, precision) in enumerate([(4.0, "16-mixed"), (16.0, "16-mixed"), (1.0, "32-true")]):
        made.add(report(step), scale, precision)  # type: ignore[arg-type]
    assert (made.lowest_scale, made.highest_scale) == (4.0, 16.0)


def test_places_are_bounded_and_those_known_are_counted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_MOST_PLACES", 2)
    made = RunHistory()
    for step, name in enumerate(["a", "b", "c", "a", "c"]):
        made.add(report(step, rescued=True, attempts=2, diagnosis=because("forward", name)), 8.0, "16-mixed")
    assert made.places == {"a": 2, "b": 1}
    assert made.causes == {"forward": 5}


# ---------------------------------------------------------------- a long run


def test_a_long_history_of_two_scales_keeps_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_MOST", 40)
    made = RunHistory()
    for step in range(1000):
        made.add(report(step), 2.0 ** (15 + step % 2), "16-mixed")
    early = [point.scale for point in made.points if point.step < 500]
    assert set(early) == {2.0**15, 2.0**16}
    assert len(made.points) <= 40


def test_a_long_history_keeps_every_change_of_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_MOST", 40)
    made = RunHistory()
    for step in range(1000):
        precision: PrecisionName = "bf16-mixed" if 500 <= step < 510 else "16-mixed"
        made.add(report(step, precision=precision), 1.0 if precision == "bf16-mixed" else 2.0 ** (step % 5), precision)
    assert [point.step for point in made.points if point.precision == "bf16-mixed"] == [500]
    assert 510 in [point.step for point in made.points]


def test_a_long_history_stays_small_and_keeps_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_MOST", 20)
    made = RunHistory()
    for step in range(1000):
        made.add(report(step, attempts=2), 2.0 ** (step % 7), "16-mixed")
        assert len(made.points) <= 20
        assert len(made.events) <= 20
    for items in (made.points, made.events):
        steps = [item.step for item in items]
        assert steps == sorted(set(steps))
        assert (steps[0], steps[-1]) == (0, 999)
        assert len(steps) > 9
    assert (made.lowest_scale, made.highest_scale) == (1.0, 64.0)


def test_the_first_thinning_lets_every_second_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_MOST", 4)
    made = RunHistory()
    for step in range(5):
        made.add(report(step, attempts=2), 2.0**step, "16-mixed")
    assert [event.step for event in made.events] == [0, 2, 4]
    assert [point.step for point in made.points] == [0, 1, 4]  # the lowest and the highest of the last four


# ---------------------------------------------------------------- state


def test_the_state_comes_back_from_json_and_from_a_checkpoint(tmp_path: Path) -> None:
    made = eventful()
    assert not [name for name, value in vars(RunHistory()).items() if value == getattr(made, name)]
    assert RunHistory.from_state(json.loads(json.dumps(made.state_dict(), allow_nan=False))) == made
    torch.save(made.state_dict(), tmp_path / "history.pt")
    assert RunHistory.from_state(torch.load(tmp_path / "history.pt", weights_only=True)) == made
    assert RunHistory.from_state(json.loads(json.dumps(RunHistory().state_dict()))) == RunHistory()


def test_the_state_does_not_follow_later_steps_and_what_was_loaded_goes_on() -> None:
    made = eventful()
    state = made.state_dict()
    made.add(report(6, optimizer=1, attempts=2, diagnosis=because("scale")), 1.0, "bf16-mixed")
    loaded = RunHistory.from_state(state)
    assert loaded == eventful()
    loaded.add(report(6, optimizer=1, attempts=2, diagnosis=because("scale")), 1.0, "bf16-mixed")
    assert loaded == made
    assert RunHistory.from_state(state) == eventful()


def test_the_state_of_a_later_version_is_refused() -> None:
    with pytest.raises(ValueError, match="history has version 2, and this lightning_amp_plus reads up to 1"):
        RunHistory.from_state({**eventful().state_dict(), "version": 2})


# ---------------------------------------------------------------- from metrics.csv


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    return folder / "metrics.csv"


def row(applied: int, skipped: int = 0, retried: int = 0, rescued: int = 0, scale: float = 8.0, bits: int = 10) -> Any:
    names = ("applied_steps", "skipped_steps", "retried_attempts", "rescued_steps", "loss_scale", "mantissa_bits")
    values = (applied, skipped, retried, rescued, scale, bits)
    return {f"amp/{name}": float(value) for name, value in zip(names, values, strict=True)}


def test_what_happened_between_two_rows_is_one_event_of_its_kind(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        row(1),
        {"loss": 3.0},
        row(10, retried=4, scale=4.0),
        row(19, skipped=1, retried=6, scale=2.0),
        row(29, skipped=1, retried=8, rescued=1, scale=2.0),
        row(39, skipped=1, retried=8, rescued=1, scale=2.0),
        row(49, skipped=1, retried=8, rescued=1, scale=1.0, bits=7),
    )
    for made in (RunHistory.from_metrics(path), RunHistory.from_metrics(tmp_path)):
        assert made.points == [
            *((0, 8.0, "16-mixed"), (9, 4.0, "16-mixed"), (19, 2.0, "16-mixed"), (49, 1.0, "bf16-mixed"))
        ]
        assert sorted(made.events) == [
            *((9, "retried"), (19, "retried"), (19, "skipped"), (29, "rescued"), (49, "fallback"))
        ]
        assert made.moves == [(49, "bf16-mixed")]
        assert (made.last_step, made.lowest_scale, made.highest_scale) == (49, 2.0, 8.0)


def test_a_file_without_amp_monitor_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = write(tmp_path, {"loss": 1.0})
    with pytest.raises(ValueError, match=r"metrics.csv has no amp/loss_scale: pass the metrics.csv of a run with the"):
        RunHistory.from_metrics(path)


class Model(pl.LightningModule):
    """The layer puts out 4 times the sum of a row: a row of 2^13 and more is beyond float16."""

    def __init__(self, scaled: float = 2.0**-10) -> None:
        super().__init__()
        self.scaled = scaled
        self.layer = nn.Linear(4, 1, bias=False)
        nn.init.constant_(self.layer.weight, 4.0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).float().mean() * self.scaled

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=2.0**-20)


def fit(folder: Path, sizes: list[float], scale: float, **arguments: Any) -> RunHistory:
    monitor = AMPMonitor()
    fallback = PrecisionFallback(patience=arguments.pop("patience", 3))
    plugin = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=scale))
    trainer = make_trainer(
        plugin,
        callbacks=[monitor, fallback],
        logger=pl.loggers.CSVLogger(folder, name="", version=""),
        log_every_n_steps=1,
    )
    trainer.fit(Model(**arguments), loader(torch.tensor(sizes)[:, None].expand(-1, 4)))
    return monitor.history


def test_a_file_of_every_step_tells_what_the_callback_has_seen(tmp_path: Path) -> None:
    made = fit(tmp_path, [1.0, 2.0**5, 2.0, 2.0**5], 2.0**14, scaled=1.0)
    told = RunHistory.from_metrics(tmp_path)
    assert [event.kind for event in made.events] == ["retried"] * len(made.events)
    assert len(made.events) > 0
    assert told.events == made.events
    assert told.points == made.points
    assert (told.last_step, told.lowest_scale) == (made.last_step, made.lowest_scale) == (3, made.points[-1].scale)


def test_a_rescued_step_in_a_file_is_no_fallback(tmp_path: Path) -> None:
    made = fit(tmp_path, [1.0, 2.0**13, 1.0], 2.0**4)
    told = RunHistory.from_metrics(tmp_path)
    assert made.events == [(1, "rescued")]
    assert told.events == made.events
    assert told.moves == []
    assert told.points == made.points


def test_a_fallback_in_a_file_is_one(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="bf16-mixed"):
        made = fit(tmp_path, [1.0, 1.0, 2.0**13, 1.0], 2.0**4, patience=1)
    told = RunHistory.from_metrics(tmp_path)
    assert [event.kind for event in told.events] == [event.kind for event in made.events] == ["rescued", "fallback"]
    assert [precision for _, precision in told.moves] == [precision for _, precision in made.moves] == ["bf16-mixed"]


def test_a_fallback_in_a_file_is_no_lower_scale(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="bf16-mixed"):
        fit(tmp_path, [1.0, 1.0, 2.0**13, 1.0], 2.0**4, patience=1)
    assert RunHistory.from_metrics(tmp_path).lowest_scale == 2.0**4


# ---------------------------------------------------------------- text


@pytest.mark.parametrize(
    ("scale", "text"),
    [
        *((1.0, "2^0"), (2.0**13, "2^13"), (2.0**24, "2^24"), (0.25, "2^-2")),
        *((1000.0, "1000"), (98304.0, "98304"), (1234567.0, "1.23457e+06"), (0.3, "0.3")),
    ],
)
def test_a_scale_is_a_power_of_two_where_it_is_one(scale: float, text: str) -> None:
    assert scale_text(scale) == text


def test_points_and_events_are_plain_tuples_with_names() -> None:
    assert Point(1, 2.0, "16-mixed") == (1, 2.0, "16-mixed")
    assert Event(3, "skipped").kind == "skipped"
