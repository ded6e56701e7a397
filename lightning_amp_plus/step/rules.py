"""When a run goes on in a wider precision, and in which: rules that are plain data. Plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from lightning_amp_plus.hardware.select import PrecisionChoice
from lightning_amp_plus.precisions import NAMES, PrecisionName
from lightning_amp_plus.step.report import is_wider

Scope = Literal["auto", "model", "module"]


@dataclass(frozen=True)
class FallbackRules:
    """What follows steps that only a wider precision could apply.

    Args:
        ladder: The precisions to try, from narrow to wide; ``None`` for all that the hardware does not emulate.
        patience: Rescued steps that move the run; at least 1.
        within_steps: Among how many of the last steps they are counted; at least ``patience``.
        scope: What moves: the whole ``"model"``; the ``"module"`` at fault alone, which then computes in float32; or
            ``"auto"``: the model where the next rung is native on the device, else the module.
        max_modules: How many modules are kept in float32 before the model moves; at least 1.
        retry_after: Clean steps after which the narrower precision is tried again; ``None`` for never.

    Raises:
        ValueError: If a value is out of its range.

    """

    ladder: tuple[PrecisionName, ...] | None = None
    patience: int = 3
    within_steps: int = 200
    scope: Scope = "model"
    max_modules: int = 8
    retry_after: int | None = None

    def __post_init__(self) -> None:
        if self.ladder is not None:
            rungs = tuple(self.ladder) if isinstance(self.ladder, (list, tuple)) else ()
            if rungs in ((), ("16-mixed",)) or rungs != tuple(precision for precision in NAMES if precision in rungs):
                found = tuple(self.ladder) if isinstance(self.ladder, (list, tuple)) else self.ladder
                self._refuse(
                    "ladder", found, f"some of {', '.join(NAMES)}, in this order and not the first alone, or None"
                )
            object.__setattr__(self, "ladder", rungs)
        self._require_count("patience", self.patience, 1)
        self._require_count("within_steps", self.within_steps, self.patience)
        self._require_count("max_modules", self.max_modules, 1)
        if self.retry_after is not None:
            self._require_count("retry_after", self.retry_after, 1)
        if self.scope not in get_args(Scope):
            self._refuse("scope", self.scope, f"one of {', '.join(map(repr, get_args(Scope)))}")

    def _require_count(self, name: str, value: object, least: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self._refuse(name, value, f"an integer of at least {least}")

    def _refuse(self, name: str, value: object, legal: str) -> None:
        raise ValueError(f"PrecisionFallback({name}={value!r}): it must be {legal}.")

    def on(self, device_type: str, hardware: PrecisionChoice) -> FallbackRules:
        """Return the rules for a device: no bfloat16 where it is emulated on a GPU, unless it was asked for."""
        ladder = self.ladder
        if ladder is None:
            is_slow = hardware.emulates_bfloat16 and device_type != "cpu"
            ladder = ("16-mixed", "32-true") if is_slow else NAMES
        scope = self.scope
        if scope == "auto":
            scope = "module" if hardware.emulates_bfloat16 else "model"
        return replace(self, ladder=ladder, scope=scope)

    def rungs(self, precision: PrecisionName, without: Sequence[PrecisionName] = ()) -> tuple[PrecisionName, ...]:
        """Return the rungs that are wider than ``precision``, from narrow to wide.

        Example:
            >>> FallbackRules().rungs("bf16-mixed")
            ('32-true',)

        """
        return tuple(r for r in self.ladder or NAMES if is_wider(r, precision) and r not in without)

    def tries_again(self, clean_steps: int, failed_trials: int) -> bool:
        """Tell whether it is time to try the narrower precision: after each failed trial it takes twice as long."""
        return self.retry_after is not None and clean_steps >= self.retry_after * 2**failed_trials

    def moves(self, rescues: Sequence[int]) -> bool:
        """Tell whether the run moves at the last of the steps that were rescued.

        Example:
            >>> FallbackRules(patience=2, within_steps=10).moves([3, 20]), FallbackRules(patience=2).moves([3, 20])
            (False, True)

        """
        return sum(step > rescues[-1] - self.within_steps for step in rescues) >= self.patience
