"""A run in a few rows: what became of its steps, where it failed, what it runs in now. Plain Python."""

from __future__ import annotations

from collections import Counter

from lightning_amp_plus.monitoring.history import RunHistory
from lightning_amp_plus.precisions import PrecisionName, scale_text
from lightning_amp_plus.step.report import StepCounters

_MOST_NAMES = 5


def summary_rows(
    history: RunHistory, counters: StepCounters, precision: PrecisionName, scale: float
) -> list[tuple[str, str]]:
    """Return names and values, both as text.

    Args:
        history: What happened.
        counters: What is counted.
        precision: What the run computes in at the end.
        scale: The loss scale at the end; 1 without loss scaling.

    """
    rows = [
        ("precision", precision if precision != "16-mixed" else f"{precision}, loss scale {scale_text(scale)}"),
        ("applied steps", f"{counters.applied_steps:,}"),
        ("skipped steps", _with_share(counters.skipped_steps, counters.steps)),
        ("retried attempts", f"{counters.retried_attempts:,}"),
        ("rescued steps", _with_share(counters.rescued_steps, counters.steps)),
    ]
    if counters.rescued_evaluations:
        rows.append(("rescued evaluation batches", f"{counters.rescued_evaluations:,}"))
    moves = [f"{moved_to} after step {step:,}" for step, moved_to in history.moves]
    rows.append(("fallbacks", _some(moves) or "none"))
    if history.kept:
        rows.append(("kept in float32", _some(history.kept)))
    if history.lowest_scale is not None and history.highest_scale is not None:
        low, high = scale_text(history.lowest_scale), scale_text(history.highest_scale)
        rows.append(("loss scale", low if low == high else f"{low} to {high}"))
    if history.causes:
        rows.append(("causes", _counted(history.causes)))
    if history.places:
        rows.append(
            ("where", _counted(Counter({name or "outside of modules": n for name, n in history.places.items()})))
        )
    return rows


def as_text(title: str, rows: list[tuple[str, str]]) -> str:
    """Return the rows as lines of text, under a title.

    Example:
        >>> print(as_text("run", [("applied steps", "3")]))
        run
          applied steps  3

    """
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def _with_share(count: int, steps: int) -> str:
    return f"{count:,} ({count / steps:.2%})" if count else "0"


def _counted(counts: Counter[str]) -> str:
    return _some([f"{name} ({count:,})" for name, count in counts.most_common()])


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
