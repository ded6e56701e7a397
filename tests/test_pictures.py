"""The script that draws the README's pictures."""

import math
import runpy
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg

from lightning_amp_plus.dynamic_range.stats import DynamicRange
from lightning_amp_plus.monitoring.history import RunHistory
from lightning_amp_plus.monitoring.plotting import plot_dynamic_range, plot_loss_scale
from lightning_amp_plus.scaling.exponents import bin_of
from lightning_amp_plus.step.report import StepReport


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[1] / "examples" / "pictures.py"))


def test_the_curves_are_those_of_the_formats(script: dict[str, Any]) -> None:
    curve_of = script["curve_of"]
    assert curve_of(torch.float16) == ([-24, -14, pytest.approx(math.log2(65504))], [0, -10, -10])
    assert curve_of(torch.bfloat16) == ([-133, -126, pytest.approx(128, abs=0.01)], [0, -7, -7])
    assert curve_of(torch.float32) == ([-149, -126, pytest.approx(128, abs=0.01)], [0, -23, -23])
    # Below the normal numbers the spacing is one smallest number: at 2^-20 that is 2^-4 of it, on the line between.
    (low, normal, _), (at_low, at_normal, _) = curve_of(torch.float16)
    number = torch.tensor(2.0**-20, dtype=torch.float16)
    after = (number.view(torch.int16) + 1).view(torch.float16)
    spacing = math.log2((after.double() - number.double()).item() / 2.0**-20)
    assert at_low + (at_normal - at_low) * (-20 - low) / (normal - low) == spacing == -4


def test_the_picture_of_the_formats_can_be_read(script: dict[str, Any]) -> None:
    figure = script["draw_formats"]()
    (axes,) = figure.axes
    assert [line.get_label() for line in axes.lines] == ["fp32", "bf16", "fp16"]
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in axes.texts if text.get_text()]
    words = " ".join(text for text, _ in boxes)
    assert "65504" in words
    assert "$2^{-24}$" in words
    assert "8 bits" in words
    assert [(a, b) for (a, one), (b, other) in combinations(boxes[:3], 2) if one.overlaps(other)] == []


def test_pictures_are_small(script: dict[str, Any], tmp_path: Path) -> None:
    history = RunHistory()
    for step in range(100):
        history.add(StepReport(step, 0, "16-mixed", 1.0, 1 + step % 2, "applied"), 2.0 ** (step % 9), "16-mixed")
    stats = DynamicRange.empty([f"layers.{number}" for number in range(40)])
    stats.counts[:, :, bin_of(-9) : bin_of(9)] = 5
    figures = {
        "formats": script["draw_formats"](),
        "loss_scale": plot_loss_scale(history)[0],
        "dynamic_range": plot_dynamic_range(stats)[0],
    }
    for name, figure in figures.items():
        path = script["save"](figure, name, tmp_path / "pictures")
        assert path == tmp_path / "pictures" / f"{name}.png"
        data = path.read_bytes()
        assert int.from_bytes(data[16:20], "big") >= 800
        assert len(data) < 150_000
