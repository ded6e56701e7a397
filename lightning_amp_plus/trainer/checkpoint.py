"""The engine's state in a checkpoint: builtins only, for ``torch.load(weights_only=True)``. Plain torch."""

from __future__ import annotations

import math
from typing import Any

from lightning_amp_plus.precisions import NAMES, PrecisionName
from lightning_amp_plus.step.engine import StepEngine
from lightning_amp_plus.step.report import StepCounters, is_wider

_VERSION = 1


def state_of(engine: StepEngine) -> dict[str, Any]:
    """Return what resumes a run exactly: loss scale, precision and counters."""
    counters = engine.counters
    return {
        **engine.loss_scaler.state_dict(),
        "precision": engine.precision,
        "configured_precision": engine.configured_precision,
        "kept_modules": list(engine.kept.found),
        "fallback": engine.fallback.state_dict(),
        "counters": {
            "applied_steps": counters.applied_steps,
            "skipped_steps": counters.skipped_steps,
            "retried_attempts": counters.retried_attempts,
            "rescued_steps": counters.rescued_steps,
            "rescued_evaluations": counters.rescued_evaluations,
            "recent": counters.recent,
            "skipped_in_a_row": dict(engine.skips.in_a_row),
        },
        "by_optimizer": {index: list(counts) for index, counts in engine.by_optimizer.items()},
        "version": _VERSION,
    }


def stock_state_of(engine: StepEngine) -> dict[str, Any]:
    """Return what Lightning's own ``MixedPrecision`` resumes from, which raises on an empty state."""
    state = engine.loss_scaler.state_dict()
    del state["hysteresis"], state["search"]  # which stock does not know
    return state


def load_state(
    engine: StepEngine, state: dict[str, Any], *, keeps_fallback: bool, only_precision: bool = False
) -> None:
    """Take over scale and counters, from stock's state too; what the engine was configured with stays.

    Args:
        engine: What to load into.
        state: Of :func:`state_of`, or of a ``GradScaler``.
        keeps_fallback: Whether a run that had moved to a wider precision goes on in it.
        only_precision: Whether to load nothing else, and no narrower precision than the present one.

    Raises:
        ValueError: If the state was written by a later version of the package.

    """
    if state.get("version", 0) > _VERSION:
        raise ValueError(
            f"The checkpoint's precision state has version {state['version']}, and this lightning_amp_plus"
            f" reads up to {_VERSION}: update the package. Nothing was loaded."
        )
    precision = engine.precision if only_precision else engine.configured_precision
    if keeps_fallback and had_moved(state, precision):
        precision = state["precision"]
    usable = 0 < state.get("scale", 0) < math.inf  # stock's may have collapsed: no matter without a scaler
    if not only_precision and (usable or (precision == "16-mixed" and "scale" in state)):
        engine.loss_scaler.load_state_dict(state)  # first, since it may refuse
    engine.precision = precision
    engine.keep(state.get("kept_modules", ()) if keeps_fallback else ())
    if only_precision:
        return
    fallback = state.get("fallback", {})
    if not keeps_fallback:
        fallback = {key: fallback[key] for key in ("is_suspect", "located") if key in fallback}
    engine.fallback.load_state_dict(fallback)
    engine.last_step = None
    counters = dict(state.get("counters", {}))
    engine.skips.in_a_row = dict(counters.pop("skipped_in_a_row", {}))
    engine.by_optimizer = {index: list(counts) for index, counts in state.get("by_optimizer", {}).items()}
    engine.counters = StepCounters(**counters)


def had_moved(state: dict[str, Any], present: PrecisionName) -> bool:
    """Tell whether the run of ``state`` had moved to a precision that is wider than the present one."""
    # "auto" may have chosen another precision on other hardware: that is no fallback.
    saved = state.get("precision")
    return saved in NAMES and saved != state.get("configured_precision") and is_wider(saved, present)
