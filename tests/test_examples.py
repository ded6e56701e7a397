"""The examples, run as a user runs them: in their own process, with their own exit status, output and files."""

import csv
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_amp_plus

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

EXAMPLES = Path(__file__).parents[1] / "examples"
PACKAGES = Path(lightning_amp_plus.__file__).parents[1]  # so that the example meets the package under test


def run_example(name: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), "--no-progress", "--log-dir", "logs", *arguments]
    path = os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path}
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result


def table_of(stdout: str) -> dict[str, str]:
    """Read the final table: the name, two spaces or more, the value."""
    pairs = (line.split("  ", 1) for line in stdout.splitlines() if "  " in line)
    return {name: value.strip() for name, value in pairs}


def logged(picture: Path, key: str) -> list[float]:
    """One value for each step, skipped ones included; what is logged again at the end of an epoch counts once."""
    with open(picture.parent / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row[key]]
    steps = [float(row["amp/applied_steps"]) + float(row["amp/skipped_steps"]) for row in rows]
    return [float(row[key]) for _, row in sorted(dict(zip(steps, rows, strict=True)).items())]


# digits.py ------------------------------------------------------------------------------------------------------------


def test_digits_by_default_takes_what_is_native_learns_and_is_quiet(tmp_path: Path) -> None:
    result = run_example("digits.py", "--epochs", "2", cwd=tmp_path)
    assert result.stderr == ""

    table = table_of(result.stdout)
    counts = ["applied", "skipped", "rescued"]
    assert list(table) == [
        "precision", "fell back", *counts, "in float32", "final scale", "accuracy", "seconds", "picture"
    ]  # fmt: skip
    assert table["precision"] in {"bf16-mixed (auto)", "16-mixed (auto)", "32-true (auto)"}
    assert table["fell back"] == "never"
    assert int(table["applied"]) + int(table["skipped"]) == 44  # 2 epochs of ceil(1347 / 64) = 22 batches
    assert float(table["accuracy"]) > 0.8

    picture = tmp_path / table["picture"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    scales = logged(picture, "amp/loss_scale")
    assert len(scales) == 44
    assert scales[-1] == float(table["final scale"])
    if table["precision"] != "16-mixed (auto)":
        assert scales == [1.0] * 44
        assert table["skipped"] == "0"


def test_digits_fp16_holds_what_is_not_hot(tmp_path: Path) -> None:
    result = run_example("digits.py", "--epochs", "2", "--precision", "16-mixed", cwd=tmp_path)
    assert result.stderr == ""
    table = table_of(result.stdout)
    assert (table["precision"], table["fell back"]) == ("16-mixed", "never")
    assert int(table["applied"]) + int(table["skipped"]) == 44
    assert float(table["final scale"]) == 2**17 / 2 ** int(table["skipped"])  # it grows once, after 30 steps
    assert float(table["accuracy"]) > 0.8


def test_digits_hot_names_the_layer_loses_no_batch_and_falls_back(tmp_path: Path) -> None:
    result = run_example("digits.py", "--epochs", "4", "--precision", "16-mixed", "--hot", cwd=tmp_path)
    (said,) = [line for line in result.stderr.splitlines() if "step" in line]
    assert "Optimizer step 2 was not finite in '16-mixed'" in said
    assert "optimizer step 3 on the run computes in 'bf16-mixed'. gain put out" in said

    table = table_of(result.stdout)
    assert (table["precision"], table["fell back"]) == ("16-mixed", "to bf16-mixed at step 3")
    assert (table["applied"], table["skipped"], table["rescued"]) == ("88", "0", "3")
    assert float(table["accuracy"]) >= 0.95
    picture = tmp_path / table["picture"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert logged(picture, "amp/mantissa_bits") == [23.0] * 2 + [7.0] * 86  # the move is to the narrowest that holds


def test_digits_hot_with_scope_module_stays_in_fp16(tmp_path: Path) -> None:
    arguments = ("--epochs", "4", "--precision", "16-mixed", "--hot", "--scope", "module")
    table = table_of(run_example("digits.py", *arguments, cwd=tmp_path).stdout)
    assert (table["precision"], table["fell back"], table["in float32"]) == ("16-mixed", "never", "gain")
    assert (table["applied"], table["skipped"], table["rescued"]) == ("88", "0", "3")
    assert float(table["accuracy"]) >= 0.95


def test_digits_hot_with_stock_learns_nothing_and_stock_says_nothing(tmp_path: Path) -> None:
    result = run_example("digits.py", "--epochs", "4", "--precision", "16-mixed", "--hot", "--stock", cwd=tmp_path)
    assert not re.search("overflow|nan|inf|skip|warn", result.stderr, re.IGNORECASE)
    table = table_of(result.stdout)
    assert (table["precision"], table["fell back"]) == ("16-mixed (stock)", "never")
    assert (table["applied"], table["skipped"]) == ("0", "88")
    assert float(table["final scale"]) == pytest.approx(2.0**16 / 2.0**88)
    assert float(table["accuracy"]) == pytest.approx(0.1)  # NaN logits: every image is read as a 0
    assert (tmp_path / table["picture"]).read_bytes().startswith(b"\x89PNG")


def test_digits_with_stock_counts_its_steps_too(tmp_path: Path) -> None:
    table = table_of(run_example("digits.py", "--epochs", "1", "--stock", cwd=tmp_path).stdout)
    assert table["precision"] == "bf16-mixed (stock)"
    assert [table[name] for name in ("applied", "skipped", "final scale")] == ["22", "0", "1"]


# gan.py ---------------------------------------------------------------------------------------------------------------


def test_gan_learns_to_draw_the_digit_that_was_asked_for(tmp_path: Path) -> None:
    result = run_example("gan.py", "--epochs", "20", "--precision", "32-true", cwd=tmp_path)
    assert result.stderr == ""
    table = table_of(result.stdout)
    assert list(table) == ["precision", "applied", "skipped", "recognised", "seconds", "picture"]
    assert (table["applied"], table["skipped"]) == ("1120", "0")  # 20 epochs of 1797 // 64 = 28 batches, twice
    assert float(table["recognised"].split()[0]) > 0.4  # by chance 0.1, after all 50 epochs 0.97
    assert (tmp_path / table["picture"]).read_bytes().startswith(b"\x89PNG")


def test_gan_runs_in_fp16(tmp_path: Path) -> None:
    result = run_example("gan.py", "--epochs", "1", "--precision", "16-mixed", cwd=tmp_path)
    assert result.stderr == ""
    table = table_of(result.stdout)
    assert table["precision"] == "16-mixed"
    assert int(table["applied"]) + int(table["skipped"]) == 56
    assert int(table["skipped"]) < 4


@pytest.mark.parametrize("name", ["digits.py", "gan.py"])
@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (("--epochs", "0"), "argument --epochs: 0 is less than 1; train for at least one epoch"),
        (("--seed", "-1"), "argument --seed: -1 is not between 0 and 2**32 - 1"),
        (("--precision", "64-true"), "argument --precision: invalid choice: '64-true'"),
    ],
)
def test_examples_refuse_bad_arguments(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    arguments: tuple[str, str],
    remedy: str,
) -> None:
    script = str(EXAMPLES / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_path(script, run_name="__main__")  # in this process, which has the imports already
    assert exit_info.value.code == 2
    stderr = capsys.readouterr().err
    assert "usage:" in stderr
    assert remedy in stderr
    assert not list(tmp_path.iterdir())
