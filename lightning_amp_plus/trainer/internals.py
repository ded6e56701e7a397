"""The only place that touches Lightning's private attributes, each with the reason why nothing public does.

It serves both of Lightning's namespaces and imports neither: where one is needed, ``pl`` is the module that the user
has imported, ``lightning.pytorch`` or ``pytorch_lightning``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn import Module
from torch.optim import Optimizer

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins import MixedPrecision


def trainer_of(module: Module) -> Trainer | None:
    """Return the Trainer of a module; the public ``module.trainer`` raises where there is none."""
    return getattr(module, "_trainer", None)


def is_spawned(pl: ModuleType, trainer: Trainer) -> bool:
    """Tell whether this process was started for the run by Lightning, and ends with it."""
    return isinstance(trainer.strategy.launcher, pl.strategies.launchers.multiprocessing._MultiProcessingLauncher)


def _callbacks(trainer: Trainer) -> list[Callback]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


# User code ------------------------------------------------------------------------------------------------------------


def call_before_optimizer_step(pl: ModuleType, trainer: Trainer, optimizer: Optimizer) -> None:
    """Call ``on_before_optimizer_step`` as stock does, profiled and with the hook's name set: only ``call`` can."""
    pl.trainer.call._call_callback_hooks(trainer, "on_before_optimizer_step", optimizer)
    pl.trainer.call._call_lightning_module_hook(trainer, "on_before_optimizer_step", optimizer)


def call_after_closure(plugin: MixedPrecision, module: LightningModule, optimizer: Optimizer) -> None:
    """Call ``on_before_optimizer_step``, then ``configure_gradient_clipping``: what stock does between the two."""
    plugin._after_closure(module, optimizer)


# Windows --------------------------------------------------------------------------------------------------------------


class Watcher(Protocol):
    """What :func:`watch` tells of a fit, and asks."""

    is_held: bool
    """Whether the last step was skipped: what counts steps is to stay where it is, and then this ends."""

    def add(self, closure: Any, arguments: dict[str, Any]) -> None:
        """Get the closure of a micro-batch, and what its ``training_step`` is called with, before it runs."""

    def run(self, closure: Any) -> Any:
        """Run the closure."""


class _WatchedClosure:
    """What the loop gets for the closure of a micro-batch."""

    def __init__(self, closure: Any, run: Callable[[Any], Any]) -> None:
        self._closure, self._run = closure, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._closure)

    def consume_result(self) -> Any:
        return self._closure.consume_result()


def watch(trainer: Trainer, watcher: Watcher) -> Callable[[], None]:
    """Have a watcher run all micro-batches of automatic optimization; return what ends it.

    The closures of all but a window's last micro-batch reach no hook. While held, learning rate schedules with
    the interval "step" and the step axis of the loggers stay where they are, and nothing of an earlier step is logged
    again: for that there is no hook either. All are attributes of objects of this Trainer, for as long as the fit.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    optimization, connector = loop.automatic_optimization, trainer._logger_connector
    make_closure, update_lr_schedulers = optimization._make_closure, loop.update_lr_schedulers
    log_step = connector.update_train_step_metrics

    def make_watched_closure(kwargs: dict[str, Any], *args: Any) -> Any:
        closure = make_closure(kwargs, *args)
        watcher.add(closure, kwargs)
        return _WatchedClosure(closure, watcher.run)

    def update_unless_held(interval: str, update_plateau_schedulers: bool) -> None:
        if interval != "step" or not watcher.is_held:
            update_lr_schedulers(interval, update_plateau_schedulers)
        elif update_plateau_schedulers:  # the last of the calls for a batch, right before the axis moves on
            loop._batches_that_stepped -= 1
            watcher.is_held = False

    def log_what_is_true() -> None:
        stale = [v for k, v in loop._results.items() if k.startswith(_PER_ATTEMPT)] if watcher.is_held else []
        flags = [value.has_reset for value in stale]
        for value in stale:
            value.has_reset = True  # until it is logged again: what is there now are the values of an earlier step
        log_step()
        for value, flag in zip(stale, flags, strict=True):
            value.has_reset = flag

    ours = [
        (optimization, "_make_closure", make_watched_closure),
        (loop, "update_lr_schedulers", update_unless_held),
        (connector, "update_train_step_metrics", log_what_is_true),
    ]
    before = [vars(owner).get(name) for owner, name, _ in ours]
    for owner, name, function in ours:
        setattr(owner, name, function)

    def end() -> None:
        for (owner, name, _), old in zip(ours, before, strict=True):
            if old is None:
                delattr(owner, name)
            else:
                setattr(owner, name, old)

    return end


def opens_window(closure: Any) -> bool:
    """Tell whether a closure is that of a window's first micro-batch, which zeroes the gradients."""
    return closure._zero_grad_fn is not None


