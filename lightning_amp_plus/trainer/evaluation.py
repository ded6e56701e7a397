"""Validation and test steps, run again in a wider precision where float16 has made inf or NaN of what comes out.

An overflow that is ours must not fool early stopping, checkpoints and test results. What is looked at are the values
that a step returns and logs, and the states of torchmetrics: one read of the device for each batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lightning_amp_plus.precisions import PrecisionName
from lightning_amp_plus.rollback.attributes import PlainAttributes
from lightning_amp_plus.rollback.batches import are_unchanged, copy_containers, tensors_in, versions_of
from lightning_amp_plus.rollback.transaction import StepTransaction
from lightning_amp_plus.step.engine import StepEngine
from lightning_amp_plus.step.tries import is_out_of_memory
from lightning_amp_plus.trainer import internals

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_STEPS = ("validation_step", "test_step")
_FRUITLESS = 3
"""After so many batches in a row that are not finite in any precision, the rest of the run is not looked at."""


class EvaluationRescue:
    """Sees to the evaluation steps of a run, from its start to :meth:`end`.

    Args:
        trainer: The Trainer of the run.
        engine: Knows the precisions.

    """

    def __init__(self, trainer: Trainer, engine: StepEngine) -> None:
        self._trainer, self._engine = trainer, engine
        self._transaction = StepTransaction(trainer.lightning_module, devices={trainer.strategy.root_device})
        self._fruitless = 0
        self._is_alone: bool | None = None  # known once the model is wrapped
        strategy: Any = trainer.strategy
        self._before = {name: vars(strategy).get(name) for name in _STEPS}
        for name in _STEPS:
            setattr(strategy, name, partial(self._guard, getattr(strategy, name)))

    def end(self) -> None:
        """Leave the strategy as it was."""
        strategy = self._trainer.strategy
        for name, before in self._before.items():
            if before is None:
                delattr(strategy, name)
            else:
                setattr(strategy, name, before)

    def _guard(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._engine.rungs or self._fruitless >= _FRUITLESS or isinstance(args[0], Iterator):
            return step(*args, **kwargs)
        try:
            return self._run_or_run_again(step, args, kwargs)
        finally:
            self._transaction.forget()

    def _run_or_run_again(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        rungs = self._engine.rungs
        try:
            batch = copy_containers(args[0])
            if any(tensor.is_inference() for tensor in tensors_in(batch)):  # whose writes torch does not count
                batch = deepcopy(args[0])
        except Exception:  # of user code, whatever it is: a batch that cannot be copied is run once
            return step(*args, **kwargs)
        versions = versions_of(batch)
        self._transaction.begin()
        logged = internals.logged_state(self._trainer, evaluates=True)
        rollback = partial(self._roll_back, logged, PlainAttributes(self._trainer.lightning_module))
        try:
            output = step(*args, **kwargs)
        except Exception as error:
            rollback()
            if self._engine.passes_through(error) or not self._can_go_alone() or not are_unchanged(versions):
                raise
            failed = error
        else:
            if self._engine.attempt_precision != "16-mixed" or not self._is_bad(output, logged):
                return output
            if not are_unchanged(versions):
                self._engine.skips.say(
                    "evaluation batch",
                    logging.WARNING,
                    "A batch of the evaluation that was not finite in float16 cannot be run again in a wider precision:"
                    " the step wrote to it in place. Its values stay as they are.",
                )
                return output
            rollback()
            again = partial(self._in_precision, step, (batch, *args[1:]), kwargs)
            return self._again_if_it_helps(again, rungs[-1], rollback, logged)
        try:
            output = self._in_precision(step, (batch, *args[1:]), kwargs, rungs[-1])
        except Exception:  # of whatever kind: it is the first one that counts
            rollback()
        else:
            self._note(f"raised {type(failed).__name__}")
            return output
        raise failed

    def _again_if_it_helps(
        self, again: Callable[[PrecisionName], Any], widest: PrecisionName, rollback: Callable[[], None], logged: Any
    ) -> Any:
        try:
            output = again(widest)
        except Exception as error:
            if not self._can_go_alone() or (self._engine.passes_through(error) and not is_out_of_memory(error)):
                raise
            rollback()
            self._note_fruitless()
            return again(self._engine.attempt_precision)
        if self._is_bad(output, logged):
            self._note_fruitless()
        else:
            self._fruitless = 0
            self._note("was not finite")
        return output

    def _note_fruitless(self) -> None:
        self._fruitless += 1
        if self._fruitless == _FRUITLESS:
            self._engine.skips.say(
                "fruitless",
                logging.WARNING,
                f"{_FRUITLESS} batches in a row of the evaluation were not finite in {self._engine.rungs[-1]!r} either,"
                " or raised there: the rest of it is not looked at for overflows of float16.",
            )

    def _in_precision(self, step: Callable[..., Any], args: Any, kwargs: Any, precision: PrecisionName) -> Any:
        before, self._engine.attempt_precision = self._engine.attempt_precision, precision
        try:
            with internals.without_sync_of_forward(self._trainer):
                return step(*args, **kwargs)
        finally:
            self._engine.attempt_precision = before

    def _roll_back(self, logged: internals.Logged, attributes: PlainAttributes) -> None:
        self._transaction.rollback()
        attributes.restore()
        internals.restore_logged(self._trainer, logged, evaluates=True)

    def _can_go_alone(self) -> bool:
        if self._is_alone is None:
            self._is_alone = self._engine.agree is None or internals.is_replicated(self._trainer)
        return self._is_alone

    def _is_bad(self, output: Any, logged: internals.Logged) -> bool:
        values = [*tensors_in(output), *internals.logged_values(self._trainer, logged, evaluates=True)]
        flags = [~value.isfinite().all() for value in values if value.is_floating_point() and value.numel()]
        flags += self._transaction.turned_non_finite()
        bad = bool(flags) and bool(torch.stack([flag.to(flags[0].device) for flag in flags]).any())
        return bad if self._can_go_alone() else self._engine.on_any_rank(bad)

    def _note(self, what: str) -> None:
        engine = self._engine
        engine.counters = replace(engine.counters, rescued_evaluations=engine.counters.rescued_evaluations + 1)
        engine.skips.say(
            "evaluation",
            logging.WARNING,
            f"A batch of the evaluation {what} in {engine.precision!r} and was run again in {engine.rungs[-1]!r}, whose"
            " values count. Others are, too, without another word; counters.rescued_evaluations counts them.",
        )
