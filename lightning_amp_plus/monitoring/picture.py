"""A picture of a run: its loss scale step by step, and what happened on the way. Needs matplotlib."""

from __future__ import annotations

import math

from lightning_amp_plus.monitoring.canvas import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    SMALL,
    VERMILLION,
    Axes,
    Figure,
    MaxNLocator,
    canvas,
    power,
)
from lightning_amp_plus.monitoring.events import EventKind
from lightning_amp_plus.monitoring.history import RunHistory
from lightning_amp_plus.monitoring.sources import history_of
from lightning_amp_plus.precisions import PrecisionName

EVENT_STYLES: dict[EventKind, tuple[str, str, str]] = {
    "retried": ("v", ORANGE, "run again at a lower scale"),
    "rescued": ("o", GREEN, "rescued in a wider precision"),
    "skipped": ("X", VERMILLION, "skipped"),
    "fallback": ("D", PURPLE, "module kept in float32"),
}
"""The marker, the colour and the name of what can happen to a step."""

PERIOD_STYLES: dict[PrecisionName, tuple[str, str, str]] = {
    "bf16-mixed": (SKY, "", "bf16-mixed: no loss scale"),
    "32-true": (GREY, "///", "32-true: no loss scale"),
}
"""The colour, the hatching and the name of the periods without loss scaling."""

_LANE = 0.06  # of the height: a lane at the bottom for each kind of event
_ENTRY_WIDTH = 2.05  # inches, of an entry of the legend


def draw_loss_scale(history: object, ax: Axes | None) -> tuple[Figure, Axes]:
    """Draw what :func:`~lightning_amp_plus.monitoring.plotting.plot_loss_scale` describes."""
    run = history_of(history)
    figure, axes = canvas(ax, 8, 4)
    axes.set(xlabel="optimizer step", ylabel="loss scale")
    if not run.points:
        _say(axes, "no optimizer step yet")
        axes.set(xticks=[], yticks=[])
        return figure, axes
    pad = max(0.5, 0.02 * (run.last_step - run.points[0].step))
    axes.set_xlim(run.points[0].step - pad, run.last_step + pad)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    _draw_periods(axes, run)
    kinds = _draw_events(axes, run)
    _draw_scale(axes, run, lanes=_LANE * (kinds + 0.5) if kinds else 0.0)
    _draw_moves(axes, run)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = max(1, int(axes.bbox.width / figure.dpi / _ENTRY_WIDTH))
        axes.legend(
            handles,
            labels,
            loc="lower center",
            bbox_to_anchor=(0.5, 1.0),
            ncols=columns,
            frameon=False,
            fontsize=SMALL + 0.5,
        )
    return figure, axes


def _say(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY)


def _draw_scale(axes: Axes, run: RunHistory, lanes: float) -> None:
    steps: list[float] = []
    scales: list[float] = []
    for point in run.points:
        if point.precision == "16-mixed":
            steps.append(point.step)
            scales.append(point.scale)
        elif scales and not math.isnan(scales[-1]):
            steps += [point.step, point.step]
            scales += [scales[-1], math.nan]
    exponents = [math.log2(scale) for scale in scales if not math.isnan(scale)]
    if not exponents:
        axes.set_yticks([])
        return
    if not math.isnan(scales[-1]):
        steps.append(run.last_step)
        scales.append(scales[-1])
    marker = "s" if len(exponents) == 1 and steps[0] == steps[-1] else ""
    axes.plot(steps, scales, drawstyle="steps-post", color=BLUE, linewidth=1.8, marker=marker)
    low, high = math.floor(min(exponents)), math.ceil(max(exponents))
    if high - low < 2:
        low, high = low - 1, high + 1
    span = high - low + 1
    axes.set_yscale("log", base=2)
    axes.set_ylim(2.0 ** (low - 0.5 - span * lanes / (1 - lanes)), 2.0 ** (low - 0.5 + span))
    every = math.ceil((high - low + 1) / 10)
    ticks = [exponent for exponent in range(low, high + 1) if exponent % every == 0]
    axes.set_yticks([2.0**tick for tick in ticks], labels=[power(tick) for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.grid(axis="y", color=GREY, alpha=0.2)


def _draw_events(axes: Axes, run: RunHistory) -> int:
    moved = {step for step, _ in run.moves}
    lane = 0
    for kind, (marker, colour, label) in EVENT_STYLES.items():
        steps = [
            event.step
            for event in run.events
            if event.kind == kind and not (kind == "fallback" and event.step in moved)
        ]
        if steps:
            axes.plot(
                steps, [_LANE * (lane + 0.75)] * len(steps), transform=axes.get_xaxis_transform(), label=label,
                linestyle="none", marker=marker, markersize=7, color=colour, markeredgecolor="white",
                markeredgewidth=0.5, alpha=1 if len(steps) < 100 else 0.6,
            )  # fmt: skip
            lane += 1
    return lane


def _draw_periods(axes: Axes, run: RunHistory) -> None:
    named = set()
    ends = [*(point.step for point in run.points[1:]), axes.get_xlim()[1]]
    for point, end in zip(run.points, ends, strict=True):
        if point.precision in PERIOD_STYLES:
            colour, hatch, name = PERIOD_STYLES[point.precision]
            label = None if name in named else name
            named.add(name)
            start = axes.get_xlim()[0] if point is run.points[0] else point.step
            axes.axvspan(
                start, end, facecolor=colour, edgecolor="white", alpha=0.25, hatch=hatch, linewidth=0, label=label
            )


def _draw_moves(axes: Axes, run: RunHistory) -> None:
    low, high = axes.get_xlim()
    last = -math.inf
    for step, precision in run.moves:
        axes.axvline(step, color=BLACK, linestyle="--", linewidth=1.2, zorder=1.5)
        if step - last > 0.03 * (high - low):  # closer ones would write over each other
            on_right = precision != "16-mixed"  # where the scale's line has ended
            axes.annotate(
                f"to {precision}", (step, 1), xycoords=axes.get_xaxis_transform(), xytext=(3 if on_right else -3, -4),
                textcoords="offset points", rotation=90, ha="left" if on_right else "right", va="top",
                fontsize=SMALL + 0.5,
            )  # fmt: skip
            last = step
