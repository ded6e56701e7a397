"""find_precision: that it leaves everything as it was, and that its advice holds."""

from __future__ import annotations

import importlib
import math
import os
import random
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch
import numpy as np
import pytest
import pytorch_lightning
import torch
from helpers import make_trainer
from namespace import AdaptiveMixedPrecision, PrecisionFallback, pl
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, TensorDataset

from lightning_amp_plus import LossScale, NonFiniteStepError, PrecisionAdvice, find_precision
from lightning_amp_plus.advice import finder
from lightning_amp_plus.hardware import select as hardware
from lightning_amp_plus.hardware.select import PrecisionChoice
from lightning_amp_plus.scaling import exponents

pytestmark = [
    pytest.mark.filterwarnings("ignore:Optimizer step .* was not finite in"),  # in a rehearsal
    pytest.mark.filterwarnings("ignore:Optimizer step .* was skipped"),
    pytest.mark.filterwarnings("ignore:Optimizer step .* raised in"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

Batch = tuple[Tensor, Tensor]
Model = TypeVar("Model", bound=pl.LightningModule)


class Net(pl.LightningModule):
    """Four classes of eight numbers; a subclass says what it computes."""

    lr = 1e-2

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 4))

    def loss(self, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.norm(self.body(batch[0]))).float(), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Plain(Net):
    """Without randomness or buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4))
        del self.norm

    def loss(self, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.between(self.body(batch[0]))).float(), batch[1])

    def between(self, hidden: Tensor) -> Tensor:
        return hidden


def rows(count: int = 64) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(count, 8, generator=generator), torch.arange(count) % 4)


def batches(count: int = 100, size: int = 16) -> DataLoader[Batch]:
    """The same batch again and again."""
    batch = rows(size).tensors
    return DataLoader([batch] * count, batch_size=None)  # type: ignore[arg-type]


def find(
    model: pl.LightningModule, loader: Any = None, trainer: pl.Trainer | None = None, **kw: Any
) -> PrecisionAdvice:
    arguments: dict[str, Any] = {"precision": "16-mixed", "steps": 6, **kw}
    return find_precision(trainer or make_trainer(), model, loader, **arguments)


def built(make: Callable[[], Model]) -> Model:
    torch.manual_seed(0)
    return make()


# The model is as before -----------------------------------------------------------------------------------------------


def everything_of(model: nn.Module) -> dict[str, Any]:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    found: dict[str, Any] = {}
    for name, part in model.named_modules():
        found[f"{name} is"] = id(part), part.training, sorted(vars(part))
        found[f"{name} hooks"] = [list(getattr(part, hook).items()) for hook in hooks]
    for name, parameter in model.named_parameters():
        grad = None if parameter.grad is None else parameter.grad.tolist()
        found[name] = id(parameter), parameter._version, parameter.tolist(), grad, parameter.requires_grad
    for name, buffer in model.named_buffers():
        found[name] = id(buffer), buffer._version, buffer.tolist()
    return found


@pytest.mark.filterwarnings("ignore:Found 1 module.* in eval mode")
def test_the_model_is_as_before_in_everything() -> None:
    model = built(Net)
    calls: list[int] = []
    model.body.register_forward_hook(lambda *_: None)
    model.body.weight.grad = torch.full_like(model.body.weight, 3.0)
    model.head[1].bias.requires_grad_(False)
    model.norm.eval()
    model.on_train_start = lambda: calls.append(1)  # type: ignore[method-assign]
    before = everything_of(model)
    find(model, batches())
    assert everything_of(model) == before
    assert len(calls) == 2  # of the copies: one in float32, one in a rehearsal
    assert model._trainer is None


def test_the_model_stays_with_the_trainer_that_it_has() -> None:
    model, trainer = built(Net), make_trainer()
    trainer.fit(model, batches(3))
    before = everything_of(model)
    find(model, batches(), trainer)
    assert everything_of(model) == before
    assert model.trainer is trainer
    assert trainer.global_step == 3


def test_a_model_that_has_kept_its_last_loss_is_copied() -> None:
    class Keeps(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.last = self.loss(batch)
            return self.last

    model = built(Keeps)
    make_trainer().fit(model, batches(2))
    assert find(model, batches()).precision == "16-mixed"


class Fails(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            raise KeyError("mine")
        return self.loss(batch)


def test_an_error_of_the_model_passes_and_leaves_nothing() -> None:
    model, trainer, generator = built(Fails), make_trainer(), seeded()
    loader = DataLoader(rows(), batch_size=4, shuffle=True, generator=generator)
    before = everything_of(model), generator.get_state().tolist(), state_of(trainer)
    with pytest.raises(KeyError, match="mine"):
        find(model, loader, trainer)
    assert (everything_of(model), generator.get_state().tolist(), state_of(trainer)) == before


def test_random_numbers_are_as_before_after_an_error() -> None:
    model = built(Fails)
    before = random_state()
    with pytest.raises(KeyError, match="mine"):
        find(model, DataLoader(rows(), batch_size=4, shuffle=True))
    assert random_state() == before


# The trainer is as before ---------------------------------------------------------------------------------------------


def random_state() -> tuple[object, ...]:
    numpy: Any = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().tolist(), random.getstate(), numpy[1].tolist(), numpy[2:]


def state_of(trainer: pl.Trainer) -> dict[str, Any]:
    return {
        **{name: id(value) for name, value in vars(trainer).items()},
        "callbacks": [id(callback) for callback in trainer.callbacks],  # type: ignore[attr-defined]
        "loggers": [id(logger) for logger in trainer.loggers],
        "loops": trainer.fit_loop.state_dict(),
        "limits": (trainer.max_epochs, trainer.max_steps, trainer.should_stop, trainer.limit_val_batches),
        "state": (trainer.state.fn, trainer.state.status, trainer.state.stage),
        "plugin": trainer.precision_plugin.state_dict(),
        "model": trainer.model,
    }


def test_the_trainer_is_as_before() -> None:
    plugin = AdaptiveMixedPrecision("16-mixed")
    trainer = make_trainer(plugin, callbacks=[PrecisionFallback()], max_epochs=3, limit_val_batches=2)
    before = state_of(trainer)
    find(built(Net), batches(), trainer)
    assert state_of(trainer) == before


class Noisy(Dataset[Batch]):
    """Uses all three generators of random numbers."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Batch:
        noise = torch.randn(8) + random.random() + float(np.random.rand())  # noqa: NPY002, S311
        return noise + index % 4, torch.tensor(index % 4)


