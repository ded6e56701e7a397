"""Manual optimization in a real Trainer: the user's ``training_step`` owns the loop and sees true gradients anywhere.

The reference is the same ``training_step`` in a Trainer without a plugin, in float32. All numbers are powers of two, so
that the two agree bitwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from helpers import PRECISIONS, ROW, Exact, factors, make_plugin, make_trainer, scale_of, sgd
from namespace import AdaptiveMixedPrecision, pl
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer

from lightning_amp_plus import NonFiniteStepError, StepCounters
from lightning_amp_plus.precisions import PrecisionName

NAN, INF = float("nan"), float("inf")
BATCHES = (32, 8, 16, 8, 2, 2, 8, 4)
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "SGD": sgd,
    "AdamW foreach": partial(AdamW, lr=0.125, eps=16.0, foreach=True),
    "AdamW fused": partial(AdamW, lr=0.125, eps=16.0, fused=True),
}
TOO_HIGH = 512.0
"""A batch whose gradient overflows float16 at the scale of ``make_plugin``."""

all_precisions = pytest.mark.parametrize("precision", PRECISIONS)
all_optimizers = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=list(OPTIMIZERS))

Step = Callable[["Manual", Tensor, int], Any]


class Manual(Exact):
    """Two layers, ``linear`` and ``other``, whose gradients are the batch; ``step`` is the ``training_step``."""

    def __init__(self, step: Step, optimizer: Callable[..., Optimizer] = sgd, optimizers: int = 1) -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False
        self.other = nn.Linear(8, 1, bias=False)
        nn.init.zeros_(self.other.weight)
        self.step, self.count = step, optimizers
        self.seen: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.step(self, batch, batch_idx)

    def all_optimizers(self) -> Any:
        """What ``optimizers`` returns: one, or a list."""
        return self.optimizers()

    def configure_optimizers(self) -> Any:
        if self.count == 1:
            return self._optimizer(self.parameters())
        return [self._optimizer(layer.parameters()) for layer in (self.linear, self.other)]

    def both(self, batch: Tensor) -> Tensor:
        """A loss that reaches both layers."""
        return self.loss(batch) + self.other(batch).float().sum()

    def look(self) -> None:
        """Note both gradients."""
        for layer in (self.linear, self.other):
            self.seen.append(None if layer.weight.grad is None else layer.weight.grad.flatten().tolist())

    @property
    def weights(self) -> list[float]:
        """One element of each layer, the one that has learned ROW[3] = 1."""
        return [self.linear.weight[0, 3].item(), self.other.weight[0, 3].item()]


def compare(
    step: Step,
    plugin: AdaptiveMixedPrecision,
    batches: Iterable[float] = BATCHES,
    optimizer: Callable[..., Optimizer] = sgd,
    optimizers: int = 1,
    **kwargs: Any,
) -> Manual:
    """Fit without a plugin and with it; assert that weights and what was seen are the same; return our module."""
    reference, module = Manual(step, optimizer, optimizers), Manual(step, optimizer, optimizers)
    data = factors(*batches)
    make_trainer(**kwargs).fit(reference, data)
    make_trainer(plugin, **kwargs).fit(module, data)
    assert reference.weight.isfinite().all()
    assert reference.weight.count_nonzero() > 0
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert module.seen == reference.seen
    return module


def plain(module: Manual, batch: Tensor, batch_idx: int) -> None:
    optimizer = module.all_optimizers()
    optimizer.zero_grad()
    module.manual_backward(module.both(batch))
    optimizer.step()


def one_backward(module: Manual, batch: Tensor, batch_idx: int) -> None:
    """Several optimizers after one backward; the batch is ``linear``'s, a constant 1 is ``other``'s."""
    for optimizer in module.all_optimizers():
        optimizer.zero_grad()
    module.manual_backward(module.loss(batch) + module.other(ROW).float().sum())
    for optimizer in module.all_optimizers():
        optimizer.step()


# The update, and what user code sees ----------------------------------------------------------------------------------


@all_precisions
@all_optimizers
@pytest.mark.parametrize("clip", ["none", "norm", "value", "torch norm", "torch value", "twice"])
def test_clipping(precision: PrecisionName, optimizer: Callable[..., Optimizer], clip: str) -> None:
    def step(module: Manual, batch: Tensor, batch_idx: int) -> None:
        optimizer = module.all_optimizers()
        optimizer.zero_grad()
        module.manual_backward(module.loss(batch))
        module.look()
        if clip in ("norm", "value", "twice"):
            algorithm = "norm" if clip == "twice" else clip
            module.clip_gradients(optimizer, gradient_clip_val=32, gradient_clip_algorithm=algorithm)
        if clip == "torch norm":
            module.seen.append(nn.utils.clip_grad_norm_(module.parameters(), 32.0).item())
        if clip in ("torch value", "twice"):
            nn.utils.clip_grad_value_(module.parameters(), 8.0)
        module.look()
        optimizer.step()
        module.look()

    plugin = make_plugin(precision)
    module = compare(step, plugin, optimizer=optimizer)
    assert module.seen[0] == (ROW * 32).tolist()
    assert plugin.counters == StepCounters(applied_steps=8)


@all_optimizers
@pytest.mark.parametrize("zero", ["before", "after"])
@pytest.mark.parametrize("clip", [False, True])
def test_accumulation_with_a_clip_in_each_iteration(optimizer: Callable[..., Optimizer], zero: str, clip: bool) -> None:
    def step(module: Manual, batch: Tensor, batch_idx: int) -> None:
        optimizer = module.all_optimizers()
        module.look()
        if zero == "before" and batch_idx % 4 == 0:
            optimizer.zero_grad()
        module.manual_backward(module.both(batch) / 4)
        if clip:
            module.clip_gradients(optimizer, gradient_clip_val=4, gradient_clip_algorithm="value")
        module.look()
        if batch_idx % 4 == 3:
            optimizer.step()
            if zero == "after":
                optimizer.zero_grad()

    plugin = make_plugin()
    compare(step, plugin, optimizer=optimizer)
    assert plugin.counters == StepCounters(applied_steps=2)


def test_a_clip_without_a_step() -> None:
    def step(module: Manual, batch: Tensor, batch_idx: int) -> None:
        module.manual_backward(module.loss(batch))
        module.clip_gradients(module.all_optimizers(), gradient_clip_val=16, gradient_clip_algorithm="value")
        module.look()

    plugin, module = make_plugin(), Manual(step)
    make_trainer(plugin).fit(module, factors(4, 4, 4))
    assert [grad[0] for grad in module.seen[::2]] == [8, 16, 16]
    assert module.weights == [0, 0]
    assert plugin.counters == StepCounters()


def test_gradients_are_true_at_any_point_of_training_step() -> None:
    def step(module: Manual, batch: Tensor, batch_idx: int) -> None:
        optimizers = module.all_optimizers()
        module.look()
        loss = module.both(batch)
        module.look()
        module.manual_backward(loss, retain_graph=True)
        module.look()
        module.manual_backward(loss)
        module.look()
        optimizers[batch_idx % 2].step()
        module.look()
        optimizers[batch_idx % 2].zero_grad()
        module.look()

    module = compare(step, make_plugin(), optimizers=2)
    assert module.seen[4][3] == 32
    assert module.seen[6][3] == 64


@pytest.mark.parametrize("hook", ["on_before_optimizer_step", "on_after_backward", "on_train_batch_end"])
def test_hooks_see_true_gradients(hook: str) -> None:
    def observe(plugin: AdaptiveMixedPrecision | None) -> list[Any]:
        cls = type("Watched", (Manual,), {hook: lambda self, *args: self.look()})
        module: Manual = cls(one_backward, optimizers=2)
        make_trainer(plugin).fit(module, factors(1, 2))
        return module.seen

    seen = observe(make_plugin())
    assert seen == observe(None)
    assert seen[-2:] == [(ROW * 2).tolist(), ROW.tolist()]


@all_precisions
@all_optimizers
def test_optimizers_at_different_rates(precision: PrecisionName, optimizer: Callable[..., Optimizer]) -> None:
    """As a GAN that trains its critic three times as often."""

    def step(module: Manual, batch: Tensor, batch_idx: int) -> None:
        critic, generator = module.all_optimizers()
        module.manual_backward(module.both(batch))
        critic.step()
        critic.zero_grad()
        if batch_idx % 3 == 2:
            module.clip_gradients(generator, gradient_clip_val=32, gradient_clip_algorithm="value")
            generator.step()
            generator.zero_grad()
        module.look()

    plugin = make_plugin(precision)
    compare(step, plugin, optimizer=optimizer, optimizers=2)
    assert plugin.counters == StepCounters(applied_steps=8 + 2)


@pytest.mark.parametrize("how", ["toggle_optimizer", "toggle_model", "neither"])
def test_gan(how: str) -> None:
    """Each optimizer has a backward of its own that reaches the other's parameters too, if they are not frozen."""

    def step(module: Manual, batch: Tensor, batch_idx: int) -> None:
        for optimizer in module.all_optimizers():
            if how == "toggle_model":
                with optimizer.toggle_model():
                    optimizer.zero_grad()
                    module.manual_backward(module.both(batch))
                    module.look()
                    optimizer.step()
            else:
                if how == "toggle_optimizer":
                    module.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                module.manual_backward(module.both(batch))
                module.look()
                optimizer.step()
                if how == "toggle_optimizer":
                    module.untoggle_optimizer(optimizer)

    module = compare(step, make_plugin(), [1, 2, 4], optimizers=2)
    assert module.weights == [-7, -7]


