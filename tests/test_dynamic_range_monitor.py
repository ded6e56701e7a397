"""DynamicRangeMonitor through a Trainer: which steps it measures, what it logs and keeps; training stays the same."""

from __future__ import annotations

import csv
import json
import math
import pickle
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from helpers import PRECISIONS, ROW, Exact, factors, loader, make_trainer
from namespace import NAMESPACE, AdaptiveMixedPrecision, PrecisionFallback, pl
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp_plus import LossScale
from lightning_amp_plus.dynamic_range.stats import KINDS, DynamicRange, Kind
from lightning_amp_plus.precisions import PrecisionName
from lightning_amp_plus.scaling.exponents import BINS, LOWEST

if TYPE_CHECKING or NAMESPACE == "lightning.pytorch":
    from lightning_amp_plus import DynamicRangeMonitor
else:
    from lightning_amp_plus.pytorch_lightning import DynamicRangeMonitor

SCALE = 2.0**8
ZERO, NOT_FINITE = -1000, 1000
ABOVE, BELOW, LOST = (
    f"amp/range/{name}" for name in ("activations_above_fp16", "gradients_below_fp16", "updates_below_bf16")
)
SKIPS = "was skipped because"
precisions = pytest.mark.parametrize("precision", PRECISIONS)


def make_plugin(precision: PrecisionName = "16-mixed", scale: float = SCALE, **kwargs: Any) -> AdaptiveMixedPrecision:
    return AdaptiveMixedPrecision(precision, LossScale(init_scale=scale), **kwargs)


def fit(
    monitor: DynamicRangeMonitor | None,
    module: pl.LightningModule,
    data: Any,
    plugin: AdaptiveMixedPrecision | None = None,
    *,
    callbacks: Sequence[pl.Callback] = (),
    validate: Any = None,
    ckpt_path: Path | None = None,
    skips: bool = False,
    **kwargs: Any,
) -> pl.Trainer:
    monitors = [] if monitor is None else [monitor]
    trainer = make_trainer(plugin or make_plugin(), callbacks=[*monitors, *callbacks], **kwargs)
    expected: AbstractContextManager[object] = pytest.warns(RuntimeWarning, match=SKIPS) if skips else nullcontext()
    with expected:
        trainer.fit(module, data, validate, ckpt_path=ckpt_path)
    return trainer


def seen(stats: DynamicRange, kind: Kind, module: str = "linear") -> dict[int, int]:
    """The counts other than 0 of a module by exponent."""
    names = {0: ZERO, BINS - 1: NOT_FINITE}
    counts = stats.counts[KINDS.index(kind), stats.modules.index(module)]
    return {names.get(index, index - 1 + LOWEST): int(counts[index]) for index in counts.nonzero().flatten().tolist()}


def of_row(power: int, times: int = 1) -> dict[int, int]:
    """What is seen of ``ROW`` times a power of two."""
    return {power + 1: 3 * times, power: 4 * times, ZERO: times}


def measured(stats: DynamicRange) -> list[int]:
    """The exponents of the batches that were seen, where each is another power of two."""
    return [power for power in sorted(seen(stats, "parameter_gradients")) if power != ZERO]


def powers(count: int) -> Any:
    """Batches of one entry: the gradient of batch ``i`` is ``2^-i``."""
    return loader([torch.tensor([2.0**-i, 0, 0, 0, 0, 0, 0, 0]) for i in range(count)])


class Manual(pl.LightningModule):
    """The gradient of the second optimizer is 4 times that of the first, which steps at every ``every``-th batch."""

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.every = every
        self.layers = nn.ModuleList(nn.Linear(8, 1, bias=False) for _ in range(2))
        for layer in self.layers:
            nn.init.zeros_(layer.weight)  # type: ignore[arg-type]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[attr-defined]
        self.manual_backward(self.layers[0](batch).float().sum())
        if (batch_idx + 1) % self.every == 0:
            first.step()
            first.zero_grad()
        self.manual_backward(self.layers[1](batch).float().sum() * 4)
        second.step()
        second.zero_grad()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in self.layers]


# ---------------------------------------------------------------- what is measured


