"""Which hooks the LightningModule and the callbacks have of their own: what costs time is done for those only."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer

_NO_USER_CODE = ("lightning.", "pytorch_lightning.", "lightning_amp_plus.")


class UserHooks:
    """Looks the hooks of a run up once, and again when its callbacks change: every step asks.

    Args:
        pl: Lightning's namespace.
        trainer: The Trainer of the run.

    """

    def __init__(self, pl: ModuleType, trainer: Trainer) -> None:
        self._pl, self._trainer = pl, trainer
        self._callbacks: list[Callback] = []
        self._known: dict[str, bool] = {}

    def someone_overrides(self, hook: str) -> bool:
        """Tell whether the LightningModule or a callback has a ``hook`` of its own."""
        known = self._up_to_date()
        if hook not in known:
            known[hook] = self.module_overrides(hook) or any(self._overrides(c, hook) for c in self._callbacks)
        return known[hook]

    def module_overrides(self, *hooks: str) -> bool:
        """Tell whether the LightningModule has any of ``hooks``."""
        module = self._trainer.lightning_module
        return any(_overrides(module, self._pl.LightningModule, hook) for hook in hooks)

    def clips_by_itself(self) -> bool:
        """Tell whether the LightningModule has a clipping of its own."""
        known = self._up_to_date()
        if "clips" not in known:
            known["clips"] = self.module_overrides("configure_gradient_clipping", "clip_gradients")
        return known["clips"]

    def looks_at_gradients(self) -> bool:
        """Tell whether code of the user's may look at ``.grad`` between a backward and its optimizer step."""
        known = self._up_to_date()
        if "step" not in known:
            known["step"] = self.module_overrides("optimizer_step") or self.someone_overrides("on_after_backward")
            between = ("on_before_backward", "on_train_batch_start", "on_train_batch_end")
            known["between"] = self.module_overrides(*between) or any(
                self._overrides(callback, hook)
                for callback in self._callbacks
                for hook in between
                if hook in vars(callback) or not type(callback).__module__.startswith(_NO_USER_CODE)
            )
        return known["step"] or (known["between"] and self._trainer.accumulate_grad_batches > 1)

    def _up_to_date(self) -> dict[str, bool]:
        callbacks: list[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        if callbacks != self._callbacks:
            self._callbacks, self._known = list(callbacks), {}
        return self._known

    def _overrides(self, callback: Callback, hook: str) -> bool:
        return _overrides(callback, self._pl.Callback, hook)


def _overrides(instance: Any, base: type, hook: str) -> bool:
    # By its class, or as an attribute of the instance. Lightning's is_overridden is public, but it unwraps mocks and
    # partials.
    return getattr(type(instance), hook, None) is not getattr(base, hook) or hook in vars(instance)
