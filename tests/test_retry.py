"""Guarantee G3, no lost batch: an overflowed window is run again, and the run is what it had been at a lower scale."""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers import ROW, Exact, make_trainer, scale_of
from namespace import AdaptiveMixedPrecision, AMPMonitor, pl
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_amp_plus import LossScale, StepCounters

pytestmark = pytest.mark.filterwarnings("ignore:Optimizer step .* was skipped because:RuntimeWarning")

NAN = float("nan")
RULES: dict[str, Any] = {"growth_interval": 10**6}
TOO_HIGH = 2.0**24
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9),
    "adamw": partial(AdamW, lr=0.01),
    "fused": partial(AdamW, lr=0.01, fused=True),
}


class Net(pl.LightningModule):
    """Everything that an attempt may leave a trace in; it infers the size of its batches."""

    net: Any

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))
        self.mean = MeanMetric()
        self.optimizer = optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).float().pow(2).mean()
        self.mean.update(loss)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())


def batches(count: int, sizes: Sequence[int] = (4,)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn((sizes[i % len(sizes)], 4), generator=generator) for i in range(count)]


def as_loader(data: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=None, collate_fn=lambda batch: batch)


def fit(
    module: pl.LightningModule,
    data: Any,
    scale: float,
    *,
    retries: int = 5,
    rules: dict[str, Any] = RULES,
    **kwargs: Any,
) -> pl.Trainer:
    plugin = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=scale, **rules), retries=retries)
    trainer = make_trainer(plugin, **kwargs)
    torch.manual_seed(5)
    trainer.fit(module, as_loader(data))
    return trainer


def plugin_of(trainer: pl.Trainer) -> AdaptiveMixedPrecision:
    assert isinstance(trainer.precision_plugin, AdaptiveMixedPrecision)
    return trainer.precision_plugin


def outcome(trainer: pl.Trainer) -> dict[str, Any]:
    return {
        "module": trainer.lightning_module.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "global_step": trainer.global_step,
        "callback_metrics": dict(trainer.callback_metrics),
        "rng": torch.get_rng_state(),
    }


def assert_equal(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


# Bit for bit ----------------------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 4},
    "clipping": {"gradient_clip_val": 0.1},
    "accumulation and clipping by value": {
        "accumulate_grad_batches": 4,
        "gradient_clip_val": 0.01,
        "gradient_clip_algorithm": "value",
    },
    "two epochs": {"accumulate_grad_batches": 4, "max_epochs": 2},
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_a_run_that_has_to_find_its_scale_equals_one_that_knows_it(case: str, optimizer: str) -> None:
    """18 batches of different sizes: with accumulation the last window of an epoch is incomplete."""
    data = batches(18, sizes=(2, 4, 6))
    searched = fit(Net(optimizer), data, TOO_HIGH, **CASES[case])
    actual = outcome(searched)
    found = scale_of(plugin_of(searched))
    known = fit(Net(optimizer), data, found, **CASES[case])
    assert_equal(actual, outcome(known))
    counters = plugin_of(searched).counters
    assert (counters.skipped_steps, found < TOO_HIGH) == (0, True)
    assert counters.retried_attempts >= 3
    assert plugin_of(known).counters.retried_attempts == 0
    assert known.global_step == (18 if "accumulate_grad_batches" not in CASES[case] else 5 * known.current_epoch)


def test_with_a_schedule_of_accumulation() -> None:
    data = batches(6, sizes=(2, 4))
    results, scale = [], TOO_HIGH
    for _ in range(2):
        schedule = pl.callbacks.GradientAccumulationScheduler({0: 2, 1: 4})
        trainer = fit(Net(), data, scale, max_epochs=2, callbacks=[schedule])
        results.append(outcome(trainer))
        scale = scale_of(plugin_of(trainer))
    assert_equal(*results)
    assert results[0]["global_step"] == 3 + 2


@pytest.mark.parametrize("accumulate", [1, 4])
def test_an_overflow_in_mid_run(accumulate: int) -> None:
    """One batch is too large for the scale: it is not lost, and weighs as much as the others."""
    numbers = [1.0, 2, 4, 4, 1, 2, 64, 4, 1, 2, 4, 4]
    module = Exact()
    trainer = fit(module, [ROW[None] * number for number in numbers], 2.0**12, accumulate_grad_batches=accumulate)
    assert torch.equal(module.weight, -ROW * sum(numbers) / accumulate)
    counters = plugin_of(trainer).counters
    assert (counters.applied_steps, counters.skipped_steps) == (12 // accumulate, 0)
    assert counters.retried_attempts == (3 if accumulate == 1 else 2)


def test_batch_end_hooks_that_change_the_module_in_mid_window() -> None:
    """Many projects update their metrics there: a retry must not undo what is not of the attempt."""

    class Counts(Exact):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))
            self.seen: Tensor

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen += 1

    module = Counts()
    trainer = fit(module, [ROW[None]] * 4, TOO_HIGH, accumulate_grad_batches=4)
    assert module.seen == 4
    assert plugin_of(trainer).counters.retried_attempts > 0


