"""What a step did, in a form that can be kept, compared and logged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from lightning_amp_plus.precisions import NAMES, PrecisionName

if TYPE_CHECKING:
    from lightning_amp_plus.diagnosis.cause import Diagnosis

Outcome = Literal["applied", "skipped"]
Place = Literal["loss", "gradients", "hook"]
Try = tuple[PrecisionName, float]
"""An attempt: its precision, and its loss scale, which is 1 without loss scaling."""

_WINDOW = 100


def is_wider(one: PrecisionName, other: PrecisionName) -> bool:
    """Tell whether a precision holds more than another."""
    return NAMES.index(one) > NAMES.index(other)


@dataclass(frozen=True)
class StepReport:
    """One optimizer step.

    Attributes:
        step: How many optimizer steps the fit had made before this one, skipped ones included.
        optimizer: The position of the optimizer in ``trainer.optimizers``.
        precision: What the step ran in.
        scale: The loss scale that the gradients of the last attempt were made with; 1 without loss scaling.
        attempts: How often its micro-batches were run, forward and backward: 1 for a step that was not run again.
        outcome: ``"applied"`` or ``"skipped"``.
        non_finite: Where the inf or NaN of a skipped step was seen: in the loss, in the gradients that backward left,
            or in what a hook or a clipping of the user's made of finite gradients. ``None`` for an applied step.
        grad_norm: The 2-norm of the true gradients before clipping, where it was needed for clipping or asked for by
            ``AdaptiveMixedPrecision.request_grad_norm``; else ``None``.
        clipped: Whether clipping by norm made the gradients smaller; ``None`` where the plugin did not clip by norm.
        rescued: Whether the step was applied only because a wider precision, or a module kept in one, made it finite.
        diagnosis: Why an attempt failed; ``None`` for a clean step, and where nothing was found out.
        tried: The precision and the loss scale of each attempt, in order; empty if there was only one.
        moves_to: The precision that the run goes on in after this step; ``None`` if it stays where it is.
        kept: The modules that this step has shown to need float32, and that compute in it from now on.

    """

    step: int
    optimizer: int
    precision: PrecisionName
    scale: float
    attempts: int
    outcome: Outcome
    non_finite: Place | None = None
    grad_norm: float | None = None
    clipped: bool | None = None
    rescued: bool = False
    diagnosis: Diagnosis | None = None
    tried: tuple[Try, ...] = ()
    moves_to: PrecisionName | None = None
    kept: tuple[str, ...] = ()

    @property
    def is_clean(self) -> bool:
        """Whether the first attempt was applied."""
        return self.attempts == 1 and self.outcome == "applied"


@dataclass(frozen=True)
class StepCounters:
    """How the steps of a run ended. In manual optimization every call of an optimizer's ``step`` counts.

    Attributes:
        applied_steps: Steps that changed the weights.
        skipped_steps: Steps that did not, because the loss or a gradient was not finite.
        recent: The last 100 steps, one bit each, the newest lowest: 1 if the step met an inf or NaN.
        retried_attempts: Attempts beyond the first of their step.
        rescued_steps: Applied steps that only a wider precision, or a module kept in one, made finite.
        rescued_evaluations: Batches of validation and test that only a wider precision made finite.

    """

    applied_steps: int = 0
    skipped_steps: int = 0
    recent: int = field(default=0, repr=False)
    retried_attempts: int = 0
    rescued_steps: int = 0
    rescued_evaluations: int = 0

    @property
    def steps(self) -> int:
        """All steps."""
        return self.applied_steps + self.skipped_steps

    @property
    def overflow_rate(self) -> float:
        """The share of the last 100 steps that met an inf or NaN, between 0 and 1."""
        steps = min(self.steps, _WINDOW)
        return self.recent.bit_count() / steps if steps else 0.0

    def after(self, outcome: Outcome, attempts: int = 1, *, rescued: bool = False) -> StepCounters:
        """Return the counters one step later, which took so many attempts."""
        skipped = outcome == "skipped"
        unclean = skipped or attempts > 1
        return StepCounters(
            self.applied_steps + (not skipped),
            self.skipped_steps + skipped,
            (self.recent << 1 | unclean) & ((1 << _WINDOW) - 1),
            self.retried_attempts + attempts - 1,
            self.rescued_steps + rescued,
            self.rescued_evaluations,
        )
