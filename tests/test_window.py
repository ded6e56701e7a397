"""The window: what is kept for a retry, what hooks and validations do in its middle, what is only partly put back."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from helpers import ROW, Exact, factors, make_trainer
from namespace import AdaptiveMixedPrecision, pl
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.utils.checkpoint import checkpoint
from torchmetrics import CatMetric, MaxMetric

from lightning_amp_plus import LossScale
from lightning_amp_plus.precisions import PrecisionName
from lightning_amp_plus.rollback.transaction import StepTransaction

SCALE = 2.0**14  # at which the gradient of 1 times ROW is finite in float16, and that of 4 times ROW is not


def plugin_for(precision: PrecisionName = "16-mixed", **kwargs: Any) -> AdaptiveMixedPrecision:
    return AdaptiveMixedPrecision(precision, LossScale(init_scale=SCALE, growth_interval=10**6), **kwargs)


def fit(module: pl.LightningModule, *numbers: float, **kwargs: Any) -> AdaptiveMixedPrecision:
    plugin = plugin_for()
    make_trainer(plugin, **kwargs).fit(module, factors(*numbers))
    return plugin


@pytest.mark.parametrize(
    ("precision", "kept"), [("16-mixed", [1, 2, 3, 0]), ("bf16-mixed", [0] * 4), ("32-true", [0] * 4)]
)
def test_batches_are_kept_only_where_they_may_be_run_again(precision: PrecisionName, kept: list[int]) -> None:
    found: list[int] = []

    class Looks(Exact):
        def on_train_batch_end(self, *_: Any) -> None:
            found.append(len(self.trainer.precision_plugin._window._micro_batches))  # type: ignore[attr-defined]

    make_trainer(plugin_for(precision), accumulate_grad_batches=4).fit(Looks(), factors(1, 1, 1, 1))
    assert found == kept


def test_gradients_of_an_accumulation_of_the_users_own_are_not_dropped() -> None:
    class Own(Exact):
        def optimizer_zero_grad(self, *_: Any) -> None: ...

    with pytest.warns(RuntimeWarning, match="cannot be run again: the optimizer had gradients before"):
        plugin = fit(Own(), 1, 4)
    assert (plugin.counters.applied_steps, plugin.counters.skipped_steps) == (1, 1)


def test_a_retry_leaves_the_gradients_of_what_no_optimizer_owns() -> None:
    class More(Exact):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Parameter(torch.ones(()))

        def loss(self, batch: Tensor) -> Tensor:
            return super().loss(batch) + self.extra

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.linear.parameters(), lr=1.0)

    module = More()
    plugin = fit(module, 1, 4, 1)
    assert (plugin.counters.applied_steps, plugin.counters.retried_attempts) == (3, 2)
    assert module.extra.grad == 3  # Lightning lets them add up
    assert torch.equal(module.weight, -6 * ROW)


def test_activation_checkpointing_does_not_keep_a_window_from_being_run_again() -> None:
    class Recomputes(Exact):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def loss(self, batch: Tensor) -> Tensor:
            hidden = checkpoint(self.norm, batch.repeat(2, 1), use_reentrant=False)
            return super().loss(batch) + 0 * hidden.sum()

    plugin = fit(Recomputes(), 1, 4, accumulate_grad_batches=2)
    assert (plugin.counters.applied_steps, plugin.counters.retried_attempts) == (1, 1)


class Busy(Exact):
    """Hooks and validations that change the module between the micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))
        self.average: Tensor
        self.seen, self.best = CatMetric(), MaxMetric()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.average = self.average + 1
        self.seen.update(float(batch_idx))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None: ...

    def on_validation_epoch_end(self) -> None:
        self.best.update(float(self.average))

    def val_dataloader(self) -> Any:
        return factors(1)


def test_what_others_change_in_mid_window_stays_and_the_window_is_run_again() -> None:
    module = Busy()
    plugin = fit(module, 1, 4, accumulate_grad_batches=2, val_check_interval=1)
    assert (plugin.counters.applied_steps, plugin.counters.retried_attempts) == (1, 1)
    assert module.average == 2
    assert module.seen.compute().tolist() == [0, 1]
    assert module.best.compute() == 2


