"""A step that float16 cannot hold is rescued: run again wider, at once, as the float32 step it would have been."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import loader, make_trainer
from namespace import AdaptiveMixedPrecision, PrecisionFallback, pl
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_amp_plus import LossScale, NonFiniteStepError
from lightning_amp_plus.precisions import PrecisionName

NAN = math.nan
NEVER = 10**6
TWO: tuple[PrecisionName, ...] = ("16-mixed", "32-true")

Inject = Callable[[Tensor], Tensor]
"""What a model does with a hidden tensor; in float16 it fails."""


class Net(pl.LightningModule):
    """Everything that an attempt may leave a trace in. ``inject`` gets what the second layer puts out.

    Attributes:
        calls: The dtype of the hidden tensor in each ``training_step`` that came so far.
        hooks: How often each hook was called.

    """

    mean: Any

    def __init__(self, inject: Inject = lambda hidden: hidden, optimizer: str = "sgd") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3))
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.mean = MeanMetric(nan_strategy="disable")
        self.inject, self.optimizer = inject, optimizer
        self.calls: list[torch.dtype] = []
        self.hooks = dict.fromkeys(("on_before_zero_grad", "on_before_optimizer_step", "optimizer_step"), 0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.second(self.first(batch))
        self.calls.append(hidden.dtype)
        loss = self.head(self.inject(hidden).float()).float().pow(2).mean()
        self.mean.update(loss)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        self.hooks["on_before_zero_grad"] += 1

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.hooks["on_before_optimizer_step"] += 1

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.hooks["optimizer_step"] += 1
        super().optimizer_step(*args, **kwargs)


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9),
    "adamw": partial(AdamW, lr=0.01),
    "fused": partial(AdamW, lr=0.01, fused=True),
}


def rows(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))


def batches(count: int) -> DataLoader[Tensor]:
    return loader(rows(4 * count), batch_size=4)


def rescues(**rules: Any) -> PrecisionFallback:
    """The callback that rescues, and never moves, unless told otherwise."""
    return PrecisionFallback(**{"ladder": TWO, "patience": NEVER, "within_steps": NEVER, **rules})


def fit(
    module: pl.LightningModule,
    data: Any,
    callback: PrecisionFallback | None,
    precision: PrecisionName = "16-mixed",
    *,
    max_skipped: int = 10,
    retries: int = 5,
    scale: float = 2.0**4,
    callbacks: Sequence[pl.Callback] = (),
    **kwargs: Any,
) -> AdaptiveMixedPrecision:
    rules = LossScale(init_scale=scale, growth_interval=NEVER)
    plugin = AdaptiveMixedPrecision(precision, rules, max_skipped, retries=retries)
    trainer = make_trainer(plugin, callbacks=[*callbacks, *filter(None, [callback])], **kwargs)
    torch.manual_seed(5)
    trainer.fit(module, data)
    return plugin


def outcome(module: pl.LightningModule) -> dict[str, Any]:
    trainer = module.trainer
    return {
        "module": module.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "global_step": trainer.global_step,
        "metrics": dict(trainer.callback_metrics),
        "rng": torch.get_rng_state(),
    }


def assert_equal(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


# What fails in float16 ------------------------------------------------------------------------------------------------


class Matched(torch.autograd.Function):
    """Its backward raises where costs are not finite, as scipy's matcher does."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.is_half = hidden.dtype is torch.float16
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        match(grads[0] * (math.inf if ctx.is_half else 1.0))
        return grads[0]


def match(costs: Tensor) -> None:
    if not costs.isfinite().all():
        raise ValueError("matrix contains invalid numeric entries")


def matched(hidden: Tensor) -> Tensor:
    match(hidden.detach() * 2.0**17)
    return hidden


def missing(hidden: Tensor) -> Tensor:
    if hidden.dtype is torch.float16:
        raise RuntimeError("could not create a primitive descriptor for the LSTM forward propagation primitive")
    return hidden


def mixed_up(hidden: Tensor) -> Tensor:
    if hidden.dtype is torch.float16:
        raise RuntimeError("expected scalar type Float but found Half")
    return hidden


def factored(hidden: Tensor) -> Tensor:
    torch.linalg.lu_factor(hidden.detach()[:, :4])
    return hidden


def masked(hidden: Tensor) -> Tensor:
    return hidden + hidden.masked_fill(hidden > NEVER, -1e9) * 2.0**-10


def hot(hidden: Tensor) -> Tensor:
    return hidden * 2.0**17 * 2.0**-17


def steep(hidden: Tensor) -> Tensor:
    """Its gradient is inf in float16 at any loss scale."""
    return Steep.apply(hidden)


