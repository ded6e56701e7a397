"""Two processes on gloo, DDP and FSDP2: what one rank saw, both answer, and their weights stay those of one process.

This file is its own worker: ``ranks`` starts it twice, and each of the two runs every case of one strategy.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import pytest
import torch
from helpers import PRECISIONS, ROW, Exact, factors, loader, make_trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from ranks import Ranks, work
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_amp_plus import AdaptiveMixedPrecision, AMPMonitor, LossScale, NonFiniteStepError
from lightning_amp_plus.precisions import PrecisionName

SCALE = 2.0**10
STEPS = ((1.0, 3.0), (2.0, 2.0), (4.0, 2.0), (1.0, 1.0))
"""The multiples of ``ROW`` that the two ranks get in each step. The second step is the one with the fault."""
WHOLE, WITHOUT_SECOND = 2 + 2 + 3 + 1, 2 + 3 + 1
"""The sums of their means."""

Kind = Literal["ddp", "fsdp2"]
Fault = Literal["none", "batch", "overflow", "loss", "shard", "ignored", "huge"]
KINDS: tuple[Kind, ...] = ("ddp", "fsdp2")


@dataclass(frozen=True)
class Case:
    """A fit with a fault on one rank.

    - ``batch``: a NaN in the input.
    - ``loss``: NaN in the loss and not in the gradients.
    - ``overflow``: the gradient of the last row of the weight overflows float16 at this loss scale; with FSDP2 rank 1
      alone holds that row.
    - ``shard``: inf written to ``.grad`` after the ranks have exchanged their gradients.
    - ``ignored``: inf in the gradient of a parameter that the ranks do not exchange.
    - ``huge``: no fault, but a gradient of such a parameter whose square float32 cannot hold.
    """

    kind: Kind
    precision: PrecisionName
    fault: Fault = "none"
    rank: int = 0
    manual: bool = False
    accumulate: int = 1
    clip: float | None = None
    outputs: int = 2

    @property
    def name(self) -> str:
        parts = [self.precision, "manual" if self.manual else "automatic", f"{self.fault} on rank {self.rank}"]
        parts += [f"accumulate {self.accumulate}", f"clip {self.clip}", f"{self.outputs} outputs"]
        return ", ".join(parts)


def cases(kind: Kind) -> list[Case]:
    found = [Case(kind, precision) for precision in PRECISIONS]
    for rank in (0, 1):
        for precision in ("16-mixed", "bf16-mixed"):
            case = partial(Case, kind, precision, rank=rank)
            found += [case("batch"), case("loss"), case("shard"), case("batch", manual=True, clip=1.0)]
            found += [case("shard", accumulate=2, clip=1.0), case("shard", manual=True, accumulate=2)]
            if kind == "ddp":
                found += [case("ignored"), case("ignored", manual=True), case("ignored", accumulate=2)]
            if precision == "16-mixed":
                found += [case("overflow"), case("overflow", manual=True), case("overflow", accumulate=2, clip=1.0)]
                found += [case("batch", accumulate=2, clip=1.0), case("loss", accumulate=2)]
        if kind == "ddp":
            found += [Case(kind, "32-true", "huge", rank), Case(kind, "bf16-mixed", "huge", rank, manual=True)]
        else:  # of one row, rank 1 holds nothing
            found += [Case(kind, "16-mixed", "batch", rank, clip=1.0, outputs=1)]
    return [*found, Case(kind, "32-true", "loss", rank=1, clip=1.0)]


# In the worker -------------------------------------------------------------------------------------------------------


class Faulty(Exact):
    """The gradient of each row of the weight is the mean of the batches of both ranks."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.automatic_optimization = not case.manual
        self.is_faulty = False
        self.linear = nn.Linear(8, case.outputs, bias=False)
        nn.init.zeros_(self.linear.weight)
        if case.fault in ("ignored", "huge"):
            self.ignored = nn.Parameter(torch.zeros(3))
            self._ddp_params_and_buffers_to_ignore = ["ignored"]
            factor = math.inf if case.fault == "ignored" else 2.0**70
            self.ignored.register_hook(lambda grad: grad * (factor if self.is_faulty else 1))
        self.final: list[list[float]] = []

    def configure_model(self) -> None:
        if self.case.kind == "fsdp2":
            shard(self.linear, self.device_mesh)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        fault, accumulate = self.case.fault, self.case.accumulate
        self.is_faulty = self.global_rank == self.case.rank and batch_idx == accumulate  # the second window begins
        if self.is_faulty and fault == "batch":
            batch = batch * math.nan
        loss = self.loss(batch)
        if self.is_faulty and fault == "overflow":
            loss = loss + 127 * self(batch)[..., -1].float().sum()
        if self.is_faulty and fault == "loss":
            loss = loss + math.nan
        if fault in ("ignored", "huge"):
            loss = loss + self.ignored.sum()
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss / accumulate)
        if (batch_idx + 1) % accumulate == 0:
            optimizer: Any = self.optimizers()
            if self.case.clip is not None:
                self.clip_gradients(optimizer, self.case.clip, "norm")
            optimizer.step()
            optimizer.zero_grad()
        return None

    def on_train_end(self) -> None:
        self.final = whole(self.linear.weight).tolist()