def test_what_others_change_in_mid_window_stays_when_it_is_skipped() -> None:
    module = Busy()
    with pytest.warns(RuntimeWarning, match="was skipped"):
        fit(module, 1, math.nan, accumulate_grad_batches=2, val_check_interval=1)
    assert module.average == 2
    assert module.seen.compute().tolist() == [0, 1]


def test_what_both_change_keeps_the_window_from_being_run_again() -> None:
    class Both(Busy):
        def loss(self, batch: Tensor) -> Tensor:
            self.average = self.average + 1
            return super().loss(batch)

    with pytest.warns(RuntimeWarning, match="cannot be run again: a hook or a validation in mid-window"):
        plugin = fit(Both(), 1, 4, accumulate_grad_batches=2)
    assert plugin.counters.skipped_steps == 1


# Manual optimization --------------------------------------------------------------------------------------------------


class Manual(Exact):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.norm = nn.BatchNorm1d(8)
        self.raises = False

    def one(self, optimizer: Any, batch: Tensor) -> None:
        loss = self.loss(batch) + 0 * self.norm(batch.repeat(2, 1)).sum()
        self.log("loss", loss, on_epoch=True)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.one(self.optimizers(), batch)
        if self.raises:
            raise KeyError("of the user's")


def test_an_exception_after_an_applied_step_leaves_what_belongs_to_it() -> None:
    module = Manual()
    module.raises = True
    with pytest.raises(KeyError, match="of the user's"):
        fit(module, 1)
    assert module.norm.num_batches_tracked == 1
    assert torch.equal(module.weight, -ROW)


def test_logged_values_of_a_skipped_step_beside_an_applied_one_are_put_back() -> None:
    class Pair(Manual):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizers: Any = self.optimizers()
            first, second = optimizers
            self.one(first, batch * (math.nan if batch_idx == 1 else 1))
            self.log("second", self.loss(batch), on_epoch=True)
            second.zero_grad()
            self.manual_backward(self.loss(batch))
            second.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=2.0**-10) for _ in range(2)]

    module = Pair()
    trainer = make_trainer(plugin_for("32-true"))
    with pytest.warns(RuntimeWarning, match="was skipped"):
        trainer.fit(module, factors(1, 1, 1))
    counters = trainer.precision_plugin.counters  # type: ignore[attr-defined]
    assert (counters.applied_steps, counters.skipped_steps) == (5, 1)
    assert trainer.callback_metrics["loss_epoch"].isfinite()
    assert trainer.callback_metrics["second_epoch"].isfinite()
    assert all(buffer.isfinite().all() for buffer in module.buffers())


# Checkpoints and tensors of other kinds -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.* was skipped", "ignore:You're resuming from a checkpoint")
def test_the_step_axis_of_a_checkpoint_from_a_skipped_step_is_the_runs(tmp_path: Path) -> None:
    axes: list[int] = []

    class Saves(Exact):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1 and self.trainer.current_epoch == 0:
                self.trainer.save_checkpoint(tmp_path / "a.ckpt")

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                axes.append(self.trainer.fit_loop.epoch_loop._batches_that_stepped)

    numbers = (1, math.nan, 1, 1)
    for path in (None, tmp_path / "a.ckpt"):
        trainer = make_trainer(plugin_for("32-true"))
        trainer.fit(Saves(), factors(*numbers), ckpt_path=path)
    assert axes == [1, 1]


def test_sharded_buffers_beside_plain_ones(tmp_path: Path) -> None:
    distributed: Any = torch.distributed
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        module: Any = nn.Module()
        module.register_buffer("plain", torch.ones(2))
        module.register_buffer("sharded", distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,))))
        transaction = StepTransaction(module)
        transaction.begin()
        module.plain.zero_()
        module.sharded.mul_(3)
        transaction.rollback()
        assert (module.plain.tolist(), module.sharded.full_tensor().tolist()) == ([1, 1], [1, 1])
    finally:
        torch.distributed.destroy_process_group()