class Steep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2.0**40 * 2.0**-40 if grads[0].dtype is torch.float32 else grads[0] * math.inf


RAISES: dict[str, tuple[Inject, str]] = {
    "value cannot be converted to type at::Half": (masked, "RuntimeError"),
    "not implemented for 'Half'": (
        factored,
        "NotImplementedError" if hasattr(torch.compiler, "set_stance") else "RuntimeError",
    ),
    "expected scalar type Float but found Half": (mixed_up, "RuntimeError"),
    "primitive": (missing, "RuntimeError"),
    "matcher": (matched, "ValueError"),
    "matcher in backward": (Matched.apply, "ValueError"),
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("case", RAISES)
def test_an_exception_of_the_dtype_costs_one_attempt_and_is_called_unsupported(case: str, accumulate: int) -> None:
    inject, kind = RAISES[case]
    module = Net(inject)
    plugin = fit(module, batches(2), rescues(), accumulate_grad_batches=accumulate)
    steps = 2 // accumulate
    assert (plugin.counters.applied_steps, plugin.counters.rescued_steps) == (steps, steps)
    assert plugin.counters.retried_attempts == steps
    report = plugin.last_step
    assert report is not None
    assert report.diagnosis is not None
    assert (report.precision, report.attempts, report.rescued) == ("32-true", 2, True)
    assert (report.diagnosis.cause, plugin.precision) == ("unsupported", "16-mixed")
    assert str(report.diagnosis).startswith(f"{kind} was raised")
    assert "test_rescue.py:" in str(report.diagnosis)
    reference = Net(inject)
    fit(reference, batches(2), None, "32-true", accumulate_grad_batches=accumulate)
    assert_equal(outcome(module), outcome(reference))


def test_an_rnn_without_a_float16_kernel_trains() -> None:
    """Whether there is one depends on the CPU: with one there is nothing to rescue."""

    class Recurrent(Net):
        def __init__(self) -> None:
            super().__init__()
            self.second = nn.LSTM(8, 8)  # type: ignore[assignment]

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            hidden, _ = self.second(self.first(batch)[None])
            return self.head(hidden.float()).float().pow(2).mean()

    plugin = fit(Recurrent(), batches(3), rescues())
    assert plugin.counters.applied_steps == 3
    assert plugin.last_step is not None
    diagnosis = plugin.last_step.diagnosis
    assert (diagnosis is not None) == (plugin.counters.rescued_steps == 3)
    assert diagnosis is None or (diagnosis.cause, diagnosis.module) == ("unsupported", "second")


# What is not rescued --------------------------------------------------------------------------------------------------


class Raises(Net):
    """Raises ``error``, in float16 only if ``only_half``, in the third of its calls or later."""

    def __init__(self, error: BaseException, *, only_half: bool = False, where: str = "forward") -> None:
        super().__init__(self._maybe)
        self.error, self.only_half, self.where = error, only_half, where

    def _maybe(self, hidden: Tensor) -> Tensor:
        if len(self.calls) < 3 or (self.only_half and hidden.dtype is not torch.float16):
            return hidden
        if self.where == "forward":
            raise self.error
        if hidden.requires_grad:
            hidden.register_hook(self._raise)
        return hidden

    def _raise(self, grad: Tensor) -> Tensor:
        raise self.error


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_of_float32_too_reaches_the_user_as_it_was(where: str) -> None:
    error = ValueError("of the user's own")
    module = Raises(error, where=where)
    with pytest.raises(ValueError, match="own") as raised:
        fit(module, batches(4), rescues())
    assert raised.value is error
    assert (error.__cause__, error.__context__, error.args) == (None, None, ("of the user's own",))
    assert module.calls[2:] == [torch.float16, torch.float32]


def test_the_first_exception_counts_where_float32_raises_another() -> None:
    first = ValueError("in float16")

    class Two(Raises):
        def _maybe(self, hidden: Tensor) -> Tensor:
            if len(self.calls) >= 3 and hidden.dtype is torch.float32:
                raise KeyError("in float32")
            return super()._maybe(hidden)

    with pytest.raises(ValueError, match="in float16") as raised:
        fit(Two(first, only_half=True), batches(4), rescues())
    assert raised.value is first
    assert (first.__cause__, first.__context__) == (None, None)


exceptions: Any = pl.utilities.exceptions
MISCONFIGURED: Exception = exceptions.MisconfigurationException("misconfigured")


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("out of memory"),
        MemoryError(),
        StopIteration("of the user's own"),
        MISCONFIGURED,
        KeyboardInterrupt(),
        SystemExit(3),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_never_retried(error: BaseException, where: str) -> None:
    """Lightning itself ends a fit without an error after a StopIteration, and exits after an interrupt."""
    module = Raises(error, only_half=True, where=where)
    if isinstance(error, StopIteration):
        fit(module, batches(4), rescues())
    else:
        with pytest.raises((type(error), SystemExit)) as raised:
            fit(module, batches(4), rescues())
        assert raised.value is error or isinstance(error, KeyboardInterrupt)
    assert module.calls == [torch.float16] * 3


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_without_the_callback_nothing_is_caught(where: str) -> None:
    error = RuntimeError("expected scalar type Float but found Half")
    module = Raises(error, only_half=True, where=where)
    with pytest.raises(RuntimeError, match="found Half") as raised:
        fit(module, batches(4), None)
    assert raised.value is error
    assert module.calls == [torch.float16] * 3


def test_an_exception_of_a_step_that_has_written_to_its_batch_is_the_users() -> None:
    """To run it again would train on a batch that was changed twice."""

    class Writes(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch.mul_(2.0), batch_idx)

    module = Writes(mixed_up)
    with pytest.raises(RuntimeError, match="found Half"):
        fit(module, batches(2), rescues())
    assert module.calls == [torch.float16]


# Bit for bit ----------------------------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[Inject, int]] = {
    "forward": (hot, 4),
    "backward": (steep, 4 + 3),  # at the loss scales 2^3, 2^2 and 1
    "raises": (mixed_up, 2),
    "raises late": (Matched.apply, 2),
}
"""What fails, and the attempts of a step that it costs."""
CLIPS: dict[str, dict[str, Any]] = {
    "none": {},
    "norm": {"gradient_clip_val": 0.1},
    "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("accumulate", "clip"), list(product([1, 4], CLIPS)))
@pytest.mark.parametrize("fault", FAULTS)
def test_rescued_steps_are_those_of_a_run_in_float32(fault: str, accumulate: int, clip: str, optimizer: str) -> None:
    """Five micro-batches: with accumulation the last window is incomplete."""
    results = []
    inject, attempts = FAULTS[fault]
    for precision in TWO:
        module = Net(inject, optimizer)
        plugin = fit(module, batches(5), rescues(), precision, accumulate_grad_batches=accumulate, **CLIPS[clip])
        results.append(outcome(module))
        steps = 5 if accumulate == 1 else 2
        assert module.hooks == dict.fromkeys(module.hooks, steps)
        counters = plugin.counters
        assert counters.rescued_steps == (steps if precision == "16-mixed" else 0)
        assert counters.retried_attempts == counters.rescued_steps * (attempts - 1)
    assert_equal(*results)


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("inject", [mixed_up, Matched.apply], ids=["forward", "backward"])
def test_an_exception_at_any_micro_batch_makes_a_float32_step_of_the_whole_window(inject: Inject, at: int) -> None:
    class Once(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.inject = inject if batch_idx == at else Tensor.clone
            return super().training_step(batch, batch_idx)

    rescued, wide = Once(optimizer="adamw"), Once(optimizer="adamw")
    options: dict[str, Any] = {"accumulate_grad_batches": 4, "gradient_clip_val": 0.1}
    plugin = fit(rescued, batches(4), rescues(), **options)
    fit(wide, batches(4), None, "32-true", **options)
    assert_equal(outcome(rescued), outcome(wide))
    assert rescued.calls == [torch.float16] * (at + 1) + [torch.float32] * 4
    assert rescued.hooks == dict.fromkeys(rescued.hooks, 1)
    assert plugin.counters.rescued_steps == 1


def test_an_exception_in_on_before_backward_does_not_zero_the_gradients_twice() -> None:
    class Early(Net):
        def on_before_backward(self, loss: Tensor) -> None:
            if self.calls[-1] is torch.float16:
                raise RuntimeError("expected scalar type Float but found Half")

    module = Early()
    fit(module, batches(2), rescues())
    assert module.hooks == dict.fromkeys(module.hooks, 2)


class At(pl.Callback):
    """Calls ``then`` right before a batch."""

    def __init__(self, batch_idx: int, then: Callable[[pl.LightningModule], None]) -> None:
        self.batch_idx, self.then = batch_idx, then

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch_idx:
            self.then(pl_module)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_one_rescued_step_after_clean_ones_is_the_float32_step_from_the_same_state(accumulate: int) -> None:
    data = rows(4 * 3 * accumulate)
    before: dict[str, Any] = {}

    def save(module: Any) -> None:
        before.update(copy.deepcopy(outcome(module)))
        module.inject = hot

    def load(module: pl.LightningModule) -> None:
        module.load_state_dict(before["module"])
        module.trainer.optimizers[0].load_state_dict(before["optimizers"][0])
        torch.set_rng_state(before["rng"])

    rescued, wide = Net(optimizer="adamw"), Net(hot, optimizer="adamw")
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate}
    plugin = fit(rescued, loader(data, 4), rescues(), callbacks=[At(2 * accumulate, save)], **options)
    assert (plugin.counters.rescued_steps, plugin.counters.applied_steps) == (1, 3)
    assert plugin.counters.retried_attempts == 3
    fit(wide, loader(data[8 * accumulate :], 4), None, "32-true", callbacks=[At(0, load)], **options)
    for name in ("module", "optimizers", "rng"):
        assert_equal(outcome(rescued)[name], outcome(wide)[name])
    with pytest.raises(AssertionError):
        assert_equal(before["module"], outcome(wide)["module"])


# What nothing can help ------------------------------------------------------------------------------------------------

SKIPPED = pytest.mark.filterwarnings("ignore:Optimizer step .* was skipped because:RuntimeWarning")


@SKIPPED
@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_nan_batch_costs_one_attempt_and_changes_nothing(accumulate: int) -> None:
    """Hooks that see the gradients are for those that are applied, as everywhere."""
    data, size = rows(4 * 3 * accumulate), 4 * accumulate
    with_nan = data.clone()
    with_nan[size] = NAN
    states: list[Any] = []

    def note(module: pl.LightningModule) -> None:
        states.append(copy.deepcopy({**outcome(module), "metrics": None}))

    module = Net(optimizer="adamw")
    look = [At(accumulate, note), At(2 * accumulate, note)]
    plugin = fit(module, loader(with_nan, 4), rescues(), callbacks=look, accumulate_grad_batches=accumulate)
    assert_equal(*states)
    counters = plugin.counters
    assert (counters.skipped_steps, counters.applied_steps, counters.retried_attempts) == (1, 2, 1)
    assert counters.rescued_steps == 0
    assert (plugin.precision, plugin.state_dict()["scale"]) == ("16-mixed", 16.0)
    assert len(module.calls) == 4 * accumulate
    assert module.hooks == {"on_before_zero_grad": 3, "on_before_optimizer_step": 2, "optimizer_step": 3}

    without = Net(optimizer="adamw")
    fit(without, loader(torch.cat([data[:size], data[2 * size :]]), 4), rescues(), accumulate_grad_batches=accumulate)
    for name in ("metrics", "global_step"):
        assert_equal(outcome(module)[name], outcome(without)[name])


def test_cause_batch_names_the_batch() -> None:
    data = rows(8)
    data[4:, 0] = NAN
    with (
        pytest.warns(RuntimeWarning, match=r"inputs of batch 1 of epoch 0 hold inf or NaN \(batch\)"),
        pytest.raises(NonFiniteStepError, match=r"2 optimizer steps in a row") as raised,
    ):
        fit(Net(), loader(torch.cat([data, data[4:]]), 4), rescues(), max_skipped=2)
    assert raised.value.diagnosis is not None
    assert raised.value.diagnosis.cause == "batch"
    assert "inputs of batch 2 of epoch 0" in str(raised.value.diagnosis)


@pytest.mark.parametrize("saves", [True, False])
def test_broken_parameters_end_the_run_at_once(saves: bool, tmp_path: Path) -> None:
    """Something has written NaN to a weight after step 1."""

    def break_it(module: pl.LightningModule) -> None:
        nn.init.constant_(module.second.weight, NAN)  # type: ignore[union-attr,arg-type]

    callbacks: list[pl.Callback] = [At(2, break_it)]
    if saves:
        callbacks.append(pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1))
    module = Net()
    with pytest.raises(NonFiniteStepError) as raised:
        fit(module, batches(8), rescues(), callbacks=callbacks, enable_checkpointing=saves)
    diagnosis = raised.value.diagnosis
    assert diagnosis is not None
    assert (diagnosis.cause, diagnosis.module) == ("parameters", "second")
    assert "(second.weight)" in str(raised.value)
    assert (f"restore {tmp_path / 'step=2.ckpt'}" in str(raised.value)) == saves
    assert module.calls == [torch.float16] * 3 + [torch.float32]