@precisions
def test_what_it_has_seen_is_what_was_computed(precision: PrecisionName) -> None:
    monitor = DynamicRangeMonitor(1)
    fit(monitor, Exact(), factors(4.0), make_plugin(precision))
    stats = monitor.stats
    assert stats.modules == ("linear",)
    assert (stats.steps, stats.loss_scale) == (1, SCALE if precision == "16-mixed" else 1.0)
    assert seen(stats, "activations") == {ZERO: 1}
    assert seen(stats, "activation_gradients") == {0: 1}
    assert seen(stats, "parameter_gradients") == of_row(2)
    assert stats.largest.flatten().tolist() == [0, 1, 8]
    assert stats.largest_input.tolist() == [8]
    assert stats.updates.flatten().tolist() == [7, 0]


@pytest.mark.parametrize(
    ("every", "steps"), [(1, [0, 1, 2, 3, 4, 5, 6]), (2, [1, 3, 5]), (3, [2, 5]), (7, [6]), (8, [])]
)
def test_every_n_steps_is_the_nth_step_and_each_nth_after_it(every: int, steps: list[int]) -> None:
    monitor = DynamicRangeMonitor(every)
    fit(monitor, Exact(), powers(7))
    assert measured(monitor.stats) == sorted(-step for step in steps)
    assert monitor.stats.steps == len(steps)


def test_with_accumulation_a_measured_step_is_seen_with_all_its_micro_batches() -> None:
    monitor = DynamicRangeMonitor(2)
    fit(monitor, Exact(), factors(64.0, 64.0, 1.0, 4.0, 16.0), accumulate_grad_batches=2)
    stats = monitor.stats  # the second window: batches 1 and 4; the third is that of a batch alone
    assert stats.steps == 1
    assert sum(seen(stats, "activations").values()) == 2
    assert seen(stats, "activation_gradients") == {-1: 2}
    assert stats.largest[2].tolist() == [5]
    assert stats.largest_input.tolist() == [8]


def test_the_last_window_of_an_epoch_is_a_step_even_if_it_is_short() -> None:
    monitor = DynamicRangeMonitor(3)
    fit(monitor, Exact(), factors(1.0, 1.0, 1.0, 1.0, 16.0), accumulate_grad_batches=2)
    assert (monitor.stats.steps, monitor.stats.largest[2].tolist()) == (1, [16.0])


def test_in_manual_optimization_each_optimizer_is_seen_with_true_gradients() -> None:
    monitor = DynamicRangeMonitor(1)
    fit(monitor, Manual(), factors(2.0))
    stats = monitor.stats
    assert [seen(stats, "parameter_gradients", f"layers.{index}") for index in (0, 1)] == [of_row(1), of_row(3)]
    assert [seen(stats, "activation_gradients", f"layers.{index}") for index in (0, 1)] == [{0: 1}, {2: 1}]
    assert stats.updates.tolist() == [[7, 7], [0, 0]]
    assert (stats.steps, stats.loss_scale) == (1, SCALE)


def test_in_manual_optimization_optimizers_at_different_rates_are_seen_when_they_step() -> None:
    monitor = DynamicRangeMonitor(1)
    fit(monitor, Manual(every=2), factors(2.0, 2.0))
    stats = monitor.stats
    assert seen(stats, "parameter_gradients", "layers.0") == of_row(2)  # of both batches, at the second
    assert seen(stats, "parameter_gradients", "layers.1") == of_row(3, times=2)


@pytest.mark.parametrize("clipping", [{}, {"gradient_clip_val": 1e9}])
def test_parameter_gradients_beyond_float16_are_counted_at_the_loss_scale(clipping: Any) -> None:
    class Doubled(Exact):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return 2 * self.loss(batch)

    monitor = DynamicRangeMonitor(1)
    fit(monitor, Doubled(), factors(120.0, 120.0), accumulate_grad_batches=2, **clipping)
    assert monitor.stats.largest[2].tolist() == [480]  # 122880 at the loss scale of 256, a sum of 2 in float32
    assert monitor.stats.share_above("parameter_gradients") == [3 / 8]


def test_gradients_of_an_inner_backward_are_true_in_every_micro_batch() -> None:
    class Penalized(Exact):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            batch = batch.clone().requires_grad_()
            torch.autograd.grad(self(batch).sum() * 16, batch)
            return self.loss(batch)

    monitor = DynamicRangeMonitor(1)
    fit(monitor, Penalized(), factors(1.0, 1.0), accumulate_grad_batches=2)
    assert seen(monitor.stats, "activation_gradients") == {4: 2, -1: 2}


