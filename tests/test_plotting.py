"""The pictures of a run: what is drawn where, and that it can be read."""

import itertools
import math
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")

from matplotlib._pylab_helpers import Gcf
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lightning_amp_plus.dynamic_range.picture import limits_of
from lightning_amp_plus.dynamic_range.stats import DynamicRange, Kind
from lightning_amp_plus.monitoring.canvas import RowLocator, shortened
from lightning_amp_plus.monitoring.events import EVENT_KINDS
from lightning_amp_plus.monitoring.history import RunHistory
from lightning_amp_plus.monitoring.picture import EVENT_STYLES, PERIOD_STYLES
from lightning_amp_plus.monitoring.plotting import plot_dynamic_range, plot_loss_scale
from lightning_amp_plus.precisions import PrecisionName
from lightning_amp_plus.scaling.exponents import BINS, bin_of, counts_of
from lightning_amp_plus.step.report import Outcome, StepReport


def step(history: RunHistory, scale: float, precision: PrecisionName = "16-mixed", **what: Any) -> None:
    """Add the next step: what it left, and what it was."""
    outcome: Outcome = what.pop("outcome", "applied")
    attempts = what.pop("attempts", 1)
    report = StepReport(history.last_step + 1, 0, "16-mixed", scale, attempts, outcome, **what)
    history.add(report, scale, precision)


def eventful() -> RunHistory:
    """Retries at steps 0 and 3, rescues at 4 and 7, a skip at 5, a kept module at 4, bf16 from 7 on, fp32 from 9 on."""
    history = RunHistory()
    step(history, 2.0**12, attempts=5)
    step(history, 2.0**12)
    step(history, 2.0**14)
    step(history, 2.0**13, attempts=2)
    step(history, 2.0**13, attempts=3, rescued=True, kept=("mlp",))
    step(history, 2.0**13, outcome="skipped")
    step(history, 2.0**13)
    step(history, 1.0, "bf16-mixed", attempts=3, rescued=True, moves_to="bf16-mixed")
    step(history, 1.0, "bf16-mixed")
    step(history, 1.0, "32-true", moves_to="32-true")
    step(history, 1.0, "32-true")
    return history


def markers(axes: Axes) -> dict[str, list[float]]:
    """The steps of the markers, by their shape."""
    return {str(line.get_marker()): points_of(line)[0] for line in axes.lines if line.get_linestyle() == "None"}


def points_of(line: Line2D) -> tuple[list[float], list[float]]:
    """Its x and its y."""
    x, y = line.get_data(orig=True)
    return np.asarray(x).tolist(), np.asarray(y).tolist()


def vertical_lines(axes: Axes, style: str) -> list[float]:
    lines = [line for line in axes.lines if line.get_linestyle() == style and is_vertical(line)]
    return [points_of(line)[0][0] for line in lines]


def is_vertical(line: Line2D) -> bool:
    x, y = points_of(line)
    return y == [0, 1] and len(set(x)) == 1


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def drawn(figure: Figure) -> Any:
    """Draw, which also lays it out, and return the renderer."""
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return canvas.get_renderer()


def overlapping(labels: Sequence[Any], renderer: Any) -> list[tuple[str, str]]:
    """The pairs of texts that touch each other."""
    boxes = [(label.get_text(), label.get_window_extent(renderer)) for label in labels if label.get_text()]
    return [(one, other) for (one, a), (other, b) in itertools.combinations(boxes, 2) if a.overlaps(b)]


# The loss scale -------------------------------------------------------------------------------------------------------


def test_the_scale_is_a_line_of_steps_that_ends_where_scaling_does() -> None:
    _, axes = plot_loss_scale(eventful())
    (line,) = [line for line in axes.lines if line.get_drawstyle() == "steps-post"]
    *values, last = zip(*points_of(line), strict=True)
    assert values == [(0, 4096.0), (2, 16384.0), (3, 8192.0), (7, 8192.0)]
    assert last[0] == 7
    assert math.isnan(last[1])
    assert axes.get_yscale() == "log"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["$2^{12}$", "$2^{13}$", "$2^{14}$"]
    assert list(axes.get_yticks()) == [2.0**12, 2.0**13, 2.0**14]


