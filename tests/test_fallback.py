"""PrecisionFallback: when a step is rescued, when a run moves on, where to, and that it is told, resumed and ended."""

import importlib
import math
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
from lightning_amp_plus.precisions import PrecisionName

# The first skip is told too; these tests are about what follows from several.
pytestmark = pytest.mark.filterwarnings("ignore:Optimizer step .* was skipped")

LETTERS = {torch.float16: "h", torch.bfloat16: "b", torch.float32: "f"}
RESCUE = "hfhf"
"""It fails, is finite in the widest precision, is looked on at while it fails again, and is applied in the widest."""
MOVE = "hfhb"
"""The same, but it is applied in the narrowest precision that holds it."""


class Hot(pl.LightningModule):
    """Its activations are 2^17, above float16's 65504; its gradient is 1. ``worse`` makes it inf in bfloat16 too."""

    def __init__(self, *, worse: bool = False, manual: bool = False, fused: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.linear = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.linear.weight)
        self.worse, self.fused = worse, fused
        self.story = ""  # what the forwards were computed in, one letter each

    def note(self, hidden: Tensor) -> Tensor:
        self.story += LETTERS[hidden.dtype]
        return hidden

    def loss(self, batch: Tensor) -> Tensor:
        hidden = self.note(self.linear(batch * 2.0**17))
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


class Steep(Hot):
    """Its loss is finite and its gradient is 2^19: inf in float16 at any loss scale."""

    def loss(self, batch: Tensor) -> Tensor:
        return self.note(self.linear(batch * 2.0**10)).float().sum() * 2.0**9

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=2.0**-23, fused=self.fused)


class Spoiled(Hot):
    """Its loss is NaN in every precision, although everything that it is computed from is finite."""

    def loss(self, batch: Tensor) -> Tensor:
        return self.note(self.linear(batch)).float().sum() * math.nan


def batches(count: int) -> DataLoader[Tensor]:
    rows: Any = torch.ones(count, 1)
    return DataLoader(rows)


def numbers(*numbers: float) -> DataLoader[Tensor]:
    rows: Any = torch.tensor(numbers).unsqueeze(1)
    return DataLoader(rows)


def told_by(warnings: Iterable[Any]) -> list[str]:
    """The texts of the fallbacks among these warnings, without the diagnoses."""
    texts = [text for text in (str(w.message) for w in warnings) if "the run computes in" in text]
    return [text[: text.index("'.") + 2] for text in texts]


def fit_and_listen(trainer: pl.Trainer, *args: Any, **kwargs: Any) -> list[str]:
    with pytest.warns(RuntimeWarning) as told:
        trainer.fit(*args, **kwargs)
    return told_by(told)


def rescued(step: int, others: int, precision: PrecisionName, wider: PrecisionName) -> str:
    """What is told of a run that moves after steps that were rescued."""
    lately = f", as were {others} others lately" if others else ""
    return (
        f"Optimizer step {step} was not finite in '{precision}'{lately}: from optimizer step {step + 1} on the run"
        f" computes in '{wider}'."
    )


def skipped(step: int, count: int, precision: PrecisionName, wider: PrecisionName) -> str:
    """What is told of a run in manual optimization that moves."""
    return (
        f"{count} optimizer steps in a row were skipped in '{precision}', and no lower loss scale can help: from"
        f" optimizer step {step + 1} on the run computes in '{wider}'."
    )


def bits(text: str) -> int:
    """The last steps as ``StepCounters.recent``: dot for a clean one, another letter for one that was not."""
    return int("".join("0" if letter == "." else "1" for letter in text), 2)


def counted(text: str, attempts: int | None = None) -> StepCounters:
    """The counters after clean (``.``), skipped (``x``) and rescued (``r``) steps, which took so many attempts."""
    retried = 0 if attempts is None else attempts - len(text)
    return StepCounters(len(text) - text.count("x"), text.count("x"), bits(text), retried, text.count("r"))


# When it moves --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize(
    ("worse", "move", "reached"), [(False, MOVE, "bf16-mixed"), (True, "hfhbf", "32-true")], ids=["hot", "worse"]
)
def test_the_third_rescue_moves_the_run_to_the_narrowest_rung_that_holds(
    worse: bool, move: str, reached: PrecisionName, fused: bool
) -> None:
    plugin, module = AdaptiveMixedPrecision("16-mixed"), Hot(worse=worse, fused=fused)
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback()], gradient_clip_val=100.0)
    with pytest.warns(RuntimeWarning) as told:
        trainer.fit(module, batches(10))
    (text,) = [str(w.message) for w in told if w.category is RuntimeWarning]
    held_by = "float32" if worse else "bfloat16"
    assert text == (
        f"{rescued(2, 2, '16-mixed', reached)} linear put out 1.1e+05, above float16's 65504; it is finite in"
        f" {held_by}: run in '{reached}', or keep this module in float32 with keep_fp32=['linear']."
    )
    assert module.story == RESCUE * 2 + move + move[-1] * 7
    assert plugin.counters == counted("rrr.......", len(module.story))
    assert module.linear.weight.item() == 1 - 10 * 2.0**-4  # no batch is lost
    assert trainer.precision == reached
    assert plugin.scaler is not None
    assert (plugin.scaler.get_scale(), plugin.scaler.is_enabled()) == (1.0, False)
    assert plugin.state_dict()["scale"] == 2.0**16
    trainer.test(module, batches(1), verbose=False)
    assert module.story[-1] == move[-1]


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_in_manual_optimization_it_climbs_rung_by_rung(fused: bool) -> None:
    """The first failing iteration is not looked on at, and does not count."""
    plugin, module = AdaptiveMixedPrecision("16-mixed"), Hot(worse=True, manual=True, fused=fused)
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback()])
    assert fit_and_listen(trainer, module, batches(10)) == [
        skipped(3, 3, "16-mixed", "bf16-mixed"),
        skipped(6, 3, "bf16-mixed", "32-true"),
    ]
    assert module.story == "hhhh" + "bbb" + "fff"
    assert plugin.counters == counted("xxxxxxx...")
    assert module.linear.weight.item() == 1 - 3 * 2.0**-4
    assert plugin.state_dict()["scale"] == 2.0**16


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
def test_without_retries_gradients_count_from_the_floor_on(
    rules: dict[str, Any], lowered: int, floor: float, patience: int
) -> None:
    plugin, module = AdaptiveMixedPrecision("16-mixed", LossScale(**rules), retries=0), Steep()
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback(patience=patience)])
    last = lowered + patience - 1
    assert fit_and_listen(trainer, module, batches(last + 3)) == [rescued(last, patience - 1, "16-mixed", "bf16-mixed")]
    assert module.story == "h" * lowered + RESCUE * (patience - 1) + MOVE + "bb"
    assert plugin.counters == counted("x" * lowered + "r" * patience + "..", len(module.story))
    assert module.linear.weight.item() == 1 - (patience + 2) * 2.0**-4
    assert plugin.state_dict()["scale"] == floor
    assert plugin.state_dict()["counters"]["skipped_in_a_row"] in ({0: 0}, {})
    assert plugin.last_step == StepReport(last + 2, 0, "bf16-mixed", 1.0, 1, "applied")


