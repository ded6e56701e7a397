"""PrecisionFallback: when a run moves on, where to, and that it is told, resumed and ended."""

import importlib
import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_trainer
from namespace import AdaptiveMixedPrecision, AMPMonitor, PrecisionFallback, pl
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp_plus import LossScale, NonFiniteStepError, StepCounters, StepReport
from lightning_amp_plus.report import Precision

# The first skip is told too; these tests are about what follows from several.
pytestmark = pytest.mark.filterwarnings("ignore:Optimizer step .* was skipped")


class Hot(pl.LightningModule):
    """Its activations are 2^17, above float16's 65504; its gradient is 1. ``worse`` makes it inf in bfloat16 too."""

    def __init__(self, *, worse: bool = False, manual: bool = False, fused: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.linear = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.linear.weight)
        self.worse, self.fused = worse, fused
        self.dtypes: list[torch.dtype] = []

    def loss(self, batch: Tensor) -> Tensor:
        hidden = self.linear(batch * 2.0**17)
        self.dtypes.append(hidden.dtype)
        bad = self.worse and hidden.dtype is not torch.float32
        return hidden.float().sum() * 2.0**-17 * (float("inf") if bad else 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            return self.loss(batch)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        return None

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=2.0**-4, fused=self.fused)


def batches(count: int) -> DataLoader[Tensor]:
    rows: Any = torch.ones(count, 1)
    return DataLoader(rows)


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize(("worse", "reached"), [(False, "bf16-mixed"), (True, "32-true")])
def test_it_moves_to_the_first_rung_that_holds(worse: bool, reached: Precision, fused: bool, manual: bool) -> None:
    plugin, module = AdaptiveMixedPrecision("16-mixed"), Hot(worse=worse, manual=manual, fused=fused)
    clip = {} if manual else {"gradient_clip_val": 100.0}
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback()], **clip)
    with pytest.warns(RuntimeWarning, match="3 optimizer steps in a row .* the run computes in") as told:
        trainer.fit(module, batches(10))
    assert f"the run computes in '{reached}'" in str(told[-1].message)
    failed = 6 if worse else 3
    assert (plugin.counters.applied_steps, plugin.counters.skipped_steps) == (10 - failed, failed)
    assert module.linear.weight.item() == 1 - (10 - failed) * 2.0**-4
    assert trainer.precision == reached
    assert plugin.scaler is not None
    assert (plugin.scaler.get_scale(), plugin.scaler.is_enabled()) == (1.0, False)
    trainer.test(module, batches(1), verbose=False)
    assert module.dtypes[-1] is (torch.float32 if worse else torch.bfloat16)


def test_it_moves_between_windows() -> None:
    plugin, module = AdaptiveMixedPrecision("16-mixed"), Hot()
    with pytest.warns(RuntimeWarning, match="bf16-mixed"):
        make_trainer(plugin, callbacks=[PrecisionFallback(patience=2)], accumulate_grad_batches=3).fit(
            module, batches(12)
        )
    assert module.dtypes == [torch.float16] * 6 + [torch.bfloat16] * 6
    assert plugin.counters == StepCounters(applied_steps=2, skipped_steps=2, recent=0b1100)


def test_clean_steps_in_between_keep_it_where_it_is() -> None:
    rows: Any = torch.tensor([1.0, float("nan")] * 8).reshape(16, 1) * 2.0**-4
    plugin = AdaptiveMixedPrecision("16-mixed")
    make_trainer(plugin, callbacks=[PrecisionFallback(patience=2)]).fit(Hot(), DataLoader(rows))
    assert plugin.precision == "16-mixed"
    assert plugin.counters.skipped_steps == 8


def test_the_last_rung_ends_in_an_error_with_counts() -> None:
    plugin = AdaptiveMixedPrecision("16-mixed", max_skipped=4)
    rows: Any = torch.full((40, 1), float("nan"))
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback()])
    with (
        pytest.warns(RuntimeWarning, match="the run computes in"),
        pytest.raises(NonFiniteStepError, match=r"4 optimizer steps in a row .*'32-true'.* step 9"),
    ):
        trainer.fit(Hot(), DataLoader(rows))
    assert plugin.counters.skipped_steps == 3 + 3 + 4


def test_a_checkpoint_is_resumed_on_its_rung_and_a_second_fit_starts_anew(tmp_path: Path) -> None:
    plugin = AdaptiveMixedPrecision("16-mixed")
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback()])
    with pytest.warns(RuntimeWarning, match="bf16-mixed"):
        trainer.fit(Hot(), batches(5))
    trainer.save_checkpoint(tmp_path / "a.ckpt")

    resumed, module = AdaptiveMixedPrecision("16-mixed"), Hot()
    trainer = make_trainer(resumed, callbacks=[PrecisionFallback()], max_epochs=2)
    trainer.fit(module, batches(5), ckpt_path=tmp_path / "a.ckpt")
    assert module.dtypes == [torch.bfloat16] * 5
    assert resumed.counters == StepCounters(applied_steps=7, skipped_steps=3, recent=0b1110000000)

    again = Hot()
    with pytest.warns(RuntimeWarning, match="bf16-mixed"):
        make_trainer(resumed, callbacks=[PrecisionFallback()]).fit(again, batches(4))
    assert again.dtypes == [torch.float16] * 3 + [torch.bfloat16]
    assert resumed.policy is None  # nothing stays behind


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ladder": ()}, r"ladder=\(\).*16-mixed, bf16-mixed, 32-true, in this order"),
        ({"ladder": ("32-true", "16-mixed")}, "ladder=.*in this order"),
        ({"ladder": ("16-true",)}, "16-true"),
        ({"patience": 0}, "patience=0.*at least 1"),
        ({"patience": True}, "patience=True"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrecisionFallback(**arguments)


def test_with_another_plugin_it_says_that_it_does_nothing() -> None:
    trainer = make_trainer(pl.plugins.MixedPrecision("bf16-mixed", "cpu"), callbacks=[PrecisionFallback()])
    with pytest.warns(RuntimeWarning, match="does nothing: the Trainer uses MixedPrecision.*AdaptiveMixedPrecision"):
        trainer.fit(Hot(), batches(1))


# What every test below shares -----------------------------------------------------------------------------------------

LOSS, GRADIENTS = "the loss held inf or NaN", "the gradients held inf or NaN"


class Steep(Hot):
    """Its loss is finite and its gradient is 2^19: inf in float16 at any loss scale."""

    def loss(self, batch: Tensor) -> Tensor:
        hidden = self.linear(batch * 2.0**10)
        self.dtypes.append(hidden.dtype)
        return hidden.float().sum() * 2.0**9

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=2.0**-23, fused=self.fused)


