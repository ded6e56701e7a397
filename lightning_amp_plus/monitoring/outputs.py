"""What the monitors leave behind at the end of a fit: a table, files beside the logger's, images in the loggers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_amp_plus import __version__
from lightning_amp_plus.dynamic_range.stats import DynamicRange, Kind
from lightning_amp_plus.monitoring.history import RunHistory
from lightning_amp_plus.monitoring.incidents import read_incidents
from lightning_amp_plus.monitoring.summary import as_text
from lightning_amp_plus.trainer.run import local_folder

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from matplotlib.figure import Figure

    from lightning_amp_plus.trainer.plugin import AdaptiveMixedPrecisionMixin

Rows = Sequence[tuple[str, str]]

_TITLE = "Mixed precision of this run"


def show_summary(rows: Rows) -> None:
    """Print a table, with ``rich`` where that is installed."""
    if find_spec("rich") is None:
        rank_zero_info("\n" + as_text(_TITLE, list(rows)))
        return
    from rich import box, get_console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=_TITLE, show_header=False, box=box.ROUNDED, title_justify="left")
    for name, value in rows:
        table.add_row(escape(name), escape(value))
    get_console().print(table)


def send_figure(trainer: Trainer, what: str, key: str, draw: Callable[[], Figure]) -> None:
    """Draw a figure for the loggers that can hold images: TensorBoard's, W&B's, MLflow's; not without matplotlib.

    Args:
        trainer: The Trainer with the loggers.
        what: What to call the figure, if something goes wrong.
        key: What the loggers call it.
        draw: Draws it, if there is a logger for it.

    """
    if not has_matplotlib():
        return
    with not_in_the_way(what):
        methods = [method for logger in trainer.loggers if (method := _image_method(logger)) is not None]
        if not methods:
            return
        figure = draw()
        for send in methods:
            with not_in_the_way(what):
                send(key, figure, trainer.global_step)


def _image_method(logger: Any) -> Callable[[str, Figure, int], None] | None:
    if _has(logger, "log_image"):
        return lambda key, figure, step: logger.log_image(key, [_pixels(figure)], step=step)
    experiment: Any = getattr(logger, "experiment", None)
    if _has(experiment, "add_figure"):
        return lambda key, figure, step: experiment.add_figure(key, figure, step, close=False)
    if _has(experiment, "log_figure") and hasattr(logger, "run_id"):
        return lambda key, figure, step: experiment.log_figure(logger.run_id, figure, f"{key.replace('/', '-')}.png")
    return None


def _has(thing: Any, method: str) -> bool:
    """Tell whether there is a method; a dummy logger answers to any name, but has none."""
    return hasattr(type(thing), method) or method in getattr(thing, "__dict__", {})


def _pixels(figure: Figure) -> Any:
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.array(canvas.buffer_rgba())


def has_matplotlib() -> bool:
    """Tell whether figures can be drawn."""
    return find_spec("matplotlib") is not None


def loss_scale_figure(history: RunHistory) -> Figure:
    """Draw the loss scale of a run."""
    from lightning_amp_plus.monitoring.plotting import plot_loss_scale

    return plot_loss_scale(history)[0]


def dynamic_range_figure(stats: DynamicRange, kind: Kind = "activations") -> Figure:
    """Draw the magnitudes of a model."""
    from lightning_amp_plus.monitoring.plotting import plot_dynamic_range

    return plot_dynamic_range(stats, kind)[0]


@contextmanager
def not_in_the_way(what: str) -> Iterator[None]:
    """Have what goes wrong at the very end of a run told, and not end it: its training is done."""
    try:
        yield
    except Exception as error:
        warnings.warn(f"{what} could not be written: {type(error).__name__}: {error}.", RuntimeWarning, stacklevel=3)


def write_whole(path: Path, text: str) -> None:
    """Write a file whole, or leave the one that is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def settings_of(trainer: Trainer, plugin: AdaptiveMixedPrecisionMixin) -> list[tuple[str, str]]:
    """Return what a run was set up with, as names and values."""
    rules, scale = plugin.rules, plugin.loss_scale
    rows = [(name, repr(value)) for name, value in plugin.settings.items()]
    rows += [(f"loss_scale.{item.name}", repr(getattr(scale, item.name))) for item in fields(scale)]
    if rules is not None:
        rows += [(f"fallback.{item.name}", repr(getattr(rules, item.name))) for item in fields(rules)]
    rows += [
        ("gradient_clip_val", repr(trainer.gradient_clip_val)),
        ("accumulate_grad_batches", repr(trainer.accumulate_grad_batches)),
        ("strategy", type(trainer.strategy).__name__),
        ("processes", str(trainer.world_size)),
        ("device", _device_name(trainer.strategy.root_device)),
        ("model", type(trainer.lightning_module).__name__),
        ("torch", torch.__version__),
        ("lightning", version("lightning")),
        ("lightning_amp_plus", __version__),
    ]
    return rows


def write_report(
    trainer: Trainer,
    summary: Rows,
    settings: Rows,
    history: RunHistory,
    stats: DynamicRange | None,
    since: str,
    *,
    keeps_incidents: bool,
) -> None:
    """Write ``report.html`` to the folder of the first logger, or without one to the Trainer's, if that is local.

    Args:
        trainer: The Trainer of the run.
        summary: Of the run.
        settings: Of :func:`settings_of`.
        history: Of the run.
        stats: The magnitudes of its model, where a :class:`DynamicRangeMonitor` has measured them.
        since: The time before which incidents are those of another run.
        keeps_incidents: Whether there is a log of incidents.

    """
    from lightning_amp_plus.monitoring.page import render_report

    folder = local_folder(trainer)
    if folder is None:
        return
    figures = [("Loss scale", loss_scale_figure(history))]
    if stats is not None:
        figures.append(("Magnitudes of activations", dynamic_range_figure(stats)))
        figures.append(("Magnitudes of their gradients", dynamic_range_figure(stats, "activation_gradients")))
    page = render_report(
        title=f"{_TITLE}: {type(trainer.lightning_module).__name__}",
        summary=summary,
        settings=settings,
        incidents=read_incidents(folder, since) if keeps_incidents else None,
        figures=figures,
    )
    write_whole(folder / "report.html", page)
    rank_zero_info(f"AMPMonitor has written {folder / 'report.html'}.")


def _device_name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