def test_the_line_reaches_to_the_last_step() -> None:
    history = RunHistory()
    for _ in range(50):
        step(history, 2.0**16)
    _, axes = plot_loss_scale(history)
    (line,) = axes.lines
    assert points_of(line) == ([0, 49], [65536.0, 65536.0])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["$2^{15}$", "$2^{16}$", "$2^{17}$"]
    assert axes.get_legend() is None  # there is nothing to explain


def test_each_kind_of_event_has_its_marker_at_its_steps_and_its_lane() -> None:
    _, axes = plot_loss_scale(eventful())
    shape = {kind: style[0] for kind, style in EVENT_STYLES.items()}
    assert markers(axes) == {
        shape["retried"]: [0, 3],
        shape["rescued"]: [4, 7],
        shape["skipped"]: [5],
        shape["fallback"]: [4],  # the kept module; the moves are lines
    }
    lanes = [points_of(line)[1][0] for line in axes.lines if line.get_linestyle() == "None"]
    assert len(set(lanes)) == 4
    scale = next(line for line in axes.lines if line.get_drawstyle() == "steps-post")
    bottom = axes.transAxes.inverted().transform(axes.transData.transform((0, 4096.0)))[1]
    assert max(lanes) + 0.05 < bottom, "the lanes are under the line"
    assert scale.get_color() not in {style[1] for style in EVENT_STYLES.values()}


def test_a_fallback_is_a_dashed_line_with_the_name_of_the_precision() -> None:
    _, axes = plot_loss_scale(eventful())
    assert vertical_lines(axes, "--") == [7, 9]
    assert texts(axes) == ["to bf16-mixed", "to 32-true"]


def test_periods_without_a_scale_are_shaded_and_named_once() -> None:
    history = eventful()
    step(history, 2.0**10, moves_to="16-mixed")
    for precision in ("bf16-mixed", "16-mixed"):
        step(history, 1.0 if precision == "bf16-mixed" else 2.0**10, precision, moves_to=precision)
    _, axes = plot_loss_scale(history)
    spans = [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in axes.patches]  # type: ignore[attr-defined]
    assert spans == [(7, 9), (9, 11), (12, 13)]
    legend = axes.get_legend()
    assert legend is not None
    names = [text.get_text() for text in legend.get_texts()]
    assert names.count(PERIOD_STYLES["bf16-mixed"][2]) == names.count(PERIOD_STYLES["32-true"][2]) == 1


def test_a_run_that_never_had_a_scale_shows_its_skips_and_no_axis_of_powers() -> None:
    history = RunHistory()
    for number in range(20):
        step(history, 1.0, "bf16-mixed", outcome="skipped" if number == 12 else "applied")
    figure, axes = plot_loss_scale(history)
    assert markers(axes) == {EVENT_STYLES["skipped"][0]: [12]}
    assert list(axes.get_yticks()) == []
    low, high = axes.get_xlim()
    (patch,) = axes.patches
    assert (patch.get_x(), patch.get_width()) == (low, high - low)  # type: ignore[attr-defined]
    drawn(figure)


def test_one_step_is_seen_and_none_is_said() -> None:
    history = RunHistory()
    step(history, 2.0**16)
    figure, axes = plot_loss_scale(history)
    assert axes.lines[0].get_marker() == "s"
    drawn(figure)
    low, high = axes.get_xlim()
    assert [tick for tick in axes.get_xticks() if low <= tick <= high] == [0]
    assert texts(plot_loss_scale(RunHistory())[1]) == ["no optimizer step yet"]


def test_thousands_of_events_and_moves_do_not_write_over_each_other() -> None:
    history = RunHistory()
    for number in range(3000):
        precision: PrecisionName = "bf16-mixed" if number % 20 > 9 else "16-mixed"
        moves_to: PrecisionName | None = precision if number % 10 == 0 and number else None
        step(history, 2.0 ** (number % 25), precision, attempts=1 + number % 3, moves_to=moves_to)
    figure, axes = plot_loss_scale(history)
    renderer = drawn(figure)
    assert len(vertical_lines(axes, "--")) == 299
    assert 10 < len(axes.texts) < 40
    assert overlapping(axes.texts, renderer) == []
    assert overlapping(axes.get_yticklabels(), renderer) == []
    assert overlapping(axes.get_xticklabels(), renderer) == []


# The dynamic range ----------------------------------------------------------------------------------------------------


