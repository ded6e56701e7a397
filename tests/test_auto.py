""" "auto" in a real Trainer: when it is decided, who gets to know, and what it means for checkpoints and other ranks.

The CPU plays the part of every device. This file is also the worker of the two ranks of its last tests.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import permutations, product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from helpers import PRECISIONS, ROW, Exact, factors, make_trainer
from lightning_utilities.core import rank_zero
from namespace import AdaptiveMixedPrecision, PrecisionFallback, pl
from ranks import Ranks, work
from torch import Tensor, nn

from lightning_amp_plus import LossScale, StepCounters
from lightning_amp_plus.hardware import select as hardware
from lightning_amp_plus.hardware.select import PrecisionChoice
from lightning_amp_plus.precisions import PrecisionName

DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16, "32-true": torch.float32}
STAGES = ("fit", "validate", "test", "predict")
all_precisions = pytest.mark.parametrize("precision", PRECISIONS)
# The first skip is told too; here it is what follows that counts.
skips_are_told = pytest.mark.filterwarnings("ignore:Optimizer step .* was skipped", "ignore:.* the run computes in")


@dataclass
class Device:
    """What the CPU is made of."""

    precision: PrecisionName = "bf16-mixed"
    emulates: bool = False
    asked: int = 0

    def __call__(self, _: set[str]) -> PrecisionChoice:
        self.asked += 1
        return PrecisionChoice(self.precision, f"it is made for {DTYPES[self.precision]}", self.emulates)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(hardware, "_on_cpu", device)
    return device


class Watching(Exact):
    """It notes the dtype of every forward and the precision that the Trainer names by then."""

    flops_per_batch = 1000

    def __init__(self, fails_in: Sequence[torch.dtype] = ()) -> None:
        super().__init__()
        self.fails_in = fails_in
        self.seen: list[tuple[torch.dtype, str]] = []

    @property
    def dtypes(self) -> list[torch.dtype]:
        return [dtype for dtype, _ in self.seen]

    def forward(self, batch: Tensor) -> Tensor:
        output = super().forward(batch)
        self.seen.append((output.dtype, self.trainer.precision))
        return output * (float("nan") if output.dtype in self.fails_in else 1)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self(batch)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self(batch)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)


def auto(precision: Literal["auto"] | PrecisionName = "auto") -> AdaptiveMixedPrecision:
    """The plugin with a loss scale that does not overflow."""
    return AdaptiveMixedPrecision(precision, LossScale(init_scale=2.0**8))


def run(trainer: pl.Trainer, stage: str, module: pl.LightningModule, **kwargs: Any) -> None:
    quiet = {} if stage in ("fit", "predict") else {"verbose": False}
    getattr(trainer, stage)(module, factors(1), **quiet, **kwargs)


class Said(logging.Handler):
    """What is said of the plugin. Not caplog: Lightning's loggers do not hand on what they get."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "AdaptiveMixedPrecision" in record.getMessage():
            self.records.append(record)


@pytest.fixture
def said() -> Iterator[list[logging.LogRecord]]:
    handler = Said()
    rank_zero.log.addHandler(handler)
    yield handler.records
    rank_zero.log.removeHandler(handler)


def warned(record: Sequence[warnings.WarningMessage], text: str) -> list[str]:
    return [str(warning.message) for warning in record if text in str(warning.message)]


# When it is decided ---------------------------------------------------------------------------------------------------


@all_precisions
@pytest.mark.parametrize("stage", STAGES)
def test_it_is_decided_before_any_forward(stage: str, precision: PrecisionName, device: Device) -> None:
    device.precision = precision
    plugin, module = auto(), Watching()
    trainer = make_trainer(plugin)
    assert (trainer.precision, plugin.precision, plugin.scaler, device.asked) == ("auto", "auto", None, 0)
    run(trainer, stage, module)
    assert module.seen == [(DTYPES[precision], precision)]
    assert (trainer.precision, plugin.precision, device.asked) == (precision, precision, 1)
    assert trainer.scaler is plugin.scaler
    assert (plugin.scaler is not None) is (precision == "16-mixed")


