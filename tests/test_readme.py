"""The README's code runs, its commands are those that CI calls, its numbers are torch's."""

import math
import re
from pathlib import Path

import pytest
import torch

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
