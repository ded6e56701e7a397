"""PrecisionFallback: when to go on in a wider precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_amp_plus.precision import AdaptiveMixedPrecisionMixin
from lightning_amp_plus.report import PRECISIONS, Precision, StepReport, is_wider

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = object  # the binding of a namespace adds the class itself


class PrecisionFallbackMixin(Callback):
    """Moves the run to a wider precision when the present one cannot hold it.

    A step counts if it was skipped and no lower loss scale can help: its loss was inf or NaN, or its gradients were
    with the scale at its floor. ``patience`` of them in a row move the run to the next rung of the ladder, with one
    warning that says why; one that a hook of the user's spoiled never does. On the last rung the plugin's
    ``max_skipped`` in a row end it with ``NonFiniteStepError``. A checkpoint is resumed on the rung that the run had
    reached. Without :class:`AdaptiveMixedPrecision` it warns and does nothing.

    Args:
        ladder: The precisions to try, from narrow to wide, without repetition.
        patience: Failing steps in a row that move the run; at least 1.

    Raises:
        ValueError: If an argument is out of its range.

    Example:
        >>> from lightning_amp_plus import PrecisionFallback
        >>> PrecisionFallback(ladder=("16-mixed", "32-true")).next_rung("16-mixed")
        '32-true'

    """

    def __init__(self, ladder: Sequence[Precision] = ("16-mixed", "bf16-mixed", "32-true"), patience: int = 3) -> None:
        rungs = tuple(ladder) if isinstance(ladder, (list, tuple)) else ()
        if not rungs or rungs != tuple(precision for precision in PRECISIONS if precision in rungs):
            found = tuple(ladder) if isinstance(ladder, (list, tuple)) else ladder
            raise ValueError(
                f"PrecisionFallback(ladder={found!r}): it must be some of {', '.join(PRECISIONS)}, in this order."
            )
        if not isinstance(patience, int) or isinstance(patience, bool) or patience < 1:
            raise ValueError(f"PrecisionFallback(patience={patience!r}): it must be an integer of at least 1.")
        self.ladder: tuple[Precision, ...] = rungs
        self.patience = patience

    def next_rung(self, precision: Precision) -> Precision | None:
        """Return the narrowest rung that is wider than ``precision``; ``None`` if there is none."""
        return next((rung for rung in self.ladder if is_wider(rung, precision)), None)

    def decide(self, report: StepReport, skipped: int) -> Precision | None:
        """Return the precision to go on with after ``skipped`` failing steps in a row; ``None`` on the last rung."""
        if report.non_finite == "hook":
            return None
        wider = self.next_rung(report.precision)
        return wider if wider is None or skipped >= self.patience else report.precision

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        plugin = trainer.precision_plugin
        if isinstance(plugin, AdaptiveMixedPrecisionMixin):
            plugin.policy = self.decide
        else:
            rank_zero_warn(
                f"PrecisionFallback does nothing: the Trainer uses {type(plugin).__name__}. Pass"
                " `Trainer(plugins=[AdaptiveMixedPrecision(...)])` without `precision=`.",
                category=RuntimeWarning,
            )