class FaultyShard(Faulty):
    def on_after_backward(self) -> None:  # not in ``Faulty``: the plugin does more for modules that have it
        if self.is_faulty:
            assert self.linear.weight.grad is not None
            local(self.linear.weight.grad)[-1, 0] = math.inf


def shard(module: nn.Module, mesh: Any) -> None:
    fully_shard(module, mesh=mesh["data_parallel"])


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def parallel_trainer(kind: Kind, plugin: AdaptiveMixedPrecision, **kwargs: Any) -> pl.Trainer:
    strategy: Strategy
    if kind == "ddp":
        strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=60))
    else:
        strategy = ModelParallelStrategy(2, 1, process_group_backend="gloo", timeout=timedelta(seconds=60))
    return make_trainer(plugin, devices=2, strategy=strategy, use_distributed_sampler=False, **kwargs)


def my_steps(accumulate: int = 1) -> DataLoader[Tensor]:
    """What this rank gets of ``STEPS``."""
    rank = int(os.environ["LOCAL_RANK"])
    return factors(*[pair[rank] for pair in STEPS for _ in range(accumulate)])


def plugin_of(precision: PrecisionName, **kwargs: Any) -> AdaptiveMixedPrecision:
    """A plugin that skips what overflows; ``test_transaction_ranks.py`` is about running it again."""
    return AdaptiveMixedPrecision(precision, LossScale(init_scale=SCALE), retries=0, **kwargs)


def run(case: Case) -> dict[str, Any]:
    plugin = plugin_of(case.precision)
    module = FaultyShard(case) if case.fault == "shard" else Faulty(case)
    automatic = {} if case.manual else {"accumulate_grad_batches": case.accumulate, "gradient_clip_val": case.clip}
    trainer = parallel_trainer(case.kind, plugin, **automatic)
    trainer.fit(module, my_steps(case.accumulate))
    return {
        "weight": module.final,
        "state": plugin.state_dict(),
        "last_step": vars(plugin.last_step),
    }


def run_until_it_raises(kind: Kind) -> dict[str, Any]:
    class BadFromThirdOn(Faulty):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            return self.loss(batch) * (math.nan if self.global_rank == 1 and batch_idx >= 2 else 1)

    plugin, module = plugin_of("16-mixed", max_skipped=3), BadFromThirdOn(Case(kind, "16-mixed"))
    error = ""
    try:
        parallel_trainer(kind, plugin).fit(module, factors(*[1] * 8))
    except NonFiniteStepError as raised:
        error = str(raised)
    return {"raised": error, "weight": whole(module.linear.weight).tolist(), "state": plugin.state_dict()}