# Near misses ----------------------------------------------------------------------------------------------------------


class Masked(Exact):
    """A causal mask of -inf in a buffer: legal."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((8, 8), -torch.inf).triu(1))
        self.mask: Tensor

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0 * (self.mask.softmax(-1) @ self.linear.weight[0]).sum()


class MarkedTargets(Exact):
    """Targets that are missing are NaN."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        output = self(x).float()
        return torch.where(y.isnan(), 0, output - y.nan_to_num()).sum()


class Pops(Exact):
    """Takes its batch apart."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch.pop("x"))


class Appends(Exact):
    def loss(self, batch: Any) -> Tensor:
        batch.append(batch[0])
        return super().loss(batch[0]) * (len(batch) == 2)


@dataclasses.dataclass
class Record:
    x: Tensor
    seen: list[int]


class Pair(NamedTuple):
    x: Tensor
    seen: list[int]


class Attributes(Exact):
    """Works on an object of the user's, whose parts it changes."""

    def loss(self, batch: Any) -> Tensor:
        batch.seen.append(1)
        x = batch.x
        if isinstance(batch, Record):
            batch.x = x * NAN
        return super().loss(x) * (len(batch.seen) == 1)


X = ROW[None]
NEAR_MISSES: dict[str, tuple[type[Exact], Callable[[], Any]]] = {
    "mask": (Masked, X.clone),
    "targets": (MarkedTargets, lambda: (X.expand(2, 8).clone() / 1, torch.tensor([[0.0], [NAN]]))),
    "pop": (Pops, lambda: {"x": X.clone()}),
    "append": (Appends, lambda: [X.clone()]),
    "dataclass": (Attributes, lambda: Record(X.clone(), [])),
    "named tuple": (Attributes, lambda: Pair(X.clone(), [])),
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_train_from_a_scale_too_high(name: str, accumulate: int) -> None:
    """The gradient overflows at more than 2^14: the run starts 2^8 above."""
    kind, make_batch = NEAR_MISSES[name]
    module = kind()
    data = as_loader([make_batch() for _ in range(4)])
    plugin = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=2.0**22, **RULES))
    make_trainer(plugin, accumulate_grad_batches=accumulate).fit(module, data)
    assert plugin.counters.skipped_steps == 0
    assert plugin.counters.retried_attempts >= 4
    assert torch.equal(module.weight, -ROW * 4 / accumulate)
    if name == "mask":
        assert torch.isinf(module.mask).sum() == 28  # type: ignore[arg-type]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_input_that_is_written_to_in_place(accumulate: int, recwarn: pytest.WarningsRecorder) -> None:
    """A retry would not do what the first attempt did: the step is skipped, and the scale comes down."""

    class Writes(Exact):
        calls = 0

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.calls += 1
            batch.mul_(2)
            return self.loss(batch)

    module = Writes()
    trainer = fit(module, [ROW[None].clone() for _ in range(6)], 2.0**16, accumulate_grad_batches=accumulate)
    plugin = plugin_of(trainer)
    assert module.calls == 6
    assert plugin.counters.retried_attempts == 0
    assert plugin.counters.skipped_steps == (3 if accumulate == 1 else 2)
    assert scale_of(plugin) == (2.0**13 if accumulate == 1 else 2.0**14)
    assert torch.equal(module.weight, -ROW * (6 if accumulate == 1 else 2))
    assert len([one for one in recwarn if "Optimizer step" in str(one.message)]) <= 1


@dataclasses.dataclass(slots=True)
class Slots:
    x: Tensor