@all_precisions
def test_the_sanity_check_and_validation_of_a_fit_compute_in_it(precision: PrecisionName, device: Device) -> None:
    device.precision = precision
    module = Watching()
    make_trainer(auto(), num_sanity_val_steps=1).fit(module, factors(1), factors(1))
    assert module.seen == [(DTYPES[precision], precision)] * 3


def test_it_is_decided_once_for_a_type_of_device(device: Device) -> None:
    plugin, module = AdaptiveMixedPrecision(), Watching()
    run(make_trainer(plugin), "fit", module)
    device.precision = "16-mixed"  # a probe that changes its mind
    for stage in STAGES:
        run(make_trainer(plugin), stage, module)
    assert module.seen == [(torch.bfloat16, "bf16-mixed")] * 5
    assert device.asked == 1


def on_device(plugin: AdaptiveMixedPrecision, name: str) -> str:
    """The plugin's precision in a run on a device that need not exist, up to where it is decided."""
    trainer = make_trainer(plugin, strategy=pl.strategies.SingleDeviceStrategy(device=name))
    module = Exact()
    module.trainer = trainer
    assert plugin.convert_module(module) is module
    assert trainer.precision == plugin.precision
    return trainer.precision


def test_another_type_of_device_decides_anew(device: Device) -> None:
    plugin, module = auto(), Watching()
    assert on_device(plugin, "meta") == "32-true"
    assert device.asked == 0
    device.precision = "16-mixed"
    run(make_trainer(plugin), "fit", module)
    assert module.seen == [(torch.float16, "16-mixed")]
    assert on_device(plugin, "meta") == "32-true"
    assert plugin.scaler is None


def test_another_device_of_the_same_type_decides_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = {0: (8, 0), 1: (7, 0)}
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(hardware, "_cuda_capability", lambda device: capabilities[device.index])
    plugin = AdaptiveMixedPrecision()
    assert on_device(plugin, "cuda:0") == "bf16-mixed"
    assert on_device(plugin, "cuda:1") == "16-mixed"


def test_a_module_without_a_trainer_decides_nothing(device: Device) -> None:
    plugin, module = AdaptiveMixedPrecision(), Exact()
    for candidate in (nn.Linear(1, 1), module):
        assert plugin.convert_module(candidate) is candidate
    assert (plugin.precision, device.asked) == ("auto", 0)


