"""What AdaptiveMixedPrecision costs next to Lightning's own MixedPrecision, as ratios of paired runs.

    python benchmarks/overhead.py [--quick] [--device cpu|cuda] [--repeats N] [--threads N]

Every time is a ratio: two fits run in one process and take turns every few steps, so that whatever slows the machine
slows both. A row is the median, lowest and highest ratio of several such pairs. The first row is stock against stock: a
ratio closer to 1 than its spread says nothing. Targets are printed for the reader and never fail the run. Where other
processes compute too, use `--threads 1`: threads that wait for each other multiply the noise.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import os
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_amp_plus import AdaptiveMixedPrecision, AMPMonitor, DynamicRangeMonitor, LossScale, PrecisionFallback

Name = Literal["16-mixed", "bf16-mixed", "32-true"]
Plugin = Callable[[Name], Precision]
Callbacks = Callable[[], list[Callback]]
Measure = Callable[["Turn"], float]
INIT_SCALE = 2.0**8  # low enough that nothing overflows: these are the costs of clean steps
MIXED: tuple[Name, ...] = ("16-mixed", "bf16-mixed")


class Setup:
    """Where to run, how often, and how large."""

    def __init__(self, device: str, quick: bool, repeats: int | None) -> None:
        self.device = device
        # One thread that never waits: its CPU time is its time, without what other processes took from it.
        alone = device == "cpu" and torch.get_num_threads() == 1
        self.clock = time.process_time if alone else time.perf_counter
        self.repeats = repeats or (2 if quick else 15)
        self.tiny_steps, self.large_steps, self.optimizer_steps = (20, 2, 2) if quick else (200, 10, 5)
        self.matrices = 2 if quick else 24  # of 1000 x 1000, in the optimizer phase
        # (width, depth, batch size) of the perceptrons; a CPU multiplies in fp16 30 to 50 times slower than in bf16.
        self.tiny = (32, 2, 16)
        wide = (4096, 8, 4096) if device == "cuda" else (1024, 4, 256)
        narrow = wide if device == "cuda" else (256, 4, 128)
        if quick:
            wide, narrow = (512, 2, 64), (128, 2, 32)
        self.large: dict[Name, tuple[int, int, int]] = {"16-mixed": narrow, "bf16-mixed": wide, "32-true": wide}

    def now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return self.clock()

    def stock(self, precision: Name) -> Precision:
        if precision == "32-true":
            return Precision()
        scaler = torch.amp.GradScaler(self.device, init_scale=INIT_SCALE) if precision == "16-mixed" else None
        return MixedPrecision(precision, self.device, scaler)

    def ours(self, precision: Name) -> Precision:
        loss_scale = LossScale(init_scale=INIT_SCALE) if precision == "16-mixed" else None
        return AdaptiveMixedPrecision(precision, loss_scale=loss_scale)


# ---------------------------------------------------------------- what is trained


class Perceptron(LightningModule):
    """Linear, BatchNorm1d (its buffers are what a rollback must know), ReLU, repeated; plain SGD."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()) for _ in range(depth)]
        self.layers = nn.Sequential(*blocks, nn.Linear(width, 10))

    @override
    def training_step(self, batch: Tensor) -> Tensor:
        return self.layers(batch).float().square().mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        # On CPU, AdamW reads a scalar per parameter itself, which would drown the reads that are counted here.
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class OptimizerPhase(LightningModule):
    """25 million parameters whose gradients are given: all that takes time is what follows the backward."""

    def __init__(self, setup: Setup, kind: str) -> None:
        super().__init__()
        shapes = [(1000, 1000), (1000,)] * setup.matrices
        self.weights = nn.ParameterList([torch.ones(shape) for shape in shapes])
        self.true_gradients = [torch.randn(shape, device=setup.device) * 1e-3 for shape in shapes]
        self.gradients = [torch.empty_like(gradient) for gradient in self.true_gradients]
        self.setup_, self.kind, self.started, self.durations = setup, kind, 0.0, list[float]()

    @override
    def training_step(self, batch: Tensor) -> Tensor:
        return batch.mean()  # 1: what arrives in `backward` is then the loss scale itself

    @override
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        for weight, true, scaled in zip(self.weights, self.true_gradients, self.gradients, strict=True):
            weight.grad = torch.mul(true, loss.detach(), out=scaled)
        self.started = self.setup_.now()

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        # Not in `optimizer_step`: a module that overrides it may look at gradients, and our plugin then unscales early.
        self.durations.append(self.setup_.now() - self.started)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), foreach=self.kind == "foreach", fused=self.kind == "fused")