@pytest.mark.parametrize("patience", [1, 3])
@pytest.mark.parametrize("init_scale", [4.0, 1.0])
def test_in_manual_optimization_gradients_count_from_the_floor_on(init_scale: float, patience: int) -> None:
    plugin, module = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=init_scale)), Steep(manual=True)
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback(patience=patience)])
    failed = int(math.log2(init_scale)) + 1 + patience
    told = fit_and_listen(trainer, module, batches(failed + 2))
    assert told == [skipped(failed - 1, patience, "16-mixed", "bf16-mixed")]
    assert module.story == "h" * failed + "bb"
    assert plugin.counters == counted("x" * failed + "..")
    assert module.linear.weight.item() == 1 - 2 * 2.0**-4
    assert plugin.state_dict()["scale"] == 1.0


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_lower_scales_are_tried_before_wider_precisions(dynamic: bool) -> None:
    """At 2^4, 2^3, 2^2 and 1 in each step; the lasting scale is not to blame."""
    plugin, module = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=16.0, dynamic=dynamic)), Steep()
    told = fit_and_listen(make_trainer(plugin, callbacks=[PrecisionFallback(patience=2)]), module, batches(4))
    assert told == [rescued(1, 1, "16-mixed", "bf16-mixed")]
    assert module.story == "hhh" + RESCUE + "hhh" + MOVE + "bb"
    assert plugin.counters == counted("rr..", len(module.story))
    assert plugin.state_dict()["scale"] == 16.0


def test_gradients_are_rescued_without_a_scale_too() -> None:
    """The loss is finite, and bfloat16 makes NaN gradients of it."""

    class Broken(Hot):
        def loss(self, batch: Tensor) -> Tensor:
            hidden = self.note(self.linear(batch))
            broken = hidden.dtype is torch.bfloat16
            return hidden.float().sum() + ((self.linear.weight.sum() * 0).sqrt() if broken else 0)

    plugin, module = AdaptiveMixedPrecision("bf16-mixed"), Broken()
    told = fit_and_listen(make_trainer(plugin, callbacks=[PrecisionFallback()]), module, batches(5))
    assert told == [rescued(2, 2, "bf16-mixed", "32-true")]
    assert module.story == "bfbf" * 3 + "ff"
    assert module.linear.weight.item() == 1 - 5 * 2.0**-4


def test_a_rescue_reports_the_precision_and_the_place() -> None:
    plugin, module = AdaptiveMixedPrecision("16-mixed"), Hot()
    make_trainer(plugin, callbacks=[PrecisionFallback()]).fit(module, batches(1))
    report = plugin.last_step
    assert report is not None
    assert (report.precision, report.scale, report.attempts, report.outcome) == ("32-true", 1.0, 4, "applied")
    assert (report.rescued, report.non_finite) == (True, None)
    assert report.diagnosis is not None
    assert (report.diagnosis.cause, report.diagnosis.module) == ("forward", "linear")
    assert "linear put out 1.3e+05" in str(report.diagnosis)
    assert plugin.precision == "16-mixed"


@pytest.mark.parametrize(("within_steps", "reached"), [(2, "16-mixed"), (3, "bf16-mixed")])
def test_rescues_count_among_the_last_steps_only(within_steps: int, reached: PrecisionName) -> None:
    """Every other step is rescued."""
    plugin, module = AdaptiveMixedPrecision("16-mixed"), Hot()
    fallback = PrecisionFallback(patience=2, within_steps=within_steps)
    trainer = make_trainer(plugin, callbacks=[fallback])
    rows = numbers(*[1.0, 2.0**-4] * 3)
    if reached == "16-mixed":
        trainer.fit(module, rows)
        assert module.story == (RESCUE + "h") * 3
    else:
        assert fit_and_listen(trainer, module, rows) == [rescued(2, 1, "16-mixed", "bf16-mixed")]
        assert module.story == RESCUE + "h" + MOVE + "bbb"
    assert plugin.precision == reached
    assert module.linear.weight.item() == 1 - 3 * (1 + 2.0**-4) * 2.0**-4


def test_a_nan_batch_costs_one_attempt_and_moves_nothing() -> None:
    plugin, module = AdaptiveMixedPrecision("16-mixed"), Hot()
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback(patience=1)])
    trainer.fit(module, numbers(*[2.0**-4, math.nan] * 4))
    assert module.story == "hhf" * 4
    assert plugin.precision == "16-mixed"
    assert plugin.counters == counted(".x" * 4, 12)
    assert plugin.state_dict()["scale"] == 2.0**16
    assert module.linear.weight.item() == 1 - 4 * 2.0**-8
    assert plugin.last_step is not None
    assert plugin.last_step.diagnosis is not None
    assert plugin.last_step.diagnosis.cause == "batch"
    assert "batch 7 of epoch 0" in str(plugin.last_step.diagnosis)