@pytest.mark.parametrize("precision", ["16-mixed", "32-true"])
def test_an_explicit_precision_asks_nobody(precision: PrecisionName, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("nobody may ask")

    monkeypatch.setattr(hardware, "_cpu_flags", refuse)
    plugin, module = auto(precision), Watching()
    assert make_trainer(plugin).precision == precision
    for stage in STAGES:
        run(make_trainer(plugin), stage, module)
    assert module.seen == [(DTYPES[precision], precision)] * 4
    for other in ("auto", "bf16-mixed"):  # they would have been refused
        with pytest.raises(AssertionError, match="nobody may ask"):
            run(make_trainer(AdaptiveMixedPrecision(other)), "test", Watching())


def test_a_copy_keeps_what_was_decided(device: Device) -> None:
    device.precision = "16-mixed"
    plugin = auto()
    assert deepcopy(plugin).precision == "auto"
    run(make_trainer(plugin), "fit", Watching())
    copy, module = deepcopy(plugin), Watching()
    assert (copy.precision, copy.counters.applied_steps) == ("16-mixed", 1)
    run(make_trainer(copy), "test", module)
    assert module.seen == [(torch.float16, "16-mixed")]
    assert device.asked == 1


def test_it_holds_after_a_search_for_a_learning_rate(
    device: Device, said: list[logging.LogRecord], tmp_path: Path
) -> None:
    class WithRate(Watching):
        lr = 0.1

    device.precision = "16-mixed"
    plugin, module = auto(), WithRate()
    trainer = make_trainer(plugin, default_root_dir=tmp_path, max_epochs=2)
    Tuner: Any = import_module(f"{pl.__name__}.tuner").Tuner
    Tuner(trainer).lr_find(module, factors(*[1] * 8), num_training=4)
    assert module.seen
    assert set(module.seen) == {(torch.float16, "16-mixed")}
    assert (trainer.precision, plugin.counters) == ("16-mixed", StepCounters())
    trainer.fit(module, factors(1, 1))
    assert plugin.counters == StepCounters(applied_steps=4)
    assert set(module.seen) == {(torch.float16, "16-mixed")}
    assert (device.asked, len(said)) == (1, 1)


# Autocast -------------------------------------------------------------------------------------------------------------


def autocast_of(plugin: AdaptiveMixedPrecision) -> torch.dtype | None:
    with plugin.forward_context():
        found = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    assert not torch.is_autocast_enabled("cpu")
    return found


@all_precisions
def test_the_forward_context_before_and_after_a_run(precision: PrecisionName, device: Device) -> None:
    expected = None if precision == "32-true" else DTYPES[precision]
    assert autocast_of(AdaptiveMixedPrecision(precision)) is expected
    device.precision = precision
    plugin = AdaptiveMixedPrecision()
    assert autocast_of(plugin) is None  # not decided: as if there were no plugin
    assert plugin.precision == "auto"
    run(make_trainer(plugin), "test", Watching())
    assert autocast_of(plugin) is expected


# 16-mixed, chosen -----------------------------------------------------------------------------------------------------


def test_a_chosen_float16_is_scaled_from_the_first_step_and_resumes(device: Device, tmp_path: Path) -> None:
    class Scaled(Watching):
        at_start: tuple[float, float] | None = None

        def on_train_start(self) -> None:
            assert plugin.scaler is self.trainer.scaler
            assert plugin.scaler is not None
            self.at_start = plugin.scaler.get_scale(), plugin.counters.applied_steps

    device.precision = "16-mixed"
    plugin, module = AdaptiveMixedPrecision(loss_scale=LossScale(init_scale=2.0**16)), Scaled()
    trainer = make_trainer(plugin)
    trainer.fit(module, factors(*[1] * 5))  # 2 * 2^15 is too large for float16
    assert module.at_start == (2.0**16, 0)
    assert plugin.counters == StepCounters(applied_steps=5, retried_attempts=2, recent=0b10000)
    assert plugin.last_step is not None
    assert (plugin.last_step.scale, plugin.last_step.precision) == (2.0**14, "16-mixed")
    assert module.weight.tolist() == (-5 * ROW).tolist()
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["AdaptiveMixedPrecision"]
    assert (saved["precision"], saved["configured_precision"], saved["scale"]) == ("16-mixed", "16-mixed", 2.0**14)

    plugin, module = AdaptiveMixedPrecision(), Scaled()
    make_trainer(plugin, max_epochs=2).fit(module, factors(*[1] * 5), ckpt_path=tmp_path / "a.ckpt")
    assert module.at_start == (2.0**14, 5)
    assert plugin.counters == StepCounters(applied_steps=10, retried_attempts=2, recent=0b1000000000)
    assert module.weight.tolist() == (-10 * ROW).tolist()


# What is said ---------------------------------------------------------------------------------------------------------


@all_precisions
def test_one_line_says_what_was_chosen_and_why(
    precision: PrecisionName, device: Device, said: list[logging.LogRecord]
) -> None:
    device.precision = precision
    device.emulates = True  # no warning: nobody asked for bfloat16
    plugin = AdaptiveMixedPrecision()
    for stage in (*STAGES, "fit"):
        run(make_trainer(plugin), stage, Watching())
    assert [(record.levelno, record.getMessage()) for record in said] == [
        (
            logging.INFO,
            f"AdaptiveMixedPrecision('auto') computes in '{precision}': it is made for {DTYPES[precision]}.",
        )
    ]


def test_other_ranks_say_nothing(
    device: Device, said: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_zero.rank_zero_only, "rank", 1)
    device.emulates = True
    assert on_device(AdaptiveMixedPrecision(), "cpu") == "bf16-mixed"
    assert on_device(AdaptiveMixedPrecision("bf16-mixed"), "cpu") == "bf16-mixed"
    assert device.asked == 2
    assert not said


@all_precisions
def test_nothing_is_said_of_an_explicit_precision_that_is_fast(
    precision: PrecisionName, device: Device, said: list[logging.LogRecord]
) -> None:
    run(make_trainer(AdaptiveMixedPrecision(precision)), "fit", Watching())
    assert not said


@pytest.mark.parametrize("better", ["16-mixed", "32-true"])
def test_an_emulated_bfloat16_warns_once_and_is_used(
    better: PrecisionName, device: Device, said: list[logging.LogRecord]
) -> None:
    device.precision, device.emulates = better, True
    plugin, module = AdaptiveMixedPrecision("bf16-mixed"), Watching()
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        for stage in ("fit", "test", "fit", "validate", "predict"):
            run(make_trainer(plugin), stage, module)
    (text,) = warned(record, "AdaptiveMixedPrecision")
    assert text == (
        f"AdaptiveMixedPrecision('bf16-mixed') is slow here: it is made for {DTYPES[better]}. '{better}' is the better"
        " choice, and the one that 'auto' makes."
    )
    assert module.seen == [(torch.bfloat16, "bf16-mixed")] * 5
    assert plugin.scaler is None
    assert not said


# Checkpoints ----------------------------------------------------------------------------------------------------------


def fit(plugin: AdaptiveMixedPrecision, module: Watching, fallback: bool, **kwargs: Any) -> pl.Trainer:
    callbacks: list[pl.Callback] = [PrecisionFallback()] if fallback else []
    epochs = 2 if "ckpt_path" in kwargs else 1
    trainer = make_trainer(plugin, max_epochs=epochs, callbacks=callbacks)
    trainer.fit(module, factors(*[1] * 4), **kwargs)
    return trainer


@pytest.mark.parametrize("fallback", [False, True], ids=["", "with PrecisionFallback"])
@pytest.mark.parametrize(("written", "resumed"), list(permutations(PRECISIONS, 2)))
def test_a_choice_is_made_anew_where_a_checkpoint_is_resumed(
    written: PrecisionName, resumed: PrecisionName, fallback: bool, device: Device, tmp_path: Path
) -> None:
    device.precision = written
    fit(auto(), Watching(), fallback).save_checkpoint(tmp_path / "a.ckpt")
    device.precision = resumed
    plugin, module = auto(), Watching()
    fit(plugin, module, fallback, ckpt_path=tmp_path / "a.ckpt")
    assert module.seen == [(DTYPES[resumed], resumed)] * 4
    assert (plugin.scaler is not None) is (resumed == "16-mixed")
    assert plugin.counters == StepCounters(applied_steps=8)
    assert module.weight.tolist() == (-8 * ROW).tolist()


def fall(device: Device, start: PrecisionName, end: PrecisionName, path: Path) -> None:
    """Leave a checkpoint of a run that began in ``start``, where "auto" chose it, and had moved to ``end``."""
    device.precision = start
    plugin = auto()
    narrower = [DTYPES[precision] for precision in PRECISIONS[: PRECISIONS.index(end)]]
    callbacks = [PrecisionFallback(ladder=(end,))]
    trainer = make_trainer(plugin, callbacks=callbacks)
    trainer.fit(Watching(fails_in=narrower), factors(*[1] * 4))
    assert plugin.precision == end
    trainer.save_checkpoint(path)


@skips_are_told
@pytest.mark.parametrize(
    ("start", "end", "resumed", "expected"),
    [
        ("16-mixed", "bf16-mixed", "16-mixed", "bf16-mixed"),
        ("16-mixed", "bf16-mixed", "bf16-mixed", "bf16-mixed"),
        ("16-mixed", "bf16-mixed", "32-true", "32-true"),
        ("16-mixed", "32-true", "bf16-mixed", "32-true"),
        ("bf16-mixed", "32-true", "16-mixed", "32-true"),
        ("bf16-mixed", "32-true", "bf16-mixed", "32-true"),
    ],
)
@pytest.mark.filterwarnings("ignore:The run of this checkpoint had moved")
@pytest.mark.parametrize("fallback", [False, True], ids=["without", "with PrecisionFallback"])
def test_a_run_that_had_moved_goes_on_in_the_wider_precision(
    start: PrecisionName,
    end: PrecisionName,
    resumed: PrecisionName,
    expected: PrecisionName,
    fallback: bool,
    device: Device,
    tmp_path: Path,
) -> None:
    fall(device, start, end, tmp_path / "a.ckpt")
    device.precision = resumed
    plugin, module = AdaptiveMixedPrecision(), Watching()
    fit(plugin, module, fallback, ckpt_path=tmp_path / "a.ckpt")
    precision = expected if fallback else resumed
    assert module.seen == [(DTYPES[precision], precision)] * 4
    counters = plugin.counters
    assert (counters.applied_steps, counters.rescued_steps, counters.skipped_steps) == (8, 3, 0)


@skips_are_told
@pytest.mark.filterwarnings("ignore:The run of this checkpoint had moved")
@pytest.mark.parametrize("stage", STAGES[1:])
@pytest.mark.parametrize("asked_for", ["auto", "16-mixed"])
def test_a_checkpoint_is_evaluated_in_what_its_run_had_moved_to(
    stage: str, asked_for: Any, device: Device, tmp_path: Path
) -> None:
    fall(device, "16-mixed", "bf16-mixed", tmp_path / "a.ckpt")
    for callbacks, expected in (([PrecisionFallback()], torch.bfloat16), ([], torch.float16)):
        plugin, module = AdaptiveMixedPrecision(asked_for), Watching()
        run(make_trainer(plugin, callbacks=callbacks), stage, module, ckpt_path=tmp_path / "a.ckpt")
        assert module.dtypes == [expected]


@skips_are_told
@pytest.mark.parametrize("asked_for", ["auto", "16-mixed"])
def test_a_fit_after_the_evaluation_of_a_checkpoint_begins_anew(asked_for: Any, device: Device, tmp_path: Path) -> None:
    fall(device, "16-mixed", "bf16-mixed", tmp_path / "a.ckpt")
    plugin, module = AdaptiveMixedPrecision(asked_for, LossScale(init_scale=2.0**8)), Watching()
    evaluating = make_trainer(plugin, callbacks=[PrecisionFallback()])
    run(evaluating, "test", Watching(), ckpt_path=tmp_path / "a.ckpt")
    run(make_trainer(plugin), "fit", module)
    assert module.dtypes == [torch.float16]
    assert plugin.counters == StepCounters(applied_steps=1)


# Lightning's own callbacks --------------------------------------------------------------------------------------------

FLOPS = {torch.float16: 3000, torch.bfloat16: 5000, torch.float32: 7000}


class Keep(pl.loggers.logger.DummyLogger):
    """It keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, float] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.kept.update(metrics)

    def available_flops(self, stage: str) -> float:
        return self.kept[f"{stage}/device/flops_per_sec"] / self.kept[f"{stage}/device/mfu"]


@pytest.fixture
def flops_asked_for(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    asked_for = []

    def get_available_flops(device: torch.device, dtype: torch.dtype) -> int:
        assert device == torch.device("cpu")
        asked_for.append(dtype)
        return FLOPS[dtype]

    monkeypatch.setattr(pl.callbacks.throughput_monitor, "get_available_flops", get_available_flops)
    return asked_for


def throughput_monitor() -> Any:
    return pl.callbacks.ThroughputMonitor(batch_size_fn=len, window_size=2)


@pytest.mark.parametrize("asked_for", ["auto", "explicit"])
@all_precisions
def test_throughput_is_compared_with_what_the_device_does_in_the_precision(
    precision: PrecisionName, asked_for: str, device: Device, flops_asked_for: list[torch.dtype]
) -> None:
    device.precision = precision
    plugin = AdaptiveMixedPrecision("auto" if asked_for == "auto" else precision)
    logger, monitor = Keep(), throughput_monitor()
    options: dict[str, Any] = {"callbacks": [monitor], "logger": logger, "log_every_n_steps": 1}
    trainer = make_trainer(plugin, **options)
    trainer.fit(Watching(), factors(1, 1, 1), factors(1, 1, 1))
    assert flops_asked_for[-1] is DTYPES[precision]
    assert monitor.available_flops == FLOPS[DTYPES[precision]]
    for stage in ("train", "validate"):
        assert logger.available_flops(stage) == pytest.approx(FLOPS[DTYPES[precision]])

    flops_asked_for.clear()
    monitor = throughput_monitor()
    trainer = make_trainer(plugin, **{**options, "callbacks": [monitor]})
    trainer.test(Watching(), factors(1, 1, 1), verbose=False)
    assert flops_asked_for[-1] is DTYPES[precision]
    assert logger.available_flops("test") == pytest.approx(FLOPS[DTYPES[precision]])


def test_a_device_of_unknown_throughput_is_not_asked_twice(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning warns each time, that it does not know."""
    asked_for = []
    monkeypatch.setattr(
        pl.callbacks.throughput_monitor, "get_available_flops", lambda _, dtype: asked_for.append(dtype)
    )
    monitor = throughput_monitor()
    make_trainer(AdaptiveMixedPrecision(), callbacks=[monitor]).fit(Watching(), factors(1, 1))
    assert len(asked_for) == 1
    assert monitor.available_flops is None


@skips_are_told
def test_throughput_of_a_run_that_had_moved(device: Device, flops_asked_for: list[torch.dtype], tmp_path: Path) -> None:
    fall(device, "16-mixed", "bf16-mixed", tmp_path / "a.ckpt")
    plugin, monitor, module = AdaptiveMixedPrecision(), throughput_monitor(), Watching()
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback(), monitor], max_epochs=2)
    trainer.fit(module, factors(*[1] * 4), ckpt_path=tmp_path / "a.ckpt")
    assert module.dtypes == [torch.bfloat16] * 4
    assert monitor.available_flops == FLOPS[torch.bfloat16]


