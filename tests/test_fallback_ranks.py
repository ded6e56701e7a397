"""PrecisionFallback on two processes, DDP and FSDP2: what one rank saw moves both, at the same step.

This file is its own worker, as ``test_distributed.py`` is.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from helpers import ROW, Exact, factors
from ranks import Ranks, work
from test_distributed import KINDS, Kind, parallel_trainer, shard, whole
from torch import Tensor, nn

from lightning_amp_plus import AdaptiveMixedPrecision, LossScale, NonFiniteStepError, PrecisionFallback

STEPS = 7
BIG = 2.0**19
Fault = Literal["forward", "loss", "gradients", "all"]
Where = Literal["rank 0", "rank 1", "alternating"]
WHERES: tuple[Where, ...] = ("rank 0", "rank 1", "alternating")


@dataclass(frozen=True)
class Case:
    """A fit with a fault in float16 on one rank, or on the two in turn.

    - ``forward``: activations above 65504.
    - ``loss``: inf in the loss and not in the gradients.
    - ``gradients``: the loss is finite, the gradient is above 65504.
    - ``all``: NaN in the loss in every precision.
    """

    kind: Kind
    fault: Fault
    where: Where
    manual: bool = False
    accumulate: int = 1

    @property
    def name(self) -> str:
        how = "manual" if self.manual else "automatic"
        return f"{self.fault}, {self.where}, {how}, accumulate {self.accumulate}"

    def fails_on(self, step: int) -> int:
        return step % 2 if self.where == "alternating" else int(self.where[-1])


def cases(kind: Kind) -> list[Case]:
    faults: tuple[Fault, ...] = ("forward", "gradients")
    found = [Case(kind, fault, where, manual) for fault in faults for where in WHERES for manual in (False, True)]
    found += [Case(kind, "loss", where) for where in WHERES]
    return found + [Case(kind, fault, where, accumulate=2) for fault in faults for where in WHERES[:2]]


# In the worker --------------------------------------------------------------------------------------------------------


class Faulty(Exact):
    """The gradient is the mean of the batches of both ranks, where that of the faulty rank may be ``BIG`` times it."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.automatic_optimization = not case.manual
        self.linear = nn.Linear(8, 2, bias=False)
        nn.init.zeros_(self.linear.weight)
        self.dtypes: list[str] = []
        self.final: list[list[float]] = []

    def configure_model(self) -> None:
        if self.case.kind == "fsdp2":
            shard(self.linear, self.device_mesh)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        fault = self.case.fault
        is_faulty = self.global_rank == self.case.fails_on(batch_idx // self.case.accumulate)
        factor = {"forward": 2.0**17, "gradients": 2.0**10}.get(fault, 1.0) if is_faulty else 1.0
        hidden = self(batch * factor)
        self.dtypes.append(str(hidden.dtype).removeprefix("torch."))
        loss = hidden.float().sum() / factor
        if is_faulty and fault == "gradients":
            loss = loss * BIG
        if is_faulty and fault == "loss" and hidden.dtype is torch.float16:
            loss = loss + math.inf
        if is_faulty and fault == "all":
            loss = loss * math.nan
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def on_train_end(self) -> None:
        self.final = whole(self.linear.weight).tolist()


def run(
    case: Case, steps: int = STEPS, fallback: PrecisionFallback | None = None, save: str = "", **kwargs: Any
) -> dict[str, Any]:
    plugin = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=2.0), max_skipped=4)
    module, resume, error = Faulty(case), kwargs.pop("resume", None), ""
    trainer = parallel_trainer(
        case.kind,
        plugin,
        callbacks=[fallback or PrecisionFallback()],
        accumulate_grad_batches=case.accumulate,
        **kwargs,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, factors(*[1] * steps * case.accumulate), ckpt_path=resume)
        except NonFiniteStepError as raised:
            error = str(raised)
    if save:
        trainer.save_checkpoint(save)
    told = [text for text in (str(warning.message) for warning in caught) if "the run computes in" in text]
    return {
        "weight": whole(module.linear.weight).tolist() if error else module.final,
        "state": plugin.state_dict(),
        "last_step": vars(plugin.last_step),
        "dtypes": module.dtypes,
        "raised": error,
        "told": told,
    }