@pytest.mark.parametrize("rescue", [True, False], ids=["rescue", "no rescue"])
def test_a_rescue_ends_a_row_of_skips(rescue: bool) -> None:
    plugin, nan = AdaptiveMixedPrecision("16-mixed", max_skipped=4), math.nan
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback()])
    rows = numbers(nan, nan, nan, 1.0 if rescue else nan, nan, nan, nan)
    if rescue:
        trainer.fit(Hot(), rows)
        assert plugin.counters == counted("xxxrxxx", 4 + 6 * 2)
    else:
        with pytest.raises(NonFiniteStepError, match="4 optimizer steps in a row"):
            trainer.fit(Hot(), rows)


def test_what_a_hook_spoils_is_no_reason_to_move() -> None:
    class Spoils(Hot):
        def loss(self, batch: Tensor) -> Tensor:
            return self.note(self.linear(batch)).float().sum()

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            optimizer.param_groups[0]["params"][0].grad.fill_(math.nan)

    plugin, module = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=1.0), max_skipped=4), Spoils()
    with pytest.raises(NonFiniteStepError, match="'16-mixed'"):
        make_trainer(plugin, callbacks=[PrecisionFallback()]).fit(module, batches(20))
    assert module.story == "hhhh"


def test_a_static_scale_that_is_too_high_is_not_taken_for_the_precision() -> None:
    """At the static 2^16 the gradient 2 overflows; at 1 it does not."""

    class Mild(Hot):
        def loss(self, batch: Tensor) -> Tensor:
            return self.note(self.linear(batch)).float().sum() * 2

    plugin, module = AdaptiveMixedPrecision("16-mixed", LossScale(dynamic=False), retries=0), Mild()
    make_trainer(plugin, callbacks=[PrecisionFallback()]).fit(module, batches(1))
    assert plugin.last_step is not None
    assert plugin.last_step.diagnosis is not None
    assert plugin.last_step.diagnosis.cause != "backward"  # "gradients non-finite at the lowest scale"
    assert "loss scale" in str(plugin.last_step.diagnosis).lower()


# Windows --------------------------------------------------------------------------------------------------------------


def test_it_moves_between_windows() -> None:
    plugin, module = AdaptiveMixedPrecision("16-mixed"), Hot()
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback(patience=2)], accumulate_grad_batches=4)
    assert fit_and_listen(trainer, module, batches(16)) == [rescued(1, 1, "16-mixed", "bf16-mixed")]
    assert module.story == "".join(letter * 4 for letter in RESCUE + MOVE + "bb")
    assert plugin.counters == counted("rr..", 2 * 4 + 2)
    assert module.linear.weight.item() == 1 - 4 * 2.0**-4


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
def test_the_window_that_moves_the_run_is_the_incomplete_one_of_an_epoch(
    clip: dict[str, Any], updates: tuple[float, float], steep: bool, fused: bool
) -> None:
    module = Steep(fused=fused) if steep else Hot(fused=fused)
    unit = 2.0**19 if steep else 1.0
    clip = {key: value * unit if isinstance(value, float) else value for key, value in clip.items()}
    plugin = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=1.0))
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback()], accumulate_grad_batches=4, max_epochs=2, **clip)
    assert fit_and_listen(trainer, module, batches(10)) == [rescued(2, 2, "16-mixed", "bf16-mixed")]
    full = "".join(letter * 4 for letter in RESCUE)
    assert module.story == full * 2 + "hhffhhbb" + "b" * 10
    assert plugin.counters == counted("rrr...", 3 * 4 + 3)
    expected = 1 - 2 * (2 * updates[0] + updates[1]) * 2.0**-4
    rounding = 1e-6 if clip.get("gradient_clip_algorithm") == "norm" else 0.0
    assert module.linear.weight.item() == pytest.approx(expected, rel=rounding, abs=0)
    if clip.get("gradient_clip_algorithm") == "norm":
        assert plugin.last_step is not None
        assert (plugin.last_step.grad_norm, plugin.last_step.clipped) == (0.5 * unit, False)


def test_windows_of_different_length_count_alike() -> None:
    plugin, module = AdaptiveMixedPrecision("16-mixed"), Hot()
    scheduler = pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 4})
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback(patience=4), scheduler], max_epochs=3)
    assert fit_and_listen(trainer, module, batches(3)) == [rescued(3, 3, "16-mixed", "bf16-mixed")]
    assert module.story == RESCUE * 3 + "hhhfffhhhbbb" + "bbb"
    assert plugin.counters == counted("rrrr.", 4 * 4 + 1)
    assert module.linear.weight.item() == 1 - (3 + 2 * 0.75) * 2.0**-4


def test_a_window_that_training_step_gives_up_is_not_rescued() -> None:
    class Gives(Hot):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            return None if batch_idx % 2 else self.loss(batch)

    plugin, module = AdaptiveMixedPrecision("16-mixed"), Gives()
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback()])
    assert fit_and_listen(trainer, module, batches(12)) == [rescued(4, 2, "16-mixed", "bf16-mixed")]
    assert module.story == RESCUE * 2 + MOVE + "bbb"
    assert module.linear.weight.item() == 1 - 6 * 2.0**-4


# Manual optimization and two optimizers -------------------------------------------------------------------------------


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
        self.story = ""
        self.reports: list[StepReport] = []
        self.grads: list[float | None] = []

    def loss_of(self, name: str, batch: Tensor) -> Tensor:
        factor = 2.0**17 if name in self.hot else 1.0
        hidden = self.get_submodule(name)(batch * factor)
        self.story += LETTERS[hidden.dtype]
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


