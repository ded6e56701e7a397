"""Which precision, loss scale and wide modules a model wants, from the magnitudes it has shown. Plain torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from glob import escape
from typing import TYPE_CHECKING, Any

from lightning_amp_plus.dynamic_range.stats import DynamicRange, Kind
from lightning_amp_plus.hardware.select import PrecisionChoice
from lightning_amp_plus.precisions import PrecisionName, scale_text
from lightning_amp_plus.scaling.exponents import FLOAT16_MAX, FLOAT16_NORMAL, FLOAT16_SUBNORMAL
from lightning_amp_plus.scaling.loss_scale import LossScale
from lightning_amp_plus.step.report import StepReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class PrecisionAdvice:
    """What to give to the plugin: ``AdaptiveMixedPrecision(**advice.arguments)``.

    Attributes:
        precision: ``"16-mixed"``, ``"bf16-mixed"`` or ``"32-true"``.
        init_scale: The loss scale to begin with; the default where the precision needs none.
        keep_fp32: The names of the modules to keep in float32.
        reasons: Why, each with its number: of ``"precision"``, ``"init_scale"``, and of each module by its name;
            ``"underflow"`` where many gradients vanish in float16.
        stats: The magnitudes that were measured.

    """

    precision: PrecisionName
    init_scale: float
    keep_fp32: tuple[str, ...]
    reasons: Mapping[str, str]
    stats: DynamicRange = field(repr=False)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of ``AdaptiveMixedPrecision``."""
        return {
            "precision": self.precision,
            "loss_scale": LossScale(init_scale=self.init_scale),
            "keep_fp32": [escape(name) for name in self.keep_fp32],  # they are patterns there
        }

    def plot(self, kind: Kind = "activations", ax: Axes | None = None) -> tuple[Figure, Axes]:
        """Draw the magnitudes, with the limits of the formats; see ``plot_dynamic_range``."""
        from lightning_amp_plus.monitoring.plotting import plot_dynamic_range

        return plot_dynamic_range(self.stats, kind, ax)

    def __str__(self) -> str:
        names = f", in float32 {', '.join(self.keep_fp32)}" if self.keep_fp32 else ""
        scale = f", init_scale {scale_text(self.init_scale)}" if self.precision == "16-mixed" else ""
        lines = [f"{self.precision}{scale}{names}"]
        return "\n".join([*lines, *(f"  {name}: {reason}" for name, reason in self.reasons.items())])


def advise(
    stats: DynamicRange, choice: PrecisionChoice, headroom: float = 4.0, max_modules: int = 8
) -> PrecisionAdvice:
    """Conclude from magnitudes that were measured in float32.

    Args:
        stats: What was measured.
        choice: The precision that is native on the device, and why.
        headroom: How many times larger activations may become; gradients, which vary more, the square of that.
        max_modules: How many modules may be kept in float32 in ``"16-mixed"``; if it takes more, a wider precision is
            advised.

    """
    reasons = {"precision": choice.reason}
    default = LossScale().init_scale
    if choice.precision != "16-mixed":
        return PrecisionAdvice(choice.precision, default, (), reasons, stats)
    wide = too_large_for_float16(stats, headroom)
    if len(wide) > max_modules or "" in wide:
        return _wider(
            stats,
            choice,
            f"{_count(wide)} that float16 does not hold, with {headroom:g} times of headroom ("
            + "; ".join(f"{name or 'the model itself'}: {wide[name]}" for name in list(wide)[:3])
            + ")",
        )
    largest = _largest_gradient(stats, wide)
    if 0 < largest * LossScale().max_scale < 2.0**FLOAT16_NORMAL:
        at = scale_text(LossScale().max_scale)
        return _wider(stats, choice, f"the largest gradient is {largest:.2g}, which vanishes in float16 even at {at}")
    scale, why = _init_scale(largest, headroom)
    reasons |= {**wide, "init_scale": why, **_vanishing(stats, wide, scale)}
    return PrecisionAdvice("16-mixed", scale, tuple(wide), reasons, stats)


