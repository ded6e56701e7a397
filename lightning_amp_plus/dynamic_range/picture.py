"""A picture of the magnitudes in a model, module by module, against what number formats hold. Needs matplotlib."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_amp_plus.dynamic_range.stats import KINDS, DynamicRange, Kind
from lightning_amp_plus.monitoring.canvas import (
    BLACK,
    GREY,
    SMALL,
    VERMILLION,
    Axes,
    AxesImage,
    Figure,
    LogNorm,
    RowLocator,
    canvas,
    power,
    seen_on_all,
    shortened,
)
from lightning_amp_plus.monitoring.sources import dynamic_range_of
from lightning_amp_plus.precisions import scale_text
from lightning_amp_plus.scaling.exponents import BINS, HIGHEST, LOWEST, bin_of

SMALLEST_SHARE = 1e-6
"""Shares below it have the colour of it."""

_LONGEST_NAME = 42  # characters
_TALLEST = 14.0  # inches
_LABEL_WIDTH = 0.95  # inches, of a limit's label


class Limit(NamedTuple):
    """A limit of a number format, as log2 of the magnitude."""

    exponent: float
    label: str


def limits_of(loss_scale: float = 1.0) -> list[Limit]:
    """Return the limits of fp16, bf16 and fp32, for numbers that float16 sees multiplied by a loss scale.

    Args:
        loss_scale: At least 1. bf16 and fp32 are not scaled: their limits stay where they are.

    Example:
        >>> [round(limit.exponent) for limit in limits_of(2.0**10)]
        [-34, -24, 6, -126, 128]

    """
    half, single = torch.finfo(torch.float16), torch.finfo(torch.bfloat16)
    by = f" / {_mathematical(loss_scale)}" if loss_scale != 1 else ""
    shift = math.log2(loss_scale)
    smallest = half.smallest_normal * half.eps
    return [
        Limit(math.log2(smallest) - shift, f"fp16 smallest\n{power(-24)}{by}"),
        Limit(math.log2(half.smallest_normal) - shift, f"fp16 normal\n{power(-14)}{by}"),
        Limit(math.log2(half.max) - shift, f"fp16 max\n65504{by}"),
        Limit(math.log2(single.smallest_normal), f"bf16, fp32\nnormal {power(-126)}"),
        Limit(math.log2(single.max), f"bf16, fp32\nmax {power(128)}"),
    ]


def draw_dynamic_range(stats: object, kind: Kind, ax: Axes | None) -> tuple[Figure, Axes]:
    """Draw what :func:`~lightning_amp_plus.monitoring.plotting.plot_dynamic_range` describes."""
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is none of {', '.join(map(repr, KINDS))}: pass one of these.")
    measured = dynamic_range_of(stats).cpu()
    counts = measured.counts[KINDS.index(kind)]
    rows = [row for row, total in enumerate(counts.sum(1).tolist()) if total]
    names = [shortened(measured.modules[row] or "(the model itself)", _LONGEST_NAME) for row in rows]
    figure, axes = canvas(ax, 9, min(1.9 + 0.21 * max(len(rows), 2), _TALLEST))
    scale = 1.0 if kind == "activations" else measured.loss_scale
    axes.set_xlabel(_title(kind, scale, measured.steps))
    if not rows:
        axes.text(0.5, 0.5, f"no {kind.replace('_', ' ')} measured", transform=axes.transAxes, ha="center", color=GREY)
        axes.set(xticks=[], yticks=[])
        return figure, axes
    shares = counts[rows] / counts[rows].sum(1, keepdim=True)
    limits = limits_of(scale)
    low, high = _columns(shares, limits)
    image = _draw_shares(axes, shares, low, high)
    _draw_limits(axes, limits, low, high)
    axes.yaxis.set_major_locator(RowLocator(len(rows), SMALL, _worst_first(measured, kind, rows)))
    axes.yaxis.set_major_formatter(lambda row, _: names[round(row)] if 0 <= round(row) < len(names) else "")
    axes.tick_params(axis="y", labelsize=SMALL, length=0)
    height = figure.get_figheight()
    bar = figure.colorbar(
        image, ax=axes, extend="min", shrink=min(1.0, 3.5 / height), anchor=(0, 1), aspect=18, pad=0.02
    )
    bar.set_label("share of elements")
    return figure, axes


def _title(kind: Kind, scale: float, steps: int) -> str:
    text = f"magnitude of {kind.replace('_', ' ')}, {steps} step{'s' * (steps != 1)}"
    if scale == 1:
        return text
    return f"{text}\ntrue gradients; fp16's limits are moved by the loss scale {_mathematical(scale)}"


def _worst_first(measured: DynamicRange, kind: Kind, rows: list[int]) -> list[int]:
    """Return where among ``rows`` the modules are that went beyond 65504, those with the largest shares first."""
    above = measured.share_above(kind)
    worst = [place for place, row in enumerate(rows) if above[row]]
    return sorted(worst, key=lambda place: -above[rows[place]])


def _mathematical(scale: float) -> str:
    text = scale_text(scale)
    return power(int(text[2:])) if text.startswith("2^") else text


def _columns(shares: Tensor, limits: list[Limit]) -> tuple[int, int]:
    """Return the first exponent shown and the one after the last: of the data and of the limits of fp16."""
    full = [index + LOWEST for index, share in enumerate(shares[:, 1:-1].sum(0).tolist()) if share]
    half = [limit.exponent for limit in limits[:3]]
    low = min([*full, math.floor(half[0])]) - 3
    high = max([*full, math.ceil(half[2])]) + 4
    return max(low, LOWEST), min(high, HIGHEST + 1)


def _draw_shares(axes: Axes, shares: Tensor, low: int, high: int) -> AxesImage:
    wide = max(1.5, 0.03 * (high - low))
    bottom = len(shares) - 0.5
    columns = {
        (low, high): shares[:, bin_of(low) : bin_of(high - 1) + 1],
        (low - 2 * wide, low - wide): shares[:, :1],
        (high + wide, high + 2 * wide): shares[:, BINS - 1 :],
    }
    norm = LogNorm(SMALLEST_SHARE, 1.0)
    images = []
    for (start, end), part in columns.items():
        images.append(
            axes.imshow(
                torch.where(part > 0, part, torch.nan).numpy(), cmap="viridis", norm=norm, aspect="auto",
                interpolation="none", extent=(start, end, bottom, -0.5), zorder=1,
            )
        )  # fmt: skip
    for edge in (low - wide / 2, high + wide / 2):
        axes.axvline(edge, color=GREY, linewidth=0.8)
    axes.set_xlim(low - 2 * wide, high + 2 * wide)
    axes.set_ylim(bottom, -0.5)
    every = next(step for step in (4, 8, 16, 32, 64) if (high - low) / step <= 11)
    ticks = [exponent for exponent in range(low + 1, high) if exponent % every == 0]
    places = [low - 1.5 * wide, *ticks, high + 1.5 * wide]
    axes.set_xticks(places, labels=["0", *(power(tick) for tick in ticks), "inf\nNaN"], fontsize=SMALL)
    return images[0]


def _draw_limits(axes: Axes, limits: list[Limit], low: int, high: int) -> None:
    inches_of_column = 0.75 * axes.bbox.width / axes.figure.dpi / (high - low)
    crowded = 10 * inches_of_column < _LABEL_WIDTH  # the two lower limits of fp16 are 10 columns apart
    alignments = ("right", "center", "left", "center", "center") if crowded else ("center",) * 5
    for place, (limit, alignment) in enumerate(zip(limits, alignments, strict=True)):
        if low <= limit.exponent <= high:
            axes.axvline(limit.exponent, color=BLACK, linewidth=1.2, path_effects=[seen_on_all()])
            axes.annotate(
                limit.label, (limit.exponent, 1), xycoords=axes.get_xaxis_transform(),
                xytext=(0, 28 if crowded and place == 1 else 4), textcoords="offset points", ha=alignment, va="bottom",
                fontsize=SMALL,
            )  # fmt: skip
    smallest, _, largest, *_ = limits
    for start, end in ((low, smallest.exponent), (largest.exponent, high)):
        axes.axvspan(start, end, color=VERMILLION, alpha=0.08, linewidth=0, zorder=0)
    if low > limits[3].exponent or high < limits[4].exponent:
        text = f"{axes.get_xlabel()}\nnot all shown: bf16 and fp32 reach from {power(-126)} to {power(128)}"
        axes.set_xlabel(text, fontsize=SMALL + 1)