def run_with_monitor(kind: Kind) -> dict[str, Any]:
    plugin, case = plugin_of("16-mixed"), Case(kind, "16-mixed", "batch", rank=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = parallel_trainer(kind, plugin, callbacks=[AMPMonitor()], log_every_n_steps=1, gradient_clip_val=8.0)
        trainer.fit(Faulty(case), my_steps())
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return {"metrics": metrics, "warnings": [str(warning.message) for warning in caught]}


def run_with_reader(kind: Kind) -> dict[str, Any]:
    """A callback on rank zero reads the metrics, as the progress bar does, and then the ranks meet."""

    class Reader(pl.Callback):
        read: float | None = None

        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            if trainer.is_global_zero:
                self.read = float(trainer.callback_metrics["amp/applied_steps"])
            trainer.strategy.barrier()

    plugin, reader = plugin_of("16-mixed"), Reader()
    state = plugin.state_dict()
    plugin.load_state_dict({**state, "counters": {**state["counters"], "applied_steps": 2**24}})
    trainer = parallel_trainer(kind, plugin, callbacks=[AMPMonitor(), reader], log_every_n_steps=1)
    trainer.fit(Faulty(Case(kind, "16-mixed")), my_steps())
    return {"read": reader.read, "last": float(trainer.callback_metrics["amp/applied_steps"])}


def run_and_resume(kind: Kind) -> dict[str, Any]:
    path = Path(sys.argv[2]) / f"{kind}.ckpt"
    first = plugin_of("16-mixed")
    trainer = parallel_trainer(kind, first)
    trainer.fit(Faulty(Case(kind, "16-mixed", "overflow", rank=1)), my_steps())
    trainer.save_checkpoint(path)
    second, module = plugin_of("16-mixed"), Faulty(Case(kind, "16-mixed"))
    parallel_trainer(kind, second, max_epochs=2).fit(module, factors(1), ckpt_path=path)
    return {"weight": module.final, "state": second.state_dict()}


class Net(pl.LightningModule):
    """A model whose layers are sharded apart, for a comparison with one process."""

    def __init__(self, sharded: bool, fused: bool = False) -> None:
        super().__init__()
        self.sharded, self.fused = sharded, fused
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
        self.final: list[list[float]] = []

    def configure_model(self) -> None:
        if self.sharded:
            for layer in (self.layers[0], self.layers[2], self.layers):
                shard(layer, self.device_mesh)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.layers(batch).float() - 3).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # With eps=1 the scale of the gradients counts. torch shards no other fused optimizer than Adam's.
        return torch.optim.AdamW(self.parameters(), lr=0.25, eps=1, fused=self.fused)

    def on_train_end(self) -> None:
        self.final = [whole(parameter).flatten().tolist() for parameter in self.parameters()]


VARIANTS: dict[str, tuple[bool, dict[str, Any]]] = {
    "clip by norm": (False, {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "norm"}),
    "clip by norm, fused": (True, {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "norm"}),
    "clip by value": (False, {"gradient_clip_val": 0.2, "gradient_clip_algorithm": "value"}),
    "no clipping, fused": (True, {}),
}


def net_rows() -> list[Tensor]:
    return list(torch.randn(16, 8, generator=torch.Generator().manual_seed(1)))


def run_net(kind: Kind, precision: PrecisionName, variant: str) -> dict[str, Any]:
    fused, clipping = VARIANTS[variant]
    module = Net(kind == "fsdp2", fused)
    trainer = parallel_trainer(kind, plugin_of(precision), **clipping)
    trainer.fit(module, loader(net_rows()[int(os.environ["LOCAL_RANK"]) :: 2]))
    return {"weights": module.final}


def jobs(kind: Kind) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    for case in cases(kind):
        yield case.name, partial(run, case)
    for precision, variant in product(PRECISIONS, VARIANTS):
        yield f"net, {precision}, {variant}", partial(run_net, kind, precision, variant)
    yield "monitor", partial(run_with_monitor, kind)
    yield "resume", partial(run_and_resume, kind)
    yield "raise", partial(run_until_it_raises, kind)
    yield "reader", partial(run_with_reader, kind)  # the last, since the ranks may miss each other


# In pytest -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(__file__, tmp_path_factory)


