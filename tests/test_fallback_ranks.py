"""PrecisionFallback on two processes, DDP and FSDP2: what one rank saw is rescued on both, and moves both.

This file is its own worker, as ``test_distributed.py`` is.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import pytest
import torch
from helpers import ROW, Exact, factors
from ranks import Ranks, work
from test_distributed import KINDS, Kind, parallel_trainer, shard, whole
from torch import Tensor, nn
from torch.optim import SGD

from lightning_amp_plus import AdaptiveMixedPrecision, LossScale, NonFiniteStepError, PrecisionFallback

STEPS = 6
BIG = 2.0**19
Fault = Literal["forward", "loss", "gradients", "all", "raise", "raise or loss", "raise always"]
Where = Literal["rank 0", "rank 1", "alternating"]
WHERES: tuple[Where, ...] = ("rank 0", "rank 1", "alternating")
LETTERS = {torch.float16: "h", torch.bfloat16: "b", torch.float32: "f"}


@dataclass(frozen=True)
class Case:
    """A fit with a fault in float16 on one rank, or on the two in turn.

    - ``forward``: activations above 65504.
    - ``loss``: inf in the loss and not in the gradients.
    - ``gradients``: the loss is finite, the gradient is above 65504.
    - ``all``: NaN in the loss in every precision.
    - ``raise``: an exception in the forward, in the last micro-batch of a window.
    - ``raise or loss``: the same, and inf in the loss of the other rank.
    - ``raise always``: an exception in every precision, from the second window on.
    """

    kind: Kind
    fault: Fault
    where: Where
    manual: bool = False
    accumulate: int = 1
    scope: Literal["model", "module"] = "model"

    @property
    def name(self) -> str:
        how = "manual" if self.manual else "automatic"
        return f"{self.fault}, {self.where}, {how}, accumulate {self.accumulate}, {self.scope}"

    def fails_on(self, step: int) -> int:
        return step % 2 if self.where == "alternating" else int(self.where[-1])


def cases(kind: Kind) -> list[Case]:
    """Those that are looked at, and that every step of is applied in the end but for manual optimization's."""
    faults: tuple[Fault, ...] = ("forward", "gradients")
    found = [Case(kind, fault, where) for fault in faults for where in WHERES]
    found += [Case(kind, fault, where, manual=True) for fault in faults for where in WHERES[:2]]
    found += [Case(kind, "loss", where) for where in WHERES[:2]]
    return found + [Case(kind, fault, where, accumulate=2) for fault in faults for where in WHERES[:2]]


def rate(case: Case) -> float:
    """Keeps the weights small enough for float16, whatever the gradients are."""
    return 2.0**-20 if case.fault == "gradients" else 1.0


# In the worker --------------------------------------------------------------------------------------------------------


class Picky(nn.Module):
    """Says that float16 is not implemented, when told to."""

    def forward(self, hidden: Tensor, *, raises: bool) -> Tensor:
        if raises:
            raise NotImplementedError("not implemented for 'Half'")
        return hidden


class Faulty(Exact):
    """The gradient is the mean of the batches of both ranks, where that of the faulty rank may be ``BIG`` times it."""

    def __init__(self, case: Case) -> None:
        super().__init__(partial(SGD, lr=rate(case)))
        self.case = case
        self.automatic_optimization = not case.manual
        self.linear, self.picky = nn.Linear(8, 2, bias=False), Picky()
        nn.init.zeros_(self.linear.weight)
        self.story = ""
        self.final: list[list[float]] = []

    def configure_model(self) -> None:
        if self.case.kind == "fsdp2":
            shard(self.linear, self.device_mesh)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        fault, accumulate = self.case.fault, self.case.accumulate
        is_faulty = self.global_rank == self.case.fails_on(batch_idx // accumulate)
        factor = {"forward": 2.0**17, "gradients": 2.0**10}.get(fault, 1.0) if is_faulty else 1.0
        hidden = self(batch * factor)
        self.story += LETTERS[hidden.dtype]
        is_half, is_last = hidden.dtype is torch.float16, batch_idx % accumulate == accumulate - 1
        raises = is_half and is_last and fault in ("raise", "raise or loss")
        hidden = self.picky(hidden, raises=is_faulty and (raises or (fault == "raise always" and batch_idx > 0)))
        loss = hidden.float().sum() / factor
        if is_faulty and fault == "gradients":
            loss = loss * BIG
        if is_half and ((is_faulty and fault == "loss") or (not is_faulty and fault == "raise or loss")):
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


class Read(pl.Callback):
    """What the diagnosis of each step names."""

    def __init__(self) -> None:
        self.named: list[tuple[str, str | None] | None] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        plugin: Any = trainer.precision_plugin
        if (report := plugin.last_step) is not None:
            found = report.diagnosis
            self.named.append(None if found is None else (found.cause, found.module))


def run(case: Case, steps: int = STEPS, save: str = "", resume: str | None = None, **kwargs: Any) -> dict[str, Any]:
    plugin = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=2.0), max_skipped=4)
    module, read, raised = Faulty(case), Read(), None
    trainer = parallel_trainer(
        case.kind,
        plugin,
        callbacks=[PrecisionFallback(scope=case.scope), read],
        accumulate_grad_batches=case.accumulate,
        **kwargs,
    )
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, factors(*[1] * steps * case.accumulate), ckpt_path=resume)
        except Exception as error:
            diagnosis = getattr(error, "diagnosis", None)
            raised = [type(error).__name__, str(error), diagnosis and diagnosis.cause, diagnosis and diagnosis.module]
    if save:
        trainer.save_checkpoint(save)
    told = [text for text in (str(warning.message) for warning in caught) if text.startswith(("Optimizer", "3 opt"))]
    if raised is not None and raised[0] != NonFiniteStepError.__name__:  # the ranks cannot meet any more
        return {"raised": raised, "seconds": time.monotonic() - began}
    return {
        "weight": whole(module.linear.weight).tolist() if raised else module.final,
        "state": plugin.state_dict(),
        "attempts": None if plugin.last_step is None else plugin.last_step.attempts,
        "named": read.named,
        "story": module.story,
        "raised": raised,
        "told": told,
    }