@skips_are_told
def test_throughput_of_a_run_that_moves(device: Device, flops_asked_for: list[torch.dtype]) -> None:
    device.precision = "16-mixed"
    plugin, monitor, module = AdaptiveMixedPrecision(), throughput_monitor(), Watching(fails_in=[torch.float16])
    make_trainer(plugin, callbacks=[PrecisionFallback(), monitor]).fit(module, factors(*[1] * 5))
    assert module.dtypes[-1] is torch.bfloat16
    assert monitor.available_flops == FLOPS[torch.bfloat16]


@pytest.mark.filterwarnings("ignore:.*does not support multiprocessing")
@all_precisions
def test_the_model_summary_runs_and_warns_as_without_the_plugin(precision: PrecisionName, device: Device) -> None:
    def warnings_of(plugin: Any) -> list[str]:
        module = Watching()
        module.example_input_array = ROW[None]
        with warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("always")
            make_trainer(plugin, enable_model_summary=True).fit(module, factors(1))
        assert module.seen == [(DTYPES[precision], precision)] * 2  # the summary's own forward, and that of the fit
        return warned(record, "model summary")

    device.precision = precision
    expected = [] if precision == "32-true" else [f"Precision {precision} is not supported by the model summary."]
    stock = None if precision == "32-true" else pl.plugins.MixedPrecision(precision, "cpu")
    found = warnings_of(auto())
    assert [text[: text.index(".") + 1] for text in found] == expected
    if precision != "16-mixed" or torch.cuda.is_available():  # stock's scaler is of CUDA
        assert warnings_of(stock) == found