def fit_two(module: Two, steps: int, patience: int = 3, max_skipped: int = 10, **rules: Any) -> AdaptiveMixedPrecision:
    plugin = AdaptiveMixedPrecision("16-mixed", LossScale(**{"init_scale": 2.0**8, **rules}), max_skipped)
    make_trainer(plugin, callbacks=[PrecisionFallback(patience=patience)]).fit(module, batches(steps))
    return plugin


@pytest.mark.parametrize("hot", ["a", "b"])
def test_the_failing_steps_of_an_optimizer_are_in_a_row_whatever_the_other_does(hot: str) -> None:
    module = Two(lambda i: "az ab as bz bb bs", hot=hot)
    with pytest.warns(RuntimeWarning) as told:
        plugin = fit_two(module, 8)
    assert told_by(told) == [skipped(7 if hot == "b" else 6, 3, "16-mixed", "bf16-mixed")]
    assert plugin.counters == counted(("x." if hot == "a" else ".x") * 4 + "." * 8)
    assert module.weights == ((1 - 4 / 16, 1 - 8 / 16) if hot == "a" else (1 - 8 / 16, 1 - 4 / 16))


@pytest.mark.parametrize("hot", ["a", "b"])
def test_so_they_are_where_the_optimizers_take_turns(hot: str) -> None:
    module = Two(lambda i: ("az ab as", "bz bb bs")[i % 2], hot=hot)
    with pytest.warns(RuntimeWarning):
        plugin = fit_two(module, 24)
    assert plugin.precision == "bf16-mixed"


def test_clean_iterations_in_between_keep_it_where_it_is() -> None:
    """Two of three iterations fail, and only the second of them is looked on at."""

    class Sometimes(Two):
        def loss_of(self, name: str, batch: Tensor) -> Tensor:
            bad = self.trainer.fit_loop.epoch_loop.batch_idx % 3 < 2
            self.hot = "ab" if bad else ""
            return super().loss_of(name, batch)

    module = Sometimes(lambda i: "az ab as")
    plugin = fit_two(module, 12, patience=2)
    assert plugin.precision == "16-mixed"
    assert plugin.counters == counted("xx." * 4)
    assert module.weights == (1 - 4 / 16, 1)


def test_nan_batches_move_nothing_in_manual_optimization() -> None:
    """What comes in is not finite already: no module is at fault."""
    plugin, module = AdaptiveMixedPrecision("16-mixed", max_skipped=6), Hot(manual=True)
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback(patience=1)])
    with pytest.raises(NonFiniteStepError, match="6 optimizer steps in a row"):
        trainer.fit(module, numbers(*[math.nan] * 8))
    assert module.story == "h" * 6
    assert plugin.precision == "16-mixed"


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
    told = fit_and_listen(make_trainer(plugin, callbacks=[PrecisionFallback()]), module, batches(6))
    assert told == [skipped(3, 3, "16-mixed", "bf16-mixed")]
    assert module.story == "hhhhbb"
    assert module.linear.weight.item() == 1 - 2 * 2.0**-4


def test_gradients_held_at_the_switch_are_true_and_their_sum_is() -> None:
    """The switch falls between the two micro-batches of an optimizer whose own steps are fine."""
    scripts = ["bz bb bs"] * 3 + ["az ab bz bb bs", "ab as bz bb bs", "az ab as bz bb bs"]
    module = Two(lambda i: scripts[i], hot="b")
    with pytest.warns(RuntimeWarning) as told:
        plugin = fit_two(module, 6)
    assert told_by(told) == [skipped(3, 3, "16-mixed", "bf16-mixed")]
    assert module.story == "hhh" + "hh" + "bbbb"
    # In float16, with that of bfloat16 on top, and the next window.
    assert [module.grads[i] for i in (3, 5, 7)] == [1.0, 2.0, 1.0]
    assert module.weights == (1 - 3 / 16, 1 - 2 / 16)
    assert plugin.counters == counted("xxxx....")
    assert [report.precision for report in module.reports] == ["16-mixed"] * 4 + ["bf16-mixed"] * 4


def test_a_backward_of_two_optimizers_fails_in_one_precision() -> None:
    module = Two(lambda i: "az bz abb as bs", hot="ab")
    with pytest.warns(RuntimeWarning) as told:
        plugin = fit_two(module, 4, patience=1)
    assert told_by(told) == [skipped(2, 1, "16-mixed", "bf16-mixed")]
    assert [report.precision for report in module.reports] == ["16-mixed"] * 4 + ["bf16-mixed"] * 4
    assert plugin.counters == counted("xxxx....")


def test_several_steps_in_one_training_step_move_one_rung() -> None:
    module = Two(lambda i: " ".join(["az ab as"] * 8), hot="a")
    with pytest.warns(RuntimeWarning) as told:
        plugin = fit_two(module, 3)
    assert len(told_by(told)) == 1
    assert plugin.precision == "bf16-mixed"
    assert module.story == "h" * 16 + "b" * 8
    assert [report.precision for report in module.reports] == ["16-mixed"] * 16 + ["bf16-mixed"] * 8


def test_what_follows_the_switch_in_a_training_step_does_not_underflow() -> None:
    """The gradient of the other optimizer is 2^-26: 0 in float16 without a scale."""

    class Small(Two):
        def loss_of(self, name: str, batch: Tensor) -> Tensor:
            return super().loss_of(name, batch) * (2.0**-26 if name == "b" else 1)

    module = Small(lambda i: "az ab as bz bb bs", hot="a")
    with pytest.warns(RuntimeWarning, match="the run computes in"):
        fit_two(module, 3, patience=1, init_scale=2.0**16)
    assert module.story == "hhhhbb"
    assert module.grads[1::2] == [2.0**-26] * 3


