"""The README's code runs, its commands are those that CI calls, its numbers are torch's."""

import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_amp_plus import AdaptiveMixedPrecision, AMPMonitor, LossScale, PrecisionFallback

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_first_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    assert len(example.strip().splitlines()) <= 15
    names: dict[str, object] = {}
    exec(example, names)  # noqa: S102
    counters = names["trainer"].precision_plugin.counters  # type: ignore[attr-defined]
    assert counters.applied_steps + counters.skipped_steps == 64
    assert counters.skipped_steps < 8  # while the scale is found


def test_the_recipes_run_after_the_first_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, *recipes = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, object] = {"torch": torch}
    exec(first.replace("trainer.fit(BoringModel())", ""), names)  # noqa: S102
    for recipe in recipes:
        exec(recipe, names)  # noqa: S102
    assert {"training_step", "CatchNaN"} <= names.keys()


def test_the_yaml_builds_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (yaml,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    Path("config.yaml").write_text(yaml)
    monkeypatch.setattr(sys, "argv", ["train.py", "--config=config.yaml"])
    trainer: Any = LightningCLI(BoringModel, run=False, seed_everything_default=False).trainer
    plugin = trainer.precision_plugin
    assert isinstance(plugin, AdaptiveMixedPrecision)
    assert plugin.precision == "auto"
    assert plugin._engine.loss_scaler.loss_scale == LossScale(init_scale=2.0**12, hysteresis=2)
    kinds = [type(callback) for callback in trainer.callbacks]
    assert {PrecisionFallback, AMPMonitor} <= set(kinds)


@pytest.mark.parametrize(
    "command",
    ['pip install -e ".[examples]" && python examples/digits.py', 'pip install -e ".[test]" && python -m pytest'],
)
def test_the_two_commands_stand_alone_on_a_line(command: str) -> None:
    assert README.splitlines().count(command) == 1


@pytest.mark.parametrize(("column", "dtype"), [(1, torch.float16), (2, torch.bfloat16), (3, torch.float32)])
def test_the_table_of_precisions(column: int, dtype: torch.dtype) -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in README.splitlines() if line.startswith("| ")]
    cells = {row[0]: row[column] for row in rows if len(row) == 4}
    info = torch.finfo(dtype)
    assert int(cells["mantissa bits"]) == -math.log2(info.eps)
    low, high = (int(n) for n in re.findall(r"2\^(-?\d+)", cells["exponent range"]))
    assert (2.0**low, high) == (info.smallest_normal, math.floor(math.log2(info.max)))
    assert float(cells["largest number"]) == pytest.approx(info.max, rel=3e-3)
    assert float(cells["smallest normal"]) == pytest.approx(info.smallest_normal, rel=3e-3)
    assert float(cells["smallest subnormal"]) == pytest.approx(info.smallest_normal * info.eps, rel=3e-3)