def told_by(warnings: Iterable[Any]) -> list[str]:
    """The texts of the fallbacks among these warnings."""
    return [text for text in (str(w.message) for w in warnings) if "the run computes in" in text]


def text(skipped: int, precision: Precision, why: str, step: int, wider: Precision) -> str:
    return (
        f"{skipped} optimizer steps in a row were skipped in '{precision}' because {why}, and no lower loss scale can"
        f" help: from optimizer step {step} on the run computes in '{wider}'."
    )


def bits(text: str) -> int:
    """The last steps as ``StepCounters.recent``: x for a skipped one, dot for an applied one."""
    return int(text.replace("x", "1").replace(".", "0"), 2)


def counted(text: str) -> StepCounters:
    return StepCounters(text.count("."), text.count("x"), recent=bits(text))


def fit_and_listen(trainer: pl.Trainer, *args: Any, **kwargs: Any) -> list[str]:
    with pytest.warns(RuntimeWarning) as told:
        trainer.fit(*args, **kwargs)
    return told_by(told)


class Two(pl.LightningModule):
    """Two weights, an optimizer each, manual. ``script`` says what each training step does.

    A word of it is a name of a weight, then ``b`` for its backward and ``s`` for its step; ``z`` clears its gradients,
    and ``ab`` stands for one backward of both. Gradients are 1 for batches of ones. In float16 weights of ``hot`` have
    an inf loss.
    """

    def __init__(self, script: Callable[[int], str], hot: str = "") -> None:
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.a.weight)
        nn.init.ones_(self.b.weight)
        self.script, self.hot = script, hot
        self.dtypes: list[torch.dtype] = []
        self.reports: list[StepReport] = []
        self.grads: list[float | None] = []

    def loss_of(self, name: str, batch: Tensor) -> Tensor:
        factor = 2.0**17 if name in self.hot else 1.0
        hidden = self.get_submodule(name)(batch * factor)
        self.dtypes.append(hidden.dtype)
        return hidden.float().sum() / factor

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        both: Any = self.optimizers()
        optimizers = dict(zip("ab", both, strict=True))
        for word in self.script(batch_idx).split():
            names, action = word[:-1], word[-1]
            if action == "b":
                self.manual_backward(sum((self.loss_of(name, batch) for name in names), torch.zeros(())))
                self.grads += [self.gradient(name) for name in names]
                continue
            for name in names:
                if action == "z":
                    optimizers[name].zero_grad()
                else:
                    optimizers[name].step()
                    plugin: Any = self.trainer.precision_plugin
                    self.reports.append(plugin.last_step)

    def gradient(self, name: str) -> float | None:
        grad = self.get_submodule(name).weight.grad
        return None if grad is None else float(grad)  # type: ignore[arg-type]

    @property
    def weights(self) -> tuple[float, float]:
        return self.a.weight.item(), self.b.weight.item()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(layer.parameters(), lr=2.0**-4) for layer in (self.a, self.b)]


# When it moves --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("patience", [1, 2, 3])
@pytest.mark.parametrize(
    ("rules", "lowered", "floor"),
    [
        ({"init_scale": 4.0}, 2, 1.0),
        ({"init_scale": 4.0, "min_scale": 4.0}, 0, 4.0),
        ({"init_scale": 2.0, "min_scale": 2.0**-2, "hysteresis": 2}, 4, 2.0**-2),
        ({"init_scale": 4.0, "dynamic": False}, 0, 4.0),
    ],
    ids=["down to the floor", "starts at the floor", "hysteresis", "static"],
)
def test_gradients_count_from_the_floor_on(
    rules: dict[str, Any], lowered: int, floor: float, patience: int, manual: bool
) -> None:
    plugin, module = AdaptiveMixedPrecision("16-mixed", LossScale(**rules), retries=0), Steep(manual=manual)
    failed = lowered + patience
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback(patience=patience)])
    (told,) = fit_and_listen(trainer, module, batches(failed + 2))
    expected = text(patience, "16-mixed", GRADIENTS, failed, "bf16-mixed")
    if not rules.get("dynamic", True):  # what it says of the scale then, a test below is about
        told, expected = (re.sub(", and .*(?=: from)", "", found) for found in (told, expected))
    assert told == expected
    assert module.dtypes == [torch.float16] * failed + [torch.bfloat16] * 2
    assert plugin.counters == counted("x" * failed + "..")
    assert module.linear.weight.item() == 1 - 2 * 2.0**-4
    assert plugin.state_dict()["scale"] == floor
    assert plugin.state_dict()["counters"]["skipped_in_a_row"] == {0: 0}
    assert plugin.last_step == StepReport(failed + 1, 0, "bf16-mixed", 1.0, 1, "applied")


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_a_step_counts_at_once_when_no_retry_has_helped(dynamic: bool) -> None:
    """At 2^4, 2^3, 2^2 and 1 in each step; the lasting scale is not to blame."""
    plugin, module = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=16.0, dynamic=dynamic)), Steep()
    told = fit_and_listen(make_trainer(plugin, callbacks=[PrecisionFallback(patience=2)]), module, batches(4))
    assert told == [text(2, "16-mixed", GRADIENTS, 2, "bf16-mixed")]
    assert module.dtypes == [torch.float16] * 4 * 2 + [torch.bfloat16] * 2
    assert plugin.counters == StepCounters(2, 2, retried_attempts=6, recent=bits("xx.."))
    assert plugin.state_dict()["scale"] == 16.0


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_a_loss_that_is_not_finite_leaves_the_scale_alone(manual: bool) -> None:
    plugin, module = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=2.0**10)), Hot(manual=manual, worse=True)
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback(patience=2)])
    assert fit_and_listen(trainer, module, batches(6)) == [
        text(2, "16-mixed", LOSS, 2, "bf16-mixed"),
        text(2, "bf16-mixed", LOSS, 4, "32-true"),
    ]
    assert module.dtypes == [torch.float16] * 2 + [torch.bfloat16] * 2 + [torch.float32] * 2
    assert plugin.counters == counted("xxxx..")
    assert plugin.state_dict()["scale"] == 2.0**10