def test_a_step_is_not_skipped_for_what_an_earlier_precision_left() -> None:
    """Both overflow in float16; only one of them steps, which moves the run; both clear their gradients."""
    module = Two(lambda i: "az bz abb as" if i < 4 else "az bz abb as bs", hot="ab")
    with pytest.warns(RuntimeWarning, match="the run computes in"):
        plugin = fit_two(module, 5)
    assert plugin.counters == counted("xxxx..")
    assert module.weights == (1 - 1 / 16, 1 - 1 / 16)
    assert [(report.precision, report.scale) for report in module.reports[4:]] == [("bf16-mixed", 1.0)] * 2


def test_a_failing_step_in_bfloat16_tells_its_own_place() -> None:
    """The first micro-batch of ``b`` in float16; the second, in bfloat16, makes NaN gradients of a finite loss."""

    class Broken(Two):
        def loss_of(self, name: str, batch: Tensor) -> Tensor:
            loss = super().loss_of(name, batch)
            broken = name == "b" and self.story[-1] == "b"
            return loss + (self.b.weight.sum() * 0).sqrt() if broken else loss

    scripts = ["az ab as"] * 3 + ["bz bb az ab as", "bb bs"]
    module = Broken(lambda i: scripts[i], hot="a")
    with pytest.warns(RuntimeWarning, match="the run computes in"):
        fit_two(module, 5)
    report = module.reports[-1]
    assert (report.step, report.optimizer, report.precision, report.scale) == (4, 1, "bf16-mixed", 1.0)
    assert (report.outcome, report.non_finite) == ("skipped", "gradients")


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
        make_trainer(plugin, callbacks=[PrecisionFallback()]).fit(module, batches(6))
    assert module.story == "hhhhbb"
    assert module.linear.weight.item() == 1 - 2 * 2.0**-4  # of two steps with the gradient 2^19


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
    fit_and_listen(make_trainer(plugin, callbacks=[PrecisionFallback()]), module, batches(6))
    assert module.story == "hhhhbb"
    assert module.linear.weight.item() == 1 - 2 * 2.0**-4


# What it computes in --------------------------------------------------------------------------------------------------


