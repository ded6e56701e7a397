"""The log of incidents: what a line tells, that lines stay whole, that the file stays small."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

import lightning_amp_plus
from lightning_amp_plus.diagnosis.cause import Diagnosis
from lightning_amp_plus.monitoring import incidents
from lightning_amp_plus.monitoring.incidents import FILE_NAME, IncidentLog, incident_of, read_incidents
from lightning_amp_plus.step.report import StepReport

PACKAGES = str(Path(lightning_amp_plus.__file__).parents[1])
WRITER = f"""
import sys
sys.path.insert(0, {PACKAGES!r})
from lightning_amp_plus.monitoring.incidents import IncidentLog
log, count, name = IncidentLog(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
step = 0
while step != count:
    log.add({{"step": step, "who": name, "text": name * 500}})
    step += 1
    if step == 20:
        print("begun", flush=True)
"""


def skipped(**what: Any) -> StepReport:
    given = {"step": 3, "optimizer": 1, "precision": "16-mixed", "scale": 1024.0, "attempts": 1, "outcome": "skipped"}
    return StepReport(**{**given, **what})


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def told(report: StepReport) -> dict[str, Any]:
    return incident_of(report, 0, 0, 0, ("16-mixed", 1024.0))


# What a line tells ----------------------------------------------------------------------------------------------------


def test_an_incident_tells_all_of_a_step() -> None:
    report = StepReport(
        7, 2, "32-true", 1.0, 3, "applied", rescued=True, diagnosis=Diagnosis("forward", "head", "1e5"),
        tried=(("16-mixed", 1024.0), ("16-mixed", 512.0), ("32-true", 1.0)), moves_to="bf16-mixed", kept=("head",),
    )  # fmt: skip
    incident = incident_of(report, epoch=4, batch_idx=9, global_step=6, after=("bf16-mixed", 1.0))
    age = datetime.now(timezone.utc) - datetime.fromisoformat(incident.pop("time"))
    assert timedelta(0) <= age < timedelta(minutes=1)
    assert incident == {
        "step": 7,
        "global_step": 6,
        "epoch": 4,
        "batch_idx": 9,
        "optimizer": 2,
        "kinds": ["rescued", "fallback"],
        "outcome": "applied",
        "cause": "forward",
        "module": "head",
        "detail": "1e5",
        "non_finite": None,
        "tried": [["16-mixed", 1024.0], ["16-mixed", 512.0], ["32-true", 1.0]],
        "precision": "32-true",
        "scale": 1.0,
        "moves_to": "bf16-mixed",
        "kept": ["head"],
        "after": ["bf16-mixed", 1.0],
    }


def test_a_step_that_was_run_once_tells_its_one_attempt() -> None:
    incident = told(skipped(non_finite="gradients"))
    assert (incident["tried"], incident["cause"], incident["module"]) == ([["16-mixed", 1024.0]], None, None)
    assert (incident["kinds"], incident["non_finite"]) == (["skipped"], "gradients")


@pytest.mark.parametrize(
    ("what", "kinds"),
    [
        ({"outcome": "applied", "attempts": 2}, ["retried"]),
        ({"attempts": 6}, ["skipped"]),
        ({"outcome": "applied", "attempts": 2, "rescued": True, "kept": ("head",)}, ["rescued", "fallback"]),
        ({"moves_to": "bf16-mixed"}, ["skipped", "fallback"]),
    ],
)
def test_the_kinds_are_what_became_of_the_step(what: dict[str, Any], kinds: list[str]) -> None:
    assert told(skipped(**what))["kinds"] == kinds


def test_an_incident_survives_json_as_it_is(tmp_path: Path) -> None:
    found = Diagnosis("unsupported", "wörter.0", 'it raised:\n "¼ \u2028 \ud800" \x00')
    incident = told(skipped(diagnosis=found))
    log = IncidentLog(tmp_path)
    log.add(incident)
    log.close()
    assert read_incidents(tmp_path) == [incident]
    assert len(lines_of(tmp_path / FILE_NAME)) == 1


def test_a_long_text_is_cut_so_that_a_line_is_small(tmp_path: Path) -> None:
    incident = told(skipped(diagnosis=Diagnosis("unsupported", "head", "x" * 10**6)))
    assert incident["detail"] == "x" * 2000


def test_a_report_with_many_kept_modules_fits_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is longer than the file may be is written all the same, and the next begins a new one."""
    monkeypatch.setattr(incidents, "MAX_BYTES", 1000)
    log = IncidentLog(tmp_path)
    for step in range(3):
        log.add(told(skipped(step=step, kept=tuple(f"layers.{i}" for i in range(200)))))
    log.close()
    assert [incident["step"] for incident in read_incidents(tmp_path)] == [1, 2]


# The file -------------------------------------------------------------------------------------------------------------


def test_the_first_incident_makes_the_folder_and_none_makes_nothing(tmp_path: Path) -> None:
    log = IncidentLog(tmp_path / "logs" / "version_0")
    log.close()
    assert list(tmp_path.iterdir()) == []
    log.add({"step": 1})
    assert log.path == tmp_path / "logs" / "version_0" / "amp_incidents.jsonl"
    assert lines_of(log.path) == ['{"step": 1}']  # before it is closed, too
    log.close()


def test_a_closed_log_and_a_new_one_go_on_where_it_ended(tmp_path: Path) -> None:
    log = IncidentLog(str(tmp_path))
    log.add({"step": 0})
    log.close()
    log.close()
    log.add({"step": 1})
    log.close()
    other = IncidentLog(tmp_path)
    other.add({"step": 2})
    other.close()
    assert [incident["step"] for incident in read_incidents(str(tmp_path))] == [0, 1, 2]


def test_it_keeps_the_newest_within_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incidents, "MAX_BYTES", 1000)
    log = IncidentLog(tmp_path)
    for step in range(1000):
        log.add({"step": step, "text": "x" * 60})
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2000
    log.close()
    assert {path.name for path in tmp_path.iterdir()} == {FILE_NAME, f"{FILE_NAME}.1"}
    steps = [incident["step"] for incident in read_incidents(tmp_path)]
    assert 11 <= len(steps) <= 22  # of 84 bytes: one file of them at least
    assert steps == list(range(1000 - len(steps), 1000))