class Repeated:
    """One batch, already on the device, `length` times: no data loading in the measurement."""

    def __init__(self, batch: Tensor, length: int) -> None:
        self.batch, self.length = batch, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Tensor]:
        return (self.batch for _ in range(self.length))


class Turn:
    """Two of them let two threads run one at a time: each runs from the start of its turn until it passes."""

    def __init__(self) -> None:
        self.is_mine, self.is_over, self.other = threading.Semaphore(0), False, self

    def pass_on(self) -> None:
        if self.other is not self and not self.other.is_over:
            self.other.is_mine.release()
            self.is_mine.acquire()

    def take(self, measure: Measure) -> float:
        """Measure, from the first turn on."""
        self.is_mine.acquire()
        try:
            return measure(self)
        finally:
            self.is_over = True
            self.other.is_mine.release()


class Meter(Callback):
    """Per-step growth of a reading (a clock, a counter) over `steps` after a warm-up, passing on `turn` in between."""

    def __init__(self, read: Callable[[], float], warm_up: int, steps: int, turn: Turn | None = None) -> None:
        self.read, self.warm_up, self.steps, self.turn = read, warm_up, steps, turn or Turn()
        self.batches, self.every = warm_up + steps + 1, max(1, steps // 20)
        self.started, self.total = 0.0, 0.0

    @property
    def per_step(self) -> float:
        return self.total / self.steps

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if (batch_idx - self.warm_up) % self.every:
            return
        if batch_idx > self.warm_up:
            self.total += self.read() - self.started
        self.turn.pass_on()
        self.started = self.read()


def fit(
    setup: Setup,
    plugin: Precision,
    module: LightningModule,
    batch: Tensor,
    batches: int,
    callbacks: list[Callback] | None = None,
    clip: float | None = None,
) -> None:
    trainer = Trainer(
        accelerator=setup.device,
        devices=1,
        max_epochs=1,
        plugins=[plugin],
        callbacks=callbacks,
        gradient_clip_val=clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, Repeated(batch, batches))


# ---------------------------------------------------------------- what is measured


class SyncCounter(TorchDispatchMode):
    """Counts what makes the host wait for the device, on a CPU too, where the same calls are made but nothing waits.

    Scalar reads (`item`, `float`, `bool` of a tensor) arrive as `_local_scalar_dense`, copies across devices as
    `_to_copy` or `copy_`, and ops whose output shape is data make the host wait as well. `tolist`, `cpu` and `numpy` of
    a CPU tensor dispatch nothing at all, so `HostReads` sees those calls instead.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.count = device, 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in ("aten::_to_copy", "aten::copy_"):
            self.count += result.device != args[name == "aten::copy_"].device  # the source comes second in copy_
        elif name == "aten::index":
            self.count += any(index is not None and index.dtype == torch.bool for index in args[1])
        elif name in ("aten::_local_scalar_dense", "aten::equal") or torch.Tag.dynamic_output_shape in func.tags:
            self.count += args[0].device.type == self.device
        return result


class HostReads(TorchFunctionMode):
    """The reads of a CPU tensor that never reach the dispatcher, added to the count of a `SyncCounter`."""

    def __init__(self, counter: SyncCounter) -> None:
        super().__init__()
        self.counter = counter

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("tolist", "cpu", "numpy") and args[0].device.type == "cpu":
            self.counter.count += self.counter.device == "cpu"
        return func(*args, **(kwargs or {}))


def perceptron(setup: Setup, size: tuple[int, int, int]) -> tuple[Perceptron, Tensor]:
    torch.manual_seed(0)
    width, depth, batch_size = size
    return Perceptron(width, depth), torch.randn(batch_size, width, device=setup.device)


def no_callbacks() -> list[Callback]:
    return []


def both_callbacks() -> list[Callback]:
    return [PrecisionFallback(), AMPMonitor(summary=False)]


def monitor() -> list[Callback]:
    return [AMPMonitor(summary=False)]


def range_monitor() -> list[Callback]:
    return [DynamicRangeMonitor(every_n_steps=1)]


def step_time(
    setup: Setup, plugin: Plugin, precision: Name, large: bool, callbacks: Callbacks = no_callbacks, *, turn: Turn
) -> float:
    """Seconds per step inside a fit: mean over its steps after a warm-up."""
    module, batch = perceptron(setup, setup.large[precision] if large else setup.tiny)
    steps = setup.large_steps if large else setup.tiny_steps
    meter = Meter(setup.now, max(2, steps // 5), steps, turn)
    fit(setup, plugin(precision), module, batch, meter.batches, [meter, *callbacks()])
    return meter.per_step


def optimizer_time(
    setup: Setup, plugin: Plugin, precision: Name, kind: str, clip: float | None, *, turn: Turn
) -> float:
    """Seconds from the end of the backward to the end of the batch: median after a warm-up of two."""
    module = OptimizerPhase(setup, kind)
    meter = Meter(setup.now, 2, setup.optimizer_steps, turn)
    fit(setup, plugin(precision), module, torch.ones(1, device=setup.device), meter.batches, [meter], clip)
    return statistics.median(module.durations[2:])


def syncs_per_step(setup: Setup, plugin: Plugin, precision: Name, everything: bool) -> float:
    """Device syncs per optimizer step of the small model; `everything` adds clipping, and to ours the callbacks."""
    module, batch = perceptron(setup, setup.tiny)
    counter = SyncCounter(setup.device)
    meter = Meter(lambda: counter.count, 10, setup.tiny_steps)
    callbacks = both_callbacks() if everything and plugin == setup.ours else []
    with counter, HostReads(counter):
        clip = 1.0 if everything else None
        fit(setup, plugin(precision), module, batch, meter.batches, [meter, *callbacks], clip)
    return meter.per_step


def peak_memory(setup: Setup, plugin: Plugin, precision: Name) -> float:
    """Bytes of the allocator at their highest while the large model is built and fitted for three steps."""

    def build_and_fit() -> None:
        module, batch = perceptron(setup, setup.large[precision])
        fit(setup, plugin(precision), module, batch, 3, clip=1.0)

    gc.collect()
    if setup.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        build_and_fit()
        return torch.cuda.max_memory_allocated() - before
    # The resident memory of the process would be mostly imports. The profiler logs every allocation on the CPU with a
    # running sum, which it carries from one profile to the next.
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        build_and_fit()
        gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    memory = [event["args"] for event in events if event["name"] == "[memory]"]
    before = memory[0]["Total Allocated"] - memory[0]["Bytes"]
    return max(event["Total Allocated"] for event in memory) - before


# ---------------------------------------------------------------- the table


def row(name: str, values: list[float], target: float | None, baseline: str) -> None:
    median = statistics.median(values)
    aim = "-" if target is None else f"<= {target:.2f}"
    verdict = "over" if target is not None and median > target else ""
    print(
        f"{name:<54}{median:>8.3f}{min(values):>8.3f}{max(values):>8.3f}{aim:>9} {verdict:<5}{baseline:>10}", flush=True
    )


def in_turns(first: Measure, second: Measure) -> tuple[float, float]:
    turns = Turn(), Turn()
    turns[0].other, turns[1].other = turns[1], turns[0]
    turns[0].is_mine.release()
    with ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(turn.take, run) for turn, run in zip(turns, (first, second), strict=True)]
    return runs[0].result(), runs[1].result()


def paired(name: str, repeats: int, ours: Measure, baseline: Measure, target: float | None = None) -> None:
    """The ratios of `repeats` pairs; which of the two goes first alternates."""
    ratios, baselines = [], []
    for repeat in range(repeats):
        gc.collect()
        our_seconds, seconds = in_turns(ours, baseline) if repeat % 2 else in_turns(baseline, ours)[::-1]
        ratios.append(our_seconds / seconds)
        baselines.append(seconds)
    row(name, ratios, target, f"{statistics.median(baselines) * 1e3:.3g} ms")


def keep_freed_memory() -> None:
    """Have glibc keep what is freed, in one heap: page faults at random would double the time of a large step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for option, value in ((-8, 1), (-4, 0), (-1, 2**31 - 1)):  # M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD
            mallopt(option, value)


def print_table(setup: Setup) -> None:
    ours, stock, repeats = setup.ours, setup.stock, setup.repeats

    def step(plugin: Plugin, precision: Name, large: bool, callbacks: Callbacks = no_callbacks) -> Measure:
        return lambda turn: step_time(setup, plugin, precision, large, callbacks, turn=turn)

    def optimizer(plugin: Plugin, precision: Name, kind: str, clip: float | None) -> Measure:
        return lambda turn: optimizer_time(setup, plugin, precision, kind, clip, turn=turn)

    targets: dict[Name, tuple[float, float | None]] = {"16-mixed": (1.03, 1.00), "bf16-mixed": (1.05, None)}

    step(stock, "16-mixed", False)(Turn())  # imports and thread pools
    gc.freeze()  # what is imported needs no more looking at, which a collection would take a tenth of a second for
    control = step(stock, "16-mixed", False), step(stock, "16-mixed", False)
    paired("noise: stock / stock, step, small model, 16-mixed", repeats, *control)
    for precision in MIXED:
        small, large = targets[precision]
        baseline = step(stock, precision, False)
        paired(f"step, small model, {precision}", repeats, step(ours, precision, False), baseline, small)
        with_both = step(ours, precision, False, both_callbacks)
        paired(f"step, small model, both callbacks, {precision}", repeats, with_both, baseline)
        measures = step(ours, precision, False, monitor), step(ours, precision, False)
        paired(f"step, small model, AMPMonitor / without, {precision}", repeats, *measures, 1.02)
        measures = step(ours, precision, True), step(stock, precision, True)
        paired(f"step, large model, {precision}", repeats, *measures, large)
        measures = step(ours, precision, True, range_monitor), step(ours, precision, True)
        paired(f"step seen by DynamicRangeMonitor, large, {precision}", repeats, *measures)
    measures = step(ours, "bf16-mixed", True), step(ours, "32-true", True)
    paired("step, large model, our bf16-mixed / our 32-true", repeats, *measures)

    for precision in MIXED:
        target = targets[precision][1]  # stock checks nothing in bf16: our pass over the gradients shows there
        for kind in ("foreach", "fused"):
            measures = optimizer(ours, precision, kind, None), optimizer(stock, precision, kind, None)
            paired(f"optimizer, {kind}, {precision}", repeats, *measures, target)
        measures = optimizer(ours, precision, "foreach", 1.0), optimizer(stock, precision, "foreach", 1.0)
        paired(f"optimizer, foreach, clip, {precision}", repeats, *measures, target)
        measures = optimizer(ours, precision, "fused", 1.0), measures[1]  # stock refuses to clip with a fused optimizer
        paired(f"optimizer, fused, clip, {precision} / stock foreach", repeats, *measures, 0.35)

    for precision in MIXED:
        memory = peak_memory(setup, stock, precision)
        ratio = peak_memory(setup, ours, precision) / memory
        row(f"peak memory, large model, clip, {precision}", [ratio], None, f"{memory / 2**20:.3g} MiB")

    for everything in (False, True):
        plain = syncs_per_step(setup, stock, "32-true", everything)
        for precision in (*MIXED, "32-true"):
            name = f"syncs per step, {precision}{', clip, both callbacks' if everything else ''}"
            count, of_stock = (syncs_per_step(setup, plugin, precision, everything) for plugin in (ours, stock))
            row(name, [count], plain + 1, f"{of_stock:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes and two pairs: does it run, not how fast")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, help="pairs per row (default: 15, with --quick 2)")
    parser.add_argument(
        "--threads", type=int, help="of torch (default: torch's own, with --quick 1); 1 if others compute"
    )
    arguments = parser.parse_args()
    if arguments.threads or arguments.quick:
        torch.set_num_threads(arguments.threads or 1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own chatter

    keep_freed_memory()
    setup = Setup(arguments.device, arguments.quick, arguments.repeats)
    where = torch.cuda.get_device_name() if setup.device == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, lightning {lightning.__version__}, {where}; {setup.repeats} pairs per row")
    print(f"{'ours / stock':<54}{'median':>8}{'min':>8}{'max':>8}{'target':>9} {'':<5}{'stock':>10}", flush=True)
    print_table(setup)


if __name__ == "__main__":
    main()
