"""find_precision: advice on precision, loss scale and wide modules, from a few steps of the real model and data."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from lightning_amp_plus.advice.advice import PrecisionAdvice, advise, corrected
from lightning_amp_plus.advice.rehearsal import Rehearsal
from lightning_amp_plus.dynamic_range.stats import KINDS, DynamicRange
from lightning_amp_plus.hardware.select import PrecisionChoice, select_precision
from lightning_amp_plus.precisions import NAMES, PrecisionName

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer

_REHEARSALS = 4


def find_precision(
    trainer: Trainer,
    model: LightningModule,
    train_dataloaders: Any = None,
    datamodule: LightningDataModule | None = None,
    *,
    steps: int = 20,
    precision: Literal["auto"] | PrecisionName = "auto",
    headroom: float = 4.0,
    max_modules: int = 8,
    rehearse: bool = True,
) -> PrecisionAdvice:
    """Train a copy of the model for a few steps in float32, look at its magnitudes, and advise.

    The steps are made by a Trainer of its own on one device, with the accumulation, clipping and limits of ``trainer``
    but without its callbacks and loggers. Afterwards model, optimizers, ``trainer``, loaders and random numbers are as
    before, bitwise: model and loaders are copied, not their data. An advice for ``"16-mixed"`` is rehearsed: as many
    steps in it, from the same start, up to four times, until there are some without an overflow. With several processes
    each of them advises on its own: seed them alike.

    Args:
        trainer: The Trainer of the run to come, of either namespace of Lightning.
        model: Its model; it has to fit on one device, twice with its host copy.
        train_dataloaders: As for ``trainer.fit``.
        datamodule: As for ``trainer.fit``.
        steps: How many optimizer steps are made; at least 1.
        precision: What the advice is about: ``"auto"`` for what the device runs natively.
        headroom: How many times larger than measured activations may become; gradients, which vary more from step to
            step, the square of that. At least 1.
        max_modules: How many modules may be kept in float32 in ``"16-mixed"``; if it takes more, a wider precision is
            advised; at least 0.
        rehearse: Whether an advice for ``"16-mixed"`` is tried.

    Returns:
        What to give to the plugin: ``AdaptiveMixedPrecision(**find_precision(trainer, model).arguments)``.

    Raises:
        ValueError: If an argument is out of its range.
        TypeError: If the loader is an iterator, which can be used once only; if the model cannot be copied.
        NonFiniteStepError: If the model is not finite in float32.

    """
    if not hasattr(trainer, "strategy"):
        name = type(trainer).__name__
        raise TypeError(f"find_precision got {name} for the Trainer: it is find_precision(trainer, model, ...).")
    _require(steps=steps, precision=precision, headroom=headroom, max_modules=max_modules)
    rehearsal = Rehearsal(trainer, model, train_dataloaders, datamodule, steps)
    choice = select_precision(trainer.strategy.root_device)
    if precision != "auto":
        choice = PrecisionChoice(precision, "it was asked for", choice.emulates_bfloat16)
    advice = advise(_measured(rehearsal, steps), choice, headroom, max_modules)
    for _ in range(_REHEARSALS if rehearse else 0):
        if advice.precision != "16-mixed":
            break
        left = max_modules - len(advice.keep_fp32)
        scope = {"scope": "module", "max_modules": left} if left > 0 else {}
        fallback = rehearsal.names.PrecisionFallback(patience=1, **scope)
        plugin, reports = rehearsal.run(advice.arguments, [fallback])
        if not reports:
            break
        scale = plugin.scaler.get_scale() if plugin.precision == "16-mixed" else 1.0
        before, advice = advice, corrected(advice, reports, plugin.kept_modules, plugin.precision, scale)
        if advice.arguments == before.arguments:
            break  # it was the batch, say
    else:
        if rehearse:
            why = f"the last of {_REHEARSALS} was not clean, and what came of it was not rehearsed"
            reasons = {**advice.reasons, "rehearsal": why}
            return replace(advice, reasons=reasons)
    return advice


def _measured(rehearsal: Rehearsal, steps: int) -> DynamicRange:
    monitor = rehearsal.names.DynamicRangeMonitor(every_n_steps=1)
    arguments = {"precision": "32-true", "max_skipped": min(steps, 10)}  # if all are, that is an error
    rehearsal.run(arguments, [monitor])
    stats: DynamicRange = monitor.stats
    if stats.counts[KINDS.index("parameter_gradients")].sum() == 0:
        raise ValueError(
            "find_precision saw no gradient: the loader was empty, or training_step returned None. Pass the loaders or"
            " the datamodule that trainer.fit gets."
        )
    return stats


def _require(*, steps: int, precision: str, headroom: float, max_modules: int) -> None:
    wrong: tuple[str, object, str] | None = None
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        wrong = "steps", steps, "an integer of at least 1"
    elif precision not in ("auto", *NAMES):
        wrong = "precision", precision, f"'auto' or one of {', '.join(NAMES)}"
    elif not isinstance(headroom, (int, float)) or not 1 <= headroom < math.inf:
        wrong = "headroom", headroom, "a number of at least 1"
    elif not isinstance(max_modules, int) or isinstance(max_modules, bool) or max_modules < 0:
        wrong = "max_modules", max_modules, "an integer of at least 0"
    if wrong is not None:
        name, value, legal = wrong
        raise ValueError(f"find_precision({name}={value!r}): it must be {legal}.")
