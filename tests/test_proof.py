"""What a window that no loss scale can help is run in, in which order, and what follows; the attempts are made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lightning_amp_plus.diagnosis.cause import OF_STATIC_SCALE, Diagnosis
from lightning_amp_plus.diagnosis.locate import Fault, Phase
from lightning_amp_plus.precisions import PrecisionName
from lightning_amp_plus.scaling.finish import Verdict
from lightning_amp_plus.step.proof import Attempt, Proof, go_on_after_error, prove
from lightning_amp_plus.step.rules import FallbackRules

RUNGS: tuple[PrecisionName, ...] = ("bf16-mixed", "32-true")
BLAMED = Diagnosis("model", None, "It is the model.")
MODEL, MODULE = FallbackRules(), FallbackRules(scope="module")
Outcome = Callable[[PrecisionName, tuple[str, ...]], Any]


class MadeUpTries:
    """A window whose attempts end as ``outcome`` says: True if finite, False if not, None if it raises."""

    def __init__(
        self,
        outcome: Outcome,
        faults: Sequence[Fault | None] = (Fault("forward", "layer"),),
        kept: tuple[str, ...] = (),
    ) -> None:
        self.outcome, self.faults, self.kept = outcome, list(faults), kept
        self.precision: PrecisionName = "16-mixed"
        self.holds_at_floor = False
        self.calls: list[str] = []

    def keep(self, names: Sequence[str]) -> None:
        self.kept = tuple(names)

    def attempt(self, precision: PrecisionName, measure: str | None = None, *, is_final: bool = True) -> Attempt | None:
        kept = "".join(f" +{name}" for name in self.kept)
        measured = f" measuring {measure}" if measure else ""
        self.calls.append(f"{precision}{kept}{measured}{'' if is_final else ' only to see'}")
        is_finite = self.outcome(precision, self.kept)
        if is_finite is None:
            return None
        verdict = Verdict(None if is_finite else "loss")
        return Attempt(self.calls[-1], verdict, None, precision, 7e4 if measure else None)

    def locate(self, phase: Phase) -> Fault | None:
        self.calls.append(f"locate {phase}")
        return self.faults.pop(0)

    def blame(self, phase: Phase) -> Diagnosis:
        self.calls.append(f"blame {phase}")
        return BLAMED


def finite_in(*precisions: PrecisionName) -> Outcome:
    return lambda precision, kept: precision in precisions


def finite_with(*modules: str) -> Outcome:
    """In float32, or with these modules in it."""
    return lambda precision, kept: precision == "32-true" or set(modules) <= set(kept)


def proof_of(
    tries: MadeUpTries, rules: FallbackRules = MODEL, phase: Phase = "forward", *, moves: bool = True
) -> Proof:
    return prove(tries, rules, RUNGS, phase, moves=moves)


def test_a_window_that_is_finite_nowhere_costs_one_attempt_and_is_blamed() -> None:
    tries = MadeUpTries(finite_in())
    proof = proof_of(tries)
    assert tries.calls == ["32-true only to see", "blame forward"]
    assert (proof.diagnosis, proof.rescued, proof.moves_to) == (BLAMED, False, None)


def test_a_window_that_raises_in_the_widest_precision_proves_nothing() -> None:
    tries = MadeUpTries(lambda precision, kept: None)
    assert proof_of(tries) == Proof(None, None)
    assert len(tries.calls) == 1


@pytest.mark.parametrize("rules", [MODEL, MODULE], ids=["model", "module"])
def test_a_window_is_rescued_in_the_widest_precision_while_the_run_stays(rules: FallbackRules) -> None:
    tries = MadeUpTries(finite_in("bf16-mixed", "32-true"))
    proof = proof_of(tries, rules, moves=False)
    assert tries.calls == ["32-true only to see", "locate forward", "32-true measuring layer"]
    assert (proof.rescued, proof.moves_to, tries.kept) == (True, None, ())
    assert proof.diagnosis is not None
    assert (proof.diagnosis.cause, proof.diagnosis.module) == ("forward", "layer")
    assert "put out 7e+04, above float16's 65504; it is finite in float32" in str(proof.diagnosis)


def test_what_is_applied_is_the_last_attempt() -> None:
    tries = MadeUpTries(finite_in("bf16-mixed", "32-true"))
    proof = proof_of(tries)
    assert proof.attempt is not None
    assert proof.attempt.output == tries.calls[-1] == "bf16-mixed measuring layer"


def test_a_run_that_moves_goes_to_the_narrowest_precision_that_holds_the_window() -> None:
    proof = proof_of(MadeUpTries(finite_in("bf16-mixed", "32-true")))
    assert (proof.rescued, proof.moves_to) == (True, "bf16-mixed")
    assert "it is finite in bfloat16" in str(proof.diagnosis)


@pytest.mark.parametrize("in_bfloat16", [False, None], ids=["not finite", "raises"])
def test_a_precision_that_does_not_hold_the_window_is_passed_over(in_bfloat16: bool | None) -> None:
    tries = MadeUpTries(lambda precision, kept: True if precision == "32-true" else in_bfloat16)
    proof = proof_of(tries)
    assert tries.calls[2:] == ["bf16-mixed measuring layer", "32-true measuring layer"]
    assert (proof.rescued, proof.moves_to) == (True, "32-true")


def test_a_window_that_is_no_longer_finite_when_it_counts_is_not_rescued() -> None:
    outcomes = iter([True, False])
    proof = proof_of(MadeUpTries(lambda precision, kept: next(outcomes)), moves=False)
    assert proof.attempt is not None
    assert not proof.attempt.is_finite
    assert (proof.rescued, proof.moves_to) == (False, None)


def test_what_the_lowest_loss_scale_holds_is_the_scale_and_not_rescued() -> None:
    tries = MadeUpTries(lambda precision, kept: precision == "32-true")
    tries.holds_at_floor = True
    proof = prove(tries, FallbackRules(), ("bf16-mixed", "32-true"), "backward", moves=True)
    assert (proof.attempt, proof.rescued, proof.diagnosis) == (None, False, OF_STATIC_SCALE)
    assert len(tries.calls) == 2  # the widest, and the one that is looked on at


def test_of_a_backward_nothing_is_measured() -> None:
    tries = MadeUpTries(finite_in("32-true"), [Fault("backward", "layer")])
    proof = proof_of(tries, phase="backward", moves=False)
    assert tries.calls == ["32-true only to see", "locate backward", "32-true"]
    assert proof.diagnosis is not None
    assert (proof.diagnosis.cause, proof.diagnosis.module) == ("backward", "layer")


def test_a_place_that_is_not_found_does_not_keep_the_window_from_being_rescued() -> None:
    proof = proof_of(MadeUpTries(finite_in("32-true"), [None]), moves=False)
    assert proof.rescued
    assert proof.diagnosis is not None
    assert proof.diagnosis.module is None


# The module at fault --------------------------------------------------------------------------------------------------


def test_the_module_at_fault_is_kept_in_float32_and_the_run_stays() -> None:
    tries = MadeUpTries(finite_with("layer"))
    proof = proof_of(tries, MODULE)
    assert tries.calls == ["32-true only to see", "locate forward", "16-mixed +layer measuring layer"]
    assert (proof.rescued, proof.moves_to, tries.kept) == (True, None, ("layer",))
    assert "it is finite in float32" in str(proof.diagnosis)


def test_more_modules_are_kept_as_they_are_found_beside_those_kept_before() -> None:
    faults = [Fault("forward", name) for name in ("b", "c")]
    tries = MadeUpTries(finite_with("a", "b", "c"), faults, kept=("a",))
    proof = proof_of(tries, MODULE)
    assert tries.calls[2:] == ["16-mixed +a +b measuring b", "locate forward", "16-mixed +a +b +c measuring b"]
    assert (proof.moves_to, tries.kept) == (None, ("a", "b", "c"))
    assert proof.diagnosis is not None
    assert proof.diagnosis.module == "b"


NO_MODULE: dict[str, tuple[FallbackRules, list[Fault | None], tuple[str, ...], Outcome]] = {
    "no place": (MODULE, [None], (), finite_in("32-true")),
    "outside of all modules": (MODULE, [Fault("forward", None)], (), finite_in("32-true")),
    "in the model's own code": (MODULE, [Fault("forward", "")], (), finite_in("32-true")),
    "in a module that is kept": (MODULE, [Fault("forward", "a")], ("a",), finite_in("32-true")),
    "the module does not help": (MODULE, [Fault("forward", "b"), None], ("a",), finite_in("32-true")),
    "the same module again": (MODULE, [Fault("forward", "b")] * 2, ("a",), finite_in("32-true")),
    "it raises": (
        MODULE,
        [Fault("forward", "b")],
        ("a",),
        lambda precision, kept: None if "b" in kept else precision == "32-true",
    ),
    "too many modules": (
        FallbackRules(scope="module", max_modules=2),
        [Fault("forward", name) for name in "bcd"],
        ("a",),
        finite_with(*"abc"),
    ),
}


@pytest.mark.parametrize("name", NO_MODULE)
def test_the_model_moves_if_no_module_can_be_kept_and_what_was_kept_before_is_kept(name: str) -> None:
    rules, faults, kept, outcome = NO_MODULE[name]
    tries = MadeUpTries(outcome, faults, kept)
    proof = proof_of(tries, rules)
    assert (proof.rescued, proof.moves_to, tries.kept) == (True, "32-true", kept)
    assert [call.split()[0] for call in tries.calls[-2:]] == list(RUNGS)


# After an error -------------------------------------------------------------------------------------------------------

RAISED = Diagnosis("unsupported", "layer", "RuntimeError was raised in layer.")


def test_after_an_error_the_run_moves_to_the_narrowest_precision_that_does_not_raise() -> None:
    tries = MadeUpTries(lambda precision, kept: True if precision == "32-true" else None)
    proof = go_on_after_error(tries, MODEL, RUNGS, RAISED)
    assert tries.calls == ["locate forward", "bf16-mixed measuring layer", "32-true measuring layer"]
    assert (proof.rescued, proof.moves_to, proof.diagnosis) == (True, "32-true", RAISED)


def test_after_an_error_in_a_module_that_module_is_kept() -> None:
    tries = MadeUpTries(finite_with("layer"))
    proof = go_on_after_error(tries, MODULE, RUNGS, RAISED)
    assert (proof.rescued, proof.moves_to, proof.diagnosis, tries.kept) == (True, None, RAISED, ("layer",))


def test_after_an_error_that_comes_in_every_precision_again_nothing_is_rescued() -> None:
    proof = go_on_after_error(MadeUpTries(lambda precision, kept: None), MODEL, RUNGS, RAISED)
    assert (proof.attempt, proof.rescued, proof.moves_to) == (None, False, None)
