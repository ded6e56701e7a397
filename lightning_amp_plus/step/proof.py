"""What a window that no loss scale can help is tried in, and what follows from that. Plain torch.

    run it in the widest precision
    not finite there either:    it is the batch, the parameters or the model: skip
    finite there:               look on while it fails once more, to find where
        the run stays:          apply it in the widest precision: a rescue
        the run moves:          apply it with the modules at fault kept in float32, or in the narrowest precision
                                that is finite: a fallback

Whoever runs the window is behind one small protocol, :class:`Tries`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_amp_plus.diagnosis.cause import OF_STATIC_SCALE, Diagnosis, of_fault
from lightning_amp_plus.diagnosis.locate import Fault, Phase
from lightning_amp_plus.precisions import PrecisionName
from lightning_amp_plus.scaling.finish import Verdict
from lightning_amp_plus.step.report import Try
from lightning_amp_plus.step.rules import FallbackRules


@dataclass
class Attempt:
    """What came of running a window: one forward and backward over its micro-batches.

    Attributes:
        output: What its last closure returned.
        verdict: What the check of its gradients found.
        made_at: The loss scale; ``None`` without one.
        precision: What it was run in.
        magnitude: The largest magnitude that the module put out that was to be measured.

    """

    output: Any
    verdict: Verdict
    made_at: float | None
    precision: PrecisionName
    magnitude: float | None = None

    @property
    def is_finite(self) -> bool:
        """Whether the step can be applied."""
        return self.verdict.non_finite is None

    @property
    def is_clean(self) -> bool:
        """Whether the step can be applied, and the window has not raised on any rank."""
        return self.verdict.non_finite is None and not self.verdict.has_raised

    @property
    def phase(self) -> Phase:
        """What it was in that was not finite."""
        return "forward" if self.verdict.non_finite == "loss" else "backward"


class Tries(Protocol):
    """Runs the window of a step again and again; all ranks alike."""

    holds_at_floor: bool
    """Whether the run's precision holds the window at the lowest loss scale, as :meth:`locate` found."""

    @property
    def precision(self) -> PrecisionName:
        """What the run computes in."""

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of the modules that were found to need float32."""

    def keep(self, names: Sequence[str]) -> None:
        """Keep these modules in float32, and no others that were found."""

    def attempt(self, precision: PrecisionName, measure: str | None = None, *, is_final: bool = True) -> Attempt | None:
        """Run the window, and measure what a module puts out; ``None`` if it raises, or does not fit into memory."""

    def locate(self, phase: Phase) -> Fault | None:
        """Run the window in the run's precision, at the lowest loss scale, and look on."""

    def blame(self, phase: Phase) -> Diagnosis:
        """Tell why no precision helps."""


@dataclass(frozen=True)
class Proof:
    """What a window has proved.

    Attributes:
        attempt: The last one, whose gradients are there; ``None`` if it came to no end.
        diagnosis: Why the window failed.
        moves_to: The precision that the run goes on in.
        rescued: Whether a wider precision, or a module kept in one, made it finite.
        failed_at: The lowest loss scale that was too high; ``None`` if it was not the scale.
        found: The modules that were found to need float32.
        tried: The precision and the loss scale of each attempt.

    """

    attempt: Attempt | None
    diagnosis: Diagnosis | None
    moves_to: PrecisionName | None = None
    rescued: bool = False
    failed_at: float | None = None
    found: tuple[str, ...] = ()
    tried: tuple[Try, ...] = ()


def prove(
    tries: Tries,
    rules: FallbackRules,
    rungs: Sequence[PrecisionName],
    phase: Phase,
    *,
    moves: bool,
    applies: bool = True,
) -> Proof:
    """Try a window that was not finite in a wider precision.

    Args:
        tries: Runs it.
        rules: What follows.
        rungs: The wider precisions that there are, from narrow to wide; at least one.
        phase: Where it was not finite.
        moves: Whether the run moves if a wider precision holds the window.
        applies: Whether the step may be applied in one. Else it is only asked why it failed.

    """
    widest = tries.attempt(rungs[-1], is_final=False)  # it is run again
    if widest is None:
        return Proof(None, None)
    if not widest.is_finite:
        return Proof(widest, tries.blame(widest.phase))
    fault = tries.locate(phase)
    if tries.holds_at_floor:
        return Proof(None, OF_STATIC_SCALE)
    if not applies:
        return Proof(None, of_fault(phase, fault, tries.precision, rungs[-1]))
    proof = _go_on(tries, rules, rungs, fault, phase, moves=moves)
    if proof.attempt is None or not proof.attempt.is_finite:
        return Proof(proof.attempt, of_fault(phase, fault, tries.precision, rungs[-1]))
    held_by = rungs[-1] if proof.attempt.precision == tries.precision else proof.attempt.precision
    diagnosis = of_fault(phase, fault, tries.precision, held_by, proof.attempt.magnitude)
    return Proof(proof.attempt, diagnosis, proof.moves_to, rescued=True)


def go_on_after_error(
    tries: Tries, rules: FallbackRules, rungs: Sequence[PrecisionName], diagnosis: Diagnosis
) -> Proof:
    """Move on after a window that raised, and did not on the widest of ``rungs``."""
    fault = tries.locate("forward")  # the user's own guard against NaN, say, raises after it
    if fault is None or not fault.module:
        fault = Fault("forward", diagnosis.module)
    proof = _go_on(tries, rules, rungs, fault, "forward", moves=True)
    return Proof(proof.attempt, diagnosis, proof.moves_to, proof.attempt is not None and proof.attempt.is_finite)


def _go_on(
    tries: Tries,
    rules: FallbackRules,
    rungs: Sequence[PrecisionName],
    fault: Fault | None,
    phase: Phase,
    *,
    moves: bool,
) -> Proof:
    measure = fault.module if fault is not None and phase == "forward" else None
    if moves and rules.scope == "module":
        attempt = _keep_modules(tries, rules, fault, measure)
        if attempt is not None:
            return Proof(attempt, None)
    attempt = None
    for rung in rungs if moves else rungs[-1:]:
        attempt = tries.attempt(rung, measure)
        if attempt is not None and attempt.is_finite:
            return Proof(attempt, None, rung if moves else None)
    return Proof(attempt, None)


def _keep_modules(tries: Tries, rules: FallbackRules, fault: Fault | None, measure: str | None) -> Attempt | None:
    """Keep one module after the other in float32, until the window is finite; ``None`` if that cannot be."""
    before = tries.kept
    while fault is not None and fault.module and fault.module not in tries.kept and len(tries.kept) < rules.max_modules:
        tries.keep((*tries.kept, fault.module))
        attempt = tries.attempt(tries.precision, measure)
        if attempt is None:
            break
        if attempt.is_finite:
            return attempt
        fault = tries.locate(attempt.phase)
    tries.keep(before)
    return None