def a_range(modules: int = 3, loss_scale: float = 1.0) -> DynamicRange:
    """In module i activations of 2^i to 2^(i+1), and gradients of 2^-20; the last one holds zeros, inf and NaN too."""
    names = [f"model.encoder.layers.{i // 8}.attention.output.projection.{i % 8}" for i in range(modules)]
    stats = DynamicRange.empty(names)
    for i in range(modules):
        stats.counts[0, i] += counts_of(torch.tensor([1.0, 1.5, 2.0, 3.0]) * 2.0 ** (i % 12))
        stats.counts[1, i] += counts_of(torch.full((8,), 2.0**-20))
    stats.counts[0, -1] += counts_of(torch.tensor([0.0, torch.inf, torch.nan, torch.nan]))
    stats.above[0, -1] = 3
    stats.steps, stats.loss_scale = 5, loss_scale
    return stats


def test_the_heat_map_holds_the_shares_of_the_elements() -> None:
    stats = a_range()
    _, axes = plot_dynamic_range(stats)
    heat, zeros, others = axes.images
    start, end, bottom, top = heat.get_extent()
    assert (bottom, top) == (2.5, -0.5)
    shares = torch.tensor(heat.get_array().filled(0.0))  # type: ignore[union-attr]
    assert shares.shape == (3, round(end - start))
    expected = stats.counts[0].double() / stats.counts[0].sum(1, keepdim=True)
    torch.testing.assert_close(shares, expected[:, bin_of(round(start)) : bin_of(round(end))], check_dtype=False)
    assert shares[0, 0 - round(start)] == 0.5, "the column of 2^0 begins at 0"
    assert shares[2].tolist()[2 - round(start) : 5 - round(start)] == [0.25, 0.25, 0.0]
    assert zeros.get_array().filled(0.0).tolist() == [[0.0], [0.0], [0.125]]  # type: ignore[union-attr]
    assert others.get_array().filled(0.0).tolist() == [[0.0], [0.0], [0.375]]  # type: ignore[union-attr]
    assert zeros.get_extent()[1] < start < end < others.get_extent()[0]
    assert (heat.norm.vmin, heat.norm.vmax) == (1e-6, 1.0)
    assert {image.norm for image in axes.images} == {heat.norm}
    assert axes.get_xlim() == (zeros.get_extent()[0], others.get_extent()[1])


def lines_at(axes: Axes) -> list[float]:
    """Of the limits, which are black."""
    return [points_of(line)[0][0] for line in axes.lines if line.get_color() == "#000000"]


def test_the_limits_are_those_of_the_formats() -> None:
    _, axes = plot_dynamic_range(a_range())
    assert lines_at(axes) == [-24, -14, math.log2(65504)]
    assert texts(axes) == ["fp16 smallest\n$2^{-24}$", "fp16 normal\n$2^{-14}$", "fp16 max\n65504"]
    assert "bf16 and fp32 reach from $2^{-126}$ to $2^{128}$" in axes.get_xlabel()


@pytest.mark.parametrize("kind", ["activation_gradients", "parameter_gradients"])
def test_for_gradients_the_limits_of_fp16_are_moved_by_the_loss_scale(kind: Kind) -> None:
    stats = a_range(loss_scale=2.0**12)
    stats.counts[2] = stats.counts[1]
    _, axes = plot_dynamic_range(stats, kind)
    assert lines_at(axes) == [-36, -26, math.log2(65504) - 12]
    assert texts(axes)[2] == "fp16 max\n65504 / $2^{12}$"
    assert "moved by the loss scale $2^{12}$" in axes.get_xlabel()
    heat = axes.images[0]
    assert heat.get_array().filled(0.0)[0, -20 - round(heat.get_extent()[0])] == 1  # type: ignore[union-attr]
    _, of_activations = plot_dynamic_range(stats)
    assert lines_at(of_activations) == [-24, -14, math.log2(65504)]


def test_limits_of_bf16_are_not_moved() -> None:
    assert [round(limit.exponent, 2) for limit in limits_of(1000.0)] == [-33.97, -23.97, 6.03, -126.0, 127.99]
    assert limits_of(1000.0)[2].label == "fp16 max\n65504 / 1000"


