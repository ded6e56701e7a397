"""PrecisionFallback: when a run moves on, where to, and that it is told, resumed and ended."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_trainer
from namespace import AdaptiveMixedPrecision, PrecisionFallback, pl
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp_plus import NonFiniteStepError, StepCounters
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
    assert plugin.scaler is None
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
    with pytest.warns(RuntimeWarning, match="step 1 was skipped"):
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