def test_finite_nowhere_ends_after_max_skipped() -> None:
    module = Net(lambda hidden: hidden * math.inf)
    plugin = AdaptiveMixedPrecision("16-mixed", max_skipped=3)
    trainer = make_trainer(plugin, callbacks=[rescues()])
    with (
        pytest.warns(RuntimeWarning, match="was skipped"),
        pytest.raises(NonFiniteStepError, match="3 optimizer steps in a row") as raised,
    ):
        trainer.fit(module, batches(9))
    assert raised.value.diagnosis is not None
    assert raised.value.diagnosis.cause == "model"
    assert (plugin.counters.applied_steps, plugin.counters.skipped_steps) == (0, 3)


@SKIPPED
def test_a_precision_that_does_not_fit_into_memory_is_dropped() -> None:
    """Float32 does not: the step is skipped, and the next ones are rescued in bfloat16."""

    def inject(hidden: Tensor) -> Tensor:
        if hidden.dtype is torch.float32:
            raise torch.OutOfMemoryError("out of memory")
        return hot(hidden)

    module = Net(inject)
    with pytest.warns(RuntimeWarning, match="did not fit into memory in '32-true', which is not tried again"):
        plugin = fit(module, batches(3), rescues(ladder=None))
    assert (plugin.counters.skipped_steps, plugin.counters.rescued_steps) == (1, 2)
    assert module.calls.count(torch.float32) == 1
    assert plugin.last_step is not None
    assert (plugin.last_step.precision, plugin.precision) == ("bf16-mixed", "16-mixed")