@all_precisions
def test_barebones(precision: PrecisionName, device: Device) -> None:
    device.precision = precision
    plugin, module = auto(), Watching()
    trainer = make_trainer(plugin, barebones=True)
    trainer.fit(module, factors(1, 1))
    assert module.seen == [(DTYPES[precision], precision)] * 2
    assert module.weight.tolist() == (-2 * ROW).tolist()


# Two ranks ------------------------------------------------------------------------------------------------------------

PAIRS = list(product(PRECISIONS, repeat=2))


def parallel(plugin: AdaptiveMixedPrecision) -> pl.Trainer:
    strategy = pl.strategies.DDPStrategy(process_group_backend="gloo")
    return make_trainer(plugin, devices=2, strategy=strategy, use_distributed_sampler=False)


def work_on(devices: tuple[PrecisionName, PrecisionName], job: str, rank: int) -> dict[str, Any]:
    device = Device(devices[rank], emulates=devices[rank] != "bf16-mixed")
    hardware._on_cpu = device  # type: ignore[assignment]
    said = Said()
    rank_zero.log.addHandler(said)
    plugin, module = AdaptiveMixedPrecision("bf16-mixed") if job == "explicit" else auto(), Watching()
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        if job == "test":
            parallel(plugin).test(module, factors(1), verbose=False)
        else:
            if job == "alone first":  # as in a script that tries its model on one device before it starts the ranks
                run(make_trainer(plugin), "test", Watching())
            if job == "alone between":
                parallel(plugin).fit(Watching(), factors(1))
                if rank == 0:
                    run(make_trainer(plugin), "validate", Watching())
            parallel(plugin).fit(module, factors(*[1 + 2 * rank] * 2))
    rank_zero.log.removeHandler(said)
    return {
        "precision": plugin.precision,
        "dtypes": [str(dtype) for dtype in module.dtypes],
        "scaled": plugin.scaler is not None,
        "weight": module.weight.tolist(),
        "said": [record.getMessage() for record in said.records],
        "warned": warned(record, "AdaptiveMixedPrecision"),
        "asked": device.asked,
    }


