"""Counters of steps, against a list of the outcomes."""

import random
from dataclasses import FrozenInstanceError

import pytest

from lightning_amp_plus import StepCounters, StepReport
from lightning_amp_plus.step.report import Outcome


@pytest.mark.parametrize("share", [0.0, 0.03, 0.5, 1.0])
def test_counters_are_those_of_the_list_of_outcomes(share: float) -> None:
    generator = random.Random(0)  # noqa: S311
    counters, outcomes = StepCounters(), list[Outcome]()
    assert counters.overflow_rate == 0
    for _ in range(250):
        outcome: Outcome = "skipped" if generator.random() < share else "applied"
        outcomes.append(outcome)
        counters = counters.after(outcome)
        recent = outcomes[-100:]
        assert counters.applied_steps == outcomes.count("applied")
        assert counters.skipped_steps == outcomes.count("skipped")
        assert counters.overflow_rate == recent.count("skipped") / len(recent)
        assert f"{counters.recent:b}".zfill(len(recent)) == "".join(str(int(o == "skipped")) for o in recent)


def test_a_step_leaves_the_earlier_counters_alone() -> None:
    before = StepCounters(applied_steps=3, skipped_steps=2, recent=0b10010)
    after = before.after("skipped")
    assert after == StepCounters(applied_steps=3, skipped_steps=3, recent=0b100101)
    assert before == StepCounters(applied_steps=3, skipped_steps=2, recent=0b10010)
    assert (before.overflow_rate, after.overflow_rate) == (0.4, 0.5)


def test_counters_and_reports_are_frozen() -> None:
    report = StepReport(step=7, optimizer=1, precision="16-mixed", scale=8.0, attempts=1, outcome="applied")
    assert (report.non_finite, report.grad_norm, report.clipped) == (None, None, None)
    for state, field in ((report, "step"), (StepCounters(), "recent")):
        with pytest.raises(FrozenInstanceError):
            setattr(state, field, 1)