class Everywhere(Hot):
    """Keeps the dtype of each kind of step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = {"training": "", "validation": "", "test": "", "predict": ""}

    def look(self, kind: str, batch: Tensor) -> Tensor:
        loss = self.loss(batch)
        self.seen[kind] += self.story[-1]
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
    assert module.seen["training"] == RESCUE * 2 + MOVE + "bb"
    assert module.seen["validation"] == "hhbbb"  # after each batch, with nothing to look at

    other = make_trainer(plugin)  # without the callback
    for each in (trainer, other):
        each.validate(module, batches(1), verbose=False)
        each.test(module, batches(1), verbose=False)
        predictions = each.predict(module, batches(1))
        assert predictions is not None
        assert predictions[0].item() == 1 - 5 * 2.0**-4  # type: ignore[union-attr]
    assert module.seen["validation"][5:] == module.seen["test"] == module.seen["predict"] == "bb"
    assert plugin.precision == "bf16-mixed"
    assert plugin.rules is None


def test_a_checkpoint_is_evaluated_on_its_rung(tmp_path: Path) -> None:
    trainer = make_trainer(AdaptiveMixedPrecision("16-mixed"), callbacks=[PrecisionFallback()])
    fit_and_listen(trainer, Everywhere(), batches(5))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    module = Everywhere()
    fresh = make_trainer(AdaptiveMixedPrecision("16-mixed"), callbacks=[PrecisionFallback()])
    fresh.test(module, batches(1), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert module.seen["test"] == "b"


def test_an_earlier_checkpoint_is_evaluated_on_the_rung_that_the_run_has_reached(tmp_path: Path) -> None:
    """As ``trainer.test(ckpt_path="best")`` after a fit, where the best was before the move."""
    plugin, module = AdaptiveMixedPrecision("16-mixed"), Everywhere()
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback(), Save(tmp_path / "a.ckpt", 1)])
    fit_and_listen(trainer, module, batches(5))
    trainer.test(module, batches(1), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert module.seen["test"] == "b"
    assert plugin.counters == counted("rrr..", 14)


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
    assert tested.seen["test"] == "h"

    plugin, module = AdaptiveMixedPrecision("16-mixed"), Everywhere()
    with pytest.warns(RuntimeWarning, match=says):
        make_trainer(plugin, max_epochs=2).fit(module, batches(2), ckpt_path=tmp_path / "a.ckpt")
    assert module.seen["training"] == "hh"
    assert plugin.counters == counted("rrr..xx", 16)

    configurations: list[tuple[PrecisionName, str]] = [("32-true", "f"), ("bf16-mixed", "b")]
    for configured, reached in configurations:
        module, wider = Everywhere(), AdaptiveMixedPrecision(configured)
        trainer = make_trainer(wider, callbacks=[PrecisionFallback()], max_epochs=2)
        trainer.fit(module, batches(2), ckpt_path=tmp_path / "a.ckpt")
        assert module.seen["training"] == reached * 2
        assert wider.counters == counted("rrr....", 16)


def test_statistics_of_batch_norm_are_those_of_the_attempts_that_were_applied() -> None:
    class Normed(Everywhere):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(1)

        def loss(self, batch: Tensor) -> Tensor:
            return self.norm(self.note(self.linear(batch * 2.0**17))).float().sum() * 0

    plugin, module, wide = AdaptiveMixedPrecision("16-mixed"), Normed(), Normed()
    rows: Any = torch.arange(1.0, 21.0).reshape(20, 1)
    make_trainer(plugin, callbacks=[PrecisionFallback(patience=9)]).fit(module, DataLoader(rows, batch_size=4))
    make_trainer(AdaptiveMixedPrecision("32-true")).fit(wide, DataLoader(rows, batch_size=4))
    assert plugin.counters == counted("rrrrr", 20)
    for (name, found), expected in zip(module.norm.named_buffers(), wide.norm.buffers(), strict=True):
        assert torch.equal(found, expected), name


# Checkpoints ----------------------------------------------------------------------------------------------------------


class Wide(Hot):
    """Several features, and an optimizer with state; activations above 65504."""

    def __init__(self, *, manual: bool = False) -> None:
        super().__init__(manual=manual)
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        nn.init.uniform_(self.linear.weight, 0.5, 1.5)

    def loss(self, batch: Tensor) -> Tensor:
        hidden = self.note(self.linear(batch * 2.0**17))
        return (hidden.float() * 2.0**-17 - 3).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class WideSteep(Wide):
    """The same with a finite loss and gradients that overflow at any loss scale."""

    def loss(self, batch: Tensor) -> Tensor:
        return self.note(self.linear(batch * 2.0**10)).float().square().mean() * 2.0**-2


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


def kill_and_resume(
    whole: Hot, resumed: Hot, path: Path, after: int, **fallback: Any
) -> tuple[AdaptiveMixedPrecision, AdaptiveMixedPrecision]:
    """Fit ``whole``, and go on from its checkpoint with ``resumed``, which must come to the same."""
    first = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=1.0))
    trainer = make_trainer(first, callbacks=[PrecisionFallback(**fallback), Save(path, after)])
    told = fit_and_listen(trainer, whole, rows(8))
    second = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=1.0))
    trainer = make_trainer(second, callbacks=[PrecisionFallback(**fallback)])
    if after < 3:
        assert fit_and_listen(trainer, resumed, rows(8), ckpt_path=path) == told
    else:
        trainer.fit(resumed, rows(8), ckpt_path=path)
    return first, second


@pytest.mark.parametrize("scope", ["model", "module"])
@pytest.mark.parametrize("after", [1, 2, 3, 7])
@pytest.mark.parametrize("model", [Wide, WideSteep], ids=["loss", "gradients"])
def test_a_run_that_was_killed_goes_on_bitwise(tmp_path: Path, after: int, model: type[Wide], scope: str) -> None:
    """It moves at the third rescue, which is the 2nd, the 1st or none of the resumed run."""
    whole, resumed = model(), model()
    first, second = kill_and_resume(whole, resumed, tmp_path / "a.ckpt", after, scope=scope)
    assert first.counters == counted("rrr.....", 17)
    assert first.kept_modules == second.kept_modules == (("linear",) if scope == "module" else ())
    assert first.precision == ("16-mixed" if scope == "module" else "bf16-mixed")
    assert resumed.story == whole.story[4 * min(after, 3) + max(after - 3, 0) :]
    assert second.state_dict() == first.state_dict()
    assert second.last_step == first.last_step
    for found, expected in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(found, expected)
    assert not torch.equal(whole.linear.weight, model().linear.weight)


@pytest.mark.parametrize("after", [1, 2, 5])
def test_so_it_does_in_manual_optimization(tmp_path: Path, after: int) -> None:
    """It moves at the fourth failing iteration."""
    whole, resumed = Wide(manual=True), Wide(manual=True)
    first, second = kill_and_resume(whole, resumed, tmp_path / "a.ckpt", after)
    assert whole.story == "hhhhbbbb"
    assert resumed.story == whole.story[after:]
    assert second.state_dict() == first.state_dict()
    for found, expected in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_a_second_fit_of_a_resumed_plugin_starts_anew(tmp_path: Path) -> None:
    trainer = make_trainer(AdaptiveMixedPrecision("16-mixed"), callbacks=[PrecisionFallback()])
    fit_and_listen(trainer, Hot(), batches(5))
    trainer.save_checkpoint(tmp_path / "a.ckpt")

    plugin, module = AdaptiveMixedPrecision("16-mixed"), Hot()
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback()], max_epochs=2)
    trainer.fit(module, batches(5), ckpt_path=tmp_path / "a.ckpt")
    assert module.story == "b" * 5
    assert plugin.counters == counted("rrr.......", 3 * 4 + 7)

    again = Hot()
    told = fit_and_listen(make_trainer(plugin, callbacks=[PrecisionFallback()]), again, batches(4))
    assert told == [rescued(2, 2, "16-mixed", "bf16-mixed")]
    assert again.story == RESCUE * 2 + MOVE + "b"
    assert plugin.rules is None  # nothing stays behind


# Ladders --------------------------------------------------------------------------------------------------------------


LADDERS: list[tuple[PrecisionName, tuple[PrecisionName, ...] | None, str, PrecisionName]] = [
    ("16-mixed", None, "bf", "bf16-mixed"),
    ("16-mixed", ("16-mixed", "32-true"), "f", "32-true"),
    ("16-mixed", ("32-true",), "f", "32-true"),
    ("16-mixed", ("bf16-mixed",), "b", "bf16-mixed"),
    ("16-mixed", ("bf16-mixed", "32-true"), "bf", "bf16-mixed"),
    ("bf16-mixed", None, "f", "bf16-mixed"),
    ("bf16-mixed", ("16-mixed", "bf16-mixed"), "", "bf16-mixed"),
    ("32-true", None, "", "32-true"),
]
"""Where a run starts, its ladder, the wider rungs of that, and where one ends that float16 cannot hold."""


@pytest.mark.parametrize(("start", "ladder", "rungs", "reached"), LADDERS)
def test_it_tries_the_widest_rung_and_moves_to_the_narrowest(
    start: PrecisionName, ladder: tuple[PrecisionName, ...] | None, rungs: str, reached: PrecisionName
) -> None:
    plugin, module = AdaptiveMixedPrecision(start, max_skipped=1), Hot()
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback(ladder, patience=1)])
    if start == reached == "16-mixed":
        with pytest.raises(NonFiniteStepError, match="'16-mixed'"):
            trainer.fit(module, batches(3))
    elif start == reached:
        trainer.fit(module, batches(3))
        assert module.story == {"bf16-mixed": "bbb", "32-true": "fff"}[start]
    else:
        assert fit_and_listen(trainer, module, batches(3)) == [rescued(0, 0, start, reached)]
        assert module.story == "h" + rungs[-1] + "h" + rungs[0] * 3
    assert plugin.precision == reached


@pytest.mark.parametrize(("start", "ladder", "rungs", "_"), LADDERS)
@pytest.mark.parametrize("cause", ["batch", "model"])
def test_what_is_finite_nowhere_ends_the_fit_where_it_began(
    start: PrecisionName, ladder: tuple[PrecisionName, ...] | None, rungs: str, _: PrecisionName, cause: str
) -> None:
    plugin = AdaptiveMixedPrecision(start, max_skipped=3)
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback(ladder, patience=1)])
    module = Hot() if cause == "batch" else Spoiled()
    message = r"^3 optimizer steps in a row .* the last one was step 2\."
    with pytest.raises(NonFiniteStepError, match=message) as raised:
        trainer.fit(module, numbers(*[math.nan if cause == "batch" else 1.0] * 9))
    narrow = {"16-mixed": "h", "bf16-mixed": "b", "32-true": "f"}[start]
    # The model's own fault is looked for in the last step, in the widest precision.
    assert module.story == (narrow + rungs[-1:]) * 3 + ((rungs or narrow)[-1] if cause == "model" else "")
    assert raised.value.diagnosis is not None
    assert raised.value.diagnosis.cause == cause
    assert plugin.precision == start
    assert plugin.counters == counted("xxx", len(module.story))
    assert module.linear.weight.item() == 1


def test_a_model_that_is_broken_ends_the_fit_at_once() -> None:
    class Breaks(Hot):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            if batch_idx == 2:
                self.linear.weight.data.fill_(math.nan)

    plugin, module = AdaptiveMixedPrecision("16-mixed"), Breaks()
    with pytest.raises(NonFiniteStepError, match=r"step 2: .*linear\.weight") as raised:
        make_trainer(plugin, callbacks=[PrecisionFallback()]).fit(module, numbers(*[2.0**-4] * 9))
    assert raised.value.diagnosis is not None
    assert raised.value.diagnosis.cause == "parameters"
    assert module.story == "hh" + "hf"
    assert plugin.counters == counted("..x", 4)


@pytest.mark.parametrize("max_skipped", [1, 2])
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_patience_may_exceed_max_skipped(max_skipped: int, manual: bool) -> None:
    """No rescue is a skip, nor is a failing iteration that was looked on at; the one before it is."""
    plugin, module = AdaptiveMixedPrecision("16-mixed", max_skipped=max_skipped), Hot(manual=manual)
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback(patience=3)])
    if manual and max_skipped == 1:
        with pytest.raises(NonFiniteStepError):
            trainer.fit(module, batches(5))
        return
    fit_and_listen(trainer, module, batches(5))
    assert plugin.precision == "bf16-mixed"


# Beside others --------------------------------------------------------------------------------------------------------


def test_of_several_the_last_decides() -> None:
    plugin, module = AdaptiveMixedPrecision("16-mixed"), Hot()
    callbacks = [PrecisionFallback(patience=1), PrecisionFallback(("32-true",), patience=2)]
    told = fit_and_listen(make_trainer(plugin, callbacks=callbacks), module, batches(4))
    assert told == [rescued(1, 1, "16-mixed", "32-true")]
    assert plugin.rules is None


def test_the_one_of_the_module_replaces_the_one_of_the_trainer() -> None:
    class Configures(Hot):
        def configure_callbacks(self) -> pl.Callback:
            return PrecisionFallback(("32-true",), patience=2)

    plugin, module = AdaptiveMixedPrecision("16-mixed"), Configures()
    told = fit_and_listen(make_trainer(plugin), module, batches(4))
    assert told == [rescued(1, 1, "16-mixed", "32-true")]
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback(patience=1)])
    again = Configures()
    assert fit_and_listen(trainer, again, batches(4)) == told
    assert again.story == RESCUE * 2 + "ff"
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
    assert told == [rescued(1, 1, "bf16-mixed", "32-true"), rescued(1, 1, "16-mixed", "bf16-mixed")]
    assert (outer.counters, inner.counters) == (counted("rr..", 10), counted("rr.", 9))
    assert (outer.precision, inner.precision) == ("bf16-mixed", "32-true")


@pytest.mark.skipif(not hasattr(pl.callbacks, "WeightAveraging"), reason="this Lightning has no WeightAveraging")
def test_a_weight_average_counts_each_rescued_step_once() -> None:
    plugin, module = AdaptiveMixedPrecision("16-mixed"), Everywhere()
    average = pl.callbacks.WeightAveraging()
    fit_and_listen(make_trainer(plugin, callbacks=[PrecisionFallback(), average]), module, batches(6))
    assert module.linear.weight.item() == pytest.approx(sum(range(10, 16)) / 16 / 6, abs=1e-6)
    assert plugin.counters == counted("rrr...", 15)


def test_stochastic_weight_averaging() -> None:
    plugin, module = AdaptiveMixedPrecision("16-mixed"), Hot()
    average = pl.callbacks.StochasticWeightAveraging(swa_lrs=2.0**-4, swa_epoch_start=2, annealing_epochs=1)
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback(), average], max_epochs=3)
    fit_and_listen(trainer, module, batches(2))
    assert plugin.counters == counted("rrr...", 15)
    # Averaged are the weights at the starts of epochs 1 (two steps applied) and 2 (four).
    assert module.linear.weight.item() == 1 - 3 / 16


@pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="eager compiled code: torch 2.6")
def test_a_compiled_module() -> None:
    torch._dynamo.reset()
    plugin, module = AdaptiveMixedPrecision("16-mixed"), Hot()
    module.linear.compile(backend="eager")
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback()])
    assert fit_and_listen(trainer, module, batches(5)) == [rescued(2, 2, "16-mixed", "bf16-mixed")]
    assert module.story == RESCUE * 2 + MOVE + "bb"
    assert module.linear.weight.item() == 1 - 5 * 2.0**-4


def test_the_monitor_logs_the_rescue_and_the_move() -> None:
    class Read(pl.Callback):
        def __init__(self) -> None:
            self.found: dict[str, list[float]] = {}

        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            for key in ("mantissa_bits", "loss_scale", "rescued_steps", "retried_attempts", "overflow_rate"):
                self.found.setdefault(key, []).append(float(trainer.callback_metrics[f"amp/{key}"]))

    plugin, read = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=4.0), retries=0), Read()
    callbacks = [PrecisionFallback(patience=2), AMPMonitor(), read]
    fit_and_listen(make_trainer(plugin, callbacks=callbacks, log_every_n_steps=1), Steep(), batches(5))
    assert read.found["mantissa_bits"] == [10, 10, 23, 7, 7]  # of the step
    assert read.found["loss_scale"] == [2, 1, 1, 1, 1]
    assert read.found["rescued_steps"] == [0, 0, 1, 2, 2]
    assert read.found["retried_attempts"] == [0, 0, 3, 6, 6]
    assert read.found["overflow_rate"] == pytest.approx([1, 1, 1, 1, 0.8])


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_learning_rate_finder_rescues_and_moves_nothing(tmp_path: Path) -> None:
    class Tuned(Hot):
        lr = 2.0**-4

    plugin, module = AdaptiveMixedPrecision("16-mixed"), Tuned()
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback(patience=1)], default_root_dir=tmp_path)
    tuner: Any = importlib.import_module(f"{pl.__name__}.tuner")
    tuner.Tuner(trainer).lr_find(module, batches(20), num_training=10)
    assert len(module.story) >= 10
    assert set(module.story) == {"h"}
    assert (plugin.precision, plugin.rules) == ("16-mixed", None)
    module.story = ""
    assert fit_and_listen(trainer, module, batches(2)) == [rescued(0, 0, "16-mixed", "bf16-mixed")]
    assert module.story == MOVE + "b"


# From run to run ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("same_trainer", [False, True])
def test_a_second_fit_counts_from_zero(same_trainer: bool) -> None:
    plugin = AdaptiveMixedPrecision("16-mixed")
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback()])
    trainer.fit(Hot(), batches(2))  # two rescues, and no third
    assert plugin.counters == counted("rr", 8)
    if same_trainer:
        trainer.fit_loop.max_epochs = 2
    else:
        trainer = make_trainer(plugin, callbacks=[PrecisionFallback()])
    module = Hot()
    assert fit_and_listen(trainer, module, batches(5)) == [rescued(2, 2, "16-mixed", "bf16-mixed")]
    assert module.story == RESCUE * 2 + MOVE + "bb"


def test_auto_starts_anew_on_the_rung_it_has_chosen() -> None:
    """ "auto" is bfloat16 here."""
    plugin = AdaptiveMixedPrecision()
    for _ in range(2):
        module = Hot(worse=True)
        trainer = make_trainer(plugin, callbacks=[PrecisionFallback(patience=2)])
        assert fit_and_listen(trainer, module, batches(3)) == [rescued(1, 1, "bf16-mixed", "32-true")]
        assert module.story == "bfbf" * 2 + "f"
        trainer.test(module, batches(1), verbose=False)
        assert module.story[-1] == "f"


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
    assert plugin.counters == counted("rr", 8)
    module = Hot()
    told = fit_and_listen(make_trainer(plugin, callbacks=[PrecisionFallback()]), module, batches(5))
    assert told == [rescued(2, 2, "16-mixed", "bf16-mixed")]
    assert plugin.counters == counted("rrr..", 14)


def test_a_fit_without_the_callback_does_not_fall_back_after_one_with_it_that_raised() -> None:
    class Breaks(Hot):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            raise Stop

    plugin = AdaptiveMixedPrecision("16-mixed", max_skipped=4)
    with pytest.raises(Stop):
        make_trainer(plugin, callbacks=[PrecisionFallback()]).fit(Breaks(), batches(1))
    assert plugin.rules is None
    with pytest.raises(NonFiniteStepError):
        make_trainer(plugin).fit(Hot(), batches(5))


def test_a_warning_that_is_an_error_leaves_a_run_that_has_moved() -> None:
    """As with ``python -W error``: the message stops the fit, with counters and precision after the step."""
    plugin, module = AdaptiveMixedPrecision("16-mixed"), Hot()
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback()])
    with pytest.raises(RuntimeWarning, match="the run computes in 'bf16-mixed'"):
        trainer.fit(module, batches(5))
    assert plugin.counters == counted("rrr", 12)
    assert plugin.precision == "bf16-mixed"
    assert module.linear.weight.item() == 1 - 3 * 2.0**-4


# What is told ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ladder": ()}, r"ladder=\(\).*16-mixed, bf16-mixed, 32-true, in this order"),
        ({"ladder": ("32-true", "16-mixed")}, "ladder=.*in this order"),
        ({"ladder": ("16-true",)}, "16-true"),
        ({"ladder": "32-true"}, "ladder='32-true'"),
        ({"patience": 0}, "patience=0.*at least 1"),
        ({"patience": True}, "patience=True"),
        ({"patience": 5, "within_steps": 4}, "within_steps=4.*at least 5"),
        ({"max_modules": 0}, "max_modules=0.*at least 1"),
        ({"retry_after": 0}, "retry_after=0.*at least 1"),
        ({"scope": "layer"}, "scope='layer'.*'auto', 'model', 'module'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrecisionFallback(**arguments)


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
