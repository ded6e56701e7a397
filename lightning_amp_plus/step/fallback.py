"""How a run goes on after steps that its precision cannot hold: rescues are counted, and it moves. Plain Python."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from lightning_amp_plus.precisions import PrecisionName
from lightning_amp_plus.step.report import StepReport
from lightning_amp_plus.step.rules import FallbackRules
from lightning_amp_plus.step.skips import Skips


class Fallback:
    """Follows :class:`FallbackRules` from step to step.

    Args:
        skips: What tells of incidents.

    Attributes:
        rules: When to move on; ``None`` for never.
        on_trial: What the run goes back to if a narrower precision, which it tries again, fails.
        next_precision: What the run goes on in, once the iteration has ended; ``None`` for the present one.
        is_suspect: Whether the next window is to be looked on at, because the last one failed and cannot be run again.
        located: By optimizer, steps in a row that could not be run again, and failed where it was seen.

    """

    def __init__(self, skips: Skips) -> None:
        self._skips = skips
        self.rules: FallbackRules | None = None
        self.restart()

    def restart(self) -> None:
        """Forget all steps."""
        self.next_precision: PrecisionName | None = None
        self.on_trial: PrecisionName | None = None
        self.is_suspect = False
        self.located: dict[int, int] = {}
        self._rescues: tuple[int, ...] = ()  # the steps rescued since the run last moved
        self._unavailable: tuple[PrecisionName, ...] = ()  # rungs that do not fit into memory
        self._clean_steps = self._failed_trials = 0

    def rungs(self, precision: PrecisionName, rules: FallbackRules | None = None) -> tuple[PrecisionName, ...]:
        """Return the wider precisions that steps may be tried in, from narrow to wide."""
        rules = rules or self.rules
        return () if rules is None else rules.rungs(precision, self._unavailable)

    def moves_at(self, step: int) -> bool:
        """Tell whether the run moves if a step is rescued."""
        return self.rules is not None and self.rules.moves((*self._rescues, step))

    def drop(self, precision: PrecisionName) -> None:
        """Take note that a precision does not fit into memory."""
        self._unavailable = (*self._unavailable, precision)
        self._skips.say(
            f"memory {precision}",
            logging.WARNING,
            f"A step did not fit into memory in {precision!r}, which is not tried again; the step is skipped. A smaller"
            " batch, or PrecisionFallback(scope='module'), needs less.",
        )

    def note_clean(self, precision: PrecisionName, configured: PrecisionName) -> None:
        """Count a clean step, and try the narrower precision again when it is time."""
        if self.on_trial is not None:
            self._skips.notify(logging.INFO, f"The run computes in {precision!r} again: a step of it was finite.")
            self.on_trial, self._clean_steps = None, 0
        elif precision != configured and self.rules is not None:
            self._clean_steps += 1
            if self.rules.tries_again(self._clean_steps, self._failed_trials):
                self.on_trial, self.next_precision = precision, configured

    def note_rescue(
        self, report: StepReport, precision: PrecisionName, moves_to: PrecisionName | None, found: Sequence[str]
    ) -> None:
        """Count a step that was not finite in ``precision``, and go on with what it was applied in.

        Args:
            report: What became of the step.
            precision: What the run computes in.
            moves_to: The precision that the run goes on in, if it moves.
            found: The modules that compute in float32 from now on.

        """
        most = 1 if self.rules is None else self.rules.patience  # more of them never count
        self._rescues = (*self._rescues, report.step)[-most:]
        raised = report.diagnosis is not None and report.diagnosis.cause == "unsupported"
        text = f"Optimizer step {report.step} {'raised' if raised else 'was not finite'} in {precision!r}"
        if found:
            self._rescues = ()
            names = f"{', '.join(found)} compute{'s' * (len(found) == 1)} in float32"
            self._skips.notify(logging.WARNING, f"{text}: from now on {names}. {report.diagnosis}")
        elif moves_to is not None:
            lately = f", as were {len(self._rescues) - 1} others lately" if len(self._rescues) > 1 else ""
            self.move(moves_to, text + lately, report)
        else:
            kind = f"rescue {report.diagnosis and report.diagnosis.module}"
            self._skips.say(kind, logging.INFO, f"{text} and was applied in {report.precision!r}. {report.diagnosis}")

    def note_located(self, report: StepReport, precision: PrecisionName, why: str) -> bool:
        """Go on after a step that failed where it was seen, and cannot be run again; ``False`` if nothing is left."""
        rungs = self.rungs(precision)
        located = self.located.get(report.optimizer, 0)
        if not located or self.rules is None or not rungs:
            return False
        if located >= self.rules.patience:
            text = f"{located} optimizer steps in a row were skipped in {precision!r}, and {why}"
            self.move(rungs[0], text, report)
        else:
            self._skips.say("located", logging.INFO, f"Optimizer step {report.step} was skipped: {report.diagnosis}")
        return True

    def move(self, precision: PrecisionName, text: str, report: StepReport, *, failed: bool = True) -> None:
        """Go on in another precision once the iteration has ended.

        Args:
            precision: Which one.
            text: Why, as the beginning of a sentence.
            report: What became of the step.
            failed: Whether that is proved: a trial of the narrower precision that ended in a step which is finite in
                none has shown nothing.

        """
        self.next_precision = precision  # before it is told, which may raise
        self._rescues, self._clean_steps, self.located = (), 0, {}
        level = logging.WARNING
        if self.on_trial is not None:
            self.on_trial, self._failed_trials, level = None, self._failed_trials + failed, logging.INFO
        why = f" {report.diagnosis}" if report.diagnosis is not None else ""
        self._skips.notify(
            level, f"{text}: from optimizer step {report.step + 1} on the run computes in {precision!r}.{why}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what resumes it, as builtins."""
        return {
            "rescues": list(self._rescues),
            "unavailable": list(self._unavailable),
            "on_trial": self.on_trial or "",
            "clean_steps": self._clean_steps,
            "failed_trials": self._failed_trials,
            "is_suspect": int(self.is_suspect),
            "located": dict(self.located),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` has returned; what is not in it is as in a new run."""
        self._rescues, self._unavailable = tuple(state.get("rescues", ())), tuple(state.get("unavailable", ()))
        self.on_trial = state.get("on_trial") or None
        self._clean_steps, self._failed_trials = state.get("clean_steps", 0), state.get("failed_trials", 0)
        self.is_suspect, self.located = bool(state.get("is_suspect", 0)), dict(state.get("located", {}))