@SKIPPED
def test_a_window_that_is_not_finite_in_float16_and_raises_in_float32_is_skipped() -> None:
    def inject(hidden: Tensor) -> Tensor:
        if hidden.dtype is torch.float32:
            raise ValueError("in float32 only")
        return hot(hidden)

    plugin = fit(Net(inject), batches(3), rescues())
    assert (plugin.counters.skipped_steps, plugin.counters.retried_attempts) == (3, 3)


def test_an_exception_stays_the_users_where_the_wide_precision_does_not_fit_into_memory() -> None:
    def inject(hidden: Tensor) -> Tensor:
        if hidden.dtype is torch.float32:
            raise torch.OutOfMemoryError("out of memory")
        return mixed_up(hidden)

    with pytest.raises(RuntimeError, match="found Half"):
        fit(Net(inject), batches(3), rescues())


# scope="module" -------------------------------------------------------------------------------------------------------


class Scaled(nn.Linear):
    """What it puts out is ``factor`` times too large for float16."""

    def __init__(self, factor: float = 2.0**22) -> None:
        super().__init__(8, 8)
        self.factor = factor

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * self.factor


class Deep(Net):
    """``count`` layers in a row, each too large for float16, and scaled down again outside of them."""

    def __init__(self, count: int = 1, layer: Callable[[], nn.Module] = Scaled, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer() for _ in range(count)])
        self.checkpoints = checkpoints
        self.outputs: list[torch.dtype] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.second(batch.repeat(1, 2))
        self.calls.append(hidden.dtype)
        for layer in self.layers:
            large = checkpoint(layer, hidden, use_reentrant=False) if self.checkpoints else layer(hidden)
            self.outputs.append(large.dtype)
            hidden = large * 2.0**-22
        return self.head(hidden).float().pow(2).mean()