class Data(pl.LightningDataModule):
    """Makes its loader anew, or hands out one that it has."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)
        self.keeps, self.loader = keeps, DataLoader(rows(), batch_size=16, shuffle=True, generator=self.generator)

    def setup(self, stage: str) -> None:
        self.stage = stage

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader if self.keeps else DataLoader(rows(), batch_size=16, shuffle=True)


class Own(Net):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(rows(), batch_size=16, shuffle=True, generator=self.generator)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


LOADERS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffled": lambda: {"train_dataloaders": DataLoader(rows(), batch_size=16, shuffle=True)},
    "generator": lambda: {"train_dataloaders": DataLoader(rows(), batch_size=16, shuffle=True, generator=seeded())},
    "sampler": lambda: {
        "train_dataloaders": DataLoader(rows(), batch_size=16, sampler=RandomSampler(rows(), generator=seeded()))
    },
    "noisy": lambda: {"train_dataloaders": DataLoader(Noisy(), batch_size=16, shuffle=True)},
    "workers": lambda: {"train_dataloaders": DataLoader(Noisy(), batch_size=16, shuffle=True, num_workers=2)},
    "persistent": lambda: {
        "train_dataloaders": DataLoader(Noisy(), batch_size=16, num_workers=1, persistent_workers=True)
    },
    "datamodule": lambda: {"datamodule": Data(keeps=False)},
    "own": dict,
}


def weights_after(loaders: dict[str, Any], *, advised: bool) -> tuple[list[Tensor], object]:
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    model = built(Own if not loaders else Net)
    trainer = make_trainer(max_epochs=2)
    torch.manual_seed(1)
    if advised:
        find_precision(
            trainer, model, **loaders, precision="16-mixed", steps=5, rehearse="train_dataloaders" in loaders
        )
    trainer.fit(model, **loaders)
    return [tensor.clone() for tensor in model.state_dict().values()], random_state()


@pytest.mark.parametrize("kind", LOADERS)
def test_the_run_that_follows_is_bitwise_the_run_without(kind: str) -> None:
    expected, state = weights_after(LOADERS[kind](), advised=False)
    weights, state_then = weights_after(LOADERS[kind](), advised=True)
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    assert state_then == state


def test_a_generator_that_a_datamodule_keeps_is_as_before() -> None:
    data = Data(keeps=True)
    before = data.generator.get_state()
    find_precision(make_trainer(), built(Net), datamodule=data, precision="16-mixed", steps=5)
    assert torch.equal(data.generator.get_state(), before)


def test_a_datamodule_has_no_attribute_more() -> None:
    data = Data(keeps=False)
    before = dict(vars(data))
    find_precision(make_trainer(), built(Net), datamodule=data, precision="16-mixed", steps=5)
    assert vars(data) == before
    assert data.trainer is None


class Drawn(Sampler[int]):
    """Draws from a generator of Python's."""

    def __init__(self) -> None:
        self.random = random.Random(0)  # noqa: S311

    def __len__(self) -> int:
        return 64

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.sample(range(64), 64))


