"""What became of the steps of a run, small however long it is: for pictures and summaries. Plain Python."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from lightning_amp_plus.report import Precision, StepReport

EventKind = Literal["retried", "rescued", "skipped", "fallback"]
EVENT_KINDS: tuple[EventKind, ...] = get_args(EventKind)
"""Applied at a lower loss scale; applied in a wider precision; not applied; the run went on in another precision."""

MANTISSA_BITS: dict[Precision, int] = {"16-mixed": 10, "bf16-mixed": 7, "32-true": 23}

_MOST = 2000  # points, and events, before every second one is let go
_MOST_PLACES = 100
_VERSION = 1


class Point(NamedTuple):
    """From a step on, the loss scale (1 without loss scaling) and the precision."""

    step: int
    scale: float
    precision: Precision


class Event(NamedTuple):
    """What happened to a step."""

    step: int
    kind: EventKind


@dataclass
class RunHistory:
    """The loss scale and the incidents of a run, step by step.

    Attributes:
        points: Where the loss scale or the precision changed, in order of steps; a long history is thinned.
        events: The steps that were not clean, in order; a long history is thinned, the newest kept.
        last_step: The last step; -1 before the first.
        places: How often a module, or ``""`` for code outside of modules, was at fault; the 100 first ones.
        causes: How often a step was not finite for a cause of :class:`Diagnosis`.
        moves: The step after which the run went on in another precision, and in which.
        kept: The modules that were found to need float32.
        by_optimizer: For each optimizer, by its position, how many steps were applied and how many skipped.
        lowest_scale: The lowest loss scale of the run in float16; ``None`` if there was none.
        highest_scale: The highest one.

    """

    points: list[Point] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    last_step: int = -1
    places: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    moves: list[tuple[int, Precision]] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    by_optimizer: dict[int, list[int]] = field(default_factory=dict)
    lowest_scale: float | None = None
    highest_scale: float | None = None

    def add(self, report: StepReport, scale: float, precision: Precision) -> None:
        """Take up the next step, after which the run has this loss scale (1 for none) and computes in ``precision``."""
        self.last_step = report.step
        self.by_optimizer.setdefault(report.optimizer, [0, 0])[report.outcome == "skipped"] += 1
        self._note_scale(report.step, scale, precision)
        if report.is_clean and report.moves_to is None:
            return
        for kind in kinds_of(report):
            self._note_event(report.step, kind)
        if report.moves_to is not None:
            self.moves.append((report.step, report.moves_to))
            _thin(self.moves)
        self.kept += report.kept
        if (diagnosis := report.diagnosis) is not None:
            self.causes[diagnosis.cause] += 1
            place = diagnosis.module or ""
            if diagnosis.cause in ("forward", "backward", "unsupported") and (
                place in self.places or len(self.places) < _MOST_PLACES
            ):
                self.places[place] += 1

    def _note_scale(self, step: int, scale: float, precision: Precision) -> None:
        last = self.points[-1] if self.points else None
        if last is not None and last.scale == scale and last.precision == precision:
            return
        self.points.append(Point(step, scale, precision))
        _thin(self.points)
        if precision == "16-mixed":
            self.lowest_scale = min(scale, self.lowest_scale or scale)
            self.highest_scale = max(scale, self.highest_scale or scale)

    def _note_event(self, step: int, kind: EventKind) -> None:
        self.events.append(Event(step, kind))
        _thin(self.events)

    # State ------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return it as builtins, for checkpoints and JSON."""
        return {
            "version": _VERSION,
            "points": [list(point) for point in self.points],
            "events": [list(event) for event in self.events],
            "last_step": self.last_step,
            "places": dict(self.places),
            "causes": dict(self.causes),
            "moves": [list(move) for move in self.moves],
            "kept": list(self.kept),
            "by_optimizer": {index: list(counts) for index, counts in self.by_optimizer.items()},
            "lowest_scale": self.lowest_scale,
            "highest_scale": self.highest_scale,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> RunHistory:
        """Return what :meth:`state_dict` has described.

        Raises:
            ValueError: If the state was written by a later version of the package.

        """
        if state["version"] > _VERSION:
            raise ValueError(
                f"The history has version {state['version']}, and this lightning_amp_plus reads up to {_VERSION}:"
                " update the package. Nothing was loaded."
            )
        return cls(
            points=[Point(*point) for point in state["points"]],
            events=[Event(*event) for event in state["events"]],
            last_step=state["last_step"],
            places=Counter(state["places"]),
            causes=Counter(state["causes"]),
            moves=[(step, precision) for step, precision in state["moves"]],
            kept=list(state["kept"]),
            by_optimizer={int(index): list(counts) for index, counts in state["by_optimizer"].items()},
            lowest_scale=state["lowest_scale"],
            highest_scale=state["highest_scale"],
        )

    @classmethod
    def from_metrics(cls, path: str | Path) -> RunHistory:
        """Return what the ``metrics.csv`` of a ``CSVLogger`` tells: what happened between two of its rows is one event.

        Args:
            path: The file, or the folder that it is in.

        Raises:
            ValueError: If AMPMonitor has logged nothing to it.

        """
        path = Path(path)
        path = path / "metrics.csv" if path.is_dir() else path
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row.get("amp/loss_scale")]
        if not rows:
            raise ValueError(
                f"{path} has no amp/loss_scale: pass the metrics.csv of a run with the AMPMonitor callback, or the"
                " callback itself."
            )
        history = cls()
        history._add_rows(rows)
        return history

    def _add_rows(self, rows: Iterable[dict[str, str]]) -> None:
        precisions = {bits: precision for precision, bits in MANTISSA_BITS.items()}
        counted: dict[EventKind, str] = {
            "retried": "amp/retried_attempts",
            "rescued": "amp/rescued_steps",
            "skipped": "amp/skipped_steps",
        }
        before = dict.fromkeys(counted, 0.0)
        for row in rows:
            step = round(float(row["amp/applied_steps"]) + float(row["amp/skipped_steps"])) - 1
            scale = float(row["amp/loss_scale"])
            grown = []
            for kind, key in counted.items():
                count = float(row.get(key) or 0)
                if count > before[kind]:
                    grown.append(kind)
                before[kind] = count
            if "rescued" in grown and "retried" in grown:
                grown.remove("retried")  # a rescue is made of attempts too
            for kind in grown:
                self._note_event(step, kind)
            last = self.points[-1] if self.points else None
            precision = precisions[round(float(row["amp/mantissa_bits"]))]
            if scale != 1:
                precision = "16-mixed"
            elif last is not None and "rescued" in grown and scale == last.scale:
                precision = last.precision  # that of the step was wider than the run
            if last is not None and precision != last.precision:
                self._note_event(step, "fallback")
                self.moves.append((step, precision))
            self.last_step = step
            self._note_scale(step, scale, precision)


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


def scale_text(scale: float) -> str:
    """Return a loss scale in few characters: as a power of two where it is one.

    Example:
        >>> scale_text(8192.0), scale_text(1000.0)
        ('2^13', '1000')

    """
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:.6g}"


def _thin(items: list[Any]) -> None:
    """Let every second item go, but the first and the last, when there are too many."""
    if len(items) > _MOST:
        del items[1:-1:2]