def test_an_input_in_slots_that_is_written_to_in_place() -> None:
    """Lightning moves dataclasses to the device, those with slots too."""

    class Writes(Exact):
        def loss(self, batch: Any) -> Tensor:
            batch.x.mul_(2)
            return super().loss(batch.x)

    module = Writes()
    data = as_loader([Slots(ROW[None].clone())])
    plugin = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=2.0**14, **RULES))
    with pytest.warns(RuntimeWarning, match="cannot be run again: training_step wrote to its batch"):
        make_trainer(plugin).fit(module, data)
    assert plugin.counters == StepCounters(0, 1, recent=1)
    assert torch.equal(module.weight, ROW * 0)


def test_a_part_of_the_batch_that_cannot_be_copied() -> None:
    """As in stock's Trainer the fit runs; without a retry if it has to be."""

    class Takes(Exact):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch["x"])

    module = Takes()
    data = [{"x": ROW[None], "rows": (row for row in "abc")}]
    fit(module, data, 2.0**10)
    assert torch.equal(module.weight, -ROW)


def test_a_dataloader_iter_is_not_run_again() -> None:
    class Takes(Exact):
        calls = 0

        def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:  # type: ignore[override]
            batch, _, _ = next(dataloader_iter)
            self.calls += 1
            return self.loss(batch)

    module = Takes()
    with (
        pytest.warns(UserWarning, match="dataloader_iter"),
        pytest.warns(RuntimeWarning, match="cannot be run again: .* took a dataloader_iter"),
    ):
        trainer = fit(module, [ROW[None]] * 6, 2.0**16)
    plugin = plugin_of(trainer)
    assert (module.calls, plugin.counters) == (6, StepCounters(4, 2, recent=0b110000))
    assert scale_of(plugin) == 2.0**14
    assert torch.equal(module.weight, -ROW * 4)


# How often ------------------------------------------------------------------------------------------------------------