def test_a_skip_that_lowers_the_scale_neither_counts_nor_forgives() -> None:
    """NaN, then an overflow at 2^13 that 2^12 would cure, then NaN: two failing steps in a row."""

    class Mixed(Hot):
        def loss(self, batch: Tensor) -> Tensor:
            nan = torch.tensor(math.nan if self.trainer.fit_loop.epoch_loop.batch_idx in (0, 2) else 1.0)
            return self.linear(batch * 2.0**10).float().sum() * 2.0**-7 * nan

    plugin = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=2.0**13), retries=0)
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback(patience=2)])
    assert fit_and_listen(trainer, Mixed(), batches(4)) == [text(2, "16-mixed", LOSS, 3, "bf16-mixed")]
    assert plugin.counters == counted("xxx.")
    assert plugin.state_dict()["scale"] == 2.0**12


def test_gradients_count_without_a_scale_too() -> None:
    """The loss is finite, and bfloat16 makes NaN gradients of it."""

    class Broken(Hot):
        def loss(self, batch: Tensor) -> Tensor:
            hidden = self.linear(batch)
            self.dtypes.append(hidden.dtype)
            broken = hidden.dtype is torch.bfloat16
            return hidden.float().sum() + ((self.linear.weight.sum() * 0).sqrt() if broken else 0)

    plugin, module = AdaptiveMixedPrecision("bf16-mixed"), Broken()
    told = fit_and_listen(make_trainer(plugin, callbacks=[PrecisionFallback()]), module, batches(5))
    assert told == [text(3, "bf16-mixed", GRADIENTS, 3, "32-true")]
    assert module.dtypes == [torch.bfloat16] * 3 + [torch.float32] * 2
    assert module.linear.weight.item() == 1 - 2 * 2.0**-4


def test_a_closure_in_manual_optimization_counts_as_any_step() -> None:
    class Closure(Hot):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure)

    plugin, module = AdaptiveMixedPrecision("16-mixed"), Closure(manual=True)
    told = fit_and_listen(make_trainer(plugin, callbacks=[PrecisionFallback()]), module, batches(5))
    assert told == [text(3, "16-mixed", LOSS, 3, "bf16-mixed")]
    assert module.dtypes == [torch.float16] * 3 + [torch.bfloat16] * 2
    assert module.linear.weight.item() == 1 - 2 * 2.0**-4


def test_what_a_hook_spoils_is_no_reason_to_move() -> None:
    class Spoils(Hot):
        def loss(self, batch: Tensor) -> Tensor:
            return self.linear(batch).float().sum()

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            optimizer.param_groups[0]["params"][0].grad.fill_(math.nan)

    plugin = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=1.0), max_skipped=4)
    with pytest.raises(NonFiniteStepError, match="'16-mixed'"):
        make_trainer(plugin, callbacks=[PrecisionFallback()]).fit(Spoils(), batches(20))


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("steep", [False, True], ids=["loss", "gradients"])
@pytest.mark.parametrize(
    ("clip", "updates"),
    [
        ({}, (1.0, 0.5)),
        ({"gradient_clip_val": 0.75, "gradient_clip_algorithm": "norm"}, (0.75, 0.5)),
        ({"gradient_clip_val": 0.25, "gradient_clip_algorithm": "value"}, (0.25, 0.25)),
    ],
    ids=["no clipping", "norm", "value"],
)
def test_the_third_failing_window_is_the_incomplete_one_of_an_epoch(
    clip: dict[str, Any], updates: tuple[float, float], steep: bool, fused: bool
) -> None:
    module = Steep(fused=fused) if steep else Hot(fused=fused)
    unit = 2.0**19 if steep else 1.0
    clip = {key: value * unit if isinstance(value, float) else value for key, value in clip.items()}
    plugin = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=1.0))
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback()], accumulate_grad_batches=4, max_epochs=2, **clip)
    told = fit_and_listen(trainer, module, batches(10))
    assert told == [text(3, "16-mixed", GRADIENTS if steep else LOSS, 3, "bf16-mixed")]
    assert module.dtypes == [torch.float16] * 10 + [torch.bfloat16] * 10
    assert plugin.counters == counted("xxx...")
    expected = 1 - (2 * updates[0] + updates[1]) * 2.0**-4
    rounding = 1e-6 if clip.get("gradient_clip_algorithm") == "norm" else 0.0
    assert module.linear.weight.item() == pytest.approx(expected, rel=rounding, abs=0)
    if clip.get("gradient_clip_algorithm") == "norm":
        assert plugin.last_step is not None
        assert (plugin.last_step.grad_norm, plugin.last_step.clipped) == (0.5 * unit, False)


def test_windows_of_different_length_count_alike() -> None:
    plugin, module = AdaptiveMixedPrecision("16-mixed"), Hot()
    scheduler = pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 4})
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback(patience=4), scheduler], max_epochs=3)
    assert fit_and_listen(trainer, module, batches(3)) == [text(4, "16-mixed", LOSS, 4, "bf16-mixed")]
    assert module.dtypes == [torch.float16] * 6 + [torch.bfloat16] * 3
    assert plugin.counters == counted("xxxx.")
    assert module.linear.weight.item() == 1 - 0.75 * 2.0**-4


# Two optimizers -------------------------------------------------------------------------------------------------------


def fit_two(module: Two, steps: int, patience: int = 3, max_skipped: int = 10, **rules: Any) -> AdaptiveMixedPrecision:
    plugin = AdaptiveMixedPrecision("16-mixed", LossScale(**{"init_scale": 2.0**8, **rules}), max_skipped)
    make_trainer(plugin, callbacks=[PrecisionFallback(patience=patience)]).fit(module, batches(steps))
    return plugin


