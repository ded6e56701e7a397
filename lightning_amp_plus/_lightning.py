"""The only place that touches Lightning's private attributes, each with the reason why nothing public does.

It serves both of Lightning's namespaces and imports neither: where one is needed, ``pl`` is the module that the user
has imported, ``lightning.pytorch`` or ``pytorch_lightning``.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins import MixedPrecision

_NO_USER_CODE = ("lightning.", "pytorch_lightning.", "lightning_amp_plus.")


def trainer_of(module: Module) -> Trainer | None:
    """Return the Trainer of a module; the public ``module.trainer`` raises where there is none."""
    return getattr(module, "_trainer", None)


def is_spawned(pl: ModuleType, trainer: Trainer) -> bool:
    """Tell whether this process was started for the run by Lightning, and ends with it."""
    return isinstance(trainer.strategy.launcher, pl.strategies.launchers.multiprocessing._MultiProcessingLauncher)


# User code ------------------------------------------------------------------------------------------------------------


def overrides(instance: Any, base: type, hook: str) -> bool:
    """Tell whether ``instance`` has a ``hook`` of its own, by its class or as an attribute of the instance.

    Lightning's ``is_overridden`` is public, but it unwraps mocks and partials: 20 times the price, at every step.
    """
    return getattr(type(instance), hook, None) is not getattr(base, hook) or hook in vars(instance)


def someone_overrides(pl: ModuleType, trainer: Trainer, hook: str) -> bool:
    """Tell whether the LightningModule or a callback has a ``hook`` of its own."""
    return overrides(trainer.lightning_module, pl.LightningModule, hook) or any(
        overrides(callback, pl.Callback, hook) for callback in _callbacks(trainer)
    )


def looks_at_gradients(pl: ModuleType, trainer: Trainer) -> bool:
    """Tell whether code of the user's may look at ``.grad`` between a backward and the optimizer step it belongs to."""
    module = trainer.lightning_module
    if overrides(module, pl.LightningModule, "optimizer_step") or someone_overrides(pl, trainer, "on_after_backward"):
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


def _callbacks(trainer: Trainer) -> list[Callback]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def call_before_optimizer_step(pl: ModuleType, trainer: Trainer, optimizer: Optimizer) -> None:
    """Call ``on_before_optimizer_step`` as stock does, profiled and with the hook's name set: only ``call`` can."""
    pl.trainer.call._call_callback_hooks(trainer, "on_before_optimizer_step", optimizer)
    pl.trainer.call._call_lightning_module_hook(trainer, "on_before_optimizer_step", optimizer)


def call_after_closure(plugin: MixedPrecision, module: LightningModule, optimizer: Optimizer) -> None:
    """Call ``on_before_optimizer_step``, then ``configure_gradient_clipping``: what stock does between the two."""
    plugin._after_closure(module, optimizer)


# Tuner ----------------------------------------------------------------------------------------------------------------


def searches(pl: ModuleType, trainer: Trainer) -> bool:
    """Tell whether this run searches for a learning rate or a batch size."""
    finders = (pl.callbacks.LearningRateFinder, pl.callbacks.BatchSizeFinder)
    return any(isinstance(callback, finders) for callback in _callbacks(trainer))


def is_tuning(trainer: Trainer) -> bool:
    """Tell whether this fit is one of a ``Tuner``'s, which ends after the search and puts all back as it was."""
    return any(getattr(callback, "_early_exit", False) for callback in _callbacks(trainer))


def is_trial(pl: ModuleType, trainer: Trainer) -> bool:
    """Tell whether a step of a run that :func:`searches` belongs to the search, which undoes it.

    The finders take the callbacks away for that time; that of the learning rate wants to see the loss diverge.
    """
    callbacks = _callbacks(trainer)
    return not callbacks or isinstance(callbacks[0], pl.tuner.lr_finder._LRCallback)


# Logging --------------------------------------------------------------------------------------------------------------


def forget_logged(trainer: Trainer, hook: str, keys: Iterable[str]) -> None:
    """Withdraw what was logged from ``hook``: until the epoch ends the Trainer works through it at every step.

    That costs more than all else that AMPMonitor does, and would log values again that are no longer true.
    """
    if trainer._results is not None:
        for key in keys:
            trainer._results.pop(f"{hook}.{key}", None)


def logs_this_step(trainer: Trainer) -> bool:
    """Tell whether the Trainer sends this step to its loggers; it tells its own callbacks in no other way."""
    return trainer._logger_connector.should_update_logs


def set_compute_dtype(pl: ModuleType, trainer: Trainer, dtype: torch.dtype) -> None:
    """Have ``ThroughputMonitor`` compare with what the device does in ``dtype``.

    It asks the plugin in its ``setup``, where "auto" is not resolved yet, and takes any ``MixedPrecision`` that is not
    bfloat16 for float16. What it found is public; the meters it has made from that are not.
    """
    module = pl.callbacks.throughput_monitor
    for callback in _callbacks(trainer):
        if isinstance(callback, module.ThroughputMonitor) and callback.available_flops is not None:
            flops = module.get_available_flops(trainer.strategy.root_device, dtype)
            callback.available_flops = flops
            for throughput in callback._throughputs.values():
                throughput.available_flops = flops
