"""What follows a skipped step that nothing can help: patience, then the end. Plain Python."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning_amp_plus.precisions import PrecisionName
from lightning_amp_plus.step.report import Place, StepReport

if TYPE_CHECKING:
    from lightning_amp_plus.diagnosis.cause import Diagnosis

Notify = Callable[[int, str], None]
"""Called with a ``logging`` level and a line of text."""

_WHAT: dict[Place, str] = {
    "loss": "the loss held inf or NaN",
    "gradients": "the gradients held inf or NaN",
    "hook": "a hook or a clipping of yours turned finite gradients into inf or NaN",
}


_WIDER: dict[PrecisionName, str] = {
    "16-mixed": "; try a wider precision ('bf16-mixed' or '32-true')",
    "bf16-mixed": "; try a wider precision ('32-true')",
    "32-true": "; no precision is wider",
}


class NonFiniteStepError(FloatingPointError):
    """Optimizer steps had a loss or gradients that hold inf or NaN, and nothing that may be tried can help.

    Attributes:
        diagnosis: Why the last one failed; ``None`` if nothing was found out.

    """

    def __init__(self, text: str, diagnosis: Diagnosis | None = None) -> None:
        super().__init__(text)
        self.diagnosis = diagnosis

    def __reduce__(self) -> tuple[type[NonFiniteStepError], tuple[str, Diagnosis | None]]:
        return type(self), (str(self), self.diagnosis)


class Skips:
    """Counts the skipped steps in a row of each optimizer, and says what follows.

    Args:
        max_skipped: Skipped steps in a row of one optimizer that raise; at least 1.
        notify: Called at most once per kind of incident, and for each change of precision.

    """

    def __init__(self, max_skipped: int, notify: Notify) -> None:
        self.max_skipped = max_skipped
        self.notify = notify
        self.restart()

    def restart(self) -> None:
        """Forget all steps."""
        self.in_a_row: dict[int, int] = {}
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

    def is_last(self, optimizer: int) -> bool:
        """Tell whether one more skipped step of an optimizer raises."""
        return self.in_a_row.get(optimizer, 0) + 1 >= self.max_skipped

    @property
    def is_near_last(self) -> bool:
        """Whether one more skipped step of any optimizer may raise."""
        return max(self.in_a_row.values(), default=0) + 1 >= self.max_skipped

    def answer(self, report: StepReport, why: str) -> None:
        """Count a skipped step.

        Args:
            report: What became of the step.
            why: Why no lower loss scale is tried, as a clause.

        Raises:
            NonFiniteStepError: After ``max_skipped`` of them in a row.

        """
        self.in_a_row[report.optimizer] = self.in_a_row.get(report.optimizer, 0) + 1
        if self.in_a_row[report.optimizer] >= self.max_skipped:
            raise self.error(report, why)
        what = _WHAT[report.non_finite or "gradients"]
        diagnosis = f" {report.diagnosis}" if report.diagnosis is not None else ""
        self.say(
            f"{what}, {report.diagnosis and report.diagnosis.cause}",
            logging.WARNING,
            f"Optimizer step {report.step} was skipped because {what} (precision {report.precision!r}).{diagnosis}"
            f" After {self.max_skipped} in a row the fit stops.",
        )

    def error(self, report: StepReport, why: str) -> NonFiniteStepError:
        """Return the error that ends the fit, and count anew."""
        skipped = self.in_a_row.pop(report.optimizer, 0)
        self.in_a_row[report.optimizer] = 0
        what, diagnosis = _WHAT[report.non_finite or "gradients"], report.diagnosis
        if diagnosis is not None and diagnosis.cause == "parameters":
            return NonFiniteStepError(f"Optimizer step {report.step}: {what}. {diagnosis}", diagnosis)
        advice = (
            "Look for inf or NaN in the batches; try a lower learning rate or"
            f" `Trainer(gradient_clip_val=1.0)`{_WIDER[report.precision]}."
            if diagnosis is None
            else str(diagnosis)
        )
        return NonFiniteStepError(
            f"{skipped} optimizer steps in a row were skipped because {what} (precision {report.precision!r}, last"
            f" loss scale {report.scale:g}); the last one was step {report.step}. None of them changed the weights,"
            f" and {why}. {advice} `max_skipped` (now {self.max_skipped}) sets how many such skips in a row are"
            " allowed.",
            diagnosis,
        )
