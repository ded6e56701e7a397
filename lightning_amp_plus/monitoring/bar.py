"""A text in the progress bar, for as long as a fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_amp_plus.diagnosis.overlay import overlay

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class _MetricsAndText:
    """What a progress bar gets for its ``get_metrics``."""

    def __init__(self, get_metrics: Callable[..., dict[str, Any]], name: str, text: Callable[[], str]) -> None:
        self._get_metrics, self._name, self._text = get_metrics, name, text

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**self._get_metrics(*args, **kwargs), self._name: self._text()}


def show_in_progress_bar(trainer: Trainer, name: str, text: Callable[[], str]) -> Callable[[], None] | None:
    """Have the progress bar show a text; return what ends it, or ``None`` if there is no bar.

    A value that is logged is shown as a decimal number. ``get_metrics`` is the bar's public hook for anything else, but
    it is the bar's own: an attribute of this one, for as long as the fit.
    """
    bar: Any = trainer.progress_bar_callback
    return None if bar is None else overlay(bar, "get_metrics", _MetricsAndText(bar.get_metrics, name, text))