# ---------------------------------------------------------------- steps that are not clean


class Scaled(Exact):
    """The gradient of the layer's output is 2^10, so that it overflows at loss scales of 2^6 and more."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch * 2.0**-10).float().sum() * 2.0**10


def test_of_a_step_that_is_retried_the_last_attempt_is_seen_alone() -> None:
    monitor, plugin = DynamicRangeMonitor(1), make_plugin(scale=2.0**8)
    fit(monitor, Scaled(), factors(1.0), plugin)
    stats, step = monitor.stats, plugin.last_step
    assert step is not None
    assert step.attempts > 1
    assert stats.steps == 1
    assert stats.loss_scale == step.scale < 2.0**6
    assert seen(stats, "activations") == {ZERO: 1}
    assert seen(stats, "activation_gradients") == {10: 1}
    assert seen(stats, "parameter_gradients") == of_row(0)
    assert stats.above.flatten().tolist() == [0, 0, 0]


def test_of_a_window_that_is_retried_each_micro_batch_is_seen_once() -> None:
    monitor, plugin = DynamicRangeMonitor(1), make_plugin(scale=2.0**9)
    fit(monitor, Scaled(), factors(1.0, 1.0), plugin, accumulate_grad_batches=2)
    assert plugin.counters.retried_attempts > 0
    assert seen(monitor.stats, "activation_gradients") == {9: 2}
    assert seen(monitor.stats, "parameter_gradients") == of_row(0)


class Huge(pl.LightningModule):
    """The layer puts out 4 times the sum of a row, and float16 does not hold a row of 2^13 and more."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1, bias=False)
        nn.init.constant_(self.layer.weight, 4.0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).float().mean() * 2.0**-10

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=2.0**-20)


def test_of_a_step_that_is_rescued_the_wide_attempt_is_seen_alone() -> None:
    monitor, plugin = DynamicRangeMonitor(1), make_plugin(scale=1.0)
    fit(monitor, Huge(), loader(torch.full((1, 4), 2.0**13)), plugin, callbacks=[PrecisionFallback()])
    assert plugin.counters.rescued_steps == 1
    stats = monitor.stats
    assert seen(stats, "activations", "layer") == {17: 1}
    assert stats.share_above("activations") == [1.0]
    assert (stats.steps, stats.loss_scale, stats.largest[0].item()) == (1, 1.0, 2.0**17)


def test_a_step_that_is_skipped_is_left_out_and_the_next_is_measured_instead() -> None:
    monitor = DynamicRangeMonitor(3)
    rows = [ROW * 2.0**-i for i in range(6)]
    rows[2] = rows[2] * math.nan
    trainer = fit(monitor, Exact(), loader(rows), skips=True)
    stats = monitor.stats  # steps 3 and, with the third skipped, 2 were due: they are measured at 3 and 5
    assert trainer.precision_plugin.counters.skipped_steps == 1  # type: ignore[attr-defined]
    assert stats.steps == 2
    assert seen(stats, "parameter_gradients") == {-2: 3, -3: 4, -4: 3, -5: 4, ZERO: 2}
    assert NOT_FINITE not in seen(stats, "activations")


def test_in_manual_optimization_a_batch_with_one_skipped_step_is_left_out() -> None:
    class OneIsBad(Manual):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            first, second = self.optimizers()  # type: ignore[attr-defined]
            for factor, layer, optimizer in ((math.nan if batch_idx == 0 else 1.0, 0, first), (1.0, 1, second)):
                self.manual_backward(self.layers[layer](batch).float().sum() * factor)
                optimizer.step()
                optimizer.zero_grad()

    monitor = DynamicRangeMonitor(1)
    fit(monitor, OneIsBad(), factors(1.0, 4.0), skips=True)
    assert monitor.stats.steps == 1
    assert [seen(monitor.stats, "parameter_gradients", f"layers.{index}") for index in (0, 1)] == [of_row(2)] * 2


