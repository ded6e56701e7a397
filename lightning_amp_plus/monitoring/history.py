"""What became of the steps of a run, small however long it is: for pictures and summaries. Plain Python."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lightning_amp_plus.monitoring.events import EventKind, kinds_of
from lightning_amp_plus.monitoring.incidents import read_incidents
from lightning_amp_plus.precisions import PrecisionName
from lightning_amp_plus.step.report import StepReport

MANTISSA_BITS: dict[PrecisionName, int] = {"16-mixed": 10, "bf16-mixed": 7, "32-true": 23}

_MOST = 2000  # points, and events, before about every second one is let go
_MOST_PLACES = 100
_VERSION = 1


class Point(NamedTuple):
    """From a step on, the loss scale (1 without loss scaling) and the precision."""

    step: int
    scale: float
    precision: PrecisionName


class Event(NamedTuple):
    """What happened to a step."""

    step: int
    kind: EventKind


@dataclass
class RunHistory:
    """The loss scale and the incidents of a run, step by step.

    Attributes:
        points: Where the loss scale or the precision changed, in order of steps. A long history is thinned: its
            extremes and all changes of precision are kept.
        events: The steps that were not clean, in order. A long history is thinned, evenly.
        last_step: The last step; -1 before the first.
        places: How often a module, or ``""`` for code outside of modules, was at fault; the 100 first ones.
        causes: How often a step was not finite for a cause of :class:`Diagnosis`.
        moves: The step after which the run went on in another precision, and in which.
        kept: The modules that were found to need float32.
        lowest_scale: The lowest loss scale of the run in float16; ``None`` if there was none.
        highest_scale: The highest one.

    """

    points: list[Point] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    last_step: int = -1
    places: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    moves: list[tuple[int, PrecisionName]] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    lowest_scale: float | None = None
    highest_scale: float | None = None

    def add(self, report: StepReport, scale: float, precision: PrecisionName) -> None:
        """Take up the next step, after which the run has this loss scale (1 for none) and computes in ``precision``."""
        self.last_step = report.step
        self._note_scale(report.step, scale, precision)
        if report.is_clean and report.moves_to is None:
            return
        for kind in kinds_of(report):
            self._note_event(report.step, kind)
        if report.moves_to is not None:
            self.moves.append((report.step, report.moves_to))
        self.kept += [name for name in report.kept if name not in self.kept]
        if (diagnosis := report.diagnosis) is not None:
            self.causes[diagnosis.cause] += 1
            place = diagnosis.module or ""
            if diagnosis.cause in ("forward", "backward", "unsupported") and (
                place in self.places or len(self.places) < _MOST_PLACES
            ):
                self.places[place] += 1

    def _note_scale(self, step: int, scale: float, precision: PrecisionName) -> None:
        last = self.points[-1] if self.points else None
        if last is not None and last.scale == scale and last.precision == precision:
            return
        self.points.append(Point(step, scale, precision))
        if len(self.points) > _MOST:
            self.points = _thinned(self.points)
        if precision == "16-mixed":
            self.lowest_scale = min(scale, self.lowest_scale or scale)
            self.highest_scale = max(scale, self.highest_scale or scale)

    def _note_event(self, step: int, kind: EventKind) -> None:
        self.events.append(Event(step, kind))
        if len(self.events) > _MOST:
            del self.events[1:-1:2]

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
            lowest_scale=state["lowest_scale"],
            highest_scale=state["highest_scale"],
        )

    @classmethod
    def from_metrics(cls, path: str | Path) -> RunHistory:
        """Return what the ``metrics.csv`` of a ``CSVLogger`` tells.

        Where AMPMonitor has kept a log of incidents beside it, events are those of the log, and exact. Else what
        happened between two rows of the file is one event, at the later one.

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
        incidents = [it for it in read_incidents(path.parent) if "after" in it]
        history._add_rows(rows, incidents)
        if incidents:
            history._replace_events(incidents)
        return history

    def _replace_events(self, incidents: Iterable[dict[str, Any]]) -> None:
        self.events, self.moves = [], []
        for incident in incidents:
            for kind in incident["kinds"]:
                self._note_event(incident["step"], kind)
            if incident["moves_to"] is not None:
                self.moves.append((incident["step"], incident["moves_to"]))

    def _add_rows(self, rows: Sequence[dict[str, str]], incidents: Sequence[dict[str, Any]]) -> None:
        precisions = {bits: precision for precision, bits in MANTISSA_BITS.items()}
        counted: dict[EventKind, str] = {
            "retried": "amp/retried_attempts",
            "rescued": "amp/rescued_steps",
            "skipped": "amp/skipped_steps",
        }
        is_resumed = float(rows[0].get("epoch") or 0) > 0  # and what had happened before is told elsewhere
        before = {kind: float(rows[0].get(key) or 0) if is_resumed else 0.0 for kind, key in counted.items()}
        waiting = list(incidents)
        for row in rows:
            step = round(float(row["amp/applied_steps"]) + float(row["amp/skipped_steps"])) - 1
            scale = float(row["amp/loss_scale"])
            while waiting and waiting[0]["step"] <= step:
                incident = waiting.pop(0)
                after: tuple[PrecisionName, float] = tuple(incident["after"])
                self._note_scale(incident["step"], after[1], after[0])
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


def _thinned(points: list[Point]) -> list[Point]:
    """Keep of each four points the lowest and the highest, and all where the precision changes."""
    kept = points[:1]
    for start in range(1, len(points), 4):
        group = points[start : start + 4]
        extremes = min(group, key=lambda point: point.scale), max(group, key=lambda point: point.scale)
        for before, point in zip(points[start - 1 :], group, strict=False):
            if point in extremes or point.precision != before.precision or point is points[-1]:
                kept.append(point)
    return kept