def test_a_sampler_with_random_numbers_of_its_own_is_as_before() -> None:
    sampler = Drawn()
    before = sampler.random.getstate()
    find(built(Net), DataLoader(rows(), batch_size=16, sampler=sampler))
    assert sampler.random.getstate() == before


def test_a_loader_with_persistent_workers_that_was_used_before_can_be_used_after() -> None:
    loader = DataLoader(rows(), batch_size=16, num_workers=1, persistent_workers=True)
    assert len(list(loader)) == 4
    find(built(Net), loader, make_trainer(max_epochs=2), rehearse=False)
    assert len(list(loader)) == 4


def test_loaders_in_a_dict_are_as_before() -> None:
    class Two(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch["a"]) + self.loss(batch["b"])

    generator = seeded()
    before = generator.get_state()
    loaders = {"a": DataLoader(rows(), batch_size=16, shuffle=True, generator=generator), "b": batches(4)}
    advice = find(built(Two), loaders)
    assert advice.stats.steps == 4
    assert torch.equal(generator.get_state(), before)


def test_a_combined_loader_is_no_iterator() -> None:
    class One(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch["a"])

    loader = pl.utilities.CombinedLoader({"a": batches()}, "min_size")
    assert find(built(One), loader).stats.steps == 6


def test_no_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, enable_progress_bar=False, default_root_dir=tmp_path / "root"
    )
    find(built(Net), batches(), trainer)
    assert list(tmp_path.iterdir()) == []


def test_callbacks_of_the_trainer_are_not_called() -> None:
    class Raises(pl.Callback):
        def setup(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError("called")

    assert find(built(Net), batches(), make_trainer(callbacks=[Raises()])).precision == "16-mixed"


def test_callbacks_of_the_model_write_nothing(tmp_path: Path) -> None:
    class Saves(Net):
        def configure_callbacks(self) -> list[pl.Callback]:
            return [pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=1)]

    find(built(Saves), batches())
    assert list(tmp_path.iterdir()) == []