def run_in_two_parts(case: Case) -> dict[str, Any]:
    path = str(Path(sys.argv[2]) / f"{case.scope}.ckpt")
    run(case, steps=2, save=path)
    return run(case, steps=2, resume=path, max_epochs=2)


def raising_cases() -> list[Case]:
    return [Case("ddp", "raise", where, accumulate=count) for where in WHERES[:2] for count in (1, 2)]


MIXED = Case("ddp", "raise or loss", "rank 0")


def jobs(kind: Kind | Literal["both"]) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    if kind == "both":
        yield MIXED.name, partial(run, MIXED)
        return
    for case in cases(kind):
        yield case.name, partial(run, case)
    for where in WHERES[:2]:
        for fault in ("forward", "all"):
            case = Case(kind, fault, where, scope="module")
            yield case.name, partial(run, case)
    for scope in ("model", "module"):
        case = Case(kind, "forward", "rank 1", scope=scope)
        yield f"resume, {scope}", partial(run_in_two_parts, case)
    if kind == "ddp":
        for case in raising_cases():
            yield case.name, partial(run, case)
    # The last, for the ranks have parted then.
    yield "end", partial(run, Case(kind, "raise always" if kind == "ddp" else "raise", "rank 1"))


# In pytest ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(__file__, tmp_path_factory)