def test_a_resumed_run_stays_within_the_bound_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incidents, "MAX_BYTES", 500)
    for step in range(50):
        log = IncidentLog(tmp_path)
        log.add({"step": step, "text": "x" * 60})
        log.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1000
    assert read_incidents(tmp_path)[-1]["step"] == 49


def test_two_processes_write_whole_lines_to_one_file(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path), "200"]
    writers = [subprocess.Popen([*command, name], stdout=subprocess.DEVNULL) for name in "ab"]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    found = [json.loads(line) for line in lines_of(tmp_path / FILE_NAME)]
    assert all(incident["text"] == incident["who"] * 500 for incident in found)
    for name in "ab":
        assert [incident["step"] for incident in found if incident["who"] == name] == list(range(200))


@pytest.mark.skipif(sys.platform == "win32", reason="kills a process by a signal")
def test_a_writer_that_is_killed_leaves_lines_that_can_be_read(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path), "-1", "a"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "begun\n"
        writer.send_signal(signal.SIGKILL)
    steps = [incident["step"] for incident in read_incidents(tmp_path)]
    assert len(steps) >= 20
    assert steps == list(range(steps[0], steps[0] + len(steps)))


def test_what_follows_the_torn_line_of_a_killed_process_is_not_lost(tmp_path: Path) -> None:
    """As when a disk was full, and a resumed run appends to the same file."""
    (tmp_path / FILE_NAME).write_text('{"step": 0}\n{"step": 1, "det')
    log = IncidentLog(tmp_path)
    log.add({"step": 2})
    log.add({"step": 3})
    log.close()
    assert [incident["step"] for incident in read_incidents(tmp_path)] == [0, 2, 3]


def test_a_folder_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    log = IncidentLog(tmp_path / "file" / "logs")
    with pytest.warns(RuntimeWarning, match="Incidents are not logged") as told:
        log.add({"step": 0})
    log.add({"step": 1})
    log.close()
    assert len(told) == 1
    assert read_incidents(tmp_path / "file" / "logs") == []


# Reading --------------------------------------------------------------------------------------------------------------


def test_there_are_no_incidents_where_there_is_no_file(tmp_path: Path) -> None:
    assert read_incidents(tmp_path / "nowhere") == []


def test_the_older_file_is_read_first(tmp_path: Path) -> None:
    (tmp_path / f"{FILE_NAME}.1").write_text('{"step": 0}\n{"step": 1}\n')
    (tmp_path / FILE_NAME).write_text('{"step": 2}\n')
    assert [incident["step"] for incident in read_incidents(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize("torn", ['{"step": 1, "det', "", "\x00\x00\x00"])
def test_a_line_that_is_no_incident_is_left_out(tmp_path: Path, torn: str) -> None:
    """A file system that lost power fills a file with zeros."""
    (tmp_path / FILE_NAME).write_text(f'{{"step": 0}}\n{torn}\n{{"step": 2}}\n')
    assert [incident["step"] for incident in read_incidents(tmp_path)] == [0, 2]


def test_bytes_that_are_no_text_do_not_hide_the_rest(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b'{"step": 0}\n\xff\xfe{"st\n{"step": 2}\n')
    assert [incident["step"] for incident in read_incidents(tmp_path)] == [0, 2]