class Validated(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


def test_a_model_that_stops_early_by_its_validation() -> None:
    class Stops(Validated):
        def configure_callbacks(self) -> list[pl.Callback]:
            return [pl.callbacks.EarlyStopping("val_loss")]

    assert find(built(Stops), batches()).precision == "16-mixed"


def test_a_schedule_that_waits_for_a_metric_of_validation() -> None:
    class Plateau(Validated):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    assert find(built(Plateau), batches(4), make_trainer(max_epochs=5)).precision == "16-mixed"


def test_nothing_is_told_of_a_run_that_is_none() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert find(built(Unheld), batches()).precision == "bf16-mixed"
    assert not [str(it.message) for it in caught if "Optimizer step 0 was not finite" in str(it.message)]


# Trainers and models of all kinds -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lightning", [lightning.pytorch, pytorch_lightning], ids=lambda it: it.__name__)
@pytest.mark.parametrize("derived", [False, True])
def test_either_namespace_and_subclasses_of_its_trainer(lightning: Any, derived: bool) -> None:
    def init(self: Any) -> None:
        lightning.LightningModule.__init__(self)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    steps = {"loss": Plain.loss, "between": Plain.between, "training_step": Net.training_step}
    body = {**steps, "configure_optimizers": Net.configure_optimizers, "__init__": init, "lr": 0.01}
    model = type("Model", (lightning.LightningModule,), body)()
    kind = type("Mine", (lightning.Trainer,), {"__module__": "mine"}) if derived else lightning.Trainer
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = kind(accelerator="cpu", devices=1, max_epochs=1, **quiet)
    advice = find(model, batches(), trainer)
    assert (advice.precision, advice.stats.steps) == ("16-mixed", 6)
    assert advice.stats.modules == ("body", "head")


def test_a_ddp_trainer_of_two_devices_that_was_not_launched() -> None:
    trainer = make_trainer(strategy="ddp", devices=2)
    assert find(built(Net), batches(), trainer).stats.steps == 6
    assert trainer.world_size == 2
    assert not torch.distributed.is_initialized()


def test_the_environment_of_torchrun_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    values |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "TORCHELASTIC_RUN_ID": "none"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    rank_zero_only: Any = pl.utilities.rank_zero.rank_zero_only  # type: ignore[attr-defined]
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    utilities = importlib.import_module("lightning.fabric.utilities.rank_zero").rank_zero_only
    monkeypatch.setattr(utilities, "rank", 0)
    trainer = make_trainer(strategy="ddp", devices=2)
    before = dict(os.environ), rank_zero_only.rank, utilities.rank
    assert find(built(Net), batches(), trainer).stats.steps == 6
    assert (dict(os.environ), rank_zero_only.rank, utilities.rank) == before
    assert (trainer.global_rank, trainer.world_size) == (1, 2)


def test_accumulation_and_clipping_are_those_of_the_trainer() -> None:
    norms: list[float] = []

    class Watches(Net):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            super().configure_gradient_clipping(optimizer, *args, **kwargs)
            norms.append(float(torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch) * 8

    trainer = make_trainer(accumulate_grad_batches=4, gradient_clip_val=0.125)
    advice = find(built(Watches), batches(), trainer, steps=5, rehearse=False)
    assert advice.stats.steps == 5
    assert norms == pytest.approx([0.125] * 5, rel=1e-4)
    body = int(advice.stats.counts[0, advice.stats.modules.index("body")].sum())
    assert body == 5 * 4 * 16 * 8  # steps, micro-batches, rows, numbers


def test_manual_optimization_of_two_networks() -> None:
    class Gan(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.makes, self.judges = nn.Linear(8, 8), nn.Linear(8, 1)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            makes, judges = self.optimizers()  # type: ignore[attr-defined]
            made = self.makes(batch[0])
            for optimizer, score in ((makes, -self.judges(made)), (judges, self.judges(made.detach()))):
                optimizer.zero_grad()
                self.manual_backward(nn.functional.softplus(score.float()).mean())
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.makes.parameters()), torch.optim.Adam(self.judges.parameters())

    model = built(Gan)
    before = everything_of(model)
    advice = find(model, batches())
    assert advice.precision == "16-mixed"
    assert min(advice.stats.largest[2].tolist()) > 0  # both have gradients
    assert everything_of(model) == before


def test_a_model_that_uses_its_logger_and_a_schedule_per_step() -> None:
    lengths: list[float] = []

    class Uses(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            logger: Any = self.logger
            logger.experiment.add_scalar("mine", 1.0, batch_idx)
            logger.log_metrics({"mine": 1.0})
            return self.loss(batch)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            lengths.append(self.trainer.estimated_stepping_batches)
            scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=int(lengths[-1]))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    trainer = make_trainer(max_epochs=3, accumulate_grad_batches=2)
    assert find(built(Uses), batches(40), trainer).precision == "16-mixed"
    assert lengths == [60, 60]


def test_a_model_that_configures_itself_stays_unconfigured() -> None:
    class Late(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.head = None  # type: ignore[assignment]

        def configure_model(self) -> None:
            if self.head is None:
                self.head = nn.Sequential(nn.Linear(8, 4))

    model = built(Late)
    assert find(model, batches()).stats.modules == ("body", "head.0")
    assert model.head is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of dynamo itself
def test_compiled_parts() -> None:
    class Compiled(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.compile(self.head, backend="eager")  # type: ignore[assignment]
            self.body.compile(backend="eager")

    assert find(built(Compiled), batches()).stats.modules == ("body", "head.0")


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda it: it, lambda it: {"a": it}, lambda it: [batches(2), it]])
@pytest.mark.parametrize("make", [iter, lambda loader: (batch for batch in loader)])
def test_an_iterator_is_refused(wrap: Callable[[Any], Any], make: Callable[[Any], Any]) -> None:
    iterator = make(batches(3))
    with pytest.raises(TypeError, match="iterator, whose batches the run itself would then miss: pass"):
        find(built(Net), wrap(iterator))
    assert len(list(iterator)) == 3


@pytest.mark.filterwarnings("ignore:Total length of")
def test_an_empty_loader_is_refused() -> None:
    with pytest.raises(ValueError, match="saw no gradient: the loader was empty"):
        find(built(Net), DataLoader([]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("argument", "value", "legal"),
    [
        ("steps", 0, "an integer of at least 1"),
        ("steps", 2.0, "an integer of at least 1"),
        ("precision", "16", "'auto' or one of 16-mixed, bf16-mixed, 32-true"),
        ("headroom", 0.5, "a number of at least 1"),
        ("headroom", float("nan"), "a number of at least 1"),
        ("max_modules", -1, "an integer of at least 0"),
        ("max_modules", 1.0, "an integer of at least 0"),
    ],
)
def test_an_argument_out_of_its_range_is_refused(argument: str, value: Any, legal: str) -> None:
    text = f"find_precision({argument}={value!r}): it must be {legal}."
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        find(built(Net), batches(), **{argument: value})


@pytest.mark.parametrize(("argument", "value"), [("steps", True), ("max_modules", True), ("headroom", float("inf"))])
def test_an_argument_that_is_no_number_is_refused(argument: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"find_precision\\({argument}={value!r}\\): it must be"):
        find(built(Net), batches(), **{argument: value})


class Broken(Net):
    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) * float("nan")


def test_a_model_that_is_not_finite_in_float32_is_an_error() -> None:
    with pytest.raises(NonFiniteStepError, match="not finite in float32"):
        find(built(Broken), batches(), steps=20)


def test_a_model_that_is_not_finite_in_a_few_steps_of_float32_is_the_same_error() -> None:
    with pytest.raises(NonFiniteStepError, match="not finite in float32"):
        find(built(Broken), batches(), steps=5)


def test_a_model_that_returns_no_loss_is_refused() -> None:
    class Nothing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            return None

    with pytest.raises(ValueError, match="training_step returned None"):
        find(built(Nothing), batches())


def test_a_bad_sample_changes_no_advice() -> None:
    good, bad = batches(), batches()
    rows_of_bad, labels = bad.dataset[2]
    bad.dataset[2] = (rows_of_bad * float("nan"), labels)  # type: ignore[index]
    assert find(built(Net), bad).arguments == find(built(Net), good).arguments


# "auto" ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "precision", "reason"),
    [
        ({"amx_bf16"}, "bf16-mixed", "this CPU has bfloat16 instructions (amx_bf16)"),
        (set(), "32-true", "this CPU has no bfloat16 instructions and emulates it"),
    ],
)
def test_auto_is_what_the_device_runs(
    flags: set[str], precision: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "_cpu_flags", lambda: flags)
    advice = find(built(Net), batches(), precision="auto")
    assert (advice.precision, advice.reasons) == (precision, {"precision": reason})
    assert advice.stats.steps == 6


@pytest.mark.parametrize(("emulates", "wider"), [(True, "32-true"), (False, "bf16-mixed")])
def test_auto_on_a_device_of_float16(emulates: bool, wider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = PrecisionChoice("16-mixed", "it multiplies float16 natively", emulates)
    monkeypatch.setattr(finder, "select_precision", lambda device: choice)
    advice = find(built(Net), batches(), precision="auto")
    assert (advice.precision, advice.reasons["precision"]) == ("16-mixed", "it multiplies float16 natively")
    assert find(built(Hot), batches(), precision="auto", max_modules=1).precision == wider


# Its advice holds -----------------------------------------------------------------------------------------------------


class Hot(Plain):
    """The output of one module, and the input of the next, are beyond 65504."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.body.weight.mul_(1e5)

    def loss(self, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.body(batch[0])).float() * 1e-5, batch[1])


class HotInput(Plain):
    """What the module puts out is small, what it gets is not."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.body.weight.mul_(1e-6)

    def loss(self, batch: Batch) -> Tensor:
        return super().loss((batch[0] * 1e6, batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(
            [self.head.get_parameter("0.weight"), self.body.bias], lr=0.1
        )  # else the small weights grow at once


class HotWeight(Plain):
    """A weight that float16 does not hold."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.body.weight.mul_(3e6)

    def loss(self, batch: Batch) -> Tensor:
        return super().loss((batch[0] * 1e-6, batch[1]))


class Unheld(Plain):
    """Overflows between its modules, in code of the model itself."""

    def between(self, hidden: Tensor) -> Tensor:
        return nn.functional.layer_norm((hidden * 1e5).float(), (8,))


class UnheldPart(Plain):
    """The same in a module of its own, whose parts show nothing of it."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, hidden: Tensor) -> Tensor:
            return self.linear(hidden) * 1e5 * 1e-5

    def __init__(self) -> None:
        super().__init__()
        self.part = self.Part()

    def between(self, hidden: Tensor) -> Tensor:
        return self.part(hidden)


class Scores(Plain):
    """The products of queries and keys are beyond 65504."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
            with torch.no_grad():
                self.query.weight.mul_(500)
                self.key.weight.mul_(500)

        def forward(self, hidden: Tensor) -> Tensor:
            scores = (self.query(hidden) @ self.key(hidden).T).float() * 1e-6
            return scores.softmax(-1) @ hidden.float()

    def __init__(self) -> None:
        super().__init__()
        self.attention = self.Attention()

    def between(self, hidden: Tensor) -> Tensor:
        return self.attention(hidden)


class Masked(Plain):
    """Fills its scores with -1e9, which raises in float16."""

    def between(self, hidden: Tensor) -> Tensor:
        scores = hidden @ hidden.T
        return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -1e9).softmax(-1) @ hidden


class ZeroRow(Plain):
    """Normalizes a row of zeros: eps is 0 in float16."""

    def between(self, hidden: Tensor) -> Tensor:
        return nn.functional.normalize(nn.functional.relu(hidden) * (torch.arange(16)[:, None] != 3), dim=-1)


class Loud(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 1e8 * 1e-8


class LoudBackward(Plain):
    """Only its backward overflows, in a module."""

    class Part(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            out: Tensor = Loud.apply(hidden)
            return out

    def __init__(self) -> None:
        super().__init__()
        self.part = self.Part()

    def between(self, hidden: Tensor) -> Tensor:
        return self.part(hidden)


class LoudBackwardBetween(LoudBackward):
    """The same outside of all modules."""

    def between(self, hidden: Tensor) -> Tensor:
        out: Tensor = Loud.apply(hidden)
        return out


class Penalty(Plain):
    """A gradient penalty, whose second derivative is not finite in float16."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.head.get_parameter("0.weight").mul_(1e-4)

    def loss(self, batch: Batch) -> Tensor:
        hidden = self.body(batch[0])
        out = self.head(hidden).float()
        (gradient,) = torch.autograd.grad(out.mean(), hidden, create_graph=True)
        norm = torch.sqrt((gradient**2).sum(1) + 1e-12)
        return nn.functional.cross_entropy(out, batch[1]) + 0.1 * ((norm - 1) ** 2).mean().float()


class Times(Plain):
    """The loss, and with it all gradients, times a number."""

    factor = 1.0

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) * self.factor


class Tiny(Times):
    factor = 1e-9


class Large(Times):
    factor = 1e4


class Huge(Times):
    factor = 1e6


class Gigantic(Times):
    factor = 1e9


class Often(Times):
    """The gradient of a weight is a sum over the steps of a recurrence."""

    factor = 1e3
    lr = 1e-3

    def between(self, hidden: Tensor) -> Tensor:
        for _ in range(8):
            hidden = torch.tanh(self.body(hidden))
        return hidden


class HalfLoss(Plain):
    """A float16 loss."""

    def loss(self, batch: Batch) -> Tensor:
        return self.body(batch[0]).mean() * 1e-3


def follow(make: Callable[[], pl.LightningModule], loader: Any, **kwargs: Any) -> PrecisionAdvice:
    """Train as advised, from the same start, and see that every step was clean."""
    advice = find(built(make), loader, **{"steps": 10, **kwargs})
    arguments = advice.arguments
    arguments["loss_scale"] = LossScale(init_scale=advice.init_scale, growth_interval=10**6)
    plugin, model = AdaptiveMixedPrecision(**arguments), built(make)
    make_trainer(plugin, callbacks=[PrecisionFallback()], max_epochs=-1, max_steps=100).fit(model, loader)
    counters = plugin.counters
    assert (counters.skipped_steps, counters.retried_attempts, counters.rescued_steps) == (0, 0, 0), str(advice)
    assert counters.applied_steps == 100
    assert plugin.precision == advice.precision
    return advice


@pytest.mark.parametrize(
    ("make", "precision", "wide"),
    [
        (Net, "16-mixed", ()),
        (Hot, "16-mixed", ("body", "head.0")),
        (HotInput, "16-mixed", ("body",)),
        (HotWeight, "16-mixed", ("body",)),
        (Unheld, "bf16-mixed", ()),
        (UnheldPart, "16-mixed", ("part",)),
        (Scores, "16-mixed", ("attention",)),
        (Masked, "bf16-mixed", ()),
        (ZeroRow, "bf16-mixed", ()),
        (LoudBackward, "16-mixed", ("part",)),
        (LoudBackwardBetween, "bf16-mixed", ()),
        (Penalty, "bf16-mixed", ()),
        (Tiny, "16-mixed", ()),
        (Large, "16-mixed", ()),
        (Huge, "16-mixed", ("body", "head.0")),
        (Gigantic, "16-mixed", ("body", "head.0")),
        (Often, "16-mixed", ()),
        (HalfLoss, "16-mixed", ()),
    ],
)
def test_a_model_trains_as_advised_without_one_overflow(
    make: Callable[[], pl.LightningModule], precision: str, wide: tuple[str, ...]
) -> None:
    advice = follow(make, batches())
    assert (advice.precision, advice.keep_fp32) == (precision, wide)
    assert set(wide) < set(advice.reasons)


def test_gradients_that_are_tiny_raise_the_scale_so_that_little_underflows() -> None:
    advice = follow(Tiny, batches())
    assert advice.init_scale == LossScale().max_scale
    gradients = advice.stats.counts[1:].sum((0, 1))
    smallest = exponents.bin_of(exponents.FLOAT16_SUBNORMAL - 24)  # at that scale
    assert int(gradients[1:smallest].sum()) < 0.01 * int(gradients[1:].sum())
    assert int(gradients[1 : smallest + 16].sum()) > 0.9 * int(gradients[1:].sum())  # at the default one


@pytest.mark.parametrize(("make", "largest"), [(Large, 1e4), (Times, 1.0)])
def test_the_scale_is_that_of_the_largest_gradient(make: Callable[[], pl.LightningModule], largest: float) -> None:
    """Of a cross-entropy that is the mean of 16 rows: at most 1/16 in the logits, and a sum of 16 in the bias."""
    advice = find(built(make), batches(), steps=1)
    found = float(advice.stats.largest[1:].max())
    assert largest / 64 < found < largest
    assert 65504 / 32 < found * advice.init_scale <= 65504 / 16
    at = round(math.log2(advice.init_scale))
    assert f"the largest gradient is {found:.2g}, at 2^{at} " in str(advice)


def test_the_reason_of_a_module_is_its_own_largest_number() -> None:
    model, batch = built(Hot), rows(16).tensors[0]
    largest = float(model.body(batch).detach().abs().max())
    advice = find(model, batches(), steps=1)
    text = f"activations up to {largest:.2g}, {largest / 65504:.2g} times float16's 65504"
    assert (advice.reasons["body"], advice.reasons["head.0"]) == (text, text)


def test_no_module_is_kept_if_none_may_be() -> None:
    advice = follow(UnheldPart, batches(), max_modules=0)
    assert (advice.precision, advice.keep_fp32) == ("bf16-mixed", ())


def test_without_a_rehearsal_only_what_was_measured_counts() -> None:
    advice = find(built(UnheldPart), batches(), rehearse=False)
    assert (advice.precision, advice.keep_fp32) == ("16-mixed", ())
    assert find(built(UnheldPart), batches()).keep_fp32 == ("part",)


def test_a_causal_mask_of_inf_keeps_no_module_wide() -> None:
    class Causal(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

        def between(self, hidden: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(len(hidden))
            out: Tensor = self.layer(hidden[None], src_mask=mask)[0]
            return out

    advice = follow(Causal, batches())
    assert (advice.precision, advice.keep_fp32) == ("16-mixed", ())


class LoudBetween(Plain):
    """Multiplies its gradients by 5e4 on the way, so that 2^8 is too much, and 2^4 is not."""

    def between(self, hidden: Tensor) -> Tensor:
        return (hidden * 2e-5) * 5e4


def test_a_rehearsal_lowers_the_scale_no_more_than_it_has_to() -> None:
    advice = follow(LoudBetween, batches())
    largest = float(advice.stats.largest[1, advice.stats.modules.index("body")]) * 5e4
    assert 65504 / 32 < largest * advice.init_scale <= 65504


def test_it_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(pyplot, "show", lambda *args: pytest.fail("shown"))
    advice = find(built(Hot), batches(), steps=1)
    figure, axes = advice.plot()
    assert axes.figure is figure
    assert {"body", "head.0"} <= {label.get_text() for label in axes.get_yticklabels()}
    other = pyplot.figure().subplots()
    assert advice.plot("parameter_gradients", other)[1] is other
    pyplot.close("all")


# Real models ----------------------------------------------------------------------------------------------------------


def test_the_hot_digits_network() -> None:
    class Gain(nn.Module):
        def forward(self, features: Tensor) -> Tensor:
            return features * 1e5

    class Digits(Net):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
            )
            self.gain = Gain()
            self.head = nn.Sequential(nn.LayerNorm(8 * 64), nn.Linear(8 * 64, 10))

        def loss(self, batch: Any) -> Tensor:
            return nn.functional.cross_entropy(self.head(self.gain(self.features(batch[0]))), batch[1])

    digits = pytest.importorskip("sklearn.datasets").load_digits()
    images = torch.tensor(digits.images[:512], dtype=torch.float32)[:, None] / 16
    data = TensorDataset(images, torch.tensor(digits.target[:512]))
    advice = follow(Digits, DataLoader(data, batch_size=16, shuffle=True))
    assert (advice.precision, set(advice.keep_fp32)) == ("16-mixed", {"gain", "head.0"})


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_t5_trains_as_advised_with_one_module_wide() -> None:
    transformers = pytest.importorskip("transformers")

    class Copy(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
            config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
            self.t5 = transformers.T5ForConditionalGeneration(config)
            with torch.no_grad():
                self.t5.encoder.block[0].layer[1].DenseReluDense.wo.weight.mul_(3e6)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss: Tensor = self.t5(input_ids=batch, labels=batch).loss
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    words = torch.randint(1, 32, (100, 4, 6), generator=seeded())
    advice = follow(Copy, DataLoader(words, batch_size=None), steps=10)  # type: ignore[arg-type]
    assert advice.precision == "16-mixed"
    assert "t5.encoder.block.0.layer.1.DenseReluDense.wo" in advice.keep_fp32


# ---------------------------------------------------------------- found by others


class WithNoise(Dataset[Any]):
    """Keeps a source of random numbers where it is not seen at once."""

    def __init__(self) -> None:
        self.transforms = [{"noise": np.random.default_rng(3)}]
        self.rows = rows()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        x, y = self.rows[index]
        return x + float(self.transforms[0]["noise"].normal()), y


def test_sources_of_random_numbers_deep_in_a_data_set_are_as_before() -> None:
    data = [WithNoise(), WithNoise()]
    before = [one.transforms[0]["noise"].bit_generator.state for one in data]
    find(built(Net), DataLoader(torch.utils.data.ConcatDataset(data), batch_size=16))
    assert [one.transforms[0]["noise"].bit_generator.state for one in data] == before


def test_a_limit_of_one_batch_is_no_limit_of_all() -> None:
    seen: set[int] = set()

    class Sees(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.add(batch_idx)
            return self.loss(batch)

    find(built(Sees), batches(), make_trainer(limit_train_batches=1, max_epochs=3), rehearse=False)
    assert seen == {0}


def test_a_forgotten_trainer_is_told_of() -> None:
    with pytest.raises(TypeError, match=r"got Net for the Trainer: it is find_precision\(trainer, model"):
        find_precision(built(Net), batches())  # type: ignore[arg-type]


def test_no_picture_is_drawn_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    plotting = importlib.import_module("lightning_amp_plus.monitoring.plotting")
    monkeypatch.setattr(plotting, "plot_dynamic_range", lambda *args: pytest.fail("drawn"))
    assert find(built(Net), batches()).precision == "16-mixed"


def test_advice_can_be_compared_and_hashed() -> None:
    advice = find(built(Net), batches(), rehearse=False)
    assert advice == advice
    assert len({advice, advice}) == 1