def agreed(both: list[dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """What the ranks have in common, which is all but what they told: rank 1 keeps silent."""
    (told, silent) = (result.pop("told") for result in both)
    assert silent == []
    assert both[0] == both[1]
    return both[0], [text.partition(".")[0] if "'." not in text else text[: text.index("'.") + 2] for text in told]


def updates(case: Case, count: float) -> list[list[float]]:
    """The weight after so many steps."""
    return (-ROW * ((BIG + 1) / 2 if case.fault == "gradients" else 1) * rate(case) * count).expand(2, 8).tolist()


def counters(story: str, retried: int) -> dict[str, Any]:
    """Of clean (``.``), skipped (``x``) and rescued (``r``) steps."""
    return {
        "applied_steps": len(story) - story.count("x"),
        "skipped_steps": story.count("x"),
        "retried_attempts": retried,
        "rescued_steps": story.count("r"),
        "rescued_evaluations": 0,
        "recent": int("".join("01"[letter != "."] for letter in story), 2),
    }


@pytest.mark.parametrize(
    "case", [case for kind in KINDS for case in cases(kind)], ids=lambda case: f"{case.kind}, {case.name}"
)
def test_both_ranks_are_rescued_alike_and_move_at_the_same_step(ranks: Ranks, case: Case) -> None:
    found, told = agreed(ranks(case.kind, case.name))
    phase = "backward" if case.fault == "gradients" else "forward"
    place = "" if case.fault == "loss" else "linear"
    if case.manual:
        # From 2 to the floor, and one that is not looked on at.
        failed = 5 if case.fault == "gradients" else 4
        steps, narrow, lowest = "x" * failed + "." * (STEPS - failed), "h" * failed, 1.0
        retried, applied = 0, STEPS - failed
        expected = (
            "3 optimizer steps in a row were skipped in '16-mixed', and no lower loss scale can help: from optimizer"
            f" step {failed} on the run computes in 'bf16-mixed'."
        )
    else:
        lower = "h" if case.fault == "gradients" else ""  # from 2 to the floor
        narrow = (lower + "hfhf") * 2 + lower + "hfhb"
        steps, retried, applied, failed, lowest = "rrr...", len(narrow) - 3, STEPS, 3, 2.0
        expected = (
            "Optimizer step 2 was not finite in '16-mixed', as were 2 others lately: from optimizer step 3 on the run"
            " computes in 'bf16-mixed'."
        )
    assert found["story"] == "".join(letter * case.accumulate for letter in narrow + "b" * (STEPS - failed))
    assert [text for text in told if "computes in" in text] == [expected]
    state = found["state"]
    assert state["precision"] == "bf16-mixed"
    assert state["scale"] == (lowest if case.fault == "gradients" else 2.0)
    assert state["counters"].pop("skipped_in_a_row") in ({}, {"0": 0})  # in JSON a key is a string
    assert state["counters"] == counters(steps, retried)
    named = found["named"][:: case.accumulate]
    assert named[failed - 3 : failed] == [[phase, place or None]] * 3
    assert named[failed:] == [None] * (STEPS - failed)
    assert found["weight"] == updates(case, applied)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", WHERES[:2])
def test_both_ranks_keep_the_same_module(ranks: Ranks, kind: Kind, where: Where) -> None:
    found, told = agreed(ranks(kind, Case(kind, "forward", where, scope="module").name))
    assert found["story"] == "hfhf" * 2 + "hfhf" + "fff"  # of the module's output, which is float32 from then on
    assert told == ["Optimizer step 2 was not finite in '16-mixed': from now on linear computes in float32"]
    assert (found["state"]["precision"], found["state"]["kept_modules"]) == ("16-mixed", ["linear"])
    assert found["weight"] == (-ROW * STEPS).expand(2, 8).tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", WHERES[:2])
def test_nan_on_one_rank_costs_one_attempt_each_and_ends_in_the_same_error(
    ranks: Ranks, kind: Kind, where: Where
) -> None:
    both = ranks(kind, Case(kind, "all", where, scope="module").name)
    for text in [result["raised"].pop(1) for result in both]:  # the rest of it is what each rank saw
        assert text.startswith("4 optimizer steps in a row were skipped because the loss held inf or NaN")
        assert "the last one was step 3." in text
    found, _ = agreed(both)
    kind_of_error, cause, _module = found["raised"]
    assert (kind_of_error, cause) == ("NonFiniteStepError", "model")
    assert found["story"] == "hf" * 4 + "f"  # and the last one is looked on at
    assert (found["state"]["precision"], found["state"]["scale"]) == ("16-mixed", 2.0)
    assert found["state"]["counters"]["skipped_steps"] == 4
    assert found["state"]["kept_modules"] == []
    assert found["weight"] == [[0.0] * 8] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scope", ["model", "module"])
def test_both_ranks_resume_the_rescues(ranks: Ranks, kind: Kind, scope: str) -> None:
    """Two rescues before the checkpoint, and one after it."""
    found, told = agreed(ranks(kind, f"resume, {scope}"))
    moves = "from now on linear" if scope == "module" else "from optimizer step 3 on the run computes in 'bf16-mixed'"
    assert len(told) == 1
    assert moves in told[0]
    assert found["story"] == ("hfhff" if scope == "module" else "hfhbb")
    assert found["weight"] == (-ROW * 4).expand(2, 8).tolist()


@pytest.mark.parametrize("case", raising_cases(), ids=lambda case: case.name)
def test_an_exception_in_one_ranks_forward_is_rescued_on_that_rank_alone(ranks: Ranks, case: Case) -> None:
    both = ranks(case.kind, case.name)
    faulty, other = (both[rank] for rank in (case.fails_on(0), 1 - case.fails_on(0)))
    rescue = "hf" if case.accumulate == 1 else "hhff"
    assert faulty["story"] == rescue * 3 + "f" * 3 * case.accumulate
    assert other["story"] == "h" * 3 * case.accumulate + "f" * 3 * case.accumulate
    assert faulty["weight"] == other["weight"] == (-ROW * STEPS).expand(2, 8).tolist()
    for result in both:
        assert (result["state"]["precision"], result["state"]["scale"]) == ("32-true", 2.0)
        assert result["state"]["counters"].pop("skipped_in_a_row") == {"0": 0}
        assert result["state"]["counters"] == counters("rrr...", 3)
    assert faulty["state"] == other["state"]


@pytest.mark.parametrize("case", raising_cases()[::2], ids=lambda case: case.name)
def test_both_ranks_name_the_module_that_raised_on_one(ranks: Ranks, case: Case) -> None:
    both = ranks(case.kind, case.name)
    assert both[0]["named"][:3] == both[1]["named"][:3] == [["unsupported", "picky"]] * 3


def test_both_ranks_are_rescued_if_one_raises_and_the_other_is_not_finite(ranks: Ranks) -> None:
    """As when a matcher refuses the NaN that one rank has, and the other has it in its loss."""
    both = ranks("both", MIXED.name)
    assert [result["raised"] for result in both] == [None, None]
    assert [result["weight"] for result in both] == [(-ROW * STEPS).expand(2, 8).tolist()] * 2
    assert both[0]["state"] == both[1]["state"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_cured_ends_both_ranks_at_once(ranks: Ranks, kind: Kind) -> None:
    """DDP: an exception in every precision. FSDP2: one in a forward, where the ranks meet."""
    other, faulty = ranks(kind, "end")
    assert faulty["raised"][:2] == ["NotImplementedError", "not implemented for 'Half'"]
    assert other["raised"] is not None
    assert max(faulty["seconds"], other["seconds"]) < 30


if __name__ == "__main__":
    work(jobs)