def has_backward(closure: Any) -> bool:
    """Tell whether a closure is one of training; averaging weights ends in an epoch without any backward."""
    return closure._backward_fn is not None


class _Zeroing:
    """Zeroes the gradients, and knows whether it has."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function, self.has_run = function, False

    def __call__(self) -> None:
        self.has_run = True
        self._function()


def note_zeroing(closure: Any) -> None:
    """Have it known whether a closure has zeroed the gradients."""
    closure._zero_grad_fn = _Zeroing(closure._zero_grad_fn)


@contextmanager
def without_zeroing_again(closure: Any) -> Generator[None, None, None]:
    """Have a closure that has zeroed the gradients not do so again: ``on_before_zero_grad`` is once per step."""
    zeroing = closure._zero_grad_fn
    if isinstance(zeroing, _Zeroing) and zeroing.has_run:
        closure._zero_grad_fn = None
    try:
        yield
    finally:
        closure._zero_grad_fn = zeroing


def let_go(closure: Any) -> None:
    """Have a closure keep of its last result but the value of the loss, which the loop asks for in the end."""
    if closure._result is not None:
        loss, closure._result = closure._result.loss, type(closure._result)(None)
        closure._result.loss = loss


def is_replicated(trainer: Trainer) -> bool:
    """Tell whether each rank's forward is its own: a DDP's is, once its buffers are no longer broadcast in it."""
    model = trainer.strategy.model
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return True
    if trainer.state.fn == "fit" or model is not trainer.lightning_module:
        return False
    # Outside of a fit Lightning wraps nothing. What is sharded has gathered its parameters for as long as it is called.
    is_sharded = any(hasattr(module, "unshard") for module in model.modules())
    return not (is_sharded or any(hasattr(parameter, "full_tensor") for parameter in model.parameters()))


@contextmanager
def without_sync_of_forward(trainer: Trainer) -> Generator[None, None, None]:
    """Have a DDP's forward not wait for the other ranks, which have been through theirs."""
    model: Any = trainer.strategy.model
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        yield
        return
    before, model.require_forward_param_sync = model.require_forward_param_sync, False
    try:
        yield
    except BaseException:
        model.require_forward_param_sync = before  # after a forward that ends well DDP itself has set it
        raise


def hold_axis_of_checkpoint(checkpoint: dict[str, Any]) -> None:
    """Take one from the saved step axis: on resume Lightning adds one for the step that it was saved at."""
    state = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.state_dict", {})
    if "_batches_that_stepped" in state:
        state["_batches_that_stepped"] -= 1


def block_sync(pl: ModuleType, trainer: Trainer, *, block: bool) -> AbstractContextManager[None]:
    """Return the context in which Lightning runs all micro-batches but the last, whose backward synchronizes."""
    return pl.loops.utilities._block_parallel_sync_behavior(trainer.strategy, block=block)


def hold_global_step(trainer: Trainer) -> None:
    """Have the step that is being made not count in ``trainer.global_step``, in which the loop will count it."""
    loop = trainer.fit_loop.epoch_loop
    if trainer.lightning_module.automatic_optimization:
        progress: Any = loop.automatic_optimization.optim_progress.optimizer.step
    else:
        progress = loop.manual_optimization.optim_step_progress
    for tracker in (progress.total, progress.current):
        tracker.ready -= 1
        tracker.completed -= 1


