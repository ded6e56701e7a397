"""What follows a skipped step that no lower loss scale can help: patience, a wider precision, the end. Plain Python."""

from __future__ import annotations

import logging
from collections.abc import Callable

from lightning_amp_plus.report import Place, Precision, StepReport

Policy = Callable[[StepReport, int], Precision | None]
"""Decides what follows a skipped step that no lower loss scale can help.

It gets the report of the step and how many such steps of its optimizer there were in a row. It returns the precision to
go on with, which may be the present one, or ``None`` to leave it at that: then ``max_skipped`` in a row raise.
"""

Notify = Callable[[int, str], None]
"""Called with a ``logging`` level and a line of text."""

_WHAT: dict[Place, str] = {
    "loss": "the loss held inf or NaN",
    "gradients": "the gradients held inf or NaN",
    "hook": "a hook or a clipping of yours turned finite gradients into inf or NaN",
}


_WIDER: dict[Precision, str] = {
    "16-mixed": "; try a wider precision ('bf16-mixed' or '32-true')",
    "bf16-mixed": "; try a wider precision ('32-true')",
    "32-true": "; no precision is wider",
}


class NonFiniteStepError(FloatingPointError):
    """Too many optimizer steps in a row had a loss or gradients that hold inf or NaN, and no lower scale can help."""


class Skips:
    """Counts the skipped steps in a row of each optimizer, and says what follows.

    Args:
        max_skipped: Skipped steps in a row of one optimizer that raise; at least 1.
        notify: Called at most once per kind of incident, and for each change of precision.

    """

    def __init__(self, max_skipped: int, notify: Notify) -> None:
        self.max_skipped = max_skipped
        self.policy: Policy | None = None
        self.notify = notify
        self.restart()

    def restart(self) -> None:
        """Forget all steps."""
        self.in_a_row: dict[int, int] = {}
        self.wider: Precision | None = None
        self._said: set[str] = set()

    def say(self, kind: str, level: int, text: str) -> None:
        """Notify of the first incident of a kind."""
        if kind not in self._said:
            self._said.add(kind)
            self.notify(level, text)

    def note_trial(self, report: StepReport) -> None:
        """Say what became of a step of a search, which goes on."""
        what = _WHAT[report.non_finite or "gradients"]
        self.say("trial", logging.INFO, f"Steps of the search were skipped in {report.precision!r}: {what}.")

    def moved(self) -> None:
        """Begin to count anew, in :attr:`wider`."""
        self.wider = None
        self.in_a_row.clear()

    def answer(self, report: StepReport, why: str) -> None:
        """Count a skipped step, and set :attr:`wider` to the precision that the run is to go on with, if to another.

        Args:
            report: What became of the step.
            why: Why no lower loss scale is tried, as a clause.

        Raises:
            NonFiniteStepError: After ``max_skipped`` of them in a row, unless the policy goes on.

        """
        skipped = self.in_a_row.get(report.optimizer, 0) + 1
        self.in_a_row[report.optimizer] = skipped
        what = _WHAT[report.non_finite or "gradients"]
        answer = None if self.policy is None else self.policy(report, skipped)
        if answer is not None and answer != report.precision:
            self.wider = answer  # before it is told, which may raise
            self.notify(
                logging.WARNING,
                f"{skipped} optimizer steps in a row were skipped in {report.precision!r} because {what}, and {why}:"
                f" from optimizer step {report.step + 1} on the run computes in {answer!r}.",
            )
            return
        if answer is None and skipped >= self.max_skipped:
            self.in_a_row[report.optimizer] = 0
            raise NonFiniteStepError(
                f"{skipped} optimizer steps in a row were skipped because {what} (precision {report.precision!r}, last"
                f" loss scale {report.scale:g}); the last one was step {report.step}. None of them changed the weights,"
                f" and {why}. Look for inf or NaN in the batches; try a lower learning rate or"
                f" `Trainer(gradient_clip_val=1.0)`{_WIDER[report.precision]}."
                f" `max_skipped` (now {self.max_skipped}) sets how many such skips in a row are allowed."
            )
        self.say(
            f"{what}, {answer is None}",
            logging.WARNING if answer is None else logging.INFO,
            f"Optimizer step {report.step} was skipped because {what} (precision {report.precision!r}). "
            + (f"After {self.max_skipped} in a row the fit stops." if answer is None else "The precision may widen."),
        )