def modules(**rules: Any) -> PrecisionFallback:
    return rescues(**{"scope": "module", "patience": 1, **rules})


NEEDS_STANCE = pytest.mark.skipif(
    not hasattr(torch.compiler, "set_stance"), reason="torch runs compiled code eagerly on request from 2.6 on"
)


def compiled() -> nn.Module:
    layer: Any = torch.compile(Scaled(), backend="eager")
    return layer


@pytest.mark.parametrize(
    "model",
    [Deep, pytest.param(partial(Deep, layer=compiled), marks=NEEDS_STANCE), partial(Deep, checkpoints=True)],
    ids=["plain", "compiled", "activation checkpointing"],
)
def test_one_module_in_float32_keeps_the_run_in_float16(model: Callable[[], Deep]) -> None:
    module = model()
    before = {name: vars(part).get("forward") for name, part in module.named_modules()}
    keys = list(module.state_dict())
    with pytest.warns(RuntimeWarning, match=r"step 0 was not finite .* on layers\.0 computes in float32\. .* put out"):
        plugin = fit(module, batches(5), modules())
    assert [name.replace("._orig_mod", "") for name in plugin.kept_modules] == ["layers.0"]
    counters = plugin.counters
    assert (counters.applied_steps, counters.rescued_steps, counters.skipped_steps) == (5, 1, 0)
    assert plugin.precision == "16-mixed"
    assert module.calls[-4:] == [torch.float16] * 4
    assert module.outputs[-4:] == [torch.float32] * 4
    assert {name: vars(part).get("forward") for name, part in module.named_modules()} == before
    assert list(module.state_dict()) == keys