@pytest.mark.parametrize("hot", ["a", "b"])
@pytest.mark.parametrize("alternating", [False, True], ids=["both in each step", "alternating"])
def test_the_failing_steps_of_an_optimizer_are_in_a_row_whatever_the_other_does(alternating: bool, hot: str) -> None:
    module = Two(lambda i: ("az ab as", "bz bb bs")[i % 2] if alternating else "az ab as bz bb bs", hot=hot)
    with pytest.warns(RuntimeWarning) as told:
        plugin = fit_two(module, 16 if alternating else 8)
    at = 6 if hot == "b" else 5
    assert told_by(told) == [text(3, "16-mixed", LOSS, at, "bf16-mixed")]
    rounds = "x." * 3 if hot == "a" else ".x" * 3
    assert plugin.counters == counted(rounds + "." * 10)
    assert module.weights == ((1 - 5 / 16, 1 - 8 / 16) if hot == "a" else (1 - 8 / 16, 1 - 5 / 16))


def test_each_optimizer_has_a_patience_of_its_own() -> None:
    """Two failing steps of either, in turn: four failing steps in a row of the run, and no fallback."""
    module = Two(lambda i: "az ab as bz bb bs", hot="")

    class Sometimes(Two):
        def loss_of(self, name: str, batch: Tensor) -> Tensor:
            bad = self.trainer.fit_loop.epoch_loop.batch_idx % 3 < 2
            return super().loss_of(name, batch) * (math.nan if bad else 1)

    module = Sometimes(lambda i: "az ab as bz bb bs")
    plugin = fit_two(module, 6)
    assert plugin.precision == "16-mixed"
    assert plugin.counters == counted("xxxx.." * 2)


def test_gradients_held_at_the_switch_are_true_and_their_sum_is() -> None:
    """The switch falls between the two micro-batches of an optimizer whose own steps are fine."""
    scripts = ["bz bb bs", "bz bb bs", "az ab bz bb bs", "ab as bz bb bs", "az ab as bz bb bs"]
    module = Two(lambda i: scripts[i], hot="b")
    with pytest.warns(RuntimeWarning) as told:
        plugin = fit_two(module, 5)
    assert told_by(told) == [text(3, "16-mixed", LOSS, 3, "bf16-mixed")]
    f16, bf16 = torch.float16, torch.bfloat16
    assert module.dtypes == [f16, f16, f16, f16, bf16, bf16, bf16, bf16]
    a = [module.grads[i] for i in (2, 4, 6)]
    assert a == [1.0, 2.0, 1.0]  # in float16, with that of bfloat16 on top, and the next window
    assert module.weights == (1 - 3 / 16, 1 - 2 / 16)
    assert plugin.counters == counted("xxx....")
    assert [report.precision for report in module.reports] == ["16-mixed"] * 3 + ["bf16-mixed"] * 4


def test_a_backward_of_two_optimizers_fails_in_one_precision() -> None:
    module = Two(lambda i: "az bz abb as bs", hot="ab")
    with pytest.warns(RuntimeWarning) as told:
        plugin = fit_two(module, 3, patience=1)
    assert plugin.precision == "bf16-mixed"
    assert len(told_by(told)) == 1
    assert [report.precision for report in module.reports[:2]] == ["16-mixed", "16-mixed"]
    assert plugin.counters == counted("xx....")


def test_several_steps_in_one_training_step_move_one_rung() -> None:
    module = Two(lambda i: " ".join(["az ab as"] * 8), hot="a")
    with pytest.warns(RuntimeWarning) as told:
        plugin = fit_two(module, 2)
    assert len(told_by(told)) == 1
    assert plugin.precision == "bf16-mixed"
    for dtype, report in zip(module.dtypes, module.reports, strict=True):
        assert (dtype is torch.float16) == (report.precision == "16-mixed")


def test_what_follows_the_switch_in_a_training_step_does_not_underflow() -> None:
    """The gradient of the other optimizer is 2^-26: 0 in float16 without a scale."""

    class Small(Two):
        def loss_of(self, name: str, batch: Tensor) -> Tensor:
            return super().loss_of(name, batch) * (2.0**-26 if name == "b" else 1)

    module = Small(lambda i: "az ab as bz bb bs", hot="a")
    with pytest.warns(RuntimeWarning, match="the run computes in"):
        fit_two(module, 2, patience=1, init_scale=2.0**16)
    assert module.grads[1::2] == [2.0**-26, 2.0**-26]


def test_a_step_is_not_skipped_for_what_an_earlier_precision_left() -> None:
    """Both overflow in float16; only one of them steps, which moves the run; both clear their gradients."""
    module = Two(lambda i: "az bz abb as" if i < 3 else "az bz abb as bs", hot="ab")
    with pytest.warns(RuntimeWarning, match="the run computes in"):
        plugin = fit_two(module, 4)
    assert plugin.counters == counted("xxx..")
    assert module.weights == (1 - 1 / 16, 1 - 1 / 16)


def test_a_step_in_bfloat16_reports_no_scale() -> None:
    module = Two(lambda i: "az bz abb as" if i < 3 else "az bz abb as bs", hot="a")
    with pytest.warns(RuntimeWarning, match="the run computes in"):
        fit_two(module, 4)
    assert [(report.precision, report.scale) for report in module.reports[3:]] == [("bf16-mixed", 1.0)] * 2


def test_a_failing_step_in_bfloat16_tells_its_own_cause() -> None:
    """The first micro-batch of ``b`` in float16; the second, in bfloat16, makes NaN gradients of a finite loss."""

    class Broken(Two):
        def loss_of(self, name: str, batch: Tensor) -> Tensor:
            loss = super().loss_of(name, batch)
            broken = name == "b" and self.dtypes[-1] is torch.bfloat16
            return loss + (self.b.weight.sum() * 0).sqrt() if broken else loss

    module = Broken(lambda i: ["az ab as", "az ab as", "bz bb az ab as", "bb bs"][i], hot="a")
    with pytest.warns(RuntimeWarning, match="the run computes in"):
        fit_two(module, 4)
    assert module.reports[-1] == StepReport(3, 1, "bf16-mixed", 1.0, 1, "skipped", "gradients")


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_a_step_without_gradients_is_no_clean_step(precision: Precision) -> None:
    """Both optimizers step each time, though only one of them has gradients: each of its steps with some fails."""

    class Broken(Two):
        def loss_of(self, name: str, batch: Tensor) -> Tensor:
            good = name == "b" or self.trainer.precision == "32-true"
            return super().loss_of(name, batch) * (1.0 if good else math.nan)

    module = Broken(lambda i: f"az bz {'ab'[i % 2]}b as bs")
    plugin = AdaptiveMixedPrecision(precision, LossScale(init_scale=1.0))
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback(ladder=("32-true",))])
    with pytest.warns(RuntimeWarning, match="3 optimizer steps in a row .* '32-true'"):
        trainer.fit(module, batches(12))
    assert plugin.precision == "32-true"