def jobs(_: str) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    names = [f"fit, {first}, {second}" for first, second in PAIRS]
    names += [
        f"{job}, {first}, {second}" for job in ("test", "explicit") for first, second in permutations(PRECISIONS, 2)
    ]
    names += [f"{job}, bf16-mixed, 16-mixed" for job in ("alone first", "alone between")]
    for name in names:
        job, *devices = name.split(", ")
        yield name, partial(work_on, tuple(devices), job, int(os.environ["LOCAL_RANK"]))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(__file__, tmp_path_factory)


def narrowest_of_both(first: PrecisionName, second: PrecisionName) -> PrecisionName:
    """All that runs bfloat16 runs float16 too, and all run float32."""
    return next(common for common in ("32-true", "16-mixed", "bf16-mixed") if common in (first, second))


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_ranks_compute_in_what_all_run_natively(first: PrecisionName, second: PrecisionName, ranks: Ranks) -> None:
    common = narrowest_of_both(first, second)
    both = ranks("auto", f"fit, {first}, {second}")
    for result in both:
        assert result["precision"] == common
        assert result["dtypes"] == [str(DTYPES[common])] * 2
        assert result["scaled"] is (common == "16-mixed")
        assert result["asked"] == 1
        assert result["warned"] == []
        assert result["weight"] == (-4 * ROW).tolist()
    reason = f"it is made for {DTYPES[first]}"
    if first != common:
        reason += f", but the device of another rank is made for '{common}'"
    assert both[0]["said"] == [f"AdaptiveMixedPrecision('auto') computes in '{common}': {reason}."]
    assert both[1]["said"] == []