@pytest.mark.parametrize(("max_modules", "kept"), [(3, 3), (2, 0)])
def test_modules_are_added_as_they_are_found_until_the_model_moves(max_modules: int, kept: int) -> None:
    module = Deep(3)
    with pytest.warns(RuntimeWarning, match="from now on layers" if kept else "the run computes in '32-true'"):
        plugin = fit(module, batches(3), modules(max_modules=max_modules))
    assert plugin.kept_modules == tuple(f"layers.{i}" for i in range(kept))
    assert plugin.precision == ("16-mixed" if kept else "32-true")
    assert (plugin.counters.applied_steps, plugin.counters.rescued_steps) == (3, 1)


def test_where_no_module_is_at_fault_the_model_moves() -> None:
    """The overflow is in the code of ``training_step``."""
    module = Net(hot)
    with pytest.warns(RuntimeWarning, match="from optimizer step 1 on the run computes in '32-true'"):
        plugin = fit(module, batches(3), modules())
    assert (plugin.kept_modules, plugin.precision) == ((), "32-true")
    assert (plugin.counters.applied_steps, plugin.counters.rescued_steps) == (3, 1)


def test_a_module_whose_backward_overflows_is_kept() -> None:
    class Backward(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return steep(hidden.clone())

    module = Deep(1, Backward)
    with pytest.warns(RuntimeWarning, match=r"layers\.0 computes in float32\. the backward of layers\.0"):
        plugin = fit(module, batches(3), modules())
    assert plugin.kept_modules == ("layers.0",)
    assert plugin.counters.rescued_steps == 1


def test_a_module_that_raises_is_kept() -> None:
    class Mixed(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return mixed_up(hidden)

    with pytest.warns(RuntimeWarning, match=r"step 0 raised .* layers\.0 computes in float32"):
        plugin = fit(Deep(1, Mixed), batches(3), modules())
    assert plugin.kept_modules == ("layers.0",)
    assert (plugin.precision, plugin.counters.rescued_steps, plugin.counters.applied_steps) == ("16-mixed", 1, 3)


@pytest.mark.parametrize("pattern", ["layers.0", "layers.*", "*.0"])
def test_keep_fp32_says_it_up_front(pattern: str) -> None:
    module = Deep()
    plugin = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=16.0), keep_fp32=[pattern])
    make_trainer(plugin).fit(module, batches(3))
    assert (plugin.counters.applied_steps, plugin.counters.retried_attempts) == (3, 0)
    assert module.calls == [torch.float16] * 3
    assert module.outputs == [torch.float32] * 3
    assert "forward" not in vars(module.layers[0])


def test_kept_modules_are_resumed(tmp_path: Path) -> None:
    first = Deep()
    plugin = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=16.0))
    trainer = make_trainer(plugin, callbacks=[modules()])
    with pytest.warns(RuntimeWarning, match="computes in float32"):
        trainer.fit(first, batches(3))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    module, resumed = Deep(), AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=16.0))
    make_trainer(resumed, callbacks=[modules()], max_epochs=2).fit(module, batches(3), ckpt_path=tmp_path / "a.ckpt")
    assert (resumed.counters.rescued_steps, resumed.counters.applied_steps) == (1, 6)
    assert module.outputs == [torch.float32] * 3


# patience and retry_after ---------------------------------------------------------------------------------------------


class Phases(Net):
    """Too large for float16 in some steps."""

    def __init__(self, is_hot: Callable[[int], bool]) -> None:
        super().__init__(self._inject)
        self.is_hot = is_hot
        self.step_precisions: list[str] = []

    def _inject(self, hidden: Tensor) -> Tensor:
        return hot(hidden) if self.is_hot(self.trainer.fit_loop.epoch_loop.batch_idx) else hidden

    def on_train_batch_end(self, *args: Any) -> None:
        plugin: Any = self.trainer.precision_plugin
        self.step_precisions.append({"16-mixed": "h", "bf16-mixed": "b", "32-true": "f"}[plugin.last_step.precision])


@pytest.mark.parametrize(
    ("within_steps", "expected"), [(3, "hfhhfhhfhhfh"), (4, "hfhhffffffff")], ids=["just not", "just"]
)
def test_patience_counts_the_rescues_of_the_last_steps(within_steps: int, expected: str) -> None:
    """Every third step is rescued."""
    module = Phases(lambda step: step % 3 == 1)
    with pytest.warns(RuntimeWarning, match="the run computes in") if within_steps == 4 else nullcontext():
        fit(module, batches(12), rescues(patience=2, within_steps=within_steps))
    assert "".join(module.step_precisions) == expected