def test_a_retried_step_may_begin_in_inference_mode() -> None:
    class Distilled(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = nn.Linear(8, 1, bias=False).requires_grad_(False)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            with torch.inference_mode():
                self.teacher(batch)
            return super().training_step(batch, batch_idx)

    monitor, plugin = DynamicRangeMonitor(1), make_plugin()
    fit(monitor, Distilled(), factors(1.0), plugin)
    assert plugin.counters.retried_attempts > 0
    assert monitor.stats.steps == 1


# ---------------------------------------------------------------- beside training


class Validates(Exact):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self(batch)


def test_validation_in_the_middle_of_a_window_is_not_counted() -> None:
    monitor = DynamicRangeMonitor(1)
    fit(
        monitor,
        Validates(),
        factors(1.0, 1.0, 1.0, 1.0),
        validate=factors(256.0),
        accumulate_grad_batches=2,
        val_check_interval=1,
        num_sanity_val_steps=1,
    )
    assert sum(seen(monitor.stats, "activations").values()) == 4
    assert monitor.stats.largest_input.tolist() == [2]


def test_a_run_that_is_resumed_ends_with_the_sums_of_one_that_was_not(tmp_path: Path) -> None:
    whole, before, after = (DynamicRangeMonitor(4) for _ in range(3))
    fit(whole, Exact(), powers(6), max_epochs=2)
    trainer = fit(before, Exact(), powers(6), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    fit(after, Exact(), powers(6), max_epochs=2, ckpt_path=tmp_path / "a.ckpt")
    assert [measured(monitor.stats) for monitor in (whole, before)] == [[-5, -3, -1], [-3]]  # steps 3, 7 and 11
    assert after.stats.state_dict() == whole.stats.state_dict()


def test_a_checkpoint_of_it_is_loaded_with_weights_only(tmp_path: Path) -> None:
    monitor = DynamicRangeMonitor(1)
    trainer = fit(monitor, Exact(), factors(2.0))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)["callbacks"][monitor.state_key]
    assert DynamicRange.from_state(state["stats"]).state_dict() == monitor.stats.state_dict()


def test_a_second_fit_begins_with_no_sums() -> None:
    monitor = DynamicRangeMonitor(1)
    fit(monitor, Exact(), factors(2.0, 2.0))
    fit(monitor, Exact(), factors(8.0))
    assert monitor.stats.steps == 1
    assert seen(monitor.stats, "parameter_gradients") == of_row(3)


class Half(Exact):
    """Half of the outputs are 98304, and the gradient of the other half is 2^-20; weights of 1 are moved by 2^-12."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.ones_(self.linear.weight)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output = self(torch.diag(torch.tensor([98304.0, 1.0]).repeat(4)))
        return (output.flatten().float() * torch.tensor([2.0**-29, 2.0**-26]).repeat(4)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([{"params": [self.linear.weight]}], lr=2.0**-2)


def test_the_logged_values_are_those_computed_by_hand(tmp_path: Path) -> None:
    # The gradients of the outputs are 2^-29 and 2^-26: both below 2^-24, at a loss scale of 1. Those of the weights,
    # 98304 * 2^-29 and 2^-26, times 2^-2: all below half an ulp of 1, which is 2^-8; the second leaves 1 as it is.
    trainer = fit(DynamicRangeMonitor(1), Half(), factors(1.0), make_plugin("32-true"), log_every_n_steps=1)
    logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
    assert logged == {ABOVE: 0.5, BELOW: 1.0, LOST: 1.0}


def csv_rows(folder: Path, key: str) -> dict[int, float]:
    with (folder / "metrics.csv").open(newline="") as file:
        return {int(row["step"]): float(row[key]) for row in csv.DictReader(file) if row.get(key)}


def fit_with_csv(
    monitor: DynamicRangeMonitor, folder: Path, module: Any = None, data: Any = None, **kwargs: Any
) -> Any:
    logger = pl.loggers.CSVLogger(folder, name="run", version=0)
    fit(monitor, module or Exact(), data or factors(*[1.0] * 12), logger=logger, **kwargs)
    return Path(logger.log_dir)


@pytest.mark.parametrize(("every", "log_every", "logged"), [(4, 2, [3, 7, 11]), (4, 4, [3, 7, 11]), (3, 4, [3, 7, 11])])
def test_a_measured_step_is_logged_once_at_the_next_step_that_the_trainer_logs(
    every: int, log_every: int, logged: list[int], tmp_path: Path
) -> None:
    folder = fit_with_csv(DynamicRangeMonitor(every), tmp_path, log_every_n_steps=log_every)
    assert csv_rows(folder, LOST) == dict.fromkeys(logged, 0.0)


def test_the_sums_lie_beside_the_files_of_the_logger(tmp_path: Path) -> None:
    monitor = DynamicRangeMonitor(2)
    folder = fit_with_csv(monitor, tmp_path, data=factors(*[2.0] * 4))
    state = json.loads((folder / "amp_dynamic_range.json").read_text())
    assert state["steps"] == 2
    assert seen(DynamicRange.from_state(state), "parameter_gradients") == of_row(1, times=2)


class Raises(Exact):
    def __init__(self, at: int = 2) -> None:
        super().__init__()
        self.at = at

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx == self.at:
            raise OSError("the disk is gone")
        return loss


def test_what_was_seen_before_an_error_is_kept_and_written(tmp_path: Path) -> None:
    monitor = DynamicRangeMonitor(1)
    logger = pl.loggers.CSVLogger(tmp_path, name="", version="")
    with pytest.raises(OSError, match="the disk is gone"):
        fit(monitor, Raises(), factors(1.0, 1.0, 1.0), logger=logger)
    assert monitor.stats.steps == 2
    assert json.loads((tmp_path / "amp_dynamic_range.json").read_text())["steps"] == 2


def test_barebones_and_fast_dev_run_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monitor = DynamicRangeMonitor(1)
    trainer = make_trainer(make_plugin(), callbacks=[monitor], fast_dev_run=True)
    trainer.fit(Exact(), factors(1.0))
    assert monitor.stats.steps == 1
    bare = pl.Trainer(barebones=True, accelerator="cpu", max_epochs=1, plugins=[make_plugin()], callbacks=[monitor])
    bare.fit(Exact(), factors(1.0))
    assert monitor.stats.steps == 0
    assert list(tmp_path.rglob("*.json")) == []


# ---------------------------------------------------------------- nothing is left, and nothing is changed


def traces(module: nn.Module) -> list[str]:
    """The attributes of all parts of it, and what hooks there are."""
    found = [name for part in module.modules() for name in vars(part)]
    found += [name for part in module.modules() for name, value in vars(part).items() if "_hooks" in name and value]
    return found + [name for name, parameter in module.named_parameters() if parameter._backward_hooks]


@pytest.mark.parametrize("kind", [Exact, Raises])
def test_nothing_is_left_on_module_plugin_or_torch_after_a_fit_and_after_an_error(kind: type[Exact]) -> None:
    from torch._dynamo import eval_frame

    stance = getattr(eval_frame, "_stance", None)
    found = []
    for monitor in (None, DynamicRangeMonitor(1)):
        module, plugin = kind(), make_plugin()
        with pytest.raises(OSError, match="the disk") if kind is Raises else nullcontext():
            fit(monitor, module, factors(1.0, 1.0, 1.0), plugin)
        found.append(traces(module))
        assert (plugin._engine.observers, plugin._engine._looks) == ([], ())
        assert monitor is None or monitor._recorder is None
    assert found[0] == found[1]
    assert getattr(eval_frame, "_stance", None) == stance


class Pickles(pl.Callback):
    def __init__(self, monitor: DynamicRangeMonitor) -> None:
        self.monitor = monitor
        self.copies: list[DynamicRangeMonitor] = []

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.copies.append(pickle.loads(pickle.dumps(self.monitor)))  # noqa: S301


def test_a_pickled_copy_from_the_middle_of_a_step_has_the_sums_so_far_and_can_fit() -> None:
    monitor = DynamicRangeMonitor(1)
    pickles = Pickles(monitor)
    fit(monitor, Exact(), factors(1.0, 1.0), callbacks=[pickles])
    assert [copy.stats.steps for copy in pickles.copies] == [0, 1]
    fit(pickles.copies[1], Exact(), factors(1.0, 1.0, 1.0))
    assert [pickles.copies[1].stats.steps, monitor.stats.steps] == [3, 2]


class Noisy(pl.LightningModule):
    def __init__(self, optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.model = nn.Sequential(
            nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 1)
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch).float().square().mean() * 2.0**4

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())


@precisions
@pytest.mark.parametrize(
    "clipping",
    [{}, {"gradient_clip_val": 0.1}, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}],
    ids=["unclipped", "norm", "value"],
)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_weights_are_bitwise_those_of_a_run_without_it(precision: PrecisionName, clipping: Any, fused: bool) -> None:
    results = []
    for monitor in (None, DynamicRangeMonitor(2)):
        torch.manual_seed(0)
        module = Noisy(lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=fused))
        plugin = make_plugin(precision, scale=2.0**14)
        fit(monitor, module, loader(torch.randn(24, 8) * 4, 4), plugin, accumulate_grad_batches=2, **clipping)
        assert monitor is None or monitor.stats.steps == 1
        assert (plugin.counters.retried_attempts > 0) == (precision == "16-mixed")
        results.append([*module.state_dict().values(), torch.get_rng_state()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a device, but for what a CPU does without a dispatch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name == "aten::_local_scalar_dense" or torch.Tag.dynamic_output_shape in func.tags
        return func(*args, **(kwargs or {}))


class Copies(TorchFunctionMode):
    """Adds that to the count."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.waits.count += getattr(func, "__name__", "") in ("tolist", "cpu", "numpy")
        return func(*args, **(kwargs or {}))


class CountsWaits(pl.Callback):
    """Between two hooks of the callbacks after it, in the order of their list."""

    def __init__(self) -> None:
        self.of_batch: list[int] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.waits = Waits()
        self.stack = ExitStack()
        self.stack.enter_context(self.waits)
        self.stack.enter_context(Copies(self.waits))

    def on_train_batch_end(self, *args: Any) -> None:
        self.stack.close()
        self.of_batch.append(self.waits.count)


@precisions
def test_on_steps_that_are_not_measured_the_host_waits_as_often_as_without_it(precision: PrecisionName) -> None:
    counts = []
    for monitor in (None, DynamicRangeMonitor(100), DynamicRangeMonitor(1)):
        waits = CountsWaits()
        callbacks = [waits] if monitor is None else [monitor, waits]
        fit(None, Exact(), factors(*[1.0] * 4), make_plugin(precision), callbacks=callbacks)
        counts.append(waits.of_batch)
    assert counts[0] == counts[1] == [1] * 4
    assert min(counts[2]) > 1  # so that the count can tell


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "2"])
def test_every_n_steps_out_of_range_is_refused_with_its_value(every: Any) -> None:
    with pytest.raises(ValueError, match=r"every_n_steps=.*must be an integer of at least 1"):
        DynamicRangeMonitor(every)


