"""A few steps of a run to come, made with copies: model, Trainer, loaders and random numbers stay as they are."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from lightning_amp_plus.advice.loaders import copy_of_loader, restorers_of
from lightning_amp_plus.rollback.batches import tensors_in
from lightning_amp_plus.step.report import StepReport

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer


class Rehearsal:
    """Trains copies of a model, with Trainers like the one of the run to come.

    Args:
        trainer: The Trainer of the run, of either namespace of Lightning.
        model: Its model.
        loaders: As for ``trainer.fit``.
        datamodule: As for ``trainer.fit``.
        steps: How many optimizer steps are made each time.

    Attributes:
        names: The plugin and the callbacks for the Trainer's namespace.

    Raises:
        TypeError: If a loader is an iterator, which can be used once only.

    """

    def __init__(
        self, trainer: Trainer, model: LightningModule, loaders: Any, datamodule: LightningDataModule | None, steps: int
    ) -> None:
        other = any(kind.__module__.startswith("pytorch_lightning.") for kind in type(trainer).__mro__)
        binding = "pytorch_lightning" if other else "lightning_pytorch"
        self.names: ModuleType = import_module(f"lightning_amp_plus.{binding}")
        self._pl: ModuleType = self.names.pl
        self._trainer, self._model, self._steps = trainer, model, steps
        self._loaders, self._datamodule = loaders, datamodule
        if any(isinstance(loader, Iterator) and not self._is_combined(loader) for loader in tree_flatten(loaders)[0]):
            raise TypeError(
                "find_precision got an iterator, whose batches the run itself would then miss: pass what is iterated"
                " over, such as a DataLoader."
            )

    def run(self, arguments: dict[str, Any], callbacks: list[Callback]) -> tuple[Any, list[StepReport]]:
        """Make the steps, and return the plugin and the reports of those that were not clean.

        Args:
            arguments: Of the plugin.
            callbacks: Of the Trainer; nobody else's are called.

        """
        plugin = self.names.AdaptiveMixedPrecision(**arguments)
        reports: list[StepReport] = []
        plugin.observe(lambda report: None if report.is_clean else reports.append(report))
        ours = self._pl.callbacks.LambdaCallback(
            on_train_start=_without_plateaus, on_train_batch_end=partial(_stop_after, self._steps)
        )
        with tempfile.TemporaryDirectory() as folder, self._as_before(), plugin.silenced():
            trainer = _trainer_like(self._trainer, self._pl, plugin, [*callbacks, ours], folder)
            trainer.fit(
                _copy_of(self._model),
                tree_map(copy_of_loader, self._loaders),
                datamodule=copy.copy(self._datamodule),
            )
        return plugin, reports

    def _is_combined(self, loader: Any) -> bool:
        return isinstance(loader, self._pl.utilities.CombinedLoader)

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """Put back all random numbers, and the states of loaders that have one, after an error too."""
        loaders = tree_flatten(self._loaders)[0]
        loaders = [part for one in loaders for part in (one.flattened if self._is_combined(one) else [one])]
        restore = list(restorers_of([*loaders, self._datamodule]))
        backend: Any = getattr(torch, self._trainer.strategy.root_device.type, None)
        if backend in (getattr(torch, "mps", None), getattr(torch, "xpu", None)):  # which isolate_rng does not know
            restore.append(partial(backend.set_rng_state, backend.get_rng_state()))
        failed: BaseException | None = None
        with self._pl.utilities.seed.isolate_rng():
            try:
                yield
            except BaseException as error:  # which isolate_rng would not outlive
                failed = error
        for function in restore:
            function()
        if failed is not None:
            raise failed


def _copy_of(model: LightningModule) -> LightningModule:
    """Copy a model, with a copy of the values where it has kept tensors with a graph, and without its callbacks."""
    kept = [tensor for part in model.modules() for tensor in _own_tensors(part) if tensor.grad_fn is not None]
    try:
        copied = copy.deepcopy(model, {id(tensor): tensor.detach().clone() for tensor in kept})
    except Exception as error:
        raise TypeError(
            f"find_precision trains a copy of the model, and {type(model).__name__} cannot be copied by copy.deepcopy"
            f" ({type(error).__name__}: {error}): make the attribute that is to blame later, or leave it out in"
            " __getstate__."
        ) from error
    copied.configure_callbacks = list  # type: ignore[method-assign]
    return copied


def _own_tensors(part: torch.nn.Module) -> Iterator[Tensor]:
    for value in vars(part).values():
        if isinstance(value, (Tensor, list, tuple, dict)):
            yield from tensors_in(value)


def _stop_after(steps: int, trainer: Trainer, *args: Any) -> None:
    plugin: Any = trainer.precision_plugin
    trainer.should_stop = trainer.should_stop or plugin.counters.steps >= steps


def _without_plateaus(trainer: Trainer, *args: Any) -> None:
    """Drop the schedules that wait for a metric: there is no validation to log it."""
    configs = trainer.strategy.lr_scheduler_configs
    trainer.strategy.lr_scheduler_configs = [config for config in configs if not config.reduce_on_plateau]


def _trainer_like(trainer: Trainer, pl: ModuleType, plugin: Any, callbacks: list[Any], folder: str) -> Trainer:
    """Return a Trainer for one device that optimizes as another one does, and leaves nothing anywhere."""
    device = trainer.strategy.root_device
    environments = import_module(pl.plugins.ClusterEnvironment.__module__.rpartition(".")[0])  # of this namespace
    max_epochs = trainer.max_epochs
    if max_epochs is None:  # what Lightning takes it for, with a warning
        max_epochs = 1000 if trainer.max_steps == -1 else -1
    overfit_batches: float = trainer.overfit_batches  # type: ignore[attr-defined]
    limit = trainer.limit_train_batches
    is_all = isinstance(limit, float) and limit == 1  # which Lightning has something to say about
    known = device.type in ("cpu", "cuda", "mps")
    like: Trainer = pl.Trainer(
        accelerator=device.type if known else trainer.accelerator,
        devices=[device.index or 0] if device.type == "cuda" else 1,
        max_epochs=max_epochs,
        max_steps=trainer.max_steps,
        limit_train_batches=None if is_all else trainer.limit_train_batches,
        overfit_batches=overfit_batches,
        log_every_n_steps=1,
        limit_val_batches=0,
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        gradient_clip_val=trainer.gradient_clip_val,
        gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        # Not the one of a launcher, which expects as many processes as it has started.
        plugins=[plugin, environments.LightningEnvironment()],
        callbacks=callbacks,
        logger=pl.loggers.logger.DummyLogger(),  # for models that use theirs
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    return like