def test_it_moves_to_the_narrowest_rung_that_holds_the_step() -> None:
    module = Phases(lambda step: step >= 1)
    with pytest.warns(
        RuntimeWarning, match=r"step 2 .*, as were 1 others lately: from optimizer step 3 on .*'bf16-mixed'"
    ):
        fit(module, batches(5), rescues(ladder=None, patience=2))
    assert "".join(module.step_precisions) == "hfbbb"


def test_after_enough_clean_steps_the_narrow_precision_is_tried_again() -> None:
    """Steps 1 and 4 are too large: moved at 1, tried in vain at 4 after 2 clean ones, tried again after 4 at 9."""
    module = Phases(lambda step: step in (1, 4))
    with pytest.warns(RuntimeWarning, match="from optimizer step 2 on"):
        plugin = fit(module, batches(12), rescues(patience=1, retry_after=2))
    assert "".join(module.step_precisions) == "hfff" + "f" + "ffff" + "hhh"
    assert plugin.counters.skipped_steps == 0
    assert plugin.precision == "16-mixed"
    results = [outcome(module)]
    assert results[0]["global_step"] == 12


# Manual optimization --------------------------------------------------------------------------------------------------


class Gan(pl.LightningModule):
    """Two networks with an optimizer each. In float16 the generator's output is too large if ``is_hot``."""

    def __init__(self, *, is_hot: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 8), Scaled() if is_hot else nn.Linear(8, 8))
        self.critic = nn.Linear(8, 1)
        self.factor = 2.0**-22 if is_hot else 1.0
        self.steps = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            self.steps += 1
            loss = self.critic(self.generator(batch) * self.factor).float().pow(2).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> list[Optimizer]:
        return [SGD(self.generator.parameters(), lr=0.01), SGD(self.critic.parameters(), lr=0.01)]