def test_a_window_without_gradients_is_one_that_training_step_gave_up() -> None:
    """As above in automatic optimization: None between failing batches."""

    class Gives(Hot):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            return None if batch_idx % 2 else self.loss(batch)

    plugin, module = AdaptiveMixedPrecision("16-mixed"), Gives()
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback()])
    told = fit_and_listen(trainer, module, batches(12))
    assert len(told) == 1
    assert plugin.precision == "bf16-mixed"


def test_clipping_by_value_does_not_hide_gradients_that_a_wider_precision_holds() -> None:
    """The true gradient is 2^19. Clipped by value the inf of float16 becomes 2^20."""

    class Clips(Steep):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, 2.0**20, "value")
            optimizer.step()

    plugin, module = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=1.0)), Clips(manual=True)
    with pytest.warns(RuntimeWarning, match="the run computes in"):
        make_trainer(plugin, callbacks=[PrecisionFallback()]).fit(module, batches(5))
    assert module.linear.weight.item() == 1 - 2 * 2.0**-4  # of two steps with the gradient 2^19


# What it computes in --------------------------------------------------------------------------------------------------


class Everywhere(Hot):
    """Keeps the dtype of each kind of step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[torch.dtype]] = {"training": [], "validation": [], "test": [], "predict": []}

    def look(self, kind: str, batch: Tensor) -> Tensor:
        loss = self.loss(batch)
        self.seen[kind].append(self.dtypes[-1])
        return loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.look("training", batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.look("validation", batch)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.look("test", batch)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.look("predict", batch)


def test_all_kinds_of_steps_move() -> None:
    plugin, module = AdaptiveMixedPrecision("16-mixed"), Everywhere()
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback()], val_check_interval=1)
    fit_and_listen(trainer, module, batches(5), batches(1))
    f16, bf16 = torch.float16, torch.bfloat16
    assert module.seen["training"] == [f16] * 3 + [bf16] * 2
    assert module.seen["validation"] == [f16] * 2 + [bf16] * 3  # after each batch

    other = make_trainer(plugin)  # without the callback
    for each in (trainer, other):
        each.validate(module, batches(1), verbose=False)
        each.test(module, batches(1), verbose=False)
        predictions = each.predict(module, batches(1))
        assert predictions is not None
        assert predictions[0].item() == 1 - 2 * 2.0**-4  # type: ignore[union-attr]
    assert module.seen["validation"][5:] == module.seen["test"] == module.seen["predict"] == [bf16] * 2
    assert plugin.precision == "bf16-mixed"
    assert plugin.policy is None


def test_a_checkpoint_is_evaluated_on_its_rung(tmp_path: Path) -> None:
    trainer = make_trainer(AdaptiveMixedPrecision("16-mixed"), callbacks=[PrecisionFallback()])
    fit_and_listen(trainer, Everywhere(), batches(5))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    module = Everywhere()
    fresh = make_trainer(AdaptiveMixedPrecision("16-mixed"), callbacks=[PrecisionFallback()])
    fresh.test(module, batches(1), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert module.seen["test"] == [torch.bfloat16]


def test_an_earlier_checkpoint_is_evaluated_on_the_rung_that_the_run_has_reached(tmp_path: Path) -> None:
    """As ``trainer.test(ckpt_path="best")`` after a fit, where the best was before the move."""
    plugin, module = AdaptiveMixedPrecision("16-mixed"), Everywhere()
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback(), Save(tmp_path / "a.ckpt", 1)])
    fit_and_listen(trainer, module, batches(5))
    trainer.test(module, batches(1), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert module.seen["test"] == [torch.bfloat16]
    assert plugin.counters == counted("xxx..")


def test_without_the_callback_a_checkpoint_is_used_in_the_configured_precision(tmp_path: Path) -> None:
    trainer = make_trainer(AdaptiveMixedPrecision("16-mixed"), callbacks=[PrecisionFallback()])
    fit_and_listen(trainer, Everywhere(), batches(5))
    trainer.save_checkpoint(tmp_path / "a.ckpt")

    tested = Everywhere()
    says = "had moved to 'bf16-mixed' and is now computed in '16-mixed'.* Add the PrecisionFallback"
    with pytest.warns(RuntimeWarning, match=says):
        make_trainer(AdaptiveMixedPrecision("16-mixed")).test(
            tested, batches(1), ckpt_path=tmp_path / "a.ckpt", verbose=False
        )
    assert tested.seen["test"] == [torch.float16]

    plugin, module = AdaptiveMixedPrecision("16-mixed"), Everywhere()
    with pytest.warns(RuntimeWarning, match=says):
        make_trainer(plugin, max_epochs=2).fit(module, batches(2), ckpt_path=tmp_path / "a.ckpt")
    assert module.seen["training"] == [torch.float16] * 2
    assert plugin.counters == counted("xxx..xx")

    for configured, reached in (("32-true", torch.float32), ("bf16-mixed", torch.bfloat16)):
        module = Everywhere()
        wider = AdaptiveMixedPrecision(configured)  # type: ignore[arg-type]
        trainer = make_trainer(wider, callbacks=[PrecisionFallback()], max_epochs=2)
        trainer.fit(module, batches(2), ckpt_path=tmp_path / "a.ckpt")
        assert module.seen["training"] == [reached] * 2
        assert wider.counters == counted("xxx....")


def test_a_model_with_batch_norm_can_be_evaluated_after_the_move() -> None:
    class Normed(Everywhere):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(1)

        def loss(self, batch: Tensor) -> Tensor:
            hidden = self.linear(batch * 2.0**17)
            self.dtypes.append(hidden.dtype)
            return self.norm(hidden).float().sum()

    plugin, module = AdaptiveMixedPrecision("16-mixed"), Normed()
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback()])
    rows: Any = torch.arange(20.0).reshape(20, 1)
    fit_and_listen(trainer, module, DataLoader(rows, batch_size=4))
    assert plugin.counters == counted("xxx..")
    assert module.norm.running_mean is not None
    assert module.norm.running_mean.isfinite().all()


# Checkpoints ----------------------------------------------------------------------------------------------------------


class Wide(Hot):
    """Several features, and an optimizer with state; activations above 65504."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        nn.init.uniform_(self.linear.weight, 0.5, 1.5)

    def loss(self, batch: Tensor) -> Tensor:
        hidden = self.linear(batch * 2.0**17)
        self.dtypes.append(hidden.dtype)
        return (hidden.float() * 2.0**-17 - 3).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Save(pl.Callback):
    """Saves after so many batches."""

    def __init__(self, path: Path, after: int) -> None:
        self.path, self.after = path, after

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if args[-1] + 1 == self.after:
            trainer.save_checkpoint(self.path)