def test_the_columns_reach_to_the_data_and_to_the_limits_of_float16() -> None:
    stats = a_range()
    start, end, *_ = plot_dynamic_range(stats)[1].images[0].get_extent()
    assert (start, end) == (-27, 20)
    stats.counts[0, 0] += counts_of(torch.tensor([1e-45, 3e38]))
    figure, axes = plot_dynamic_range(stats)
    start, end, *_ = axes.images[0].get_extent()
    assert (start, end) == (-149, 128)
    assert axes.images[0].get_array().shape == (3, BINS - 2)  # type: ignore[union-attr]
    assert lines_at(axes) == [-24, -14, math.log2(65504), -126, pytest.approx(128, abs=0.01)]
    assert "not all shown" not in axes.get_xlabel()
    assert overlapping(axes.texts, drawn(figure)) == []


def test_modules_without_elements_are_left_out() -> None:
    stats = a_range()
    stats.counts[2, 1, bin_of(-5)] = 3
    figure, axes = plot_dynamic_range(stats, "parameter_gradients")
    drawn(figure)
    assert [label.get_text() for label in axes.get_yticklabels()] == [shortened(stats.modules[1], 42)]
    assert axes.images[0].get_array().shape[0] == 1  # type: ignore[union-attr]
    stats.counts[2] = 0
    assert texts(plot_dynamic_range(stats, "parameter_gradients")[1]) == ["no parameter gradients measured"]


def test_another_kind_is_answered_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="kind='weights' is none of 'activations', 'activation_gradients', 'param"):
        plot_dynamic_range(a_range(), "weights")  # type: ignore[arg-type]


@pytest.mark.parametrize("modules", [1, 3, 50, 200])
def test_labels_can_be_read(modules: int) -> None:
    stats = a_range(modules, loss_scale=2.0**16)
    figure, axes = plot_dynamic_range(stats)
    renderer = drawn(figure)
    labels = [label for label in axes.get_yticklabels() if label.get_text()]
    assert overlapping(labels, renderer) == []
    assert overlapping(axes.get_xticklabels(), renderer) == []
    assert overlapping(axes.texts, renderer) == []
    assert all(float(label.get_fontsize()) >= 8 for label in labels)
    assert all(label.get_window_extent(renderer).x0 >= 0 for label in labels), "none is cut off"
    rows = [round(tick) for tick in axes.get_yticks()]
    assert [label.get_text() for label in labels] == [shortened(stats.modules[row], 42) for row in rows]
    if modules < 60:
        assert rows == list(range(modules))
    else:
        assert len(rows) > 50
        assert {after - before for before, after in itertools.pairwise(rows[:-2])} == {3}, "evenly"
        assert rows[-1] == modules - 1, "the module that overflowed has its label"
    assert figure.get_figheight() == pytest.approx(min(1.9 + 0.21 * max(modules, 2), 14))


def test_labels_are_apart_after_the_figure_is_made_smaller() -> None:
    figure, axes = plot_dynamic_range(a_range(60))
    figure.set_size_inches(9, 4)
    renderer = drawn(figure)
    assert overlapping([label for label in axes.get_yticklabels() if label.get_text()], renderer) == []
    assert 5 < len(axes.get_yticks()) < 30


def test_the_most_important_rows_get_their_labels_first() -> None:
    figure = Figure(figsize=(4, 4))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_ylim(99.5, -0.5)  # 2.88 points a row; 10.4 points a label: 4 rows
    axes.yaxis.set_major_locator(RowLocator(100, 8, first=(50, 49, 3)))
    rows = list(axes.get_yticks())
    assert rows[:4] == [3, 8, 12, 16]
    assert 50 in rows
    assert 49 not in rows
    assert {48, 52}.isdisjoint(rows)


def test_of_two_modules_that_overflow_side_by_side_the_worse_has_the_label() -> None:
    stats = a_range(200)
    stats.above[0, 100:102] = torch.tensor([1, 2])
    _, axes = plot_dynamic_range(stats)
    assert 101 in axes.get_yticks()
    assert 100 not in axes.get_yticks()


def test_the_legend_is_as_wide_as_the_axes() -> None:
    figure, axes = plot_loss_scale(eventful())
    renderer = drawn(figure)
    narrow = Figure(figsize=(9, 3), layout="constrained")
    left, _ = narrow.subplots(1, 2)
    plot_loss_scale(eventful(), left)
    for drawing, given in ((figure, axes), (narrow, left)):
        renderer = drawn(drawing)
        legend = given.get_legend()
        assert legend is not None
        assert legend.get_window_extent(renderer).x0 >= 0
        assert overlapping(legend.get_texts(), renderer) == []


