"""The incident log: a line of JSON for each step that was not clean, in a file that cannot grow for ever.

It is plain Python: the standard library's rotating file handler appends each line at once and as a whole, and a disk
that is full ends no run.
"""

from __future__ import annotations

import json
import logging
import warnings
from datetime import datetime, timezone
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from lightning_amp_plus.monitoring.events import kinds_of
from lightning_amp_plus.precisions import PrecisionName
from lightning_amp_plus.step.report import StepReport

FILE_NAME = "amp_incidents.jsonl"
MAX_BYTES = 2**20
"""Of the file; then it is renamed to ``amp_incidents.jsonl.1``, in place of an earlier one, and a new one begun."""

_LONGEST_TEXT = 2000  # characters: a line is far smaller than a file


def time_now() -> str:
    """Return the time in UTC, as text whose order is that of time."""
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")


def incident_of(
    report: StepReport, epoch: int, batch_idx: int, global_step: int, after: tuple[PrecisionName, float]
) -> dict[str, Any]:
    """Return what a line tells of a step.

    Its keys: ``time`` (UTC), ``step`` (from 0; those of all optimizers, skipped ones included), ``global_step`` (the
    Trainer's, before the step), ``epoch``, ``batch_idx`` (of the last of the step's batches), ``optimizer``, ``kinds``
    (of ``EVENT_KINDS``), ``outcome``, ``cause``, ``module``, ``detail`` (the diagnosis), ``non_finite``, ``tried``
    (precision and loss scale of each attempt), ``precision``, ``scale`` (of the last attempt), ``moves_to``, ``kept``,
    ``after`` (precision and loss scale that the run goes on with).
    """
    diagnosis = report.diagnosis
    tried = report.tried or ((report.precision, report.scale),)
    return {
        "time": time_now(),
        "step": report.step,
        "global_step": global_step,
        "epoch": epoch,
        "batch_idx": batch_idx,
        "optimizer": report.optimizer,
        "kinds": kinds_of(report),
        "outcome": report.outcome,
        "cause": None if diagnosis is None else diagnosis.cause,
        "module": None if diagnosis is None else diagnosis.module,
        "detail": None if diagnosis is None else diagnosis.detail[:_LONGEST_TEXT],
        "non_finite": report.non_finite,
        "tried": [list(attempt) for attempt in tried],
        "precision": report.precision,
        "scale": report.scale,
        "moves_to": report.moves_to,
        "kept": list(report.kept),
        "after": list(after),
    }


def evaluation_incident(batches: int, step: int, epoch: int) -> dict[str, Any]:
    """Return what a line tells of a validation, after an optimizer step, in which so many batches were rescued."""
    detail = f"{batches} batches of the validation were not finite, or raised, and were run again in a wider precision."
    return {"time": time_now(), "step": step, "epoch": epoch, "kinds": [], "outcome": "applied", "detail": detail}


class IncidentLog:
    """Appends incidents to ``amp_incidents.jsonl``, which it makes with the first of them.

    Args:
        folder: Where the file is.

    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / FILE_NAME
        self._handler: RotatingFileHandler | None = None
        self._cannot_write = False

    def add(self, incident: dict[str, Any]) -> None:
        """Append a line. If the file cannot be opened, one warning tells so, and nothing is written."""
        if self._cannot_write:
            return
        if self._handler is None:
            try:
                self._handler = _opened(self.path)
            except OSError as error:
                self._cannot_write = True
                warnings.warn(f"Incidents are not logged: {error}.", RuntimeWarning, stacklevel=2)
                return
        line = json.dumps(incident, allow_nan=False, default=str)
        self._handler.emit(logging.makeLogRecord({"msg": line}))

    def close(self) -> None:
        """Let go of the file; another line opens it again."""
        if self._handler is not None:
            self._handler.close()
            self._handler = None


def _opened(path: Path) -> RotatingFileHandler:
    path.parent.mkdir(parents=True, exist_ok=True)
    is_torn = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
    if is_torn:  # by a process that was killed, or a disk that was full
        with path.open("a") as file:
            file.write("\n")
    return RotatingFileHandler(path, maxBytes=MAX_BYTES, backupCount=1, encoding="utf-8")


def read_incidents(folder: str | Path, since: str = "") -> list[dict[str, Any]]:
    """Return the incidents of a run, oldest first, from the folder that they were logged to.

    A line that is no JSON, as the last one of a process that was killed, is left out.

    Args:
        folder: Where the file is.
        since: The time, of :func:`time_now`, before which they are left out.

    """
    path = Path(folder) / FILE_NAME
    incidents = []
    for file in (path.with_name(f"{FILE_NAME}.1"), path):
        if file.exists():
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    incidents.append(json.loads(line))
                except json.JSONDecodeError:
                    continue
    return [it for it in incidents if isinstance(it, dict) and it.get("time", since) >= since]