def run_in_two_parts(kind: Kind) -> dict[str, Any]:
    path = str(Path(sys.argv[2]) / f"{kind}.ckpt")
    case = Case(kind, "forward", "rank 1")
    run(case, steps=2, save=path)
    return run(case, steps=2, resume=path, max_epochs=2)


def jobs(kind: Kind) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    for case in cases(kind):
        yield case.name, partial(run, case)
    for where in WHERES:
        fallback = PrecisionFallback(("16-mixed", "32-true"), patience=2)
        yield f"raise, {where}", partial(run, Case(kind, "all", where), fallback=fallback)
    yield "resume", partial(run_in_two_parts, kind)


# In pytest ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(__file__, tmp_path_factory)


def text(skipped: int, precision: str, why: str, step: int, wider: str) -> str:
    return (
        f"{skipped} optimizer steps in a row were skipped in '{precision}' because the {why} held inf or NaN, and no"
        f" lower loss scale can help: from optimizer step {step} on the run computes in '{wider}'."
    )


def agreed(both: list[dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """What the ranks have in common, which is all but what they told: rank 1 keeps silent."""
    (told, silent) = (result.pop("told") for result in both)
    assert silent == []
    assert both[0] == both[1]
    return both[0], told


@pytest.mark.parametrize(
    "case", [case for kind in KINDS for case in cases(kind)], ids=lambda case: f"{case.kind}, {case.name}"
)
def test_both_ranks_move_at_the_same_step(ranks: Ranks, case: Case) -> None:
    found, told = agreed(ranks(case.kind, case.name))
    # From 2 to the floor: automatic optimization tries it at once, and manual optimization in the next step.
    lowered = 1 if case.fault == "gradients" and case.manual else 0
    retried = 3 if case.fault == "gradients" and not case.manual else 0
    failed, good = 3 + lowered, STEPS - 3 - lowered
    narrow, wide = (failed + retried) * case.accumulate, good * case.accumulate
    assert found["dtypes"] == ["float16"] * narrow + ["bfloat16"] * wide
    why = "gradients" if case.fault == "gradients" else "loss"
    assert told == [text(3, "16-mixed", why, failed, "bf16-mixed")]
    state = found["state"]
    assert state["precision"] == "bf16-mixed"
    assert state["scale"] == 2.0 - lowered
    recent = int("1" * failed + "0" * good, 2)
    assert state["counters"] == {
        "applied_steps": good,
        "skipped_steps": failed,
        "retried_attempts": retried,
        "recent": recent,
        "skipped_in_a_row": {"0": 0},  # in JSON a key is a string
    }
    assert found["last_step"]["step"] == STEPS - 1
    gradient = ROW * ((BIG + 1) / 2 if case.fault == "gradients" else 1)
    assert found["weight"] == (-gradient * good).expand(2, 8).tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", WHERES)
def test_both_ranks_climb_the_ladder_and_raise(ranks: Ranks, kind: Kind, where: Where) -> None:
    found, told = agreed(ranks(kind, f"raise, {where}"))
    assert told == [text(2, "16-mixed", "loss", 2, "32-true")]
    assert found["dtypes"] == ["float16"] * 2 + ["float32"] * 4
    assert "4 optimizer steps in a row" in found["raised"]
    assert "the last one was step 5." in found["raised"]
    assert found["state"]["counters"]["skipped_steps"] == 6
    assert found["weight"] == [[0.0] * 8] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_both_ranks_resume_the_failing_steps_in_a_row(ranks: Ranks, kind: Kind) -> None:
    """Two failing steps before the checkpoint, and one after it."""
    found, told = agreed(ranks(kind, "resume"))
    assert told == [text(3, "16-mixed", "loss", 3, "bf16-mixed")]
    assert found["dtypes"] == ["float16", "bfloat16"]
    assert found["weight"] == (-ROW).expand(2, 8).tolist()


if __name__ == "__main__":
    work(jobs)