def test_long_names_are_cut_in_the_middle() -> None:
    assert shortened("short", 5) == "short"
    assert shortened("abcdefghijklmnop", 9) == "ab…klmnop"
    name = "model.encoder.layers.11.attention.output.dense"
    assert shortened(name, 42) == "model.enco…11.attention.output.dense"
    assert all(len(shortened(name, most)) <= most for most in range(4, 60))


# Both -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "draw", [lambda ax=None: plot_loss_scale(eventful(), ax), lambda ax=None: plot_dynamic_range(a_range(), ax=ax)]
)
def test_it_draws_on_given_axes_and_leaves_pyplot_alone(draw: Any) -> None:
    figure = Figure(figsize=(10, 4))
    left, right = figure.subplots(1, 2)
    before = list(Gcf.figs)
    assert draw(ax=right) == (figure, right)
    assert not left.has_data()
    assert right.has_data()
    whole = Figure()
    part: Any = whole.subfigures()
    assert draw(ax=part.add_subplot())[0] is whole
    own, _ = draw()
    assert isinstance(own, Figure)
    assert own is not figure
    drawn(own)
    assert list(Gcf.figs) == before


def test_importing_the_pictures_loads_no_matplotlib_and_drawing_them_no_pyplot() -> None:
    code = """
import sys
from lightning_amp_plus.monitoring.history import RunHistory
from lightning_amp_plus.monitoring.plotting import plot_loss_scale
print("matplotlib" in sys.modules)
plot_loss_scale(RunHistory())
print("matplotlib" in sys.modules, "matplotlib.pyplot" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "True", "False"]


@pytest.mark.parametrize("draw", [partial(plot_loss_scale, RunHistory()), partial(plot_dynamic_range, 3)])
def test_without_matplotlib_the_extra_is_named(draw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.split(".")[0] == "matplotlib":
            monkeypatch.setitem(sys.modules, name, None)
        elif name in {
            f"lightning_amp_plus.{part}"
            for part in ("monitoring.canvas", "monitoring.picture", "dynamic_range.picture")
        }:
            monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r'pip install "lightning_amp_plus\[plot\]"'):
        draw()


# Colours --------------------------------------------------------------------------------------------------------------

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
SIGHT = {
    "normal": torch.eye(3),
    "protanopia": torch.tensor(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": torch.tensor(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}


def seen(colour: str, sight: str) -> torch.Tensor:
    """A colour as it is seen, in CIELAB, where a distance of 2.3 is just noticed."""
    rgb = torch.tensor(to_rgb(colour))
    linear = torch.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = (SIGHT[sight] @ linear).clamp(0, 1)
    to_xyz = torch.tensor([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ linear / torch.tensor([0.9505, 1.0, 1.089])
    f = torch.where(xyz > 0.008856, xyz ** (1 / 3), 7.787 * xyz + 16 / 116)
    return torch.stack([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("sight", SIGHT)
def test_colours_and_shapes_are_told_apart_whoever_looks(sight: str) -> None:
    assert tuple(EVENT_STYLES) == EVENT_KINDS
    shapes, colours, names = zip(*EVENT_STYLES.values(), strict=True)
    assert len(set(shapes)) == len(set(names)) == len(EVENT_KINDS)
    for one, other in itertools.combinations((*colours, "#0072B2"), 2):
        assert (seen(one, sight) - seen(other, sight)).norm() > 15, (one, other)
    assert (seen("#009E73", "normal") - seen("#D55E00", "normal")).norm() > 100  # the measure measures


@pytest.mark.parametrize("sight", SIGHT)
def test_a_larger_share_is_brighter_whoever_looks(sight: str) -> None:
    heat = plot_dynamic_range(a_range())[1].images[0]
    colours = ["#" + "".join(f"{round(255 * part):02x}" for part in heat.cmap(i / 6)[:3]) for i in range(7)]
    brightness = [seen(colour, sight)[0].item() for colour in colours]
    assert all(after - before > 5 for before, after in itertools.pairwise(brightness))