@SKIPPED
def test_located_failures_in_manual_optimization_move_the_run_and_run_nothing_again() -> None:
    module = Gan(is_hot=True)
    with pytest.warns(
        RuntimeWarning, match=r"in a row were skipped .* the run computes in 'bf16-mixed'\. generator\.1"
    ):
        plugin = fit(module, batches(8), PrecisionFallback(patience=2))
    assert (module.steps, plugin.counters.retried_attempts, plugin.precision) == (16, 0, "bf16-mixed")
    # One iteration that was not looked on at, and two that were, of two steps each.
    assert (plugin.counters.skipped_steps, plugin.counters.applied_steps) == (6, 10)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_patience_in_manual_optimization_begins_anew_on_the_next_rung() -> None:
    class Worse(nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            hidden = super().forward(hidden)
            return hidden if hidden.dtype is torch.float32 else hidden * 1e30 * 1e30

    module = Gan()
    module.critic = Worse(8, 1)
    plugin = fit(module, batches(8), PrecisionFallback(patience=2))
    assert (plugin.precision, plugin.counters.skipped_steps) == ("32-true", 2 * (1 + 2 + 2))


@SKIPPED
def test_nan_batches_in_manual_optimization_do_not_move_the_run() -> None:
    data = rows(4 * 8)
    data[4 : 4 * 7] = NAN
    module = Gan()
    plugin = fit(module, loader(data, 4), PrecisionFallback(patience=2), max_skipped=20)
    assert (module.steps, plugin.precision) == (16, "16-mixed")
    assert (plugin.counters.skipped_steps, plugin.counters.applied_steps) == (12, 4)


# What was found by trying to break it ---------------------------------------------------------------------------------


def broken_in_half(hidden: Tensor) -> Tensor:
    if hidden.dtype is torch.float16:
        raise RuntimeError("not implemented for 'Half'")
    return hidden


def test_an_error_of_a_callback_ends_the_fit() -> None:
    class StopError(Exception):
        pass

    class Stops(pl.Callback):
        stopped = False

        def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
            if not self.stopped:
                self.stopped = True
                raise StopError

    module = Net()
    with pytest.raises(StopError):
        fit(module, batches(3), rescues(), callbacks=[Stops()])
    assert len(module.calls) == 1


def test_gradients_that_are_kept_over_steps_are_not_lost_to_a_rescue() -> None:
    """``optimizer_zero_grad`` does nothing: the second step sums the gradients of both."""

    class Keeps(Net):
        def optimizer_zero_grad(self, *args: Any) -> None:
            pass

    def second_time(hidden: Tensor) -> Tensor:
        return broken_in_half(hidden) if len(rescued.calls) == 2 else hidden

    rescued, clean = Keeps(second_time), Keeps()
    fit(rescued, batches(2), rescues())
    fit(clean, batches(2), None)
    assert rescued.calls == [torch.float16, torch.float16, torch.float32]
    for found, expected in zip(rescued.parameters(), clean.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_nothing_is_left_switched_on_after_an_error_while_it_was_looked_on() -> None:
    class Manual(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == 1:
                assert torch.is_anomaly_enabled()  # by what looks on
                raise KeyError("mine")
            optimizer: Any = self.optimizers()
            self.manual_backward(super().training_step(batch, batch_idx) * NAN)
            optimizer.step()
            return batch.sum()

    module = Manual()
    with pytest.raises(KeyError, match="mine"), pytest.warns(RuntimeWarning, match="was skipped"):
        fit(module, batches(3), rescues())
    assert not torch.is_anomaly_enabled()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def test_a_nan_batch_in_float32_is_named_too() -> None:
    data = rows(12)
    data[5] = NAN
    with pytest.warns(RuntimeWarning, match=r"inputs of batch 1 of epoch 0 hold inf or NaN \(batch\)"):
        plugin = fit(Net(), loader(data, batch_size=4), rescues(), "32-true")
    assert (plugin.counters.applied_steps, plugin.counters.skipped_steps) == (2, 1)


def test_a_guard_of_the_users_against_nan_does_not_hide_the_module() -> None:
    class Guards(Net):
        def __init__(self) -> None:
            super().__init__()
            self.hot = Scaled()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            hot = self.hot(self.second(self.first(batch)))
            if not hot.isfinite().all():
                raise ValueError("loss is not finite")
            return (hot.float() * 2.0**-22).pow(2).mean()

    module = Guards()
    with pytest.warns(RuntimeWarning, match="from now on hot computes in float32"):
        plugin = fit(module, batches(4), rescues(patience=1, scope="module"))
    assert (plugin.precision, plugin.kept_modules) == ("16-mixed", ("hot",))


def test_an_evaluation_without_the_callback_says_which_modules_were_kept(tmp_path: Path) -> None:
    class Hot(Net):
        def __init__(self) -> None:
            super().__init__()
            self.second = Scaled()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return (self.second(self.first(batch)).float() * 2.0**-22).pow(2).mean()

        def test_step(self, batch: Tensor, batch_idx: int) -> None:
            self(batch)

        def forward(self, batch: Tensor) -> Tensor:
            return self.second(self.first(batch))

    module = Hot()
    with pytest.warns(RuntimeWarning, match="from now on second computes in float32"):
        fit(module, batches(2), rescues(patience=1, scope="module"))
    module.trainer.save_checkpoint(tmp_path / "a.ckpt")
    plain = make_trainer(AdaptiveMixedPrecision("16-mixed"))
    with pytest.warns(RuntimeWarning, match=r"kept second in float32.*keep_fp32=\['second'\]"):
        plain.test(Hot(), batches(1), ckpt_path=tmp_path / "a.ckpt", verbose=False)


def test_a_kept_module_that_is_no_longer_there_is_told_and_left_out() -> None:
    plugin = AdaptiveMixedPrecision("16-mixed")
    state = {**plugin.state_dict(), "kept_modules": ["second", "gone"]}

    class Loads(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            plugin.load_state_dict(state)
            assert plugin.kept_modules == ("second",)

    with pytest.warns(RuntimeWarning, match="is left out: gone"):
        make_trainer(plugin, callbacks=[rescues(), Loads()]).fit(Net(), batches(1))


def test_what_ends_a_run_on_purpose_is_not_taken_for_a_failed_attempt() -> None:
    """Not in the run that looks on either: the third one."""

    class Ends(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if len(self.calls) == 3:
                raise StopIteration
            return loss * (NAN if self.calls[-1] is torch.float16 else 1)

    module = Ends()
    fit(module, batches(2), rescues())  # Lightning ends the epoch
    assert module.calls == [torch.float16, torch.float32, torch.float16]


# ---------------------------------------------------------------- code of the user's that raises at the very end


class HookRaises(Net):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        raise KeyError("mine")


class ClippingRaises(Net):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        raise KeyError("mine")


class CallbackRaises(pl.Callback):
    def on_before_optimizer_step(self, *args: Any) -> None:
        raise KeyError("mine")


@pytest.mark.parametrize("inject", [hot, factored])
@pytest.mark.parametrize("kind", [HookRaises, ClippingRaises, CallbackRaises])
def test_what_a_hook_raises_in_a_rescue_reaches_the_user(inject: Inject, kind: Any) -> None:
    is_callback = kind is CallbackRaises
    module = Net(inject) if is_callback else kind(inject)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(KeyError, match="mine"):
        fit(module, batches(2), rescues(), callbacks=[CallbackRaises()] if is_callback else [])
    assert_equal(module.state_dict(), before)
