"""What can happen to a step, besides being applied at the first attempt. Plain Python."""

from __future__ import annotations

from typing import Literal, get_args

from lightning_amp_plus.step.report import StepReport

EventKind = Literal["retried", "rescued", "skipped", "fallback"]
EVENT_KINDS: tuple[EventKind, ...] = get_args(EventKind)
"""Applied at a lower loss scale; applied in a wider precision; not applied; the run went on in another precision."""


def kinds_of(report: StepReport) -> list[EventKind]:
    """Return what a step was, besides clean."""
    kinds: list[EventKind] = []
    if report.outcome == "skipped":
        kinds.append("skipped")
    elif report.rescued:
        kinds.append("rescued")
    elif report.attempts > 1:
        kinds.append("retried")
    if report.moves_to is not None or report.kept:
        kinds.append("fallback")
    return kinds
