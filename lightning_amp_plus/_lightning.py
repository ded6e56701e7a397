"""The only place that touches Lightning's private attributes, each with the reason why nothing public does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.trainer import call
from torch.nn import Module
from torch.optim import Optimizer

_NO_USER_CODE = ("lightning.", "pytorch_lightning.", "lightning_amp_plus.")


def trainer_of(module: Module) -> pl.Trainer | None:
    """Return the Trainer of a module; the public ``module.trainer`` raises where there is none."""
    return getattr(module, "_trainer", None)


def overrides(instance: Any, base: type, hook: str) -> bool:
    """Tell whether ``instance`` has a ``hook`` of its own, by its class or as an attribute of the instance.

    Lightning's ``is_overridden`` is public, but it unwraps mocks and partials: 20 times the price, at every step.
    """
    return getattr(type(instance), hook, None) is not getattr(base, hook) or hook in vars(instance)


def someone_overrides(trainer: pl.Trainer, hook: str) -> bool:
    """Tell whether the LightningModule or a callback has a ``hook`` of its own."""
    return overrides(trainer.lightning_module, pl.LightningModule, hook) or any(
        overrides(callback, pl.Callback, hook) for callback in _callbacks(trainer)
    )


def looks_at_gradients(trainer: pl.Trainer) -> bool:
    """Tell whether code of the user's may look at ``.grad`` between a backward and the optimizer step it belongs to."""
    module = trainer.lightning_module
    if overrides(module, pl.LightningModule, "optimizer_step") or someone_overrides(trainer, "on_after_backward"):
        return True
    if trainer.accumulate_grad_batches == 1:
        return False
    return any(
        overrides(module, pl.LightningModule, hook)
        or any(
            overrides(callback, pl.Callback, hook)
            for callback in _callbacks(trainer)
            if hook in vars(callback) or not type(callback).__module__.startswith(_NO_USER_CODE)
        )
        for hook in ("on_before_backward", "on_train_batch_start", "on_train_batch_end")
    )


def _callbacks(trainer: pl.Trainer) -> Iterable[pl.Callback]:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def call_before_optimizer_step(trainer: pl.Trainer, optimizer: Optimizer) -> None:
    """Call ``on_before_optimizer_step`` as stock does, profiled and with the hook's name set: only ``call`` can."""
    call._call_callback_hooks(trainer, "on_before_optimizer_step", optimizer)
    call._call_lightning_module_hook(trainer, "on_before_optimizer_step", optimizer)


def call_after_closure(plugin: MixedPrecision, module: pl.LightningModule, optimizer: Optimizer) -> None:
    """Call ``on_before_optimizer_step``, then ``configure_gradient_clipping``: what stock does between the two."""
    plugin._after_closure(module, optimizer)


def forget_logged(trainer: pl.Trainer, hook: str, keys: Iterable[str]) -> None:
    """Withdraw what was logged from ``hook``: until the epoch ends the Trainer works through it at every step.

    That costs more than all else that AMPMonitor does, and would log values again that are no longer true.
    """
    if trainer._results is not None:
        for key in keys:
            trainer._results.pop(f"{hook}.{key}", None)


def logs_this_step(trainer: pl.Trainer) -> bool:
    """Tell whether the Trainer sends this step to its loggers; it tells its own callbacks in no other way."""
    return trainer._logger_connector.should_update_logs