@pytest.mark.parametrize(("first", "second"), list(permutations(PRECISIONS, 2)))
def test_ranks_evaluate_in_what_all_run_natively(first: PrecisionName, second: PrecisionName, ranks: Ranks) -> None:
    for result in ranks("auto", f"test, {first}, {second}"):
        assert result["dtypes"] == [str(DTYPES[narrowest_of_both(first, second)])]


@pytest.mark.parametrize(("first", "second"), list(permutations(PRECISIONS, 2)))
def test_rank_zero_warns_of_an_explicit_bfloat16_that_any_rank_emulates(
    first: PrecisionName, second: PrecisionName, ranks: Ranks
) -> None:
    both = ranks("auto", f"explicit, {first}, {second}")
    common = narrowest_of_both(first, second)
    for result in both:
        assert result["dtypes"] == ["torch.bfloat16"] * 2
    assert both[1]["warned"] == []
    assert len(both[0]["warned"]) == 1
    assert re.search(rf"is slow here: .* '{common}' is the better choice", both[0]["warned"][0])


def test_ranks_agree_though_each_had_chosen_alone_before(ranks: Ranks) -> None:
    """Otherwise the mean of the gradients is taken over scaled and unscaled ones."""
    for result in ranks("auto", "alone first, bf16-mixed, 16-mixed"):
        assert result["dtypes"] == ["torch.float16"] * 2
        assert result["weight"] == (-4 * ROW).tolist()


def test_ranks_agree_though_one_has_evaluated_alone_in_between(ranks: Ranks) -> None:
    """The choice is a collective: were it to depend on what one rank remembers, the ranks would miss each other."""
    for result in ranks("auto", "alone between, bf16-mixed, 16-mixed"):
        assert result["precision"] == "16-mixed"
        assert result["dtypes"] == ["torch.float16"] * 2
        assert result["weight"] == (-4 * ROW).tolist()
        assert result["asked"] == 2


if __name__ == "__main__":
    work(jobs)
