"""Where pictures get their numbers: every legal source gives the same, and the others are told what is."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers import make_trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_amp_plus.dynamic_range.stats import KINDS, DynamicRange
from lightning_amp_plus.monitoring.history import Event, Point, RunHistory
from lightning_amp_plus.monitoring.sources import RANGE_FILE_NAME, dynamic_range_of, history_of
from lightning_amp_plus.scaling.exponents import bin_of
from lightning_amp_plus.step.report import StepReport


def a_history() -> RunHistory:
    history = RunHistory()
    history.add(StepReport(0, 0, "16-mixed", 2.0**12, 5, "applied"), 2.0**12, "16-mixed")
    history.add(StepReport(1, 0, "16-mixed", 2.0**12, 1, "skipped"), 2.0**12, "16-mixed")
    history.add(StepReport(2, 0, "16-mixed", 2.0**12, 2, "applied", rescued=True, moves_to="32-true"), 1.0, "32-true")
    return history


def a_range() -> DynamicRange:
    stats = DynamicRange.empty(("first", "second"))
    for kind in range(len(KINDS)):
        stats.counts[kind, 1, bin_of(-3)] = 7 + kind
    stats.largest[0, 1] = torch.inf
    stats.steps, stats.loss_scale = 3, 2.0**12
    return stats


class AMPMonitor(pl.Callback):
    """What sources.py looks for, and no more."""

    def __init__(self) -> None:
        self.history = a_history()

    @property
    def state_key(self) -> str:
        return self._generate_state_key(prog_bar=True)

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history.state_dict()}


class DynamicRangeMonitor(pl.Callback):
    def __init__(self) -> None:
        self.stats = a_range()

    def state_dict(self) -> dict[str, Any]:
        return {"stats": self.stats.state_dict()}


def trainer_with(*callbacks: pl.Callback, **kwargs: Any) -> pl.Trainer:
    return make_trainer(callbacks=list(callbacks), max_steps=1, limit_val_batches=0, **kwargs)


def is_the_history(history: RunHistory) -> None:
    assert history.points == [Point(0, 4096.0, "16-mixed"), Point(2, 1.0, "32-true")]
    assert history.events == [Event(0, "retried"), Event(1, "skipped"), Event(2, "rescued"), Event(2, "fallback")]
    assert history.moves == [(2, "32-true")]
    assert history.last_step == 2


def is_the_range(stats: DynamicRange) -> None:
    assert stats.modules == ("first", "second")
    assert stats.counts[:, 1, bin_of(-3)].tolist() == [7, 8, 9]
    assert stats.counts.sum() == 24
    assert stats.largest.tolist() == [[0.0, torch.inf], [0.0, 0.0], [0.0, 0.0]]
    assert (stats.steps, stats.loss_scale) == (3, 4096.0)


# Objects --------------------------------------------------------------------------------------------------------------


def test_the_object_itself_is_returned_as_it_is() -> None:
    history, stats = a_history(), a_range()
    assert history_of(history) is history
    assert dynamic_range_of(stats) is stats


def test_a_live_callback_and_anything_like_it() -> None:
    callback = AMPMonitor()
    assert history_of(callback) is callback.history
    result = SimpleNamespace(stats=a_range(), precision="16-mixed")
    assert dynamic_range_of(result) is result.stats


def test_a_trainer_with_the_callbacks() -> None:
    monitor, measured = AMPMonitor(), DynamicRangeMonitor()
    trainer = trainer_with(pl.callbacks.Timer(), measured, monitor)
    assert history_of(trainer) is monitor.history
    assert dynamic_range_of(trainer) is measured.stats


# Checkpoints ----------------------------------------------------------------------------------------------------------


def a_checkpoint(folder: Path, **hyper_parameters: Any) -> Path:
    """One that Lightning has written."""
    trainer = trainer_with(AMPMonitor(), DynamicRangeMonitor())
    model = BoringModel()
    model.save_hyperparameters(hyper_parameters)
    trainer.fit(model)
    trainer.save_checkpoint(folder / "last.ckpt")
    return folder / "last.ckpt"


def test_a_checkpoint_as_a_path_and_as_a_dict(tmp_path: Path) -> None:
    path = a_checkpoint(tmp_path)
    loaded = torch.load(path, weights_only=True)
    assert "AMPMonitor{'prog_bar': True}" in loaded["callbacks"]  # the key has a suffix
    for source in (path, str(path), loaded):
        is_the_history(history_of(source))
        is_the_range(dynamic_range_of(source))


@pytest.mark.parametrize("name", ["sharded.ckpt", "sharded"])
def test_a_sharded_checkpoint_is_a_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    a_checkpoint(tmp_path).rename(folder / "meta.pt")
    is_the_history(history_of(folder))
    is_the_range(dynamic_range_of(folder))


def test_a_checkpoint_with_other_objects_is_not_run_but_asked_for(tmp_path: Path) -> None:
    path = a_checkpoint(tmp_path, backbone=SimpleNamespace())
    with pytest.raises(ValueError, match=r"last\.ckpt could not be loaded.*UnpicklingError.*weights_only=False"):
        history_of(path)
    is_the_history(history_of(torch.load(path, weights_only=False)))


def test_what_is_no_checkpoint_is_told_with_its_keys() -> None:
    with pytest.raises(ValueError, match=r"no 'callbacks' \(it has weight, bias\): pass a whole checkpoint"):
        history_of({"weight": 1, "bias": 2})
    state: dict[str, Any] = {"callbacks": {"AMPMonitor": {"counts": {}}, "Timer": None}}
    with pytest.raises(ValueError, match=r"no history of AMPMonitor \(its callbacks: AMPMonitor, Timer\)"):
        history_of(state)
    with pytest.raises(ValueError, match=r"no stats of DynamicRangeMonitor .*callbacks=\[DynamicRangeMonitor\(\)\]"):
        dynamic_range_of(state)


def test_the_state_of_another_callback_is_not_taken_for_ours() -> None:
    state = {"history": {"points": [1, 2]}, "stats": {"mean": 3}}
    callbacks = {"Another": state, "AMPMonitor{}": {"history": a_history().state_dict()}}
    is_the_history(history_of({"callbacks": callbacks}))
    with pytest.raises(ValueError, match="no stats of DynamicRangeMonitor"):
        dynamic_range_of({"callbacks": callbacks})


# Files ----------------------------------------------------------------------------------------------------------------

METRICS = """step,amp/loss_scale,amp/mantissa_bits,amp/applied_steps,amp/skipped_steps,amp/retried_attempts,loss
0,4096.0,10,1,0,4,
0,,,,,,0.5
9,1.0,23,9,1,4,
"""


def test_the_folder_of_a_run_and_each_file_in_it(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(METRICS)
    (tmp_path / RANGE_FILE_NAME).write_text(json.dumps(a_range().state_dict()))
    for source in (tmp_path, str(tmp_path), tmp_path / "metrics.csv"):
        history = history_of(source)
        assert history.points == [Point(0, 4096.0, "16-mixed"), Point(9, 1.0, "32-true")]
        assert history.events == [Event(0, "retried"), Event(9, "skipped"), Event(9, "fallback")]
        is_the_range(dynamic_range_of(source))
    is_the_range(dynamic_range_of(tmp_path / RANGE_FILE_NAME))


def test_files_that_are_not_there_or_something_else(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no .*nothing\.ckpt: pass a \.ckpt"):
        history_of(tmp_path / "nothing.ckpt")
    (tmp_path / "events.out").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"no metrics\.csv \(it has events\.out\).*CSVLogger"):
        history_of(tmp_path)
    with pytest.raises(ValueError, match=r"events\.out is neither a metrics\.csv nor a \.ckpt"):
        history_of(tmp_path / "events.out")
    with pytest.raises(FileNotFoundError, match=r"amp_dynamic_range\.json, which DynamicRangeMonitor writes"):
        dynamic_range_of(tmp_path)
    with pytest.raises(ValueError, match=r"events\.out holds no dynamic range"):
        dynamic_range_of(tmp_path / "events.out")
    (tmp_path / RANGE_FILE_NAME).write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        dynamic_range_of(tmp_path)


# Others ---------------------------------------------------------------------------------------------------------------


def test_what_is_no_source_is_told_what_is() -> None:
    with pytest.raises(TypeError, match=r"int is no source of a RunHistory: pass one, the AMPMonitor, a Trainer"):
        history_of(3)
    with pytest.raises(TypeError, match="RunHistory is no source of a DynamicRange"):
        dynamic_range_of(a_history())
    with pytest.raises(ValueError, match="This SimpleNamespace has no RunHistory yet: run fit first"):
        history_of(SimpleNamespace(history=None))
    with pytest.raises(ValueError, match=r"No callback of the Trainer has a RunHistory \(there is Timer\).*AMPMonitor"):
        history_of(trainer_with(pl.callbacks.Timer()))
