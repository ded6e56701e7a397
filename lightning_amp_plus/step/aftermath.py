"""What follows a step that was skipped, or applied because it was run again: scale, counts, words. Plain torch."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_amp_plus.diagnosis.cause import Diagnosis, of_fault
from lightning_amp_plus.diagnosis.locate import Phase
from lightning_amp_plus.step.proof import Proof
from lightning_amp_plus.step.report import StepReport

if TYPE_CHECKING:
    from lightning_amp_plus.step.engine import StepEngine


def after_proof(engine: StepEngine, report: StepReport, proof: Proof) -> None:
    """Go on after a step that was applied because it was run again."""
    if proof.rescued:
        engine.fallback.note_rescue(report, engine.precision, proof.moves_to, proof.found)
    elif proof.moves_to is not None:
        engine.fallback.move(proof.moves_to, _failed(engine, report), report)
    elif proof.failed_at is not None:
        _note_cure(engine, report, proof.failed_at, report.scale)


def after_skip(engine: StepEngine, report: StepReport, made_at: float | None, *, trial: bool) -> None:
    """Lower the scale if it may be to blame and was not tried; otherwise ask what follows."""
    untried = report.non_finite == "gradients" and not engine.tried_lower
    if untried and made_at is not None and _lower_scale(engine, made_at):
        engine.skips.say(
            "scale",
            logging.INFO,
            f"Optimizer step {report.step}: the gradients overflowed at loss scale {made_at:g} and the step was"
            f" skipped; the next one is made at {engine.loss_scaler.get_scale():g}. This is how the scale is found.",
        )
        return
    if engine.passes.anomaly is not None:
        raise engine.passes.anomaly
    if trial:
        engine.skips.note_trial(report)
        return
    if report.diagnosis is None:
        engine.last_step = report = replace(report, diagnosis=_look_back(engine, report))
    if report.diagnosis is not None and report.diagnosis.cause == "parameters":
        raise engine.skips.error(report, "no loss scale can help")
    if engine.fallback.on_trial is not None:
        engine.fallback.move(engine.fallback.on_trial, _failed(engine, report), report, failed=False)
    if engine.fallback.next_precision is not None:
        return
    why = _why_not_lower(engine, report)
    if not engine.fallback.note_located(report, engine.precision, why):
        engine.skips.answer(report, why)


def _look_back(engine: StepEngine, report: StepReport) -> Diagnosis | None:
    """Tell what is known of a skipped step that could not be run again, and have the next one looked on at."""
    engine.fallback.is_suspect = report.non_finite != "hook"
    if engine.fallback.rules is None and not engine.skips.is_last(report.optimizer):
        return None
    if (state := engine.diagnose_state()) is not None:
        return state
    phase: Phase = "forward" if report.non_finite == "loss" else "backward"
    fault = (
        None
        if engine.locator is None
        else engine.agreed(engine.locator.fault(phase) or engine.locator.fault("backward"))
    )
    if fault is None:
        engine.fallback.located.pop(report.optimizer, None)
        return None
    engine.fallback.located[report.optimizer] = engine.fallback.located.get(report.optimizer, 0) + 1
    return of_fault(phase, fault, report.precision, None)


def _note_cure(engine: StepEngine, report: StepReport, failed_at: float, worked_at: float) -> None:
    engine.loss_scaler.record_cure(failed=failed_at, worked=worked_at)
    first = report.tried[0][1]
    scales = f"loss scale {first:g}" + (f" and down to {failed_at:g}" if first != failed_at else "")
    text = f"Optimizer step {report.step}: the gradients overflowed at {scales}; the step was run"
    text += f" again and applied at {worked_at:g}."
    if engine.loss_scaler.loss_scale.dynamic:
        engine.skips.say("scale", logging.INFO, f"{text} This is how the scale is found.")
    else:
        engine.skips.say("scale", logging.WARNING, f"{text} LossScale(dynamic=False) keeps the scale where it is.")


def _why_not_lower(engine: StepEngine, report: StepReport) -> str:
    if engine.scaler is None or engine.scaler.loss_scale.dynamic or engine.tried_lower:
        return "no lower loss scale can help"
    return "LossScale(dynamic=False) keeps the loss scale (a lower init_scale, or dynamic=True, may help)"


def _lower_scale(engine: StepEngine, made_at: float) -> bool:
    """Lower the scale, once for all gradients that were made with it; tell whether a lower one is to be tried."""
    if made_at <= engine.loss_scaler.state.scale and not engine.passes.blamed:
        engine.loss_scaler.record(overflow=True, at=made_at)
        engine.passes.blamed = True
    return engine.may_lower(made_at)


def _failed(engine: StepEngine, report: StepReport) -> str:
    return f"Optimizer step {report.step} was not finite in {engine.precision!r}"