class Counting(Exact):
    """Counts the calls of its hooks; a gradient of 2 times the batch may be NaN though the loss is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.count("training_step")
        loss = self.loss(batch.nan_to_num())
        if batch.isnan().any():
            return loss + (self.linear.weight.sum() * 0).sqrt()
        return loss

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        self.count("on_before_zero_grad")

    def on_before_backward(self, loss: Tensor) -> None:
        self.count("on_before_backward")

    def on_after_backward(self) -> None:
        self.count("on_after_backward")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count("on_train_batch_end")

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.count("on_before_optimizer_step")


@pytest.mark.parametrize(
    ("retries", "attempts", "scale"),
    # From 2^20 on: half of it, then 2^18 and 2^16 and 2^12, and the last at min_scale. It overflows above 2^14.
    [(0, 1, 2.0**19), (1, 2, 1.0), (2, 3, 1.0), (3, 4, 1.0), (4, 5, 1.0), (5, 5, 2.0**12)],
)
def test_so_many_retries(retries: int, attempts: int, scale: float) -> None:
    module = Counting()
    plugin = plugin_of(fit(module, [ROW[None]], 2.0**20, retries=retries))
    assert plugin.last_step is not None
    assert (plugin.last_step.attempts, module.calls["training_step"]) == (attempts, attempts)
    if retries == 0:
        assert (plugin.last_step.outcome, scale_of(plugin)) == ("skipped", scale)
        assert plugin.counters == StepCounters(0, 1, recent=1)
        return
    assert (plugin.last_step.outcome, plugin.last_step.scale) == ("applied", scale)
    assert plugin.counters == StepCounters(1, 0, recent=1, retried_attempts=attempts - 1)
    assert torch.equal(module.weight, -ROW)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_hooks_run_once_per_step_or_once_per_attempt(accumulate: int) -> None:
    module = Counting()
    trainer = fit(
        module, [ROW[None]] * 2 * accumulate, 2.0**16, accumulate_grad_batches=accumulate, callbacks=[AMPMonitor()]
    )
    counters = plugin_of(trainer).counters
    assert counters.retried_attempts == (2 if accumulate == 1 else 1)  # of the first step, at 2^16 and 2^15
    attempts = 2 + counters.retried_attempts
    assert module.calls == {
        "on_before_zero_grad": 2,
        "on_before_optimizer_step": 2,
        "on_train_batch_end": 2 * accumulate,
        **dict.fromkeys(("training_step", "on_before_backward", "on_after_backward"), attempts * accumulate),
    }
    assert trainer.callback_metrics["amp/retried_attempts"] == counters.retried_attempts
    assert trainer.callback_metrics["amp/skipped_steps"] == 0


@pytest.mark.parametrize("kind", ["loss", "gradients"])
def test_samples_that_no_scale_helps(kind: str) -> None:
    """5 % of them: a NaN loss costs no retry, a NaN gradient all of them, and neither lowers the lasting scale."""

    class Sums(Counting):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if kind == "loss":
                self.count("training_step")
                return self.loss(batch)
            return super().training_step(batch, batch_idx)

    data = [ROW[None] * (NAN if i % 20 == 7 else 1) for i in range(40)]
    module = Sums()
    trainer = fit(module, data, 2.0**8, retries=3)
    plugin = plugin_of(trainer)
    cost = 0 if kind == "loss" else 2 * 3
    assert scale_of(plugin) == 2.0**8
    assert (plugin.counters.applied_steps, plugin.counters.skipped_steps) == (38, 2)
    assert (plugin.counters.retried_attempts, module.calls["training_step"]) == (cost, 40 + cost)
    assert torch.equal(module.weight, -ROW * 38)


def test_the_sizes_of_the_batches_that_are_logged() -> None:
    """Each micro-batch of a retried window weighs what it weighed, and so does the batch after it."""
    sizes = (1, 2, 4, 8, 3, 5)

    class Logs(Exact):
        def loss(self, batch: Tensor) -> Tensor:
            self.log("size", float(len(batch)), on_step=False, on_epoch=True)
            return super().loss(batch)

    trainer = fit(Logs(), [ROW.expand(size, 8) for size in sizes], 2.0**20, accumulate_grad_batches=2)
    assert plugin_of(trainer).counters.retried_attempts > 2
    assert trainer.callback_metrics["size"] == pytest.approx(sum(size**2 for size in sizes) / sum(sizes))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_outputs_are_those_of_the_applied_attempt(accumulate: int) -> None:
    outputs_seen: list[Any] = []

    class Numbers(Exact):
        attempt = 0

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.attempt += 1
            return {"loss": self.loss(batch), "attempt": self.attempt}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            outputs_seen.append(outputs["attempt"])

    trainer = fit(Numbers(), [ROW[None]] * accumulate, 2.0**16, accumulate_grad_batches=accumulate)
    report = plugin_of(trainer).last_step
    assert report is not None
    assert report.attempts > 1
    assert outputs_seen[-1] == report.attempts * accumulate


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_overflow_in_anomaly_mode(accumulate: int) -> None:
    """Torch raises at the first NaN of a backward: here a lower scale cures it."""

    class Cancels(Exact):  # once the gradient of the output overflows, its sum is inf + inf - inf
        def loss(self, batch: Tensor) -> Tensor:
            output = self(batch)
            return (output + output - output).float().sum()

    module = Cancels()
    with pytest.warns(UserWarning, match="Error detected in"):
        trainer = fit(module, [ROW[None]] * 2, 2.0**20, accumulate_grad_batches=accumulate, detect_anomaly=True)
    assert torch.equal(module.weight, -ROW * 2 / accumulate)
    counters = plugin_of(trainer).counters
    assert (counters.applied_steps, counters.skipped_steps) == (2 // accumulate, 0)
    assert counters.retried_attempts > 0


# Memory ---------------------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations have made and that are still alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self.known:
                storage = tensor.untyped_storage()
                self.known.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
        return result

    def free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


class Keeps(torch.autograd.Function):
    """Holds an activation for as long as its node of the graph lives, as some functions of users' do."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.hidden = hidden
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Wide(Exact):
    """Activations that weigh much more than the weights; it notes how many graphs are alive when a forward begins."""

    def __init__(self, by_node: bool, leaks: bool) -> None:
        super().__init__()
        self.by_node, self.leaks, self.leaked = by_node, leaks, list[Tensor]()
        self.activations: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []

    def loss(self, batch: Tensor) -> Tensor:
        self.alive.append(sum(activation() is not None for activation in self.activations))
        hidden = self.linear(batch).float().expand(-1, 32).exp()
        self.activations.append(weakref.ref(hidden))
        if self.leaks:
            self.leaked.append(hidden)
        result: Tensor = Keeps.apply(hidden) if self.by_node else hidden.log().exp()
        return result.mean(1).sum()

    def on_train_start(self) -> None:
        self.meter = LiveBytes()
        self.meter.__enter__()

    def on_train_end(self) -> None:
        self.meter.__exit__(None, None, None)