@pytest.mark.parametrize(
    "case", [case for kind in KINDS for case in cases(kind)], ids=lambda case: f"{case.kind}, {case.name}"
)
def test_both_ranks_answer_a_fault_of_one(ranks: Ranks, case: Case) -> None:
    first, second = ranks(case.kind, case.name)
    assert first == second

    good = case.fault in ("none", "huge")
    row = ROW * (WHOLE if good else WITHOUT_SECOND)
    if case.clip is not None:  # the norm of the gradient is above it in every step
        row = ROW / ROW.norm() / math.sqrt(case.outputs) * case.clip * (4 if good else 3)
    torch.testing.assert_close(
        torch.tensor(first["weight"]), -row.expand(case.outputs, 8), rtol=1e-5 if case.clip else 0, atol=0
    )
    counters = first["state"]["counters"]
    assert (counters["applied_steps"], counters["skipped_steps"]) == ((4, 0) if good else (3, 1))
    assert counters["retried_attempts"] == 0
    assert counters["recent"] == (0 if good else 0b0100)
    lowers = case.precision == "16-mixed" and case.fault in ("overflow", "ignored")
    if not (case.fault == "shard" and case.accumulate > 1):  # a hook's inf, which the next backward seems to have made
        assert first["state"]["scale"] == (SCALE / 2 if lowers else SCALE)


@pytest.fixture(scope="module", params=VARIANTS)
def reference(request: pytest.FixtureRequest) -> tuple[str, list[list[float]]]:
    """A variant, and the weights of one process in plain float32 whose batch is that of both ranks."""
    module = Net(sharded=False)
    make_trainer(**VARIANTS[request.param][1]).fit(module, loader(net_rows(), batch_size=2))
    return request.param, module.final


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-5), ("16-mixed", 4e-3), ("bf16-mixed", 3e-2)])
def test_training_equals_that_of_one_process(
    ranks: Ranks, reference: tuple[str, list[list[float]]], kind: Kind, precision: PrecisionName, tolerance: float
) -> None:
    variant, weights = reference
    first, second = ranks(kind, f"net, {precision}, {variant}")
    assert first == second
    for found, expected in zip(first["weights"], weights, strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_raise_when_one_keeps_failing(ranks: Ranks, kind: Kind) -> None:
    first, second = ranks(kind, "raise")
    told = [one.pop("raised") for one in (first, second)]  # each names its own batch, or says that it is another's
    assert first == second
    assert all("3 optimizer steps in a row" in text and "not finite in float32 either" in text for text in told)
    torch.testing.assert_close(torch.tensor(first["weight"]), -2 * ROW.expand(2, 8), rtol=0, atol=0)
    assert (first["state"]["counters"]["applied_steps"], first["state"]["counters"]["skipped_steps"]) == (2, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_resume_with_the_lowered_scale(ranks: Ranks, kind: Kind) -> None:
    first, second = ranks(kind, "resume")
    assert first == second
    assert first["state"]["scale"] == SCALE / 2
    counters = first["state"]["counters"]
    assert (counters["applied_steps"], counters["skipped_steps"]) == (4, 1)
    expected = -(WITHOUT_SECOND + 1) * ROW.expand(2, 8)
    torch.testing.assert_close(torch.tensor(first["weight"]), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_monitor_says_the_same_on_all_ranks(ranks: Ranks, kind: Kind) -> None:
    first, second = ranks(kind, "monitor")
    metrics = first["metrics"]
    assert metrics == second["metrics"]
    assert metrics["amp/grad_norm"] == pytest.approx(math.sqrt(2) * 4, rel=1e-6)  # of the last step, of both rows
    assert metrics["amp/clipped"] == 0
    assert (metrics["amp/applied_steps"], metrics["amp/skipped_steps"]) == (3, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_monitor_does_not_make_lightning_warn(ranks: Ranks, kind: Kind) -> None:
    """Lightning's advice to log with ``sync_dist=True`` is not for the user of a callback to follow."""
    for result in ranks(kind, "monitor"):
        assert [text for text in result["warnings"] if "amp/" in text] == []


@pytest.mark.parametrize("kind", KINDS)
def test_monitor_lets_one_rank_read_the_metrics_alone(ranks: Ranks, kind: Kind) -> None:
    """No collective hides in reading them. The count is one that float32 does not hold."""
    first, second = ranks(kind, "reader")
    assert (first["read"], second["read"]) == (2**24 + 4, None)
    assert (first["last"], second["last"]) == (2**24 + 4, 2**24 + 4)


if __name__ == "__main__":
    work(jobs)
