"""The example, run as a user runs it: in its own process, with its own exit status, output and files."""

import csv
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_amp_plus

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

DIGITS = Path(__file__).parents[1] / "examples" / "digits.py"
PACKAGES = Path(lightning_amp_plus.__file__).parents[1]  # so that the example meets the package under test


def run_digits(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DIGITS), "--no-progress", *arguments]
    path = os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)


def table_of(stdout: str) -> dict[str, str]:
    """Read the final table: the name, two spaces or more, the value."""
    pairs = (line.split("  ", 1) for line in stdout.splitlines() if "  " in line)
    return {name: value.strip() for name, value in pairs}


def test_digits_learns_and_leaves_its_table_picture_and_log(tmp_path: Path) -> None:
    result = run_digits("--epochs", "2", "--precision", "32-true", "--log-dir", "logs", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr

    table = table_of(result.stdout)
    assert list(table) == ["precision", "applied", "skipped", "final scale", "accuracy", "seconds", "picture"]
    assert table["precision"] == "32-true"
    assert table["applied"] == "44"  # 2 epochs of ceil(1347 / 64) = 22 batches
    assert table["skipped"] == "0"
    assert table["final scale"] == "1"
    assert float(table["accuracy"]) > 0.8

    picture = tmp_path / table["picture"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    with open(picture.parent / "metrics.csv", newline="") as file:
        scales = {
            int(row["step"]): float(row["amp/loss_scale"]) for row in csv.DictReader(file) if row["amp/loss_scale"]
        }
    assert scales == dict.fromkeys(range(44), 1.0)


def test_digits_fp16_reports_the_scale_and_accounts_for_every_step(tmp_path: Path) -> None:
    result = run_digits("--epochs", "1", "--precision", "16-mixed", "--log-dir", "logs", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    table = table_of(result.stdout)
    assert int(table["applied"]) + int(table["skipped"]) == 22
    assert float(table["final scale"]) > 1


def test_digits_stock_runs_without_the_counters_and_the_picture(tmp_path: Path) -> None:
    result = run_digits("--epochs", "1", "--stock", "--log-dir", "logs", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    table = table_of(result.stdout)
    assert table["precision"] == "bf16-mixed (stock)"
    assert [table[name] for name in ("applied", "skipped", "final scale")] == ["-", "-", "-"]
    assert "picture" not in table
    assert not list(tmp_path.rglob("*.png"))


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (("--epochs", "0"), "argument --epochs: 0 is less than 1; train for at least one epoch"),
        (("--seed", "-1"), "argument --seed: -1 is not between 0 and 2**32 - 1"),
        (("--precision", "64-true"), "argument --precision: invalid choice: '64-true'"),
    ],
)
def test_digits_refuses_bad_arguments(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, str],
    remedy: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(DIGITS), *arguments])
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_path(str(DIGITS), run_name="__main__")  # in this process, which has the imports already
    assert exit_info.value.code == 2
    stderr = capsys.readouterr().err
    assert "usage:" in stderr
    assert remedy in stderr
    assert not list(tmp_path.iterdir())