def too_large_for_float16(stats: DynamicRange, headroom: float) -> dict[str, str]:
    """Return the modules that are beyond 65504, or would be if magnitudes grew, and why.

    By what they are called with or put out, or by gradients at the lowest loss scale.
    """
    outputs, gradients, of_parameters = stats.largest.tolist()
    reasons = {}
    for row, (name, largest_input) in enumerate(zip(stats.modules, stats.largest_input.tolist(), strict=True)):
        activation, gradient = max(outputs[row], largest_input), max(gradients[row], of_parameters[row])
        for what, value in (("gradients", gradient), ("activations", activation)):
            if value * headroom > FLOAT16_MAX:
                reasons[name] = f"{what} up to {value:.2g}, {value / FLOAT16_MAX:.2g} times float16's 65504"
    return reasons


def _wider(stats: DynamicRange, choice: PrecisionChoice, reason: str) -> PrecisionAdvice:
    """Advise what to use where float16 does not hold a model: bfloat16, but not where it is emulated."""
    precision: PrecisionName = "32-true" if choice.emulates_bfloat16 else "bf16-mixed"
    return PrecisionAdvice(precision, LossScale().init_scale, (), {"precision": reason}, stats)


def _count(wide: Mapping[str, str]) -> str:
    return "1 module has numbers" if len(wide) == 1 else f"{len(wide)} modules have numbers"


def _largest_gradient(stats: DynamicRange, wide: Mapping[str, str]) -> float:
    """Return the largest gradient in the modules that compute in float16; 0 if there is none."""
    rows = [row for row, name in enumerate(stats.modules) if name not in wide]
    return float(stats.largest[1:, rows].max()) if rows else 0.0


def _init_scale(largest: float, headroom: float) -> tuple[float, str]:
    rules = LossScale()
    if largest == 0:
        return rules.init_scale, "the modules in float16 have shown no gradient: the default"
    exponent = math.floor(math.log2(FLOAT16_MAX / headroom**2 / largest))
    scale = min(max(2.0**exponent, rules.min_scale), rules.max_scale)
    return scale, (
        f"the largest gradient is {largest:.2g}, at {scale_text(scale)} {largest * scale:.2g}, which leaves"
        f" {FLOAT16_MAX / (largest * scale):.2g} times of headroom to 65504"
    )


def _vanishing(stats: DynamicRange, wide: Mapping[str, str], scale: float) -> dict[str, str]:
    """Tell of modules most of whose gradients vanish in float16: no scale suits all."""
    below = replace(stats, loss_scale=scale).share_below("activation_gradients", FLOAT16_SUBNORMAL)
    lost = [(share, name) for share, name in zip(below, stats.modules, strict=True) if share > 0.5 and name not in wide]
    if not lost:
        return {}
    share, name = max(lost)
    more = f", and of {len(lost) - 1} other modules more than half" if len(lost) > 1 else ""
    return {"underflow": f"{share:.0%} of the gradients of {name} vanish in float16 at {scale_text(scale)}{more}"}


def corrected(
    advice: PrecisionAdvice, reports: Sequence[StepReport], kept: Sequence[str], precision: PrecisionName, scale: float
) -> PrecisionAdvice:
    """Return what a rehearsal has made of an advice.

    Args:
        advice: What was rehearsed.
        reports: Of its steps that were not clean; at least one.
        kept: The modules that it found to need float32.
        precision: What it ended in.
        scale: The loss scale that it ended at; 1 without one.

    """
    diagnoses = [report.diagnosis for report in reports if report.diagnosis is not None]
    if precision != advice.precision:
        detail = diagnoses[-1].detail if diagnoses else "it overflowed"
        reasons = {"precision": f"in a rehearsal {advice.precision!r} did not hold: {detail}"}
        return PrecisionAdvice(precision, LossScale().init_scale, (), reasons, advice.stats)
    reasons = dict(advice.reasons)
    for name in kept:  # the diagnosis of a step is about the first module that it has found
        found = [r.diagnosis.detail for r in reports if r.diagnosis is not None and r.kept[:1] == (name,)]
        reasons[name] = f"in a rehearsal: {found[-1] if found else 'it overflowed'}"
    init_scale = advice.init_scale
    if precision == "16-mixed" and scale < init_scale:
        reasons["init_scale"] = (
            f"in a rehearsal gradients overflowed at {scale_text(init_scale)}, and not at {scale_text(scale)}"
        )
        init_scale = max(scale / 2, LossScale().min_scale)
    return replace(advice, init_scale=init_scale, keep_fp32=(*advice.keep_fp32, *kept), reasons=reasons)
