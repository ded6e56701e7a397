"""The monitors on two ranks of gloo: what one rank saw, both log, and rank zero alone writes it down.

This file is its own worker: ``ranks`` starts it twice.
"""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import pytest
import torch
from helpers import ROW, Exact, loader, make_trainer
from lightning.pytorch.strategies import DDPStrategy
from ranks import Ranks, work
from torch import Tensor, nn

from lightning_amp_plus import AdaptiveMixedPrecision, AMPMonitor, DynamicRangeMonitor, LossScale, PrecisionFallback
from lightning_amp_plus.monitoring.incidents import read_incidents
from lightning_amp_plus.monitoring.underflow import UnderflowMeter

SCALE = 2.0**10
STEPS = 6
FAULTY = 2
"""The step with the fault; the second of three measurements is after it."""

Fault = Literal["nan", "overflow", "forward"]
FAULTS: tuple[Fault, ...] = ("nan", "overflow", "forward")


class OneFaulty(Exact):
    """Each rank's batches are its own rows; one rank's batch number ``FAULTY`` has a fault."""

    def __init__(self, fault: Fault, rank: int) -> None:
        super().__init__()
        self.fault, self.rank = fault, rank
        self.other = nn.Linear(8, 1, bias=False)
        nn.init.ones_(self.other.weight)

    def loss(self, batch: Tensor) -> Tensor:
        return (self(batch) + self.other(batch)).float().sum()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx != FAULTY or self.global_rank != self.rank:
            return self.loss(batch)
        if self.fault == "nan":
            return self.loss(batch * math.nan)
        if self.fault == "overflow":  # of the gradient in float16: from the scale 2^10 on
            return self.loss(batch * 2.0**6)
        return self.other(batch * 2.0**15).float().sum() * 2.0**-15 + self(batch).float().sum()


