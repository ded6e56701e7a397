"""Pictures of a run, drawn by matplotlib: ``pip install "lightning_amp_plus[plot]"``.

Both functions return ``(figure, axes)`` and draw on any axes. They use no pyplot: no figure is registered anywhere,
none has to be closed, and none is shown but by its owner. ``figure.savefig("scale.png")`` writes it to a file.
Without matplotlib this module can still be imported; the functions then name the extra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_amp_plus.dynamic_range.stats import Kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_loss_scale(history: object, ax: Axes | None = None) -> tuple[Figure, Axes]:
    """Draw the loss scale over the optimizer steps.

    The scale is a line of steps on an axis of powers of two. Under it each kind of event has a lane with a marker of
    its own: steps that were run again at a lower scale, rescued in a wider precision, or skipped. A dashed vertical
    line with the precision's name shows where the run has moved to another precision; periods in bf16 and fp32, which
    have no loss scale, are shaded.

    Args:
        history: Any source that :func:`~lightning_amp_plus.monitoring.sources.history_of` takes: a live ``AMPMonitor``
            or its Trainer, a checkpoint, the folder of a ``CSVLogger``.
        ax: Where to draw; a new figure of 8 x 4 inches if it is ``None``.

    Returns:
        The figure, which pyplot does not know of, and its axes.

    Raises:
        TypeError, ValueError, FileNotFoundError: If the source is none, or holds no history.
        ImportError: If matplotlib is not installed.

    """
    from lightning_amp_plus.monitoring.picture import draw_loss_scale

    return draw_loss_scale(history, ax)


def plot_dynamic_range(stats: object, kind: Kind = "activations", ax: Axes | None = None) -> tuple[Figure, Axes]:
    """Draw a heat map of magnitudes: a row for each module, a column for each power of two.

    The colour is the share of a module's elements, on a logarithmic scale from 1e-6 to 1; a column without elements is
    white. Narrow columns apart hold the zeros, on the left, and inf and NaN, on the right. Lines show the limits of
    fp16, and those of bf16 and fp32 where the data come near them. The gradients shown are true ones: for them the
    lines of fp16 are moved by the loss scale, which float16 sees them multiplied by.

    Args:
        stats: Any source that :func:`~lightning_amp_plus.monitoring.sources.dynamic_range_of` takes: a live
            ``DynamicRangeMonitor`` or its Trainer, the result of ``find_precision``, a checkpoint, the folder of logs.
        kind: ``"activations"``, ``"activation_gradients"`` or ``"parameter_gradients"``. Modules without any are left
            out.
        ax: Where to draw; if it is ``None``, a new figure 9 inches wide, whose height grows with the number of
            modules, up to 14 inches.

    Returns:
        The figure, which pyplot does not know of, and its axes.

    Raises:
        TypeError, FileNotFoundError: If the source is none.
        ValueError: If it holds no dynamic range, or for another ``kind``.
        ImportError: If matplotlib is not installed.

    """
    from lightning_amp_plus.dynamic_range.picture import draw_dynamic_range

    return draw_dynamic_range(stats, kind, ax)
