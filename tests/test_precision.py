"""Automatic optimization in a real Trainer: what the weights become, and what user code gets to see on the way.

The reference is a Trainer without a plugin, in float32. Where all numbers are powers of two the two agree bitwise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from helpers import PRECISIONS, ROW, Exact, factors, loader, make_plugin, make_trainer, scale_of, sgd
from namespace import AdaptiveMixedPrecision, PrecisionFallback, pl
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer

from lightning_amp_plus import NonFiniteStepError, StepCounters
from lightning_amp_plus.precisions import PrecisionName

ExactT = TypeVar("ExactT", bound=Exact)
NAN, INF = float("nan"), float("inf")
BATCHES = (32, 8, 16, 8, 2, 2, 8, 4, 32, 32)  # windows of four sum to powers of two; the last one is incomplete
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "SGD": sgd,
    # Adam does not feel a factor that all its gradients have in common, unless eps is large.
    "AdamW foreach": partial(AdamW, lr=0.125, eps=16.0, foreach=True),
    "AdamW fused": partial(AdamW, lr=0.125, eps=16.0, fused=True),
}
CLIPPING: dict[str, dict[str, Any]] = {
    "none": {},
    # The norms that are clipped are so large that the 1e-6 which clipping adds to them rounds away.
    "norm": {"gradient_clip_val": 32.0, "gradient_clip_algorithm": "norm"},
    "value": {"gradient_clip_val": 16, "gradient_clip_algorithm": "value"},
}
all_precisions = pytest.mark.parametrize("precision", PRECISIONS)
all_optimizers = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
all_clipping = pytest.mark.parametrize("clip", CLIPPING.values(), ids=list(CLIPPING))
with_accumulation = pytest.mark.parametrize("accumulate", [1, 4])


def compare(
    make: Callable[[], ExactT], plugin: AdaptiveMixedPrecision, batches: Iterable[float] = BATCHES, **kwargs: Any
) -> ExactT:
    """Fit without a plugin and with it; assert that the weights are the same bitwise; return our module."""
    reference, module = make(), make()
    data = factors(*batches)
    make_trainer(**kwargs).fit(reference, data)
    make_trainer(plugin, **kwargs).fit(module, data)
    assert torch.isfinite(reference.weight).all()
    assert reference.weight.count_nonzero() > 0
    torch.testing.assert_close(module.weight, reference.weight, rtol=0, atol=0)
    return module


# The update -----------------------------------------------------------------------------------------------------------


@all_precisions
@all_optimizers
@all_clipping
@with_accumulation
def test_weights_are_those_of_float32(
    precision: PrecisionName, optimizer: Callable[..., Optimizer], clip: dict[str, Any], accumulate: int
) -> None:
    plugin = make_plugin(precision)
    module = compare(lambda: Exact(optimizer), plugin, accumulate_grad_batches=accumulate, **clip)
    assert plugin.counters == StepCounters(applied_steps=10 if accumulate == 1 else 3)
    if clip:
        unclipped = Exact(optimizer)
        make_trainer(accumulate_grad_batches=accumulate).fit(unclipped, factors(*BATCHES))
        assert not torch.equal(module.weight, unclipped.weight)  # the threshold was met


@pytest.mark.parametrize(("precision", "tolerance"), [("16-mixed", 2.0**-8), ("bf16-mixed", 2.0**-5), ("32-true", 0.0)])
@all_optimizers
def test_weights_are_those_of_float32_up_to_rounding(
    precision: PrecisionName, tolerance: float, optimizer: Callable[..., Optimizer]
) -> None:
    class Regression(Exact):
        def __init__(self) -> None:
            super().__init__(optimizer)
            torch.manual_seed(0)
            self.linear = nn.Linear(8, 8)
            self.head = nn.Linear(8, 1)

        def loss(self, batch: Tensor) -> Tensor:
            return (self.head(torch.tanh(self.linear(batch))).float() - batch.mean(1, keepdim=True)).pow(2).mean()

    weights = []
    for plugin in (None, make_plugin(precision, scale=2.0**12)):
        module = Regression()
        start = module.weight
        rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
        trainer = make_trainer(plugin, gradient_clip_val=0.25, accumulate_grad_batches=2)
        trainer.fit(module, loader(rows, batch_size=8))
        weights.append(module.weight - start)
    error = (weights[1] - weights[0]).norm() / weights[0].norm()
    assert error <= tolerance


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
@all_precisions
@pytest.mark.parametrize("clip_val", [None, 1.0])
def test_parameters_of_other_dtypes(dtype: torch.dtype, precision: PrecisionName, clip_val: float | None) -> None:
    class Square(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((4,), 1.0, dtype=dtype))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return (self.weight * self.weight.conj()).real.sum().float() * 0.25

        def configure_optimizers(self) -> Optimizer:
            return SGD(self.parameters(), lr=0.5)

    reference, module = Square(), Square()
    make_trainer(gradient_clip_val=clip_val).fit(reference, factors(1, 1))
    make_trainer(make_plugin(precision), gradient_clip_val=clip_val).fit(module, factors(1, 1))
    assert module.weight.dtype == dtype
    # bfloat16: the norm that torch clips by is itself rounded to 8 bits.
    torch.testing.assert_close(
        module.weight, reference.weight, rtol=2.0**-8 if dtype is torch.bfloat16 else 1e-6, atol=0
    )
    assert module.weight[0].real.item() < 0.6


def test_a_finite_gradient_with_an_infinite_norm_is_applied() -> None:
    class Huge(Exact):
        def loss(self, batch: Tensor) -> Tensor:
            return (self.linear.weight * batch).sum() * 2.0**66  # its square is 2^132

    plugin = make_plugin("16-mixed")
    module = Huge()
    make_trainer(plugin, gradient_clip_val=2.0**70).fit(module, factors(1))
    assert module.weight.tolist() == (ROW * -(2.0**66)).tolist()
    make_trainer(plugin, gradient_clip_val=1.0).fit(Huge(), factors(1))
    assert plugin.last_step is not None
    assert plugin.last_step.grad_norm == 2.0**68
    assert plugin.counters == StepCounters(applied_steps=1)


@pytest.mark.parametrize("scale", [2.0**8, 2.0**16])
@with_accumulation
def test_a_float16_loss_trains_from_the_first_step(scale: float, accumulate: int) -> None:
    class HalfLoss(Exact):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            # Both kinds in one window: what its gradients are multiplied by changes within.
            return (self.linear.weight * batch).sum() if batch_idx % 4 == 1 else self(batch)[0, 0]

    plugin = make_plugin("16-mixed", scale=scale)
    compare(HalfLoss, plugin, [2.0**-4] * 6, accumulate_grad_batches=accumulate)
    assert plugin.counters.skipped_steps == 0
    assert scale_of(plugin) == scale


def test_a_forward_without_grad_does_not_poison_the_one_with_grad() -> None:
    class NoGradFirst(Exact):
        def loss(self, batch: Tensor) -> Tensor:
            with torch.no_grad():
                self(batch)
            return super().loss(batch)

    compare(NoGradFirst, make_plugin())


@all_precisions
def test_double_backward(precision: PrecisionName) -> None:
    class Penalty(Exact):
        def loss(self, batch: Tensor) -> Tensor:
            batch = batch.clone().requires_grad_()
            (gradient,) = torch.autograd.grad((self.linear.weight * batch).sum().pow(2), batch, create_graph=True)
            return gradient.sum() + gradient.pow(2).sum() + self.linear.weight.sum()

    compare(lambda: Penalty(partial(SGD, lr=2.0**-10)), make_plugin(precision), [0.5, 0.25, 1])


@pytest.mark.parametrize("missing", [{0, 1, 2, 3}, {0}, {3}, {1, 2}])
@all_precisions
@all_optimizers
@with_accumulation
def test_training_step_that_returns_none(
    missing: set[int], precision: PrecisionName, optimizer: Callable[..., Optimizer], accumulate: int
) -> None:
    """On all micro-batches of the second window of four, on its first, on its last, in its middle."""

    class Sometimes(Exact):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            return None if batch_idx - 4 in missing else self.loss(batch)

    plugin = make_plugin(precision)
    compare(lambda: Sometimes(optimizer), plugin, accumulate_grad_batches=accumulate, **CLIPPING["norm"])
    assert plugin.counters.skipped_steps == 0


def test_none_after_a_skipped_step_is_not_another_skip() -> None:
    class NoneLater(Exact):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            return self.loss(batch) if batch_idx == 0 else None

    plugin = make_plugin("32-true", max_skipped=2)
    with pytest.warns(RuntimeWarning, match="skipped"):
        make_trainer(plugin).fit(NoneLater(), factors(NAN, 1, 1, 1))
    assert plugin.counters.skipped_steps == 1


def test_frozen_unused_and_foreign_parameters() -> None:
    class Mixed(Exact):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
            self.unused = nn.Parameter(torch.ones(8))
            self.foreign = nn.Parameter(torch.ones(8))  # trained by no optimizer

        def loss(self, batch: Tensor) -> Tensor:
            return super().loss(batch) + (self.frozen * batch).sum() + (self.foreign * batch).sum()

        def configure_optimizers(self) -> Optimizer:
            return AdamW([self.linear.weight, self.frozen, self.unused], lr=0.125, weight_decay=0.5)

    module = compare(Mixed, make_plugin(), accumulate_grad_batches=2)
    assert all(torch.equal(p.detach(), torch.ones(8)) for p in (module.frozen, module.unused, module.foreign))


def test_a_parameter_that_joins_the_optimizer_in_mid_window() -> None:
    class Unfreezing(Exact):
        def __init__(self) -> None:
            super().__init__()
            self.late = nn.Parameter(torch.zeros(8), requires_grad=False)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == 1:
                self.trainer.optimizers[0].add_param_group({"params": [self.late.requires_grad_(True)]})
            return self.loss(batch) + (self.late * batch).sum()

        def configure_optimizers(self) -> Optimizer:
            return sgd(self.linear.parameters())

    module = compare(Unfreezing, make_plugin(), [2, 4, 8], accumulate_grad_batches=2)
    assert module.late.tolist() == (ROW * -6).tolist()


@all_precisions
def test_without_an_optimizer_nothing_moves(precision: PrecisionName) -> None:
    class NoOptimizer(Exact):
        steps = 0

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.steps += 1
            return self.loss(batch)

        def configure_optimizers(self) -> None:
            return None

    module = NoOptimizer()
    with pytest.warns(UserWarning, match="will run with no optimizer"):
        make_trainer(make_plugin(precision)).fit(module, factors(1, 1))
    assert module.weight.count_nonzero() == 0
    assert module.steps == 2


def test_lr_schedule() -> None:
    class Halving(Exact):
        def configure_optimizers(self) -> Any:
            optimizer = sgd(self.parameters())
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    module = compare(Halving, make_plugin(), [1, 2, 4, 8])
    assert module.weight.tolist() == (ROW * -4).tolist()


def test_accumulation_that_changes_between_epochs() -> None:
    compare(
        lambda: Exact(AdamW),
        make_plugin(),
        max_epochs=3,
        callbacks=[pl.callbacks.GradientAccumulationScheduler({1: 2, 2: 4})],
    )


def test_compiled_module() -> None:
    module = Exact()
    compiled: Any = torch.compile(module, backend="eager")
    make_trainer(make_plugin()).fit(compiled, factors(1, 2))
    assert module.weight.tolist() == (ROW * -3).tolist()


@pytest.mark.parametrize(
    ("kwargs", "steps"), [({"barebones": True}, 2), ({"fast_dev_run": True}, 1), ({"detect_anomaly": True}, 2)]
)
def test_trainer_flags(kwargs: dict[str, Any], steps: int) -> None:
    module, plugin = Exact(), make_plugin()
    make_trainer(plugin, **kwargs).fit(module, factors(1, 1))
    assert module.weight.tolist() == (ROW * -steps).tolist()
    assert plugin.counters.applied_steps == steps


# What user code sees --------------------------------------------------------------------------------------------------


def watch(hook: str, owner: str, seen: list[Any], **attributes: Any) -> tuple[Exact, list[pl.Callback]]:
    """A module, or a callback, or a LambdaCallback that notes ``module.grad`` each time that its ``hook`` is called."""
    if owner == "module":

        def of_module(self: Exact, *args: Any, **kwargs: Any) -> Any:
            seen.append(None if self.grad is None else self.grad.tolist())
            return getattr(Exact, hook)(self, *args, **kwargs)

        return type("Watched", (Exact,), {**attributes, hook: of_module})(), []

    def of_callback(trainer: pl.Trainer, module: Exact, *args: Any, **kwargs: Any) -> None:
        seen.append(None if module.grad is None else module.grad.tolist())

    if owner == "lambda":
        return type("Plain", (Exact,), attributes)(), [pl.callbacks.LambdaCallback(**{hook: of_callback})]
    return type("Plain", (Exact,), attributes)(), [type("Watcher", (pl.Callback,), {hook: staticmethod(of_callback)})()]


@pytest.mark.parametrize(
    ("hook", "owner"),
    [
        *(
            (hook, owner)
            for hook in (
                "on_before_backward",
                "on_after_backward",
                "on_before_optimizer_step",
                "on_before_zero_grad",
                "on_train_batch_start",
                "on_train_batch_end",
                "on_train_epoch_end",
            )
            for owner in ("module", "callback", "lambda")
        ),
    ],
)
@pytest.mark.parametrize(("optimizer", "clip"), [("SGD", "none"), ("AdamW fused", "norm")])
@with_accumulation
def test_user_code_sees_true_gradients(hook: str, owner: str, optimizer: str, accumulate: int, clip: str) -> None:
    def run(plugin: AdaptiveMixedPrecision | None) -> list[Any]:
        seen: list[Any] = []
        attributes = {
            "validation_step": lambda self, batch, batch_idx: None,
            "configure_optimizers": lambda self: OPTIMIZERS[optimizer](self.parameters()),
        }
        module, callbacks = watch(hook, owner, seen, **attributes)
        # Lightning itself clears the gradients before a validation, but not within a window.
        validate = {"val_check_interval": 1} if "validation" in hook else {"limit_val_batches": 0}
        trainer = make_trainer(
            plugin, callbacks=callbacks, accumulate_grad_batches=accumulate, **CLIPPING[clip], **validate
        )
        trainer.fit(module, factors(*BATCHES[:6]), factors(1))
        return seen

    reference = run(None)
    assert accumulate == 1 or any(grad is not None and any(grad) for grad in reference)
    assert run(make_plugin()) == reference


@pytest.mark.parametrize("hook", ["on_before_optimizer_step", "on_train_batch_end"])
def test_gradients_of_a_parameter_without_an_optimizer_are_true(hook: str) -> None:
    seen: list[float] = []

    class Foreign(Exact):
        def __init__(self) -> None:
            super().__init__()
            self.foreign = nn.Parameter(torch.zeros(8))

        def loss(self, batch: Tensor) -> Tensor:
            return super().loss(batch) + (self.foreign * batch).sum()

        def configure_optimizers(self) -> Optimizer:
            return sgd(self.linear.parameters())

    def look(self: Foreign, *args: Any) -> None:
        assert self.foreign.grad is not None
        seen.append(self.foreign.grad[0].item())

    module = type("Looking", (Foreign,), {hook: look})()
    make_trainer(make_plugin()).fit(module, factors(1, 2, 4))
    assert seen == [2, 6, 14]  # nobody zeroes it


@pytest.mark.parametrize("stop", [KeyError, None])
def test_gradients_left_by_an_unfinished_window_are_true(stop: type[Exception] | None) -> None:
    class Stopping(Exact):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == 2 and stop:
                raise stop
            self.trainer.should_stop = batch_idx == 1
            return self.loss(batch)

    module = Stopping()
    with suppress(KeyError):
        make_trainer(make_plugin(), accumulate_grad_batches=4, min_epochs=0 if stop is None else 2).fit(
            module, factors(4, 4, 4, 4)
        )
    assert module.grad is not None
    assert module.grad.tolist() == (ROW * 2).tolist()


@pytest.mark.parametrize("owner", ["module", "callback"])
@all_precisions
def test_on_before_backward_sees_the_true_loss(owner: str, precision: PrecisionName) -> None:
    losses: list[float] = []

    class Offset(Exact):
        def loss(self, batch: Tensor) -> Tensor:
            return super().loss(batch) + 3

    def note(*args: Any) -> None:
        losses.append(args[-1].item())

    hooks = {"on_before_backward": note}
    module = type("Noting", (Offset,), hooks if owner == "module" else {})()
    callbacks = [type("Noter", (pl.Callback,), hooks)()] if owner == "callback" else []
    make_trainer(make_plugin(precision), callbacks=callbacks).fit(module, factors(1, 2))
    assert losses == [3, 3 - 2 * 16]


def test_a_hook_of_an_optimizer_sees_true_gradients() -> None:
    seen: list[float] = []

    def hooked(parameters: Iterable[Tensor]) -> Optimizer:
        optimizer = AdamW(parameters, fused=True)

        def note(optimizer: Optimizer, *args: Any) -> None:
            seen.append(optimizer.param_groups[0]["params"][0].grad[0, 0].item())

        optimizer.register_step_pre_hook(note)
        optimizer.register_step_post_hook(note)
        return optimizer

    make_trainer(make_plugin()).fit(Exact(hooked), factors(1, 2))
    assert seen == [2, 2, 4, 4]


@all_precisions
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW fused"])
@pytest.mark.parametrize("own", ["norm", "value", "torch norm", "torch value", "nothing"])
def test_overridden_configure_gradient_clipping(precision: PrecisionName, optimizer: str, own: str) -> None:
    class Clipping(Exact):
        def configure_gradient_clipping(
            self,
            optimizer: Optimizer,
            gradient_clip_val: float | None = None,
            gradient_clip_algorithm: str | None = None,
        ) -> None:
            assert gradient_clip_val == 32
            if own in ("norm", "value"):
                self.clip_gradients(optimizer, gradient_clip_val=32, gradient_clip_algorithm=own)
            elif own == "torch norm":
                nn.utils.clip_grad_norm_(self.parameters(), 32)
            elif own == "torch value":
                nn.utils.clip_grad_value_(self.parameters(), 32)

    compare(lambda: Clipping(OPTIMIZERS[optimizer]), make_plugin(precision), gradient_clip_val=32)


@all_precisions
@with_accumulation
def test_overridden_optimizer_step_that_runs_the_closure_itself(precision: PrecisionName, accumulate: int) -> None:
    class OwnStep(Exact):
        def __init__(self) -> None:
            super().__init__(OPTIMIZERS["AdamW fused"])
            self.seen: list[float] = []

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
            closure()
            assert self.linear.weight.grad is not None
            self.seen.append(self.linear.weight.grad[0, 0].item())
            self.linear.weight.grad.mul_(0.5)
            optimizer.step()

    module = compare(OwnStep, make_plugin(precision), [2, 4, 8, 16], accumulate_grad_batches=accumulate)
    assert module.seen == ([4, 8, 16, 32] if accumulate == 1 else [15])


@pytest.mark.parametrize("precision", ["16-mixed", "32-true"])
def test_a_step_that_the_user_declines_leaves_no_trace(precision: PrecisionName) -> None:
    class Careful(Exact):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
            closure()
            if self.grad is not None and self.grad.isfinite().all():
                optimizer.step()

    plugin = make_plugin(precision)
    module = compare(Careful, plugin, [1, NAN, 2, 4])
    assert module.weight.tolist() == (ROW * -7).tolist()
    assert plugin.counters == StepCounters(applied_steps=3)


def test_overridden_optimizer_step_with_a_warm_up() -> None:
    class WarmUp(Exact):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 2.0 ** (self.trainer.global_step - 4)
            super().optimizer_step(epoch, batch_idx, optimizer, closure)

    module = compare(WarmUp, make_plugin(), [1, 1, 1, 1])
    assert module.weight.tolist() == (ROW * -0.9375).tolist()


def test_overridden_backward() -> None:
    class Twice(Exact):
        def backward(self, loss: Tensor) -> None:
            loss.backward(retain_graph=True)
            loss.backward()

    module = compare(Twice, make_plugin(), [1, 2], accumulate_grad_batches=2)
    assert module.weight.tolist() == (ROW * -3).tolist()


# Steps that are skipped -----------------------------------------------------------------------------------------------


@all_optimizers
@all_clipping
@with_accumulation
def test_an_overflow_is_skipped_and_lowers_the_scale(
    optimizer: Callable[..., Optimizer], clip: dict[str, Any], accumulate: int
) -> None:
    """The first window ends with a gradient of 2^9, which times a scale of 2^9 is above 65504."""
    plugin = make_plugin(scale=2.0**9, growth_interval=3)
    module, reference = Exact(optimizer), Exact(optimizer)
    kwargs = {"accumulate_grad_batches": accumulate, **clip}
    good = [32] * (4 * accumulate)
    bad = [1] * (accumulate - 1) + [256 * accumulate]
    make_trainer(plugin, **kwargs).fit(module, factors(*bad, *good))
    make_trainer(**kwargs).fit(reference, factors(*good))
    torch.testing.assert_close(module.weight, reference.weight, rtol=0, atol=0)
    assert plugin.counters.skipped_steps == 1
    assert plugin.counters.applied_steps == 4
    assert scale_of(plugin) == 2.0**9  # lowered once, grown once after three clean steps


@all_precisions
@all_optimizers
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_bad_batch_is_skipped_in_every_precision(
    precision: PrecisionName, optimizer: Callable[..., Optimizer], bad: float
) -> None:
    plugin = make_plugin(precision)
    module, reference = Exact(optimizer), Exact(optimizer)
    with pytest.warns(RuntimeWarning, match="step 2 was skipped because the loss held inf or NaN"):
        make_trainer(plugin).fit(module, factors(1, 2, bad, 4, 8))
    make_trainer().fit(reference, factors(1, 2, 4, 8))
    torch.testing.assert_close(module.weight, reference.weight, rtol=0, atol=0)
    assert plugin.counters == StepCounters(applied_steps=4, skipped_steps=1, recent=0b00100)
    assert plugin.scaler is None or scale_of(plugin) == 2.0**8  # a lower one would not have helped


@pytest.mark.parametrize("hook", ["on_before_optimizer_step", "configure_gradient_clipping"])
@all_optimizers
def test_an_overflow_does_not_reach_the_hooks(hook: str, optimizer: Callable[..., Optimizer]) -> None:
    seen: list[Any] = []
    attributes = {"configure_optimizers": lambda self: optimizer(self.parameters())}
    module, _ = watch(hook, "module", seen, **attributes)
    plugin = make_plugin()
    make_trainer(plugin).fit(module, factors(256, 1))
    assert seen == [ROW.tolist()]
    assert scale_of(plugin) == 2.0**7


def test_a_skipped_step_leaves_no_gradient() -> None:
    seen: list[Any] = []
    module, callbacks = watch("on_train_batch_end", "callback", seen)
    make_trainer(make_plugin(), callbacks=callbacks).fit(module, factors(256, 1))
    assert seen == [None, ROW.tolist()]


@all_precisions
@all_clipping
@pytest.mark.parametrize("bad", [2, 3])
def test_an_infinite_loss_is_skipped_though_its_gradients_are_finite(
    precision: PrecisionName, clip: dict[str, Any], bad: int
) -> None:
    """On the first or the last micro-batch of the second window of two."""

    class Offset(Exact):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.loss(batch) + (INF if batch_idx == bad else 0)

    plugin, module = make_plugin(precision), Offset()
    with pytest.warns(RuntimeWarning, match="the loss held inf or NaN"):
        make_trainer(plugin, accumulate_grad_batches=2, **clip).fit(module, factors(1, 1, 2, 2, 4, 4))
    assert module.weight.tolist() == (ROW * -5).tolist()
    assert plugin.counters == StepCounters(applied_steps=2, skipped_steps=1, recent=0b010)


@all_precisions
@pytest.mark.parametrize("clip", ["none", "norm", "value"])
@pytest.mark.parametrize(
    "hook",
    ["on_before_optimizer_step", "on_after_backward", "configure_gradient_clipping", "callback", "optimizer_step"],
)
def test_nan_made_by_a_hook_never_reaches_the_weights(precision: PrecisionName, clip: str, hook: str) -> None:
    def spoil(module: Exact) -> None:
        assert module.linear.weight.grad is not None
        if module.trainer.fit_loop.epoch_loop.batch_idx == 1:
            module.linear.weight.grad[0, 3] = NAN

    def of_module(self: Exact, *args: Any, **kwargs: Any) -> None:
        spoil(self)

    def of_callback(self: pl.Callback, trainer: pl.Trainer, module: Exact, *args: Any) -> None:
        spoil(module)

    def step(self: Exact, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        closure()
        spoil(self)
        optimizer.step()

    callbacks: list[pl.Callback] = []
    module = Exact()
    if hook == "callback":
        callbacks.append(type("Spoiler", (pl.Callback,), {"on_before_optimizer_step": of_callback})())
    else:
        module = type("Spoiled", (Exact,), {hook: step if hook == "optimizer_step" else of_module})()
    plugin = make_plugin(precision, dynamic=False)  # so that nobody takes it for the fault of the scale
    with pytest.warns(RuntimeWarning, match="skipped"):
        make_trainer(plugin, callbacks=callbacks, **CLIPPING[clip]).fit(module, factors(1, 2, 4))
    assert module.weight.tolist() == (ROW * -5).tolist()
    assert plugin.counters == StepCounters(applied_steps=2, skipped_steps=1, recent=0b010)


@pytest.mark.parametrize("how", ["zero_grad", "nan_to_num", "clamp"])
def test_an_overflow_that_a_hook_tidies_away_still_lowers_the_scale(how: str) -> None:
    """Otherwise no step ever changes a weight, or each changes it wrongly, and nothing says so."""

    class Tidy(Exact):
        def on_after_backward(self) -> None:
            grad = self.linear.weight.grad
            assert grad is not None
            if how == "clamp":
                grad.clamp_(-32, 32)
            elif not grad.isfinite().all():
                self.zero_grad() if how == "zero_grad" else grad.nan_to_num_(0, 0, 0)

    plugin, module = make_plugin(scale=2.0**16), Tidy()
    make_trainer(plugin).fit(module, factors(*[4] * 16))
    assert scale_of(plugin) < 2.0**16
    applied = module.weight[0].item() / -8
    assert applied == plugin.counters.applied_steps > 0


@pytest.mark.parametrize(
    ("precision", "scale", "lowered"), [("16-mixed", 4.0, 2), ("bf16-mixed", 4.0, 0), ("32-true", 4.0, 0)]
)
def test_max_skipped_raises_when_no_lower_scale_is_left(precision: PrecisionName, scale: float, lowered: int) -> None:
    class InfiniteSlope(Exact):
        def loss(self, batch: Tensor) -> Tensor:
            return self.linear.weight.pow(2).sum().sqrt()  # 0, with a NaN for its gradient

    plugin, module = make_plugin(precision, scale=scale, max_skipped=3), InfiniteSlope()
    with (
        pytest.warns(RuntimeWarning, match="After 3 in a row the fit stops"),
        pytest.raises(NonFiniteStepError, match="3 optimizer steps in a row were skipped") as error,
    ):
        make_trainer(plugin).fit(module, factors(*[1] * 20))
    assert plugin.counters.skipped_steps == lowered + 3
    assert f"last loss scale {1:g})" in str(error.value)
    assert "gradient_clip_val" in str(error.value)
    assert module.weight.count_nonzero() == 0


def test_an_overflow_at_the_lowest_scale_is_not_taken_for_the_search_of_one() -> None:
    class InfiniteSlope(Exact):
        def loss(self, batch: Tensor) -> Tensor:
            return self.linear.weight.pow(2).sum().sqrt()

    plugin = make_plugin(scale=1.0, max_skipped=2)
    with (
        pytest.warns(RuntimeWarning, match="step 0 was skipped because the gradients"),
        pytest.raises(NonFiniteStepError),
    ):
        make_trainer(plugin).fit(InfiniteSlope(), factors(1, 1))
    assert plugin.counters.skipped_steps == 2


@all_precisions
def test_max_skipped_counts_in_a_row_only(precision: PrecisionName) -> None:
    plugin = make_plugin(precision, max_skipped=3)
    with pytest.warns(RuntimeWarning, match="skipped"), pytest.raises(NonFiniteStepError, match="last one was step 7"):
        make_trainer(plugin).fit(Exact(), factors(NAN, NAN, 1, NAN, 1, NAN, NAN, NAN, 1))
    extra = 0 if precision == "32-true" else 1  # the last one is put to the proof in float32 before the fit ends
    assert plugin.counters == StepCounters(2, 6, recent=0b11010111, retried_attempts=extra)


# Closures -------------------------------------------------------------------------------------------------------------


class Bowl(Exact):
    """A loss with a minimum, for optimizers that look for it within a step."""

    evaluations = 0

    def loss(self, batch: Tensor) -> Tensor:
        self.evaluations += 1
        return (self(batch).float() - 1).pow(2).sum()


class TwoEvaluations(SGD):
    """Steps along the gradient at a point a step ahead, as SAM and extragradient do."""

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        closure()
        weight = self.param_groups[0]["params"][0]
        start = weight.detach().clone()
        super().step()
        output = closure()
        weight.data.copy_(start)
        super().step()
        return output


class MovesFirst(TwoEvaluations):
    """Evaluates only at points away from where the step begins, so that no evaluation is known beforehand."""

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        weight = self.param_groups[0]["params"][0]
        with torch.no_grad():
            weight.add_(0.25)
        return super().step(closure)


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
@pytest.mark.parametrize("clip", ["none", "norm"])
@pytest.mark.parametrize(
    "optimizer",
    [
        LBFGS,
        partial(LBFGS, line_search_fn="strong_wolfe"),
        partial(TwoEvaluations, lr=2.0**-8),
        partial(MovesFirst, lr=2.0**-8),
    ],
    ids=["LBFGS", "strong Wolfe", "TwoEvaluations", "MovesFirst"],
)
def test_optimizers_that_evaluate_again(
    precision: PrecisionName, clip: str, optimizer: Callable[..., Optimizer]
) -> None:
    """As stock in the same precision, bitwise."""
    stock, module = Bowl(optimizer), Bowl(optimizer)
    stock_plugin = pl.plugins.MixedPrecision("bf16-mixed", "cpu") if precision == "bf16-mixed" else None
    kwargs = {"gradient_clip_val": 4.0} if clip == "norm" else {}
    make_trainer(stock_plugin, max_epochs=2, **kwargs).fit(stock, factors(0.25, 0.5, 1))
    make_trainer(make_plugin(precision), max_epochs=2, **kwargs).fit(module, factors(0.25, 0.5, 1))
    assert module.weight.count_nonzero() > 0
    torch.testing.assert_close(module.weight, stock.weight, rtol=0, atol=0)
    moves_first = isinstance(optimizer, partial) and issubclass(optimizer.func, MovesFirst)  # type: ignore[arg-type]
    assert module.evaluations == stock.evaluations + 6 * moves_first > 6  # one more per step: the check comes before


@pytest.mark.parametrize("optimizer", [LBFGS, partial(TwoEvaluations, lr=1.0)], ids=["LBFGS", "TwoEvaluations"])
def test_optimizers_that_evaluate_again_are_refused_in_float16(optimizer: Callable[..., Optimizer]) -> None:
    module = Bowl(optimizer)
    name = "LBFGS" if optimizer is LBFGS else "TwoEvaluations"
    with pytest.raises(RuntimeError, match=f"{name} evaluates its closure again.*'bf16-mixed'"):
        make_trainer(make_plugin("16-mixed")).fit(module, factors(0.25))
    assert module.weight.count_nonzero() == 0


# Set-up and the rest of the Trainer -----------------------------------------------------------------------------------


def test_float16_parameters_are_refused_by_name() -> None:
    module = Exact()
    module.linear.half()
    with pytest.raises(TypeError, match=r"'linear\.weight' is float16.*\.float\(\)"):
        make_trainer(make_plugin("16-mixed")).fit(module, factors(1))


def test_frozen_float16_parameters_are_welcome() -> None:
    module = Exact()
    module.register_parameter("table", nn.Parameter(torch.ones(8, dtype=torch.float16), requires_grad=False))
    make_trainer(make_plugin("16-mixed")).fit(module, factors(1))
    assert module.weight.tolist() == (ROW * -1).tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "16"}, "precision='16'.*16-mixed, bf16-mixed, 32-true"),
        ({"precision": None}, "precision=None"),
        ({"precision": "16-mixed", "max_skipped": 0}, "max_skipped=0.*at least 1"),
        ({"precision": "16-mixed", "max_skipped": 2.0}, "max_skipped=2.0"),
        ({"precision": "16-mixed", "max_skipped": True}, "max_skipped=True"),
        ({"precision": "16-mixed", "loss_scale": 1024.0}, "loss_scale=1024.0.*LossScale"),
        ({"keep_fp32": "*.wo"}, r"keep_fp32='\*\.wo'.*a list of patterns, such as"),
        ({"keep_fp32": [1]}, r"keep_fp32=\[1\].*a list of patterns"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        AdaptiveMixedPrecision(**arguments)


def test_precision_and_plugin_together_are_refused_by_lightning() -> None:
    with pytest.raises(ValueError, match="both"):
        make_trainer(make_plugin(), precision="16-mixed")


@all_precisions
def test_what_the_trainer_says_about_the_plugin(precision: PrecisionName) -> None:
    plugin = make_plugin(precision)
    trainer = make_trainer(plugin)
    assert trainer.precision_plugin is plugin
    assert trainer.precision == plugin.precision == precision
    assert trainer.scaler is plugin.scaler
    assert (plugin.scaler is not None) == (precision == "16-mixed")
    if plugin.scaler is not None:
        assert isinstance(plugin.scaler, torch.amp.GradScaler)
        assert plugin.scaler.get_scale() == 2.0**8


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("16-mixed", torch.float16), ("bf16-mixed", torch.bfloat16), ("32-true", torch.float32)],
)
def test_every_stage_computes_in_the_precision(precision: PrecisionName, dtype: torch.dtype) -> None:
    class Stages(Exact):
        def __init__(self) -> None:
            super().__init__()
            self.dtypes: list[torch.dtype] = []

        def note(self, batch: Tensor, batch_idx: int) -> Tensor:
            output = self(batch)
            self.dtypes.append(output.dtype)
            return output.float().sum()

        training_step = validation_step = test_step = predict_step = note

    module, trainer = Stages(), make_trainer(make_plugin(precision))
    data = factors(1)
    trainer.fit(module, data, data)
    trainer.validate(module, data, verbose=False)
    trainer.test(module, data, verbose=False)
    trainer.predict(module, data)
    assert module.dtypes == [dtype] * 5
    assert module.linear.weight.dtype == torch.float32
    assert module(ROW).dtype == torch.float32  # nothing is left switched on


@all_precisions
@pytest.mark.parametrize("outside", [torch.bfloat16, None])
@pytest.mark.parametrize(
    "name",
    ["forward_context", "train_step_context", "val_step_context", "test_step_context", "predict_step_context"],
)
def test_contexts_restore_autocast_when_the_body_raises(
    precision: PrecisionName, outside: torch.dtype | None, name: str
) -> None:
    context = getattr(make_plugin(precision), name)
    wanted = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16, "32-true": outside or torch.float32}[precision]
    with torch.autocast("cpu", torch.bfloat16, enabled=outside is not None):

        def seen() -> torch.dtype:
            return torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype

        before = seen()
        with suppress(KeyError), context():
            inside = seen()
            raise KeyError
        assert inside == wanted
        assert seen() == before == (outside or torch.float32)
    assert torch.get_default_dtype() == torch.float32


def test_a_second_fit_starts_at_the_configured_scale() -> None:
    plugin = make_plugin(scale=2.0**9)
    for _ in range(2):
        make_trainer(plugin).fit(Exact(), factors(256, 1))
        assert scale_of(plugin) == 2.0**8
        assert plugin.counters == StepCounters(applied_steps=1, skipped_steps=1, recent=0b10)


def test_evaluation_leaves_the_state_alone() -> None:
    plugin, module = make_plugin(scale=2.0**9), Exact()
    make_trainer(plugin).fit(module, factors(256, 1))
    make_trainer(plugin).predict(module, factors(1))
    assert scale_of(plugin) == 2.0**8
    assert plugin.counters.applied_steps == 1


@all_clipping
def test_last_step_reports_the_true_norm(clip: dict[str, Any]) -> None:
    plugin = make_plugin()

    class Asking(Exact):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            plugin.request_grad_norm()

    reports = []
    callback = pl.callbacks.LambdaCallback(on_train_batch_end=lambda *args: reports.append(plugin.last_step))
    make_trainer(plugin, callbacks=[callback], **clip).fit(Asking(), factors(32, 1))
    assert [report.grad_norm for report in reports if report] == [128, 4]
    by_norm = clip.get("gradient_clip_algorithm") == "norm"
    assert [report.clipped for report in reports if report] == ([True, False] if by_norm else [None, None])
    assert [report.scale for report in reports if report] == [256, 256]
    assert [report.step for report in reports if report] == [0, 1]


# Nothing global -------------------------------------------------------------------------------------------------------


def attributes_of(trainer: pl.Trainer, module: pl.LightningModule) -> list[dict[str, Any]]:
    """The attributes of all that a plugin might leave something in, hook dicts of modules and parameters included."""
    owners = [module, *module.children(), *module.parameters(), *trainer.optimizers, trainer, trainer.strategy]
    return [vars(owner) for owner in [*owners, trainer.fit_loop, trainer.fit_loop.epoch_loop]]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_nothing_is_left_in_module_trainer_or_optimizer(accumulate: int) -> None:
    modules, trainers = (
        [Exact(OPTIMIZERS["AdamW fused"]) for _ in range(2)],
        [make_trainer(plugin, accumulate_grad_batches=accumulate) for plugin in (None, make_plugin())],
    )
    for module, trainer in zip(modules, trainers, strict=True):
        trainer.fit(module, factors(1, 256))
    for stock, ours in zip(*map(attributes_of, trainers, modules), strict=True):
        assert set(ours) == set(stock)
        for name, value in ours.items():
            assert "lightning_amp_plus" not in type(value).__module__ or name == "_precision_plugin"
            if "hooks" in name:
                assert len(value) == len(stock[name])
    weight = modules[1].linear.weight
    assert not weight._backward_hooks
    assert not weight._post_accumulate_grad_hooks


@pytest.mark.parametrize("raises", [False, True], ids=["to the end", "after an exception"])
def test_nothing_is_left_of_kept_modules_and_the_rules(raises: bool) -> None:
    class Stops(Exact):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            assert "forward" in vars(self.linear)
            if raises and batch_idx == 1:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    plugin, module = AdaptiveMixedPrecision("16-mixed", keep_fp32=["linear"]), Stops()
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback()])
    with pytest.raises(ZeroDivisionError) if raises else nullcontext():
        trainer.fit(module, factors(1, 1))
    assert "forward" not in vars(module.linear)
    assert not {"validation_step", "test_step"} & set(vars(trainer.strategy))
    assert plugin.rules is None
    assert plugin._engine.module is None


def test_nothing_global_is_patched() -> None:
    def state() -> list[Any]:
        owners = (torch, torch.Tensor, torch.autograd, nn.Module, Optimizer, SGD, pl.LightningModule, pl.Trainer)
        levels = [logging.getLogger(name).level for name in ("", "lightning", "lightning.pytorch", "torch")]
        return [*({key: id(value) for key, value in vars(owner).items()} for owner in owners), levels]

    module, trainer = Exact(), make_trainer(make_plugin())
    make_trainer().fit(Exact(), factors(1))  # what Lightning and torch initialize lazily
    during: list[Any] = []
    module.on_before_optimizer_step = lambda optimizer: during.append(state())  # type: ignore[method-assign]
    before = state()
    trainer.fit(module, factors(1))
    assert during == [before]
    assert state() == before


def test_two_trainers_do_not_see_each_other() -> None:
    """One fit runs inside the other, in mid-window, and overflows."""
    outer, inner = make_plugin(scale=2.0**8), make_plugin(scale=2.0**9)
    inner_module = Exact()

    class Nesting(Exact):
        def on_train_batch_end(self, *args: Any) -> None:
            if self.trainer.global_step == 0:
                make_trainer(inner).fit(inner_module, factors(256, 1))

    module = Nesting()
    make_trainer(outer, accumulate_grad_batches=2).fit(module, factors(2, 4))
    assert module.weight.tolist() == (ROW * -3).tolist()
    assert inner_module.weight.tolist() == (ROW * -1).tolist()
    assert (scale_of(outer), scale_of(inner)) == (2.0**8, 2.0**8)
    assert outer.counters == StepCounters(applied_steps=1)
    assert inner.counters == StepCounters(applied_steps=1, skipped_steps=1, recent=0b10)


def test_a_negative_clip_value_clips_nothing_as_in_stock() -> None:
    module = Exact()
    make_trainer(make_plugin(), gradient_clip_val=-1.0).fit(module, factors(1, 2))
    assert module.weight.tolist() == (ROW * -3).tolist()
