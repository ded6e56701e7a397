"""What all pictures share: figures that belong to the caller alone, colours, and labels that fit. Needs matplotlib.

The colours are those of Okabe and Ito (Color Universal Design, 2008), which colour-blind people tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

try:
    from matplotlib.axes import Axes as Axes
    from matplotlib.colors import LogNorm as LogNorm
    from matplotlib.figure import Figure as Figure
    from matplotlib.image import AxesImage as AxesImage
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import Locator
    from matplotlib.ticker import MaxNLocator as MaxNLocator
except ImportError as error:
    raise ImportError(
        'Pictures need matplotlib, which is not installed: pip install "lightning_amp_plus[plot]".', name="matplotlib"
    ) from error

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILLION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
)  # fmt: skip
GREY = "#666666"

SMALL = 8.0
"""The size of small text, in points."""


def canvas(ax: Axes | None, width: float, height: float) -> tuple[Figure, Axes]:
    """Return where to draw: ``ax`` and its figure, or else a new figure, in inches, that pyplot knows nothing of."""
    if ax is None:
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.add_subplot()
    return ax.figure.figure, ax  # of a subfigure, the figure that it is in


def seen_on_all() -> withStroke:
    """Return a white seam, for lines that cross all colours."""
    return withStroke(linewidth=2.6, foreground="white")


def power(exponent: int) -> str:
    """Return a power of two in matplotlib's math.

    Example:
        >>> power(-14)
        '$2^{-14}$'

    """
    return f"$2^{{{exponent}}}$"


def shortened(name: str, most: int) -> str:
    """Return a name of at most ``most`` characters: what is left out is in the middle, most of what is kept at its end.

    Example:
        >>> shortened("model.encoder.layers.11.attention.query", 24)
        'model.…attention.query'

    """
    if len(name) <= most:
        return name
    head = most // 4
    tail = name[len(name) - (most - head - 1) :]
    part = tail.find(".") + 1
    return f"{name[:head]}…{tail[part:] if part < len(tail) // 3 else tail}"


class RowLocator(Locator):
    """Ticks at rows 0, k, 2k, ... of an axis whose rows are one apart: k is the smallest that keeps labels apart.

    Args:
        rows: How many rows there are.
        size: The size of the labels, in points.
        first: Rows that have a label even where it takes the place of others, the most important one first.

    """

    def __init__(self, rows: int, size: float, first: Sequence[int] = ()) -> None:
        self.rows, self.size, self.first = rows, size, first

    def __call__(self) -> Sequence[float]:
        """Return the rows that have a label, for the present height of the axes."""
        axes = getattr(self.axis, "axes", None)
        if axes is None:
            return range(self.rows)
        low, high = sorted(axes.get_ylim())
        points_of_row = axes.bbox.height * 72 / axes.figure.dpi / (high - low)
        apart = max(1, ceil(1.3 * self.size / points_of_row))
        chosen: list[int] = []
        for row in (*self.first, *range(0, self.rows, apart)):
            if all(abs(row - other) >= apart for other in chosen):
                chosen.append(row)
        return sorted(chosen)

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        """Return the rows that have a label; the limits do not matter."""
        return self()
