"""Evaluation steps that float16 makes inf or NaN of are run again wider, without a trace in metrics and callbacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import pytest
import torch
from helpers import make_trainer
from namespace import AdaptiveMixedPrecision, PrecisionFallback, pl
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanMetric, MinMetric

from lightning_amp_plus import LossScale
from lightning_amp_plus.precisions import PrecisionName

NAN, INF = math.nan, math.inf
ROWS = (1.0, 4.0, 2.0, 5.0, 3.0)
"""Batches of one. Times 2^14 float16 holds them exactly below 4, and not from 4 on: two are too large."""
HOT = sum(row >= 4 for row in ROWS)

BOTH: tuple[PrecisionName, ...] = ("16-mixed", "32-true")

TOLD = pytest.mark.filterwarnings(
    "ignore:A batch of the evaluation:RuntimeWarning", "ignore:3 batches in a row of the evaluation:RuntimeWarning"
)


class Model(pl.LightningModule):
    """``shows`` is how an evaluation step shows its loss, which is the row itself."""

    mean: Any
    smallest: Any
    cat: Any

    def __init__(
        self,
        shows: Sequence[str] = ("return", "log", "log metric", "state"),
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.linear.weight)
        self.mean, self.cat = MeanMetric(nan_strategy="disable"), CatMetric(nan_strategy="disable")
        self.logged = MeanMetric(nan_strategy="disable")
        self.shows, self.change = tuple(shows), change
        self._calls: list[torch.dtype] = []  # plain attributes are put back
        self.returned: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.linear(batch).float().sum()

    def loss(self, batch: Tensor) -> Tensor:
        hidden = self.linear(batch * 2.0**14)
        self._calls.append(hidden.dtype)
        return (hidden if self.change is None else self.change(hidden)).float().mean() * 2.0**-14

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss = self.loss(batch)
        if "state" in self.shows:
            self.mean.update(loss)
        if "list" in self.shows:
            self.cat.update(loss)
        if "log metric" in self.shows:
            self.logged.update(loss)
            self.log("logged", self.logged)
        if "log" in self.shows:
            self.log("loss", loss, on_step=False, on_epoch=True)
            self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return {"loss": loss} if "return" in self.shows else None

    def test_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.validation_step(batch, batch_idx)

    def on_validation_batch_end(self, outputs: Any, *args: Any) -> None:
        if isinstance(outputs, dict):
            self.returned.append(float(outputs["loss"]))

    def on_validation_epoch_end(self) -> None:
        for name, metric in (("state", self.mean), ("list", self.cat)):
            if name in self.shows:
                self.log(name, metric.compute().mean())
                metric.reset()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def loader(rows: Sequence[float] = ROWS) -> DataLoader[Tensor]:
    data: Any = torch.tensor(rows).reshape(-1, 1)
    return DataLoader(data)


def make_plugin(precision: PrecisionName = "16-mixed") -> AdaptiveMixedPrecision:
    return AdaptiveMixedPrecision(precision, LossScale(init_scale=1.0))


def evaluate(
    module: pl.LightningModule,
    precision: PrecisionName = "16-mixed",
    rows: Sequence[float] = ROWS,
    *,
    method: Literal["validate", "test"] = "validate",
    rescues: bool = True,
) -> AdaptiveMixedPrecision:
    plugin = make_plugin(precision)
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback()] if rescues else [])
    getattr(trainer, method)(module, loader(rows), verbose=False)
    return plugin


def metrics(module: pl.LightningModule) -> dict[str, float]:
    return {name: value.item() for name, value in module.trainer.callback_metrics.items()}


# What comes out is float32's ------------------------------------------------------------------------------------------


@TOLD
@pytest.mark.parametrize("shows", ["return", "log", "log metric", "state", "list"])
def test_what_an_overflow_would_show_in_is_as_in_float32(shows: str) -> None:
    rescued, wide, narrow = Model([shows]), Model([shows]), Model([shows])
    counters = evaluate(rescued).counters
    evaluate(wide, "32-true")
    evaluate(narrow, rescues=False)
    assert (metrics(rescued), rescued.returned) == (metrics(wide), wide.returned)
    assert [*metrics(wide).values(), *wide.returned].count(INF) == 0
    assert INF in [*metrics(narrow).values(), *narrow.returned]
    assert (counters.rescued_evaluations, counters.rescued_steps, counters.steps) == (HOT, 0, 0)
    assert rescued._calls.count(torch.float32) == HOT
    assert len(rescued._calls) == len(ROWS) + HOT


@pytest.mark.parametrize("method", ["validate", "test"])
def test_it_is_told_once(method: Literal["validate", "test"]) -> None:
    module = Model()
    text = "A batch of the evaluation was not finite in '16-mixed' and was run again in '32-true'"
    with pytest.warns(RuntimeWarning, match=text) as told:
        plugin = evaluate(module, method=method)
    assert sum("evaluation" in str(warning.message) for warning in told) == 1
    assert plugin.counters.rescued_evaluations == HOT
    assert metrics(module)["loss"] == sum(ROWS) / len(ROWS)
    assert plugin.precision == "16-mixed"


@TOLD
def test_several_loaders_and_batches_of_different_sizes() -> None:
    """Values are weighed by the size of the batch that was run again."""
    results = []
    for precision in BOTH:
        module, plugin = Model(), make_plugin(precision)
        trainer = make_trainer(plugin, callbacks=[PrecisionFallback()])
        data: Any = torch.tensor([1.0, 2.0, 4.0, 5.0, 3.0]).reshape(-1, 1)
        loaders = [DataLoader(data, batch_size=2), DataLoader(data, batch_size=3)]
        trainer.validate(module, loaders, verbose=False)
        results.append(metrics(module))
    assert results[0] == results[1]
    assert results[0]["loss/dataloader_idx_0"] == 3.0


@TOLD
def test_callbacks_are_not_fooled() -> None:
    """In plain float16 the loss of the third epoch is inf, which stops the run and hides the best epoch."""

    class Falls(Model):
        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
            """The losses are 6, 5, 4, 3: from large to small, and inf in float16 until the last."""
            return super().validation_step(batch + 6.0 - self.current_epoch, batch_idx)

    found = []
    for rescues in (True, False):
        module, plugin = Falls(["log"]), make_plugin()
        stop = pl.callbacks.EarlyStopping("loss", patience=1, check_finite=True)
        trainer = make_trainer(
            plugin, callbacks=[stop, *([PrecisionFallback()] if rescues else [])], max_epochs=4, num_sanity_val_steps=2
        )
        trainer.fit(module, loader([1.0]), loader([0.0, 0.0]))
        found.append((trainer.current_epoch, float(stop.best_score)))
    assert found == [(4, 3.0), (1, INF)]


@TOLD
def test_checkpoints_are_those_of_float32(tmp_path: Any) -> None:
    """Of losses 5, 3, 4 the second is best and float16 has no number for the others; ``max`` would take an inf."""
    names = []
    for index, precision in enumerate(BOTH):
        saved = pl.callbacks.ModelCheckpoint(tmp_path / str(index), "{epoch}-{loss}", monitor="loss", mode="max")

        class Jumps(Model):
            def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
                return super().validation_step(batch + (5.0, 3.0, 4.0)[self.current_epoch], batch_idx)

        trainer = make_trainer(
            make_plugin(precision),
            callbacks=[saved, PrecisionFallback()],
            max_epochs=3,
            enable_checkpointing=True,
        )
        trainer.fit(Jumps(["log"]), loader([1.0]), loader([0.0]))
        names.append([path.name for path in (tmp_path / str(index)).iterdir()])
    assert names == [["epoch=0-loss=5.0.ckpt"]] * 2


def test_training_goes_on_in_float16_after_a_validation_that_was_run_again() -> None:
    class Watched(Model):
        def __init__(self) -> None:
            super().__init__()
            self._dtypes: list[torch.dtype] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            hidden = self.linear(batch)
            self._dtypes.append(hidden.dtype)
            return hidden.float().sum()

    module, plugin = Watched(), make_plugin()
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback()], max_epochs=2)
    with pytest.warns(RuntimeWarning, match="A batch of the evaluation"):
        trainer.fit(module, loader([1.0, 2.0]), loader())
    assert module._dtypes == [torch.float16] * 4
    assert (plugin.counters.applied_steps, plugin.counters.rescued_evaluations) == (4, 2 * HOT)


# What it costs --------------------------------------------------------------------------------------------------------


class Reads(TorchDispatchMode):
    """Counts the scalars that the host reads; in inference mode they arrive as the operation that was called."""

    names = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::item")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name in self.names
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("precision", "reads"), [("16-mixed", 1), ("bf16-mixed", 0), ("32-true", 0)])
def test_a_clean_batch_costs_one_read_in_float16_and_none_elsewhere(precision: PrecisionName, reads: int) -> None:
    rows, counts = [1.0, 2.0, 3.0, 2.0, 1.0, 3.0, 2.0], []
    for rescues in (True, False):
        module = Model(["return", "log", "log metric", "state", "list"])
        with Reads() as counted:
            evaluate(module, precision, rows, rescues=rescues)
        counts.append(counted.count)
        assert len(module._calls) == len(rows)
    assert counts[0] - counts[1] == reads * len(rows)


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_wider_precisions_are_not_looked_at(precision: PrecisionName) -> None:
    module = Model()
    plugin = evaluate(module, precision, [1.0, INF, NAN])
    assert (len(module._calls), plugin.counters.rescued_evaluations) == (3, 0)


# What is legal --------------------------------------------------------------------------------------------------------


def test_a_metric_that_starts_at_inf_is_legal() -> None:
    """The state of a MinMetric is inf until its first value, which comes in the last batch."""

    class Smallest(Model):
        def __init__(self) -> None:
            super().__init__(["log"])
            self.smallest = MinMetric()

        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
            loss = self.loss(batch)
            if batch_idx == 2:
                self.smallest.update(loss)
            self.log("smallest", self.smallest)
            return loss

    module = Smallest()
    plugin = evaluate(module, rows=[3.0, 1.0, 2.0])
    assert metrics(module) == {"smallest": 2.0}
    assert (module._calls, plugin.counters.rescued_evaluations) == ([torch.float16] * 3, 0)


@TOLD
def test_metrics_that_start_at_inf_are_rolled_back_with_the_others() -> None:
    class Smallest(Model):
        def __init__(self) -> None:
            super().__init__(["log"])
            self.smallest = MinMetric()

        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
            loss = self.loss(batch)
            self.smallest.update(-loss)  # -inf where the loss is inf
            self.log("smallest", self.smallest)

    module = Smallest()
    plugin = evaluate(module)
    assert metrics(module) == {"smallest": -max(ROWS)}
    assert plugin.counters.rescued_evaluations == HOT


# What no precision helps ----------------------------------------------------------------------------------------------


@TOLD
def test_after_three_batches_in_a_row_in_vain_nothing_is_run_again() -> None:
    module = Model(["return", "log"])
    plugin = evaluate(module, rows=[NAN] * 8 + [4.0])
    assert module._calls == [torch.float16, torch.float32] * 3 + [torch.float16] * 6
    assert plugin.counters.rescued_evaluations == 0
    assert math.isnan(metrics(module)["loss"])
    assert [value for value in module.returned if not math.isnan(value)] == [INF]


@TOLD
def test_a_batch_that_a_wider_precision_helps_ends_the_count() -> None:
    module = Model(["return"])
    plugin = evaluate(module, rows=[NAN, NAN, 4.0, NAN, NAN, 5.0])
    assert module._calls == [torch.float16, torch.float32] * 6
    assert plugin.counters.rescued_evaluations == 2
    assert [value for value in module.returned if not math.isnan(value)] == [4.0, 5.0]


@TOLD
def test_what_raises_in_float32_only_is_as_it_was_in_float16() -> None:
    def change(hidden: Tensor) -> Tensor:
        if hidden.dtype is torch.float32:
            raise torch.OutOfMemoryError("out of memory")
        return hidden

    module = Model(change=change)
    plugin = evaluate(module)
    assert plugin.counters.rescued_evaluations == 0
    assert module.returned == [1.0, INF, 2.0, INF, 3.0]
    assert metrics(module)["state"] == INF


@TOLD
def test_a_step_that_writes_to_its_batch_is_not_run_again_on_what_it_has_written() -> None:
    """Float32 shows 2 and 8; to run the second batch again makes 16 of it."""

    class Writes(Model):
        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return super().validation_step(batch.mul_(2.0), batch_idx)

    module = Writes(["return"])
    evaluate(module, rows=[1.0, 4.0])
    assert module.returned in ([2.0, 8.0], [2.0, INF])


@TOLD
def test_in_the_middle_of_a_window_that_was_rescued_training_goes_on_in_its_precision() -> None:
    """The training raises in float16, and a validation batch after two of its four micro-batches is NaN."""

    class Raises(Model):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            hidden = self.linear(batch)
            if hidden.dtype is torch.float16:
                raise RuntimeError("expected scalar type Float but found Half")
            return hidden.float().sum()

    module, plugin = Raises(["return"]), make_plugin()
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback()], accumulate_grad_batches=4, val_check_interval=2)
    trainer.fit(module, loader([1.0] * 4), loader([NAN]))
    assert (plugin.counters.applied_steps, plugin.counters.rescued_steps) == (1, 1)


# Exceptions -----------------------------------------------------------------------------------------------------------


def half_raises(hidden: Tensor) -> Tensor:
    return hidden.masked_fill(hidden == 2.0**15, -1e9) if hidden.dtype is torch.float16 else hidden


@pytest.mark.parametrize("method", ["validate", "test"])
def test_an_exception_of_the_dtype_is_run_again_wider(method: Literal["validate", "test"]) -> None:
    module = Model(change=half_raises)
    with pytest.warns(RuntimeWarning, match="A batch of the evaluation raised RuntimeError in '16-mixed'"):
        plugin = evaluate(module, rows=[1.0, 3.0], method=method)
    assert module._calls == [torch.float16, torch.float32] * 2
    assert metrics(module)["loss"] == 2.0
    assert plugin.counters.rescued_evaluations == 2


def test_an_exception_in_bfloat16_is_too() -> None:
    def change(hidden: Tensor) -> Tensor:
        if hidden.dtype is torch.bfloat16:
            raise RuntimeError("not implemented for 'BFloat16'")
        return hidden

    module = Model(change=change)
    with pytest.warns(RuntimeWarning, match="raised RuntimeError in 'bf16-mixed'"):
        evaluate(module, "bf16-mixed")
    assert module._calls == [torch.bfloat16, torch.float32] * len(ROWS)
    assert metrics(module)["loss"] == 3.0


def raising(error: BaseException, *, only_half: bool = False) -> Callable[[Tensor], Tensor]:
    def change(hidden: Tensor) -> Tensor:
        if only_half and hidden.dtype is torch.float32:
            return hidden
        raise error

    return change


def test_an_exception_of_float32_too_reaches_the_user_as_it_was() -> None:
    error = ValueError("of the user's own")
    module = Model(change=raising(error))
    with pytest.raises(ValueError, match="own") as raised:
        evaluate(module)
    assert raised.value is error
    assert (error.__cause__, error.__context__) == (None, None)
    assert module._calls == [torch.float16, torch.float32]


exceptions: Any = pl.utilities.exceptions
MISCONFIGURED: Exception = exceptions.MisconfigurationException("misconfigured")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("out of memory"),
        MISCONFIGURED,
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_never_run_again(error: BaseException) -> None:
    module = Model(change=raising(error, only_half=True))
    with pytest.raises((type(error), SystemExit)):
        evaluate(module)
    assert module._calls == [torch.float16]


def test_without_the_callback_nothing_is_caught_or_run_again() -> None:
    error = RuntimeError("not implemented for 'Half'")
    module = Model(change=raising(error, only_half=True))
    with pytest.raises(RuntimeError, match="Half") as raised:
        evaluate(module, rescues=False)
    assert raised.value is error
    assert module._calls == [torch.float16]


# What is let be -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor", "ignore:Found `dataloader_iter`")
def test_a_step_that_takes_the_iterator_is_run_once() -> None:
    class Iterates(Model):
        def validation_step(self, dataloader_iter: Iterator[Any]) -> Any:  # type: ignore[override]
            batch, _, _ = next(dataloader_iter)
            loss = self.loss(batch)
            self.log("loss", loss, batch_size=1)
            return {"loss": loss}

    module = Iterates(["return", "log"])
    plugin = evaluate(module)
    assert module._calls == [torch.float16] * len(ROWS)
    assert metrics(module)["loss"] == INF
    assert plugin.counters.rescued_evaluations == 0


@TOLD
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("run", ["validate", "test", "fit"])
def test_the_strategy_is_left_as_it_was(run: str, fails: bool) -> None:
    module, plugin = Model(change=raising(ValueError("own")) if fails else None), make_plugin()
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback()])
    before = dict(vars(trainer.strategy))
    loaders = [loader([1.0]), loader()] if run == "fit" else [loader()]
    with pytest.raises(ValueError, match="own") if fails else nullcontext():
        getattr(trainer, run)(module, *loaders)
    assert vars(trainer.strategy).keys() == before.keys()
    assert "validation_step" not in vars(module)
    assert plugin.counters.rescued_evaluations == (0 if fails else HOT)


def test_without_the_callback_the_strategy_is_not_touched() -> None:
    class Looks(Model):
        def on_validation_start(self) -> None:
            self.found = [name for name in vars(self.trainer.strategy) if name.endswith("_step")]

    module = Looks()
    evaluate(module, rescues=False)
    assert module.found == []
    evaluate(again := Looks(), "32-true", rows=[1.0])
    assert again.found == ["validation_step", "test_step"]


def test_sums_and_lists_of_the_module_are_put_back() -> None:
    """The idiom of Lightning 2: the step appends, the end of the epoch takes the mean."""

    class Collects(Model):
        def __init__(self) -> None:
            super().__init__(["return"])
            self.outputs: list[Tensor] = []
            self.count, self.total, self.by_name = 0, torch.zeros(()), dict[str, float]()

        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
            output = super().validation_step(batch, batch_idx)
            self.outputs.append(output["loss"])
            self.count += len(batch)
            self.total += output["loss"]
            self.by_name[f"{batch_idx} {output['loss'].item()}"] = 1.0
            return output

    module = Collects()
    with pytest.warns(RuntimeWarning, match="whose values count"):
        plugin = evaluate(module)
    assert plugin.counters.rescued_evaluations == HOT
    assert (module.count, module.total.item(), len(module.by_name)) == (len(ROWS), sum(ROWS), len(ROWS))
    assert torch.stack(module.outputs).tolist() == list(ROWS)
