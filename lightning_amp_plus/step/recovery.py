"""What is tried with a window that has failed: lower loss scales, then wider precisions. Plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from lightning_amp_plus.diagnosis.cause import of_error, of_error_elsewhere, of_scale
from lightning_amp_plus.diagnosis.locate import Fault
from lightning_amp_plus.scaling.loss_scale import FLOAT16_LOSS_MAX_SCALE
from lightning_amp_plus.scaling.passes import Request
from lightning_amp_plus.step.proof import Attempt, Proof, go_on_after_error, prove
from lightning_amp_plus.step.report import Try
from lightning_amp_plus.step.rules import FallbackRules
from lightning_amp_plus.step.tries import StepTries, Window

if TYPE_CHECKING:
    from lightning_amp_plus.step.engine import StepEngine


def rescue(
    engine: StepEngine,
    error: Exception,
    optimizer: Optimizer,
    run_again: Callable[[], Any],
    *,
    alone: bool,
    has_gradients: bool,
) -> Any:
    """Put an error that a window has raised to the proof: run the window, so far, in the widest precision.

    The rest of the window is computed there too. The loss scale stays, for other ranks may not have raised.

    Args:
        engine: What makes the step.
        error: What was raised.
        optimizer: What the window belongs to.
        run_again: Runs what there is of the window; it has been rolled back.
        alone: Whether this rank can do so while the others go on.
        has_gradients: Whether the window has left gradients.

    Raises:
        Exception: The error itself, if there is no wider precision, or the window raises there too.

    """
    passes, rungs = engine.passes, engine.rungs
    if engine.fallback.on_trial is not None:
        rungs = (engine.fallback.on_trial,)
    may_go = engine.agree is None or (alone and _scales_alike(engine))
    if not rungs or not may_go or engine.raised is not None or engine.passes_through(error):
        raise error
    if has_gradients:
        if not passes.began_fresh:
            raise error
        passes.clear(optimizer)
    engine.attempt_precision, passes.has_raised = rungs[-1], True
    passes.begin_again()
    try:
        output = run_again()
    except Exception:  # of whatever kind: it is the first one that counts
        engine.attempt_precision, passes.has_raised = engine.precision, False
    else:
        engine.raised = of_error(error, engine.module, engine.precision)
        error.__traceback__ = None  # which holds the frames of the forward, and with them its graph
        return output
    raise error


def _scales_alike(engine: StepEngine) -> bool:
    """Tell whether this rank knows what the other ranks scale the loss by."""
    return engine.passes.has_half_loss is not None or engine.loss_scaler.get_scale() <= FLOAT16_LOSS_MAX_SCALE


def try_again(
    engine: StepEngine, request: Request, window: Window, attempt: Attempt, *, trial: bool
) -> tuple[Attempt, Proof]:
    """Run a window again until it is finite or nothing is left.

    Args:
        engine: What makes the step.
        request: What is asked of it.
        window: What it is computed from.
        attempt: The first attempt, which failed, or whose window has raised.
        trial: Whether the step belongs to a search that wants to see it fail: no other precision is tried.

    Returns:
        The last attempt in the run's precision, and what was proved.

    """
    tried: list[Try] = [(attempt.precision, attempt.made_at or 1.0)]
    if attempt.verdict.has_raised:
        tried.insert(0, (engine.precision, attempt.made_at or 1.0))
    tries, kept = StepTries(engine, request, window, tried), engine.kept.found
    attempt, proof = _try(engine, tries, attempt, trial=trial)
    found = tuple(name for name in engine.kept.found if name not in kept)
    return attempt, replace(proof, found=found, tried=tuple(tries.tried))


def _try(engine: StepEngine, tries: StepTries, attempt: Attempt, *, trial: bool) -> tuple[Attempt, Proof]:
    if attempt.is_finite:
        return attempt, _prove_error(engine, tries, attempt)
    failed_at = None
    for scale in _scales_to_retry(engine, tries, attempt):
        failed_at, engine.tried_lower = attempt.made_at, True
        attempt = tries.run_at(scale)
        if attempt.verdict.non_finite != "gradients":
            break
    if attempt.is_finite and failed_at is not None and attempt.made_at is not None:
        return attempt, Proof(attempt, of_scale(failed_at, attempt.made_at), failed_at=failed_at)
    may_be_scale = attempt.verdict.non_finite == "gradients" and not engine.tried_lower
    if trial or attempt.verdict.non_finite == "hook" or (may_be_scale and engine.may_lower(attempt.made_at)):
        return attempt, Proof(attempt, None)
    return attempt, _prove(engine, tries, attempt)


def _scales_to_retry(engine: StepEngine, tries: StepTries, attempt: Attempt) -> list[float]:
    if engine.scaler is None or attempt.made_at is None or attempt.verdict.non_finite != "gradients":
        return []
    scales = engine.loss_scaler.retry_scales(attempt.made_at, engine.retries)
    return scales if scales and tries.can_run else []


def _prove(engine: StepEngine, tries: StepTries, attempt: Attempt) -> Proof:
    """Try a window in wider precisions, also where none may be gone on in, if it is the last before the end."""
    if engine.fallback.on_trial is not None:
        wide = tries.attempt(engine.fallback.on_trial) if tries.can_run else None
        return Proof(wide, None, engine.fallback.on_trial)
    rules = engine.fallback.rules or (FallbackRules() if engine.skips.is_last(tries.index) else None)
    if rules is None:
        return Proof(attempt, None)
    rungs = engine.fallback.rungs(engine.precision, rules)
    if not rungs:
        return Proof(attempt, tries.blame(attempt.phase))
    if not tries.can_run:
        return Proof(attempt, None)
    if engine.agree is not None and engine.passes.has_raised_anywhere:
        rungs = rungs[-1:]  # where it is known not to raise
    moves, applies = engine.fallback.moves_at(engine.counters.steps), engine.fallback.rules is not None
    proof = prove(tries, rules, rungs, attempt.phase, moves=moves, applies=applies)
    return proof if applies else Proof(attempt, proof.diagnosis)


def _prove_error(engine: StepEngine, tries: StepTries, attempt: Attempt) -> Proof:
    """Go on after a window that has raised on some rank, and not in a wider precision."""
    wide = engine.fallback.on_trial or engine.rungs[-1]
    diagnosis = engine.raised
    place = engine.agreed(None if diagnosis is None else Fault("forward", diagnosis.module))
    if diagnosis is None:
        diagnosis = of_error_elsewhere(None if place is None else place.module, engine.precision)
    if engine.fallback.on_trial is not None or not engine.fallback.moves_at(engine.counters.steps):
        return Proof(attempt, diagnosis, engine.fallback.on_trial, rescued=True)
    if engine.agree is not None or engine.fallback.rules is None or not tries.can_run:
        return Proof(attempt, diagnosis, wide, rescued=True)
    return go_on_after_error(tries, engine.fallback.rules, engine.rungs, diagnosis)