class Rows:
    """A loader that resumes within an epoch."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.position = rows, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Tensor]:
        self.position %= len(self.rows)
        while self.position < len(self.rows):
            self.position += 1
            yield self.rows[self.position - 1 : self.position]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def rows(count: int) -> Rows:
    return Rows(torch.rand(count, 4, generator=torch.Generator().manual_seed(1)) + 0.5)


@pytest.mark.parametrize("after", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("cause", ["loss", "gradients"])
def test_a_run_that_was_killed_goes_on_bitwise(tmp_path: Path, after: int, cause: str) -> None:
    """It falls back at the third failing step, which is the 2nd, the 1st or none of the resumed run."""

    class Killed(Wide):
        def loss(self, batch: Tensor) -> Tensor:
            if cause == "loss":
                return super().loss(batch)
            hidden = self.linear(batch * 2.0**10)
            self.dtypes.append(hidden.dtype)
            return hidden.float().square().mean() * 2.0**-2

    whole, first = Killed(), AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=1.0))
    trainer = make_trainer(first, callbacks=[PrecisionFallback(), Save(tmp_path / "a.ckpt", after)])
    told = fit_and_listen(trainer, whole, rows(8))
    assert told == [text(3, "16-mixed", LOSS if cause == "loss" else GRADIENTS, 3, "bf16-mixed")]
    assert first.counters == counted("xxx.....")

    resumed, second = Killed(), AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=1.0))
    trainer = make_trainer(second, callbacks=[PrecisionFallback()])
    if after < 3:
        told_again = fit_and_listen(trainer, resumed, rows(8), ckpt_path=tmp_path / "a.ckpt")
        assert told_again == told
    else:
        trainer.fit(resumed, rows(8), ckpt_path=tmp_path / "a.ckpt")
    assert resumed.dtypes == whole.dtypes[after:]
    assert second.state_dict() == first.state_dict()
    assert second.last_step == first.last_step
    for found, expected in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(found, expected)
    assert not torch.equal(whole.linear.weight, Killed().linear.weight)


def test_the_counts_of_two_optimizers_are_saved_apart(tmp_path: Path) -> None:
    """Two failing steps of ``a`` and one of ``b`` before the run is killed: ``a`` is the first to come to three."""

    def script(i: int) -> str:
        return "az ab as" if i == 0 else "az ab as bz bb bs"

    ones = torch.ones(5, 1)
    trainer = make_trainer(
        AdaptiveMixedPrecision("16-mixed"), callbacks=[PrecisionFallback(), Save(tmp_path / "a.ckpt", 2)]
    )
    fit_and_listen(trainer, Two(script, hot="ab"), Rows(ones))
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)[AdaptiveMixedPrecision.__qualname__]
    assert saved["counters"]["skipped_in_a_row"] == {0: 2, 1: 1}

    resumed, module = AdaptiveMixedPrecision("16-mixed"), Two(script, hot="ab")
    trainer = make_trainer(resumed, callbacks=[PrecisionFallback()])
    told = fit_and_listen(trainer, module, Rows(ones), ckpt_path=tmp_path / "a.ckpt")
    assert told == [text(3, "16-mixed", LOSS, 4, "bf16-mixed")]
    assert module.reports[0].step == 3


# Ladders --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "ladder", "path"),
    [
        ("16-mixed", ("16-mixed", "32-true"), ["16-mixed", "32-true"]),
        ("16-mixed", ("32-true",), ["16-mixed", "32-true"]),
        ("16-mixed", ("bf16-mixed",), ["16-mixed", "bf16-mixed"]),
        ("16-mixed", ("16-mixed",), ["16-mixed"]),
        ("16-mixed", ("bf16-mixed", "32-true"), ["16-mixed", "bf16-mixed", "32-true"]),
        ("bf16-mixed", ("16-mixed", "bf16-mixed", "32-true"), ["bf16-mixed", "32-true"]),
        ("bf16-mixed", ("16-mixed", "32-true"), ["bf16-mixed", "32-true"]),
        ("bf16-mixed", ("16-mixed", "bf16-mixed"), ["bf16-mixed"]),
        ("bf16-mixed", ("16-mixed",), ["bf16-mixed"]),
        ("32-true", ("16-mixed", "bf16-mixed", "32-true"), ["32-true"]),
    ],
)
def test_every_rung_of_the_ladder_is_tried_and_then_the_fit_ends(
    start: Precision, ladder: tuple[Precision, ...], path: list[Precision]
) -> None:
    plugin = AdaptiveMixedPrecision(start, max_skipped=3)
    nans: Any = torch.full((40, 1), math.nan)
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback(ladder, patience=2)])
    moves, failed = len(path) - 1, 2 * len(path) + 1
    message = rf"^3 optimizer steps in a row .*'{path[-1]}'.* the last one was step {failed - 1}\."
    module = Hot()
    with pytest.warns(RuntimeWarning) as told, pytest.raises(NonFiniteStepError, match=message):
        trainer.fit(module, DataLoader(nans))
    assert told_by(told) == [text(2, path[i], LOSS, 2 * i + 2, path[i + 1]) for i in range(moves)]
    assert plugin.precision == path[-1]
    assert plugin.counters == counted("x" * failed)
    assert module.linear.weight.item() == 1


@pytest.mark.parametrize("max_skipped", [3, 4])
def test_patience_goes_before_max_skipped(max_skipped: int) -> None:
    plugin = AdaptiveMixedPrecision("16-mixed", max_skipped=max_skipped)
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback(patience=3)])
    assert fit_and_listen(trainer, Hot(), batches(5)) == [text(3, "16-mixed", LOSS, 3, "bf16-mixed")]
    assert plugin.counters == counted("xxx..")


def test_max_skipped_below_patience_ends_only_the_last_rung() -> None:
    plugin = AdaptiveMixedPrecision("16-mixed", max_skipped=2)
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback(patience=3)])
    fit_and_listen(trainer, Hot(), batches(5))
    assert plugin.precision == "bf16-mixed"


# Beside others --------------------------------------------------------------------------------------------------------


def test_of_several_the_last_decides() -> None:
    plugin, module = AdaptiveMixedPrecision("16-mixed"), Hot()
    callbacks = [PrecisionFallback(patience=1), PrecisionFallback(("32-true",), patience=2)]
    told = fit_and_listen(make_trainer(plugin, callbacks=callbacks), module, batches(4))
    assert told == [text(2, "16-mixed", LOSS, 2, "32-true")]
    assert plugin.policy is None


def test_the_one_of_the_module_replaces_the_one_of_the_trainer() -> None:
    class Configures(Hot):
        def configure_callbacks(self) -> pl.Callback:
            return PrecisionFallback(("32-true",), patience=2)

    plugin, module = AdaptiveMixedPrecision("16-mixed"), Configures()
    told = fit_and_listen(make_trainer(plugin), module, batches(4))
    assert told == [text(2, "16-mixed", LOSS, 2, "32-true")]
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback(patience=1)])
    again = Configures()
    assert fit_and_listen(trainer, again, batches(4)) == told
    assert again.dtypes == [torch.float16] * 2 + [torch.float32] * 2
    assert [type(c) for c in trainer.callbacks].count(PrecisionFallback) == 1  # type: ignore[attr-defined]


def test_one_callback_serves_two_runs_at_once() -> None:
    fallback = PrecisionFallback(patience=2)
    inner = AdaptiveMixedPrecision("bf16-mixed")
    told: list[str] = []

    class Nested(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if args[-1] == 0:
                bad = Hot(worse=True)
                told.extend(fit_and_listen(make_trainer(inner, callbacks=[fallback]), bad, batches(3)))

    outer, module = AdaptiveMixedPrecision("16-mixed"), Hot()
    told += fit_and_listen(make_trainer(outer, callbacks=[fallback, Nested()]), module, batches(4))
    assert told == [text(2, "bf16-mixed", LOSS, 2, "32-true"), text(2, "16-mixed", LOSS, 2, "bf16-mixed")]
    assert (outer.counters, inner.counters) == (counted("xx.."), counted("xx."))
    assert (outer.precision, inner.precision) == ("bf16-mixed", "32-true")


@pytest.mark.skipif(not hasattr(pl.callbacks, "WeightAveraging"), reason="this Lightning has no WeightAveraging")
def test_a_weight_average_is_one_of_the_weights_there_were() -> None:
    plugin, module = AdaptiveMixedPrecision("16-mixed"), Everywhere()
    average = pl.callbacks.WeightAveraging()
    fit_and_listen(make_trainer(plugin, callbacks=[PrecisionFallback(), average]), module, batches(6))
    # Skipped steps do not count in the average: 15/16, 14/16, 13/16.
    assert module.linear.weight.item() == pytest.approx((15 / 16 + 14 / 16 + 13 / 16) / 3, abs=1e-6)
    assert plugin.counters == counted("xxx...")


def test_stochastic_weight_averaging() -> None:
    plugin, module = AdaptiveMixedPrecision("16-mixed"), Hot()
    average = pl.callbacks.StochasticWeightAveraging(swa_lrs=2.0**-4, swa_epoch_start=2, annealing_epochs=1)
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback(), average], max_epochs=3)
    fit_and_listen(trainer, module, batches(2))
    assert plugin.counters == counted("xxx...")
    # Averaged are the weights at the starts of epochs 1 (no step applied) and 2 (one applied).
    assert module.linear.weight.item() == 31 / 32


def test_a_compiled_module() -> None:
    torch._dynamo.reset()
    plugin, module = AdaptiveMixedPrecision("16-mixed"), Hot()
    module.linear.compile(backend="eager")
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback()])
    assert fit_and_listen(trainer, module, batches(5)) == [text(3, "16-mixed", LOSS, 3, "bf16-mixed")]
    assert module.dtypes == [torch.float16] * 3 + [torch.bfloat16] * 2
    assert module.linear.weight.item() == 1 - 2 * 2.0**-4


def test_the_work_around_for_stock_survives_the_move() -> None:
    """The README calls ``scaler.unscale_(optimizer)`` harmless."""

    class WorkAround(Hot):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            plugin: Any = self.trainer.precision_plugin
            plugin.scaler.unscale_(optimizer)
            optimizer.step()

    plugin, module = AdaptiveMixedPrecision("16-mixed"), WorkAround(manual=True)
    fit_and_listen(make_trainer(plugin, callbacks=[PrecisionFallback()]), module, batches(5))
    assert module.linear.weight.item() == 1 - 2 * 2.0**-4


def test_the_monitor_logs_the_move() -> None:
    class Read(pl.Callback):
        def __init__(self) -> None:
            self.bits: list[float] = []
            self.scales: list[float] = []

        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            self.bits.append(float(trainer.callback_metrics["amp/mantissa_bits"]))
            self.scales.append(float(trainer.callback_metrics["amp/loss_scale"]))

    plugin, read = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=4.0), retries=0), Read()
    callbacks = [PrecisionFallback(patience=2), AMPMonitor(), read]
    fit_and_listen(make_trainer(plugin, callbacks=callbacks, log_every_n_steps=1), Steep(), batches(6))
    assert read.bits == [10, 10, 10, 10, 7, 7]
    assert read.scales == [2, 1, 1, 1, 1, 1]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_learning_rate_finder_moves_nothing(tmp_path: Path) -> None:
    class Tuned(Hot):
        lr = 2.0**-4

    plugin, module = AdaptiveMixedPrecision("16-mixed"), Tuned()
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback(patience=1)], default_root_dir=tmp_path)
    tuner: Any = importlib.import_module(f"{pl.__name__}.tuner")
    tuner.Tuner(trainer).lr_find(module, batches(20), num_training=10)
    assert module.dtypes == [torch.float16] * len(module.dtypes)
    assert len(module.dtypes) >= 10
    assert (plugin.precision, plugin.policy) == ("16-mixed", None)
    module.dtypes.clear()
    assert fit_and_listen(trainer, module, batches(2)) == [text(1, "16-mixed", LOSS, 1, "bf16-mixed")]
    assert module.dtypes == [torch.float16, torch.bfloat16]


# From run to run ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("same_trainer", [False, True])
def test_a_second_fit_counts_from_zero(same_trainer: bool) -> None:
    plugin = AdaptiveMixedPrecision("16-mixed")
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback()])
    trainer.fit(Hot(), batches(2))  # two failing steps, and no third
    assert plugin.counters == counted("xx")
    if same_trainer:
        trainer.fit_loop.max_epochs = 2
    else:
        trainer = make_trainer(plugin, callbacks=[PrecisionFallback()])
    module = Hot()
    assert fit_and_listen(trainer, module, batches(5)) == [text(3, "16-mixed", LOSS, 3, "bf16-mixed")]
    assert module.dtypes == [torch.float16] * 3 + [torch.bfloat16] * 2


def test_auto_starts_anew_on_the_rung_it_has_chosen() -> None:
    """ "auto" is bfloat16 here."""
    plugin = AdaptiveMixedPrecision()
    for _ in range(2):
        module = Hot(worse=True)
        trainer = make_trainer(plugin, callbacks=[PrecisionFallback(patience=2)])
        assert fit_and_listen(trainer, module, batches(3)) == [text(2, "bf16-mixed", LOSS, 2, "32-true")]
        assert module.dtypes == [torch.bfloat16] * 2 + [torch.float32]
        trainer.test(module, batches(1), verbose=False)
        assert module.dtypes[-1] is torch.float32


class Stop(Exception):  # noqa: N818 (it is no error)
    pass


def test_after_an_exception_the_next_fit_starts_anew() -> None:
    class Breaks(Hot):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            if batch_idx == 2:
                raise Stop
            return super().training_step(batch, batch_idx)

    plugin = AdaptiveMixedPrecision("16-mixed")
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback()])
    with pytest.raises(Stop):
        trainer.fit(Breaks(), batches(5))
    assert plugin.counters == counted("xx")
    module = Hot()
    told = fit_and_listen(make_trainer(plugin, callbacks=[PrecisionFallback()]), module, batches(5))
    assert told == [text(3, "16-mixed", LOSS, 3, "bf16-mixed")]
    assert plugin.counters == counted("xxx..")


def test_after_an_exception_nothing_stays_behind() -> None:
    plugin = AdaptiveMixedPrecision("16-mixed", max_skipped=4)
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback(("16-mixed",))])
    with pytest.raises(NonFiniteStepError):
        trainer.fit(Hot(), batches(5))
    assert plugin.policy is None


def test_a_fit_without_the_callback_does_not_fall_back_after_one_with_it_that_raised() -> None:
    class Breaks(Hot):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            raise Stop

    plugin = AdaptiveMixedPrecision("16-mixed", max_skipped=4)
    with pytest.raises(Stop):
        make_trainer(plugin, callbacks=[PrecisionFallback()]).fit(Breaks(), batches(1))
    with pytest.raises(NonFiniteStepError):
        make_trainer(plugin).fit(Hot(), batches(5))


def test_a_warning_that_is_an_error_leaves_a_run_that_has_moved() -> None:
    """As with ``python -W error``: the message stops the fit, with counters and precision after the step."""
    plugin = AdaptiveMixedPrecision("16-mixed")
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback()])
    with pytest.raises(RuntimeWarning, match="the run computes in 'bf16-mixed'"):
        trainer.fit(Hot(), batches(5))
    assert plugin.counters == counted("xxx")
    assert plugin.precision == "bf16-mixed"


# What is told ---------------------------------------------------------------------------------------------------------


def test_one_warning_for_each_move() -> None:
    plugin = AdaptiveMixedPrecision("16-mixed")
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback()])
    with pytest.warns(RuntimeWarning) as told:
        trainer.fit(Hot(worse=True), batches(10))
    assert [str(w.message) for w in told if w.category is RuntimeWarning] == [
        text(3, "16-mixed", LOSS, 3, "bf16-mixed"),
        text(3, "bf16-mixed", LOSS, 6, "32-true"),
    ]


def test_the_warning_of_a_static_scale_blames_it() -> None:
    """At the static 2^16 the gradient 2 overflows; at 2^14 it would not."""

    class Mild(Hot):
        def loss(self, batch: Tensor) -> Tensor:
            return self.linear(batch).float().sum() * 2

    plugin = AdaptiveMixedPrecision("16-mixed", LossScale(dynamic=False), retries=0)
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback()])
    (told,) = fit_and_listen(trainer, Mild(), batches(5))
    assert "no lower loss scale can help" not in told


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_a_stock_plugin_is_told_once(stage: str) -> None:
    trainer = make_trainer(pl.plugins.MixedPrecision("bf16-mixed", "cpu"), callbacks=[PrecisionFallback()])
    with pytest.warns(RuntimeWarning) as told:
        getattr(trainer, stage)(Everywhere(), batches(1))
    expected = (
        "PrecisionFallback does nothing: the Trainer uses MixedPrecision. Pass"
        " `Trainer(plugins=[AdaptiveMixedPrecision(...)])` without `precision=`."
    )
    assert [str(w.message) for w in told if w.category is RuntimeWarning] == [expected]


def test_without_a_plugin_it_says_so_too() -> None:
    trainer = make_trainer(callbacks=[PrecisionFallback()])
    with pytest.warns(RuntimeWarning, match=r"does nothing: the Trainer uses Precision\."):
        trainer.fit(Hot(), batches(1))