class Spy(pl.Callback):
    """Keeps what is said after each batch, of both monitors."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.metrics.append({key: float(value) for key, value in trainer.callback_metrics.items() if "amp/" in key})


def count_looks() -> list[float]:
    """What the gradients are multiplied by when they are looked at, from now on."""
    looks: list[float] = []
    look = UnderflowMeter.look

    def counted(self: UnderflowMeter, optimizer: Any, scale: float, made_at: float | None) -> None:
        looks.append(scale)
        look(self, optimizer, scale, made_at)

    UnderflowMeter.look = counted  # type: ignore[method-assign]  # of this process, which is one test's
    return looks


def run(looks: list[float], fault: Fault, rank: int, *, log_every: int = 1) -> dict[str, Any]:
    """Fit and tell all that a rank can see. The folder is the same on both."""
    looks.clear()
    folder = Path.cwd() / f"{fault}-{rank}-{log_every}"
    plugin = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=SCALE))
    monitor = AMPMonitor(underflow=True, every_n_steps=2, report=fault == "forward")
    ranges, spy, module = DynamicRangeMonitor(every_n_steps=2), Spy(), OneFaulty(fault, rank)
    trainer = make_trainer(
        plugin,
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=40)),
        callbacks=[PrecisionFallback(patience=1), monitor, ranges, spy],
        logger=pl.loggers.CSVLogger(folder, name="", version=""),
        log_every_n_steps=log_every,
        use_distributed_sampler=False,
    )
    own = int(trainer.global_rank)
    out = io.StringIO()
    with warnings.catch_warnings(record=True) as told, contextlib.redirect_stdout(out):
        warnings.simplefilter("always")
        trainer.fit(module, loader([ROW * (own + 1)] * STEPS))
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {
        "rank": own,
        "metrics": spy.metrics,
        "history": monitor.history.state_dict(),
        "ranges": ranges.stats.state_dict(),
        "looks": len(looks),
        "files": files,
        "printed": "Mixed precision of this run" in out.getvalue(),
        "incidents": read_incidents(folder),
        "monitor warnings": [str(w.message) for w in told if "amp/" in str(w.message) or "Monitor" in str(w.message)],
    }


def jobs(kind: str) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    looks = count_looks()
    for fault in FAULTS:
        for rank in (0, 1):
            yield f"{fault} on rank {rank}", partial(run, looks, fault, rank)
    yield "between logged steps", partial(run, looks, "nan", 1, log_every=4)


# In pytest ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(__file__, tmp_path_factory)


every_fault = pytest.mark.parametrize("job", [f"{fault} on rank {rank}" for fault in FAULTS for rank in (0, 1)])


def pair(ranks: Ranks, job: str) -> tuple[dict[str, Any], dict[str, Any]]:
    first, second = sorted(ranks("ddp", job), key=lambda result: result["rank"])
    return first, second


@every_fault
def test_both_ranks_log_the_same(ranks: Ranks, job: str) -> None:
    first, second = pair(ranks, job)
    assert first["metrics"] == second["metrics"]
    assert first["history"] == second["history"]
    assert first["ranges"] == second["ranges"]
    assert first["monitor warnings"] == second["monitor warnings"] == []
    metrics = first["metrics"]
    assert len(metrics) == STEPS
    fault = job.split()[0]
    last = {key: metrics[-1][f"amp/{key}"] for key in ("applied_steps", "skipped_steps", "rescued_steps")}
    skips, rescues = int(fault == "nan"), int(fault == "forward")
    assert last == {"applied_steps": STEPS - skips, "skipped_steps": skips, "rescued_steps": rescues}
    assert metrics[FAULTY]["amp/overflow_rate"] == 1 / 3
    assert metrics[-1]["amp/mantissa_bits"] == (7 if fault == "forward" else 10)
    tried = [len(incident["tried"]) for incident in first["incidents"]]
    assert metrics[-1]["amp/retried_attempts"] == sum(tried) - len(tried) > 0


@every_fault
def test_the_norm_and_the_underflow_are_those_of_both_ranks(ranks: Ranks, job: str) -> None:
    first, _ = pair(ranks, job)
    mean = torch.cat([ROW, ROW]).double() * 1.5  # of ROW and twice ROW
    assert first["metrics"][1]["amp/grad_norm"] == pytest.approx(float(mean.norm()), rel=1e-6)
    assert first["metrics"][1]["amp/underflow"] == first["metrics"][1]["amp/zero_gradients"] == 1 / 8
    assert first["metrics"][1]["amp/underflow_added_at_half_scale"] == 0


@every_fault
def test_both_ranks_look_at_the_same_steps(ranks: Ranks, job: str) -> None:
    """Steps 1, 3 and 5; after the move to bfloat16 only DynamicRangeMonitor goes on."""
    first, second = pair(ranks, job)
    assert first["looks"] == second["looks"] == (1 if job.startswith("forward") else 3)
    assert first["ranges"]["steps"] == 3


@every_fault
def test_rank_zero_alone_writes_and_once(ranks: Ranks, job: str) -> None:
    first, second = pair(ranks, job)
    assert (first["printed"], second["printed"]) == (True, False)
    fault = job.split()[0]
    report = ["report.html"] if fault == "forward" else []
    assert first["files"] == ["amp_dynamic_range.json", "amp_incidents.jsonl", "metrics.csv", *report]
    kinds = {"nan": ["skipped"], "overflow": ["retried"], "forward": ["rescued", "fallback"]}[fault]
    assert [(i["step"], i["batch_idx"], i["kinds"]) for i in first["incidents"]] == [(FAULTY, FAULTY, kinds)]
    assert first["incidents"][0]["cause"] == {"nan": "model", "overflow": "scale", "forward": "forward"}[fault]


def test_the_ranks_do_not_wait_for_each_other_between_the_logged_steps(ranks: Ranks) -> None:
    first, second = pair(ranks, "between logged steps")
    assert first["metrics"] == second["metrics"]
    assert first["looks"] == second["looks"] == 3
    assert first["history"] == second["history"]


if __name__ == "__main__":
    work(jobs)