_PER_ATTEMPT = (
    "training_step.", "backward.", "on_before_backward.", "on_after_backward.",
    "on_before_optimizer_step.", "configure_gradient_clipping.", "optimizer_step.",
)  # fmt: skip
_LOGGED = ("value", "cumulated_batch_size", "_forward_cache", "_computed", "_update_count", "has_reset")
"""What a logged value consists of. All of it is replaced when it changes, never written to."""

Logged = dict[str, dict[str, Any]]


def _logged(trainer: Trainer, *, evaluates: bool) -> tuple[Any, tuple[str, ...]]:
    """Return what ``self.log`` fills, and how the keys begin of what is logged from the hooks that are run again."""
    if evaluates:
        return trainer._results, ("validation_step.", "test_step.")
    return trainer.fit_loop.epoch_loop._results, _PER_ATTEMPT


def logged_state(trainer: Trainer, *, evaluates: bool = False) -> Logged:
    """Return what ``self.log`` has collected in the hooks that run per attempt."""
    results, prefixes = _logged(trainer, evaluates=evaluates)
    return {
        key: {name: vars(value)[name] for name in _LOGGED if name in vars(value)}
        for key, value in results.items()
        if key.startswith(prefixes)
    }


def logged_values(trainer: Trainer, before: Logged, *, evaluates: bool) -> list[torch.Tensor]:
    """Return the values that were logged since :func:`logged_state`, of tensors and of torchmetrics."""
    results, prefixes = _logged(trainer, evaluates=evaluates)
    values = []
    for key, value in results.items():
        if key.startswith(prefixes) and vars(value).get("_update_count") != before.get(key, {}).get("_update_count"):
            cached = value.value if value.is_tensor else value._forward_cache
            values += [cached] if isinstance(cached, torch.Tensor) else []
    return values


def restore_logged(trainer: Trainer, state: Logged, *, only_non_finite: bool = False, evaluates: bool = False) -> None:
    """Put back what ``self.log`` had collected; what was logged for the first time since vanishes."""
    results, prefixes = _logged(trainer, evaluates=evaluates)
    for key in [key for key in results if key.startswith(prefixes)]:
        if only_non_finite and (not results[key].is_tensor or bool(results[key].value.isfinite().all())):
            continue
        if key in state:
            vars(results[key]).update(state[key])
        else:
            del results[key]


def announce_batch(trainer: Trainer, batch: Any) -> None:
    """Have ``self.log`` weigh its values by the size of ``batch``."""
    results: Any = trainer._results
    results.batch, results.batch_size = batch, None


def control_flow(pl: ModuleType) -> tuple[type[Exception], ...]:
    """Return the errors that Lightning ends a run with on purpose, or that tell of a misuse."""
    module = pl.utilities.exceptions
    return (module.MisconfigurationException, module._TunerExitException, module.SIGTERMException)


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


def withdraw_logged(trainer: Trainer, keys: Iterable[str]) -> dict[str, Any]:
    """Withdraw what was logged, and return it: until the epoch ends the Trainer works through it at every step.

    That costs more than all else that AMPMonitor does, and would log values again that are no longer true.
    """
    results: Any = trainer._results
    return {key: results.pop(key) for key in keys if results is not None and key in results}


def log_again(trainer: Trainer, key: str, withdrawn: Any, value: torch.Tensor) -> None:
    """Put back what was withdrawn, with another value: ``self.log`` takes 300 us each time, most of it to move it."""
    results: Any = trainer._results
    results[key] = withdrawn
    results.update_metrics(key, value, 1)


def logs_this_step(trainer: Trainer) -> bool:
    """Tell whether the Trainer sends this step to its loggers; it tells its own callbacks in no other way."""
    # What `should_update_logs` of the logger connector says, without its five properties: it is asked at every step.
    stepped = trainer.fit_loop.epoch_loop._batches_that_stepped + 1
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return (every > 0 and stepped % every == 0) or trainer.should_stop


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