def test_a_trainer_without_the_plugin_is_refused() -> None:
    trainer = make_trainer(callbacks=[DynamicRangeMonitor()])
    with pytest.raises(TypeError, match="DynamicRangeMonitor reads what AdaptiveMixedPrecision does"):
        trainer.fit(Exact(), factors(1.0))


# ---------------------------------------------------------------- strategies and devices that CPUs do not show


class LoadsLate(pl.strategies.SingleDeviceStrategy):
    """As a ModelParallelStrategy, which has a checkpoint loaded after ``on_fit_start``."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True


def test_sums_go_on_where_a_checkpoint_is_loaded_late(tmp_path: Path) -> None:
    first = fit(DynamicRangeMonitor(1), Exact(), factors(1.0, 1.0))
    first.save_checkpoint(tmp_path / "a.ckpt")
    monitor = DynamicRangeMonitor(1)
    strategy = LoadsLate(torch.device("cpu"))
    fit(monitor, Exact(), factors(1.0, 1.0), strategy=strategy, max_epochs=2, ckpt_path=tmp_path / "a.ckpt")
    assert monitor.stats.steps == 4


def test_a_device_that_is_broken_hides_no_error_and_leaves_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaks(Exact):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.loss(batch)
            monkeypatch.setattr(DynamicRange, "cpu", fail)
            raise ValueError("mine")

    def fail(stats: DynamicRange) -> DynamicRange:
        raise RuntimeError("an illegal memory access")

    module = Breaks()
    with pytest.warns(RuntimeWarning, match="stats could not be written"), pytest.raises(ValueError, match="mine"):
        fit(DynamicRangeMonitor(1), module, factors(1.0))
    assert not module.linear._forward_hooks
