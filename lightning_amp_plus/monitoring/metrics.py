"""The metrics that are logged, by key: every value finite, and the same on all ranks. Plain Python."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lightning_amp_plus.monitoring.history import MANTISSA_BITS
from lightning_amp_plus.monitoring.underflow import UnderflowShares
from lightning_amp_plus.step.report import StepCounters, StepReport


def metrics_of_run(counters: StepCounters, report: StepReport, scale: float) -> dict[str, float]:
    """Return what holds for the run, after a step and at a loss scale (1 for none)."""
    return {
        "amp/loss_scale": scale,
        "amp/mantissa_bits": float(MANTISSA_BITS[report.precision]),
        "amp/applied_steps": float(counters.applied_steps),
        "amp/skipped_steps": float(counters.skipped_steps),
        "amp/retried_attempts": float(counters.retried_attempts),
        "amp/rescued_steps": float(counters.rescued_steps),
        "amp/overflow_rate": counters.overflow_rate,
    }


def metrics_of_step(report: StepReport, index: int | None = None) -> dict[str, float]:
    """Return what holds for a step; ``index`` tells its optimizer, where there are several."""
    values, suffix = {}, "" if index is None else f"_{index}"
    if report.grad_norm is not None and math.isfinite(report.grad_norm):
        values[f"amp/grad_norm{suffix}"] = report.grad_norm
    if report.clipped is not None:
        values[f"amp/clipped{suffix}"] = float(report.clipped)
    return values


def metrics_of_optimizers(counts: Mapping[int, Sequence[int]]) -> dict[str, float]:
    """Return how many steps of each optimizer were applied and skipped."""
    values = {}
    for index, (applied, skipped) in counts.items():
        values[f"amp/applied_steps_{index}"] = float(applied)
        values[f"amp/skipped_steps_{index}"] = float(skipped)
    return values


def metrics_of_underflow(shares: UnderflowShares) -> dict[str, float]:
    """Return the shares of gradient elements that float16 is too coarse for."""
    return {
        "amp/underflow": shares.underflow,
        "amp/underflow_added_at_half_scale": shares.added_at_half_scale,
        "amp/zero_gradients": shares.zero,
    }
