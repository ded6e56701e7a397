"""PrecisionFallback: go on in a wider precision where the present one cannot hold the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_amp_plus.precisions import PrecisionName
from lightning_amp_plus.step.rules import FallbackRules
from lightning_amp_plus.trainer.plugin import AdaptiveMixedPrecisionMixin

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = object  # the binding of a namespace adds the class itself


class PrecisionFallbackMixin(Callback):
    """Puts a step that no lower loss scale can help to the proof in a wider precision, and moves the run if need be.

    A step whose loss or gradients are inf or NaN, or that raises, is run again on the widest rung of the ladder. If it
    works there, it is applied: a rescue, which loses no batch. ``patience`` rescues within ``within_steps`` steps move
    the run to the narrowest rung that holds the step, or keep the modules at fault in float32, with one warning that
    says what overflowed and where. If it works nowhere, the step is skipped; so many in a row as the plugin's
    ``max_skipped`` end the run with ``NonFiniteStepError``, which tells why, and a model whose parameters are not
    finite ends it at once.

    In manual optimization nothing is run again. A failing iteration is skipped, the next one is looked on at, and
    ``patience`` of them in a row that turn finite numbers into inf or NaN move the run to the next rung.

    A checkpoint is resumed as the run was, on its rung and with its kept modules. Without
    :class:`AdaptiveMixedPrecision` it warns and does nothing.

    Args:
        ladder: The precisions to try, from narrow to wide, without repetition; ``None`` for all three, but for
            bfloat16 on a GPU that emulates it.
        patience: Rescued steps that move the run; at least 1.
        within_steps: Among how many of the last steps they are counted; at least ``patience``.
        scope: What moves: the whole ``"model"``; the ``"module"`` at fault alone, which then computes in float32; or
            ``"auto"``: the model where bfloat16 is native on the device, else the module.
        max_modules: How many modules are kept in float32 before the model moves; at least 1.
        retry_after: Clean steps after which the narrower precision is tried again, by one step that is put to the
            proof, and after twice as many each time it fails; ``None`` for never. Not in manual optimization.

    Raises:
        ValueError: If an argument is out of its range.

    Example:
        >>> from lightning_amp_plus import PrecisionFallback
        >>> PrecisionFallback(ladder=("16-mixed", "32-true")).rules.rungs("16-mixed")
        ('32-true',)

    """

    def __init__(
        self,
        ladder: Sequence[PrecisionName] | None = None,
        patience: int = 3,
        within_steps: int = 200,
        scope: Literal["auto", "model", "module"] = "model",
        max_modules: int = 8,
        retry_after: int | None = None,
    ) -> None:
        rungs: tuple[PrecisionName, ...] | None = ladder  # type: ignore[assignment]  # which the rules look at
        self.rules = FallbackRules(rungs, patience, within_steps, scope, max_modules, retry_after)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        plugin = trainer.precision_plugin
        if isinstance(plugin, AdaptiveMixedPrecisionMixin):
            plugin.rules = self.rules
        else:
            rank_zero_warn(
                f"PrecisionFallback does nothing: the Trainer uses {type(plugin).__name__}. Pass"
                " `Trainer(plugins=[AdaptiveMixedPrecision(...)])` without `precision=`.",
                category=RuntimeWarning,
            )
