"""The benchmark runs and prints every row; what the ratios are is for a quiet machine to say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MIXED_ROWS = (
    "step, small model, {}",
    "step, small model, both callbacks, {}",
    "step, small model, AMPMonitor / without, {}",
    "step seen by DynamicRangeMonitor, large, {}",
    "step, large model, {}",
    "optimizer, foreach, {}",
    "optimizer, fused, {}",
    "optimizer, foreach, clip, {}",
    "optimizer, fused, clip, {} / stock foreach",
    "peak memory, large model, clip, {}",
    "syncs per step, {}",
    "syncs per step, {}, clip, both callbacks",
)
OTHER_ROWS = (
    "noise: stock / stock, step, small model, 16-mixed",
    "step, large model, our bf16-mixed / our 32-true",
    "syncs per step, 32-true",
    "syncs per step, 32-true, clip, both callbacks",
)


@pytest.fixture(scope="module")
def table() -> dict[str, list[str]]:
    """The columns of each row by its name."""
    command = [sys.executable, "benchmarks/overhead.py", "--quick", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("torch ")
    lines = run.stdout.splitlines()[2:]
    return {line[:54].strip(): line[54:].split() for line in lines}


def test_all_rows_hold_numbers(table: dict[str, list[str]]) -> None:
    expected = {row.format(precision) for row in MIXED_ROWS for precision in ("16-mixed", "bf16-mixed")}
    assert set(table) == expected | set(OTHER_ROWS)
    for columns in table.values():
        median, low, high = (float(column) for column in columns[:3])
        assert 0 <= low <= median <= high


@pytest.mark.parametrize("suffix", ["", ", clip, both callbacks"])
def test_syncs_per_step(table: dict[str, list[str]], suffix: str) -> None:
    """Exact on any machine: the counter sees stock's one read in fp16 and none in 32-true; we add at most one."""
    assert [table[f"syncs per step, {precision}{suffix}"][-1] for precision in ("16-mixed", "32-true")] == [
        "1.00",
        "0.00",
    ]
    for precision in ("16-mixed", "bf16-mixed", "32-true"):
        assert float(table[f"syncs per step, {precision}{suffix}"][0]) <= 1