def test_a_frozen_optimizer_keeps_its_pending_gradient() -> None:
    def step(module: Manual, batch: Tensor, batch_idx: int) -> None:
        first, second = module.all_optimizers()
        if batch_idx == 0:
            module.manual_backward(module.both(batch))  # pending for the second
        module.toggle_optimizer(first)
        first.zero_grad()
        module.manual_backward(module.both(batch))
        first.step()
        module.untoggle_optimizer(first)
        module.look()
        if batch_idx == 2:
            second.step()

    module = compare(step, make_plugin(), [1, 2, 4], optimizers=2)
    assert module.weights == [-7, -1]


@all_precisions
@all_optimizers
@pytest.mark.parametrize("toggle", [False, True])
def test_closures(precision: PrecisionName, optimizer: Callable[..., Optimizer], toggle: bool) -> None:
    def step(module: Manual, batch: Tensor, batch_idx: int) -> None:
        for optimizer in module.all_optimizers():

            def closure(optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = module.both(batch) + 3
                module.manual_backward(loss)
                module.look()
                return loss

            if toggle:
                with optimizer.toggle_model():
                    module.seen.append(optimizer.step(closure=closure).isfinite())
            else:
                module.seen.append(optimizer.step(closure=closure).isfinite())

    plugin = make_plugin(precision)
    compare(step, plugin, [1, 2, 4], optimizer=optimizer, optimizers=2)
    assert plugin.counters.applied_steps == 6


def test_a_parameter_that_two_optimizers_share() -> None:
    class Shared(Manual):
        def configure_optimizers(self) -> Any:
            return sgd(self.parameters()), SGD(self.linear.parameters(), lr=0.25)

    module = Shared(one_backward)
    make_trainer(make_plugin()).fit(module, factors(1, 2))
    assert module.weights == [-3.75, -2]


@pytest.mark.parametrize("late", [False, True], ids=["trainable", "unfrozen later"])
def test_gradients_of_a_parameter_without_an_optimizer_are_true(late: bool) -> None:
    class Foreign(Manual):
        def configure_optimizers(self) -> Any:
            return sgd(self.linear.parameters())

    def step(module: Manual, batch: Tensor, batch_idx: int) -> None:
        module.other.requires_grad_(True)
        plain(module, batch, batch_idx)
        module.look()

    module = Foreign(step)
    module.other.requires_grad_(not late)
    make_trainer(make_plugin()).fit(module, factors(1, 2, 4))
    assert [grad[3] for grad in module.seen[1::2]] == [1, 3, 7]  # nobody zeroes it


@pytest.mark.parametrize("mixed", [False, True], ids=["only", "beside manual_backward"])
def test_plain_backward(mixed: bool) -> None:
    def step(module: Manual, batch: Tensor, batch_idx: int) -> None:
        optimizer = module.all_optimizers()
        optimizer.zero_grad()
        module.loss(batch).backward()
        module.look()
        if mixed:
            module.manual_backward(module.both(batch))
            module.look()
            module.other(batch).float().sum().backward()
        module.look()
        optimizer.step()

    module = compare(step, make_plugin(), [1, 2, 4])
    assert module.weights == ([-14, -14] if mixed else [-7, 0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_loss_that_is_no_scalar(dtype: torch.dtype) -> None:
    def step(module: Manual, batch: Tensor, batch_idx: int) -> None:
        optimizer = module.all_optimizers()
        optimizer.zero_grad()
        loss = module(batch.expand(2, -1)).to(dtype)
        module.manual_backward(loss, gradient=torch.tensor([[2.0], [-0.5]], dtype=dtype))
        module.look()
        optimizer.step()

    assert compare(step, make_plugin(), [1, 2, 4]).weights[0] == -7 * 1.5


@pytest.mark.parametrize("scale", [2.0**8, 2.0**16])
def test_a_float16_loss_trains_from_the_first_step(scale: float) -> None:
    def step(module: Manual, batch: Tensor, batch_idx: int) -> None:
        optimizer = module.all_optimizers()
        optimizer.zero_grad()
        module.manual_backward(module(batch)[0, 0])
        module.look()
        optimizer.step()

    plugin = make_plugin(scale=scale)
    compare(step, plugin, [2.0**-4] * 3)
    assert plugin.counters == StepCounters(applied_steps=3)


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True")
def test_a_gradient_penalty_through_create_graph() -> None:
    def step(module: Manual, batch: Tensor, batch_idx: int) -> None:
        optimizer = module.all_optimizers()
        optimizer.zero_grad()
        module.manual_backward(((module.linear.weight * batch).sum() + 1).pow(2), create_graph=True)
        module.look()
        assert module.linear.weight.grad is not None
        module.manual_backward(module.linear.weight.grad.pow(2).sum())
        module.look()
        optimizer.step()
        module.linear.weight.grad = None

    compare(step, make_plugin(), [0.5, 0.25, 1], optimizer=partial(SGD, lr=2.0**-10))


def test_an_exception_in_manual_backward_that_the_user_catches() -> None:
    class Explosive(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor) -> Tensor:
            return tensor.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise KeyError("boom")

    def step(module: Manual, batch: Tensor, batch_idx: int) -> None:
        optimizer = module.all_optimizers()
        optimizer.zero_grad()
        module.manual_backward(module.both(batch))
        with suppress(KeyError):
            module.manual_backward(Explosive.apply(module.linear.weight).sum())
        module.look()
        optimizer.step()

    assert compare(step, make_plugin(), [1, 2, 4]).weights == [-7, -7]


@all_precisions
def test_a_step_without_gradients_is_a_no_op(precision: PrecisionName) -> None:
    def step(module: Manual, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 1:
            module.all_optimizers().step()
        else:
            plain(module, batch, batch_idx)
            module.all_optimizers().zero_grad()

    plugin = make_plugin(precision)
    compare(step, plugin, optimizer=AdamW)
    assert plugin.counters.skipped_steps == 0


def test_a_raw_optimizer_gets_true_gradients() -> None:
    def step(module: Manual, batch: Tensor, batch_idx: int) -> None:
        optimizer = module.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, Optimizer)
        optimizer.zero_grad()
        module.manual_backward(module.loss(batch))
        optimizer.step()

    compare(step, make_plugin())


@all_precisions
def test_an_optimizer_computes_in_float32(precision: PrecisionName) -> None:
    """``training_step``, and with it the step of the user, runs in autocast; the products of an optimizer must not."""

    class Preconditioned(SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for weight in self.param_groups[0]["params"]:
                if weight.grad is not None:
                    weight.sub_(weight.grad @ (torch.eye(8) * 2.0**16) * 2.0**-16)

    compare(plain, make_plugin(precision), [1, 2, 4], optimizer=partial(Preconditioned, lr=1.0))


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_lbfgs_is_as_stock(precision: PrecisionName) -> None:
    def step(module: Manual, batch: Tensor, batch_idx: int) -> None:
        optimizer = module.all_optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (module(batch).float() - 1).pow(2).sum()
            module.manual_backward(loss)
            module.look()
            return loss

        optimizer.step(closure=closure)

    modules = [Manual(step, LBFGS) for _ in range(2)]
    stock = pl.plugins.MixedPrecision("bf16-mixed", "cpu") if precision == "bf16-mixed" else None
    for module, plugin in zip(modules, (stock, make_plugin(precision)), strict=True):
        make_trainer(plugin).fit(module, factors(0.25, 0.5))
    assert modules[0].weight.count_nonzero() > 0
    assert len(modules[0].seen) > 4
    assert modules[1].seen == modules[0].seen
    torch.testing.assert_close(modules[1].weight, modules[0].weight, rtol=0, atol=0)


def test_lbfgs_is_refused_in_float16() -> None:
    def step(module: Manual, batch: Tensor, batch_idx: int) -> None:
        module.all_optimizers().step(closure=lambda: None)

    with pytest.raises(RuntimeError, match=r"LBFGS evaluates its closure again.*'bf16-mixed'"):
        make_trainer(make_plugin("16-mixed")).fit(Manual(step, LBFGS), factors(1))


# The scaler in the hands of the user ----------------------------------------------------------------------------------


@all_optimizers
@pytest.mark.parametrize("times", [1, 2])
def test_unscale_is_harmless(optimizer: Callable[..., Optimizer], times: int) -> None:
    plugin = make_plugin()

    def step(module: Manual, batch: Tensor, batch_idx: int) -> None:
        optimizer = module.all_optimizers()
        optimizer.zero_grad()
        module.manual_backward(module.both(batch))
        if module.trainer.scaler is not None:
            for _ in range(times):
                module.trainer.scaler.unscale_(optimizer)
        module.look()
        nn.utils.clip_grad_value_(module.parameters(), 8.0)
        optimizer.step()

    compare(step, plugin, optimizer=optimizer)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("update", [False, True])
def test_scaler_by_hand_around_manual_backward(unscale: bool, update: bool) -> None:
    """What worked against stock, whose scaler had to be driven; the scale still grows once per iteration."""
    plugin = make_plugin(growth_interval=2)
    scaler = plugin.scaler
    assert scaler is not None

    def step(module: Manual, batch: Tensor, batch_idx: int) -> None:
        optimizer = module.all_optimizers()
        optimizer.zero_grad()
        module.manual_backward(module.loss(batch))
        if unscale:
            scaler.unscale_(optimizer)
        module.look()
        scaler.step(optimizer)
        if update:
            scaler.update()

    module = Manual(step)
    make_trainer(plugin).fit(module, factors(1, 2, 4, 8))
    assert module.weights[0] == -15
    assert scale_of(plugin) == 2.0**10


@all_optimizers
def test_scaler_all_by_hand(optimizer: Callable[..., Optimizer]) -> None:
    plugin = make_plugin(growth_interval=2)
    scaler = plugin.scaler
    assert scaler is not None

    def by_hand(module: Manual, batch: Tensor, batch_idx: int) -> None:
        optimizer = module.all_optimizers()
        optimizer.zero_grad()
        scaler.scale(module.both(batch)).backward()
        scaler.unscale_(optimizer)
        module.clip_gradients(optimizer, gradient_clip_val=8, gradient_clip_algorithm="value")
        scaler.step(optimizer)
        scaler.update()

    def as_usual(module: Manual, batch: Tensor, batch_idx: int) -> None:
        optimizer = module.all_optimizers()
        optimizer.zero_grad()
        module.manual_backward(module.both(batch))
        module.clip_gradients(optimizer, gradient_clip_val=8, gradient_clip_algorithm="value")
        optimizer.step()

    module, reference = Manual(by_hand, optimizer), Manual(as_usual, optimizer)
    make_trainer(plugin).fit(module, factors(1, 2, TOO_HIGH, 4, 8))
    make_trainer().fit(reference, factors(1, 2, 4, 8))
    torch.testing.assert_close(module.weight, reference.weight, rtol=0, atol=0)
    assert scale_of(plugin) == 2.0**9  # grown, lowered, grown


@pytest.mark.parametrize("end", ["optimizer.step()", "scaler.step(optimizer)", "unscale_, optimizer.step()"])
def test_a_half_hand_driven_scaler_is_right_or_raises(end: str) -> None:
    """A forgotten unscale or update must not put gradients into the weights that are 256 times too large."""
    plugin = make_plugin()
    scaler = plugin.scaler
    assert scaler is not None

    def step(module: Manual, batch: Tensor, batch_idx: int) -> None:
        optimizer = module.all_optimizers()
        optimizer.zero_grad()
        scaler.scale(module.loss(batch)).backward()
        if end == "scaler.step(optimizer)":
            scaler.step(optimizer)
            return
        if end.startswith("unscale_"):
            scaler.unscale_(optimizer)
        optimizer.step()

    module = Manual(step)
    with suppress(RuntimeError):
        make_trainer(plugin).fit(module, factors(1, 2))
    assert module.weights[0] in (0, -1, -3)


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("unscale", [True, False])
def test_scale_by_hand_before_manual_backward(used: bool, unscale: bool) -> None:
    """Whether the scaled loss goes into ``manual_backward``, or the loss does and the scaled one is dropped."""
    plugin = make_plugin(scale=2.0**4)
    scaler = plugin.scaler
    assert scaler is not None

    def step(module: Manual, batch: Tensor, batch_idx: int) -> None:
        optimizer = module.all_optimizers()
        optimizer.zero_grad()
        loss = module.loss(batch)
        scaled = scaler.scale(loss)
        module.manual_backward(scaled if used else loss)
        if unscale:
            scaler.unscale_(optimizer)
        optimizer.step()
        scaler.update()

    module = Manual(step)
    make_trainer(plugin).fit(module, factors(1, 2))
    assert module.weights[0] == -3


# Overflows ------------------------------------------------------------------------------------------------------------


def test_only_the_optimizer_that_overflowed_is_skipped() -> None:
    plugin = make_plugin()
    module = Manual(one_backward, optimizers=2)
    make_trainer(plugin).fit(module, factors(1, TOO_HIGH, 2))
    assert module.weights == [-3, -3]
    assert plugin.counters == StepCounters(applied_steps=5, skipped_steps=1, recent=0b001000)
    assert scale_of(plugin) == 2.0**7


@all_precisions
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_bad_batch_is_skipped_in_every_precision(precision: PrecisionName, bad: float) -> None:
    plugin = make_plugin(precision)
    module = Manual(one_backward, optimizer=OPTIMIZERS["AdamW fused"], optimizers=2)
    reference = Manual(one_backward, optimizer=OPTIMIZERS["AdamW fused"], optimizers=2)
    with pytest.warns(RuntimeWarning, match="step 2 was skipped"):
        make_trainer(plugin).fit(module, factors(1, bad, 2))
    make_trainer().fit(reference, factors(1, 2))
    torch.testing.assert_close(module.weight, reference.weight, rtol=0, atol=0)
    assert module.other.weight.isfinite().all()
    assert plugin.counters == StepCounters(applied_steps=5, skipped_steps=1, recent=0b001000)
    assert plugin.scaler is None or scale_of(plugin) == 2.0**8


def test_a_gradient_that_the_user_turns_into_nan_is_skipped() -> None:
    def step(module: Manual, batch: Tensor, batch_idx: int) -> None:
        module.all_optimizers().zero_grad()
        module.manual_backward(module.loss(batch))
        assert module.linear.weight.grad is not None
        if batch_idx == 1:
            module.linear.weight.grad.div_(0)
        module.all_optimizers().step()

    module, plugin = Manual(step), make_plugin("32-true")
    with pytest.warns(RuntimeWarning, match="skipped"):
        make_trainer(plugin).fit(module, factors(1, 2, 4))
    assert module.weights[0] == -5


def test_gradients_of_another_rate_survive_a_change_of_scale() -> None:
    """The second optimizer accumulates over an iteration in which the first overflows and the scale changes."""

    def step(module: Manual, batch: Tensor, batch_idx: int) -> None:
        first, second = module.all_optimizers()
        first.zero_grad()
        module.manual_backward(module.loss(batch) + module.other(ROW).float().sum())
        module.seen.append(None if module.other.weight.grad is None else module.other.weight.grad[0, 3].item())
        first.step()
        if batch_idx == 3:
            second.step()

    plugin, module = make_plugin(), Manual(step, optimizers=2)
    make_trainer(plugin).fit(module, factors(1, TOO_HIGH, 2, 4))
    assert module.seen == [1, 2, 3, 4]
    assert module.weights == [-7, -4]
    assert scale_of(plugin) == 2.0**7


def test_an_overflow_is_blamed_on_the_largest_scale_of_its_gradients() -> None:
    """Those of the second optimizer begin at 2^8, then the scale grows to 2^9, where 128 times it is above 65504."""

    def step(module: Manual, batch: Tensor, batch_idx: int) -> None:
        first, second = module.all_optimizers()
        first.zero_grad()
        module.manual_backward(module.loss(ROW) + module.other(batch).float().sum())
        first.step()
        if batch_idx == 1:
            second.step()

    plugin, module = make_plugin(growth_interval=1), Manual(step, optimizers=2)
    make_trainer(plugin).fit(module, factors(1, 64))
    assert module.weights == [-2, 0]
    assert scale_of(plugin) == 2.0**8


@pytest.mark.parametrize("clip", ["clip_gradients", "clip_grad_value_"])
def test_clipping_does_not_hide_an_overflow(clip: str) -> None:
    """inf clipped to 16 is a finite gradient, and a wrong one: the true one is 2^-4 in all elements."""

    def step(module: Manual, batch: Tensor, batch_idx: int) -> None:
        optimizer = module.all_optimizers()
        optimizer.zero_grad()
        # The gradient of the output of ``linear`` is 4 times the scale, which is above 65504.
        module.manual_backward(module(torch.full_like(batch, 2.0**-6)).float().sum() * 4)
        if clip == "clip_gradients":
            module.clip_gradients(optimizer, gradient_clip_val=16, gradient_clip_algorithm="value")
        else:
            nn.utils.clip_grad_value_(module.parameters(), 16)
        optimizer.step()

    plugin, module = make_plugin(scale=2.0**16), Manual(step)
    make_trainer(plugin).fit(module, factors(*[1] * 8))
    assert plugin.counters == StepCounters(applied_steps=5, skipped_steps=3, recent=0b11100000)
    assert module.weight.tolist() == [-5 * 2.0**-4] * 8
    assert scale_of(plugin) == 2.0**13


def test_the_scale_is_lowered_once_per_iteration() -> None:
    def step(module: Manual, batch: Tensor, batch_idx: int) -> None:
        for optimizer in module.all_optimizers():
            optimizer.zero_grad()
        module.manual_backward(module.both(batch))
        for optimizer in module.all_optimizers():
            optimizer.step()

    plugin, module = make_plugin(), Manual(step, optimizers=2)
    make_trainer(plugin).fit(module, factors(TOO_HIGH))
    assert plugin.counters.skipped_steps == 2
    assert scale_of(plugin) == 2.0**7


@pytest.mark.parametrize(("iterations", "scale"), [(1, 2.0**8), (2, 2.0**7)])
def test_two_optimizers_are_one_overflow_for_hysteresis(iterations: int, scale: float) -> None:
    def step(module: Manual, batch: Tensor, batch_idx: int) -> None:
        for optimizer in module.all_optimizers():
            optimizer.zero_grad()
        module.manual_backward(module.both(batch))
        for optimizer in module.all_optimizers():
            optimizer.step()

    plugin = make_plugin(hysteresis=2)
    make_trainer(plugin).fit(Manual(step, optimizers=2), factors(*[TOO_HIGH] * iterations))
    assert scale_of(plugin) == scale


@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_scale_grows_once_per_iteration_with_a_step(optimizers: int, accumulate: int) -> None:
    def step(module: Manual, batch: Tensor, batch_idx: int) -> None:
        module.manual_backward(module.both(batch))
        if (batch_idx + 1) % accumulate == 0:
            opts = module.all_optimizers()
            for optimizer in opts if isinstance(opts, list) else [opts]:
                optimizer.step()
                optimizer.zero_grad()

    plugin = make_plugin(growth_interval=2)
    make_trainer(plugin).fit(Manual(step, optimizers=optimizers), factors(*[1] * 8))
    assert scale_of(plugin) == 2.0 ** (12 if accumulate == 1 else 10)


def test_an_iteration_with_an_overflow_does_not_count_for_growth() -> None:
    """Whichever of the two optimizers overflowed."""
    for order in (1, -1):

        def step(module: Manual, batch: Tensor, batch_idx: int, order: int = order) -> None:
            for optimizer in module.all_optimizers():
                optimizer.zero_grad()
            module.manual_backward(module.loss(batch) + module.other(ROW).float().sum())
            for optimizer in module.all_optimizers()[::order]:
                optimizer.step()

        plugin = make_plugin(growth_interval=3)
        make_trainer(plugin).fit(Manual(step, optimizers=2), factors(1, 1, TOO_HIGH, 1, 1))
        assert scale_of(plugin) == 2.0**7
        assert plugin.scaler is not None
        assert plugin.scaler.state_dict()["_growth_tracker"] == 2


def test_lr_schedules_can_be_held_by_last_step_skipped() -> None:
    plugin = make_plugin()

    class Scheduled(Manual):
        def configure_optimizers(self) -> Any:
            optimizer = sgd(self.parameters())
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def step(module: Manual, batch: Tensor, batch_idx: int) -> None:
        plain(module, batch, batch_idx)
        module.seen.append(plugin.last_step_skipped)
        schedule: Any = module.lr_schedulers()
        if not plugin.last_step_skipped:
            schedule.step()

    module = Scheduled(step)
    make_trainer(plugin).fit(module, factors(1, TOO_HIGH, TOO_HIGH / 2, 1))
    assert module.seen == [False, True, True, False]
    assert module.weights == [-1.5, -1.5]
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == 0.25


@all_precisions
def test_max_skipped_is_per_optimizer(precision: PrecisionName) -> None:
    """The good steps of the one in between do not excuse the other."""
    plugin, module = make_plugin(precision, max_skipped=3), Manual(one_backward, optimizers=2)
    with (
        pytest.warns(RuntimeWarning, match="After 3 in a row the fit stops"),
        pytest.raises(NonFiniteStepError, match=r"3 optimizer steps in a row .* last one was step 8"),
    ):
        make_trainer(plugin).fit(module, factors(1, 1, NAN, NAN, NAN, 1))
    assert module.weights == [-2, -4]


def test_skips_of_two_optimizers_do_not_add_up() -> None:
    def step(module: Manual, batch: Tensor, batch_idx: int) -> None:
        good, bad = (ROW, batch) if batch_idx % 2 else (batch, ROW)
        for optimizer in module.all_optimizers():
            optimizer.zero_grad()
        module.manual_backward(module.loss(good) + module.other(bad).float().sum())
        for optimizer in module.all_optimizers():
            optimizer.step()

    plugin, module = make_plugin("32-true", max_skipped=2), Manual(step, optimizers=2)
    with pytest.warns(RuntimeWarning, match="skipped"):
        make_trainer(plugin).fit(module, factors(*[NAN] * 6))
    assert plugin.counters.skipped_steps == 6
    assert module.weights == [-3, -3]
