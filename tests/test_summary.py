"""A run in a few rows: each number where it belongs, and nothing about what did not happen."""

from __future__ import annotations

from collections import Counter

import pytest

from lightning_amp_plus.monitoring.history import RunHistory
from lightning_amp_plus.monitoring.summary import as_text, summary_rows
from lightning_amp_plus.step.report import StepCounters


def test_a_run_without_incidents_has_the_rows_that_all_have() -> None:
    history = RunHistory(last_step=9, lowest_scale=2.0**16, highest_scale=2.0**16)
    assert summary_rows(history, StepCounters(applied_steps=10), "16-mixed", 2.0**16) == [
        ("precision", "16-mixed, loss scale 2^16"),
        ("applied steps", "10"),
        ("skipped steps", "0"),
        ("retried attempts", "0"),
        ("rescued steps", "0"),
        ("fallbacks", "none"),
        ("loss scale", "2^16"),
    ]


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_without_loss_scaling_no_scale_is_told(precision: str) -> None:
    rows = summary_rows(RunHistory(), StepCounters(applied_steps=1), precision, 1.0)  # type: ignore[arg-type]
    assert dict(rows)["precision"] == precision
    assert "loss scale" not in dict(rows)


def test_all_that_happened_is_told_with_shares_and_counts() -> None:
    history = RunHistory(
        moves=[(1234, "bf16-mixed"), (20000, "32-true")],
        kept=["layers.3.wo"],
        lowest_scale=3.0,
        highest_scale=2.0**13,
        causes=Counter({"scale": 2, "forward": 1500}),
        places=Counter({"": 2, "layers.3.wo": 1500}),
    )
    counters = StepCounters(9000, 1000, retried_attempts=12345, rescued_steps=5, rescued_evaluations=1002)
    assert summary_rows(history, counters, "32-true", 1.0) == [
        ("precision", "32-true"),
        ("applied steps", "9,000"),
        ("skipped steps", "1,000 (10.00%)"),
        ("retried attempts", "12,345"),
        ("rescued steps", "5 (0.05%)"),
        ("rescued evaluation batches", "1,002"),
        ("fallbacks", "bf16-mixed after step 1,234, 32-true after step 20,000"),
        ("kept in float32", "layers.3.wo"),
        ("loss scale", "3 to 2^13"),
        ("causes", "forward (1,500), scale (2)"),
        ("where", "layers.3.wo (1,500), outside of modules (2)"),
    ]


def test_of_many_names_the_five_most_frequent_are_told_and_how_many_more_there_are() -> None:
    history = RunHistory(places=Counter({f"layer{n}": n for n in range(1, 9)}), kept=list("abcdef"))
    rows = dict(summary_rows(history, StepCounters(), "16-mixed", 8.0))
    assert rows["where"] == "layer8 (8), layer7 (7), layer6 (6), layer5 (5), layer4 (4) and 3 more"
    assert rows["kept in float32"] == "a, b, c, d, e and 1 more"


def test_as_text_the_values_stand_below_each_other() -> None:
    text = as_text("A run", [("applied steps", "3"), ("where", "here")])
    assert text == "A run\n  applied steps  3\n  where          here"