def fit_wide(scale: float, accumulate: int, by_node: bool, *, leaks: bool = False) -> Wide:
    """Without the help of the garbage collector."""
    module = Wide(by_node, leaks)
    gc.disable()
    try:
        data = [ROW.expand(512, 8).clone() for _ in range(accumulate)]
        trainer = fit(module, data, scale, accumulate_grad_batches=accumulate)
    finally:
        gc.enable()
    counters = plugin_of(trainer).counters
    assert (counters.applied_steps, counters.skipped_steps) == (1, 0)
    assert (counters.retried_attempts > 0) == (scale > 2**4)
    return module


graphs = pytest.mark.parametrize("by_node", [False, True])


@graphs
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_failed_attempt_is_gone_before_the_next(accumulate: int, by_node: bool) -> None:
    """Its graph, and with it all activations."""
    module = fit_wide(2.0**14, accumulate, by_node)
    assert len(module.alive) > accumulate
    assert max(fit_wide(2.0**14, accumulate, by_node, leaks=True).alive) > 0  # which can be seen
    assert max(module.alive) == 0


@graphs
@pytest.mark.parametrize("accumulate", [1, 2])
def test_peak_memory_of_a_retried_step(accumulate: int, by_node: bool) -> None:
    clean = fit_wide(2.0**4, accumulate, by_node).meter.peak
    assert clean > 512 * 32 * 4  # the activations are seen
    assert fit_wide(2.0**14, accumulate, by_node, leaks=True).meter.peak > 1.05 * clean
    assert fit_wide(2.0**14, accumulate, by_node).meter.peak <= 1.05 * clean


def test_stochastic_weight_averaging_keeps_no_batches() -> None:
    kept: list[int] = []

    class Looks(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            window = plugin_of(self.trainer)._window
            assert window is not None
            kept.append(len(window._micro_batches))

    averaging = pl.callbacks.StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1)
    fit(Looks(), batches(8), 2.0**10, callbacks=[averaging], max_epochs=2)
    assert kept[:16] == [0] * 16
    assert max(kept) <= 1


# Killed in mid-epoch --------------------------------------------------------------------------------------------------


class Resumable(DataLoader[Tensor]):
    """Goes on after the batches that were taken before the checkpoint."""

    taken = 0

    def __iter__(self) -> Any:
        for batch in list(self.dataset)[self.taken :]:  # type: ignore[call-overload]
            self.taken += 1
            yield batch
        self.taken = 0

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


KILL_AFTER = 5
"""Optimizer steps: the scale has come down, hysteresis counts, and the best scale is searched for."""


class Killed(pl.Callback):
    """Saves a checkpoint, as a user's callback may, and dies one step later."""

    def __init__(self, path: Path, dies: bool) -> None:
        self.path, self.dies = path, dies
        self.state: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == KILL_AFTER and not self.path.exists():
            self.state = plugin_of(trainer).state_dict()
            trainer.save_checkpoint(self.path)
        elif self.dies and trainer.global_step > KILL_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)


def train(path: Path, *, dies: bool = False, resume: bool = False) -> tuple[pl.Trainer, dict[str, Any]]:
    rules: dict[str, Any] = {"hysteresis": 2, "growth_interval": 3, "growth_factor": 2.0**6}
    plugin = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=2.0**30, max_scale=2.0**60, **rules))
    callback = Killed(path, dies)
    trainer = make_trainer(plugin, callbacks=[callback], max_epochs=2)
    module = Net()
    module.net[2].p = 0.0  # the state of the random numbers is no part of a checkpoint
    data = batches(12)
    data[3] = data[3] * NAN  # a skipped step among those that are counted
    module.mean = MeanMetric(nan_strategy="disable")
    loader: Any = Resumable(data, batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, loader, ckpt_path=path if resume else None)
    return trainer, callback.state


def test_killed_in_mid_epoch_and_resumed(tmp_path: Path) -> None:
    folder = Path(__file__).parent
    command = (
        f"import test_retry; from pathlib import Path; test_retry.train(Path({str(tmp_path / 'a.ckpt')!r}), dies=True)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    killed = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    whole, state = train(tmp_path / "b.ckpt")
    expected = outcome(whole)
    assert state["scale"] < 2.0**30
    assert state["hysteresis"] == 1
    assert len(state["search"]) == 2
    assert state["counters"]["skipped_steps"] == 1
    assert state["counters"]["retried_attempts"] > 0
    resumed, _ = train(tmp_path / "a.ckpt", resume=True)
    actual = outcome(resumed)
    for one in (actual, expected):
        del one["rng"], one["callback_metrics"]  # of an epoch that was interrupted they know the rest only
    assert_equal(actual, expected)
    assert plugin_of(resumed).state_dict() == plugin_of(whole).state_dict()
