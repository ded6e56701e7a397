"""Steps as transactions on two ranks: what one rank saw, both skip without a trace, or both run again.

This file is its own worker, as ``test_distributed.py`` is. A run with a faulty window is compared, on each rank and bit
for bit, with the run that is spared it: without that window, where it is skipped, or at a scale that needs no retry.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from helpers import PRECISIONS, ROW, make_trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from ranks import Ranks, Result, work
from test_distributed import KINDS, Kind, local, shard, whole
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from lightning_amp_plus import AdaptiveMixedPrecision, LossScale
from lightning_amp_plus.precisions import PrecisionName

SCALE, WORKS_AT, AFTER_SEARCH = 2.0**10, 2.0**6, 2.0**7
"""What a fit starts with, what the curable faults are cured at, after 2^9 and 2^8, and what is found from there."""
ATTEMPTS = {"cured": 4, "not cured": 6}
GOOD = 3
"""The windows of a fit besides the faulty one."""
PROMPTLY = 20  # seconds, of the 60 after which gloo gives up

Fault = Literal["none", "loss", "gradients", "overflow", "ignored", "ignored overflow", "shard", "branch"]
Option = Literal["", "static_graph", "find_unused_parameters", "gradient_as_bucket_view", "no broadcast", "in place"]


@dataclass(frozen=True)
class Case:
    """A fit with a fault on one rank, in the first micro-batch of one window.

    - ``loss``: ``value`` in the loss and not in the gradients.
    - ``gradients``: ``value`` in what flows back, at every scale.
    - ``overflow``: the gradient of the last row of the weight overflows float16, above ``WORKS_AT``; with FSDP2 rank 1
      alone holds that row.
    - ``ignored``: ``value`` in the gradient of a parameter that the ranks do not exchange.
    - ``ignored overflow``: inf in it, above ``WORKS_AT``.
    - ``shard``: ``value`` written to ``.grad`` after the ranks have exchanged their gradients.
    - ``branch``: ``value`` in the gradient of a parameter that the other rank does not use.
    """

    kind: Kind
    fault: Fault
    rank: int = 0
    precision: PrecisionName = "16-mixed"
    value: str = "inf"
    manual: bool = False
    accumulate: int = 1
    at: int = 1
    option: Option = ""
    strength: float = 2.0**7
    is_spared: bool = False

    @property
    def name(self) -> str:
        parts = [self.precision, "manual" if self.manual else "automatic", f"accumulate {self.accumulate}"]
        parts += [f"{self.value} in {self.fault} on rank {self.rank}, window {self.at}", self.option]
        return ", ".join(filter(None, parts))

    @property
    def is_cured(self) -> bool:
        return "overflow" in self.fault and not self.manual and self.option != "in place"

    @property
    def attempts(self) -> int:
        """How often the faulty window is run."""
        if self.is_cured:
            return ATTEMPTS["cured"]
        # What a hook has written, only the next backward seems to have made.
        by_hook = self.fault == "shard" and self.accumulate == 1
        looks_curable = self.fault != "loss" and not by_hook and "overflow" not in self.fault
        tries = looks_curable and not self.manual and self.precision == "16-mixed"
        return ATTEMPTS["not cured"] if tries else 1

    @property
    def lowers(self) -> bool:
        """Whether the skip lowers the scale: because no lower one was tried."""
        may_help = self.fault != "loss" and (self.fault != "shard" or self.accumulate > 1)
        return may_help and self.attempts == 1 and self.precision == "16-mixed"

    @property
    def reference(self) -> Case:
        """The same without what must leave no trace."""
        if self.is_cured:
            return self
        fault: Fault = "ignored" if "ignored" in self.fault else "none"  # with that parameter
        option: Option = "" if self.option == "in place" else self.option
        return replace(self, fault=fault, rank=0, value="inf", at=1, option=option, is_spared=True)


def cases(kind: Kind) -> list[Case]:
    found = []
    for rank, accumulate in product((0, 1), (1, 4)):
        case = partial(Case, kind, rank=rank, accumulate=accumulate)
        found += [case("loss", value="nan"), case("gradients"), case("gradients", manual=True, value="nan")]
        found += [case("overflow"), case("overflow", manual=True), case("overflow", option="in place")]
        found += [case("shard"), case("shard", manual=True, value="nan")]
        if accumulate == 1:
            found += [case("loss"), case("gradients", value="nan")]
        if kind == "ddp":
            found += [case("ignored"), case("ignored", value="nan", manual=True)]
            found += [case("ignored overflow"), case("ignored overflow", manual=True)]
        precision: PrecisionName = "bf16-mixed" if rank == (accumulate > 1) else "32-true"
        found += [case("loss", precision=precision), case("gradients", precision=precision, value="nan")]
        found += [case("shard", precision=precision), case("gradients", precision=precision, manual=True)]
    found += [Case(kind, "overflow", rank=1, at=0), Case(kind, "gradients", at=0, accumulate=4)]
    if kind == "ddp":
        found += [Case(kind, "ignored overflow", rank=1, option="in place")]
        for option, (accumulate, at) in product(OPTIONS, ((1, 0), (1, 1), (4, 1))):
            if option == "static_graph" and accumulate > 1:
                continue  # torch itself fails then: "expect_autograd_hooks_ INTERNAL ASSERT FAILED"
            case = partial(Case, kind, accumulate=accumulate, at=at, option=option)
            found += [case("overflow", rank=1), case("gradients")]
        found += [
            Case(kind, "branch", accumulate=accumulate, value=value, option="find_unused_parameters")
            for accumulate, value in ((1, "nan"), (4, "inf"))
        ]
    return found


OPTIONS: tuple[Option, ...] = ("static_graph", "find_unused_parameters", "gradient_as_bucket_view", "no broadcast")

# In the worker --------------------------------------------------------------------------------------------------------


def rows(window: int, micro_batch: int, rank: int) -> Tensor:
    """Two rows, whose factors are 1 and 2: the ranks see them in the same order only in the last of the windows."""
    swap = (window + micro_batch + (rank if window < GOOD - 1 else 0)) % 2
    return torch.stack([ROW * (1 + swap), ROW * (2 - swap)])


def batches(case: Case, rank: int | None = None) -> DataLoader[Any]:
    rank = int(os.environ["LOCAL_RANK"]) if rank is None else rank
    windows = list(range(GOOD))
    if case.fault != "none" and not case.is_spared:
        windows.insert(case.at, -1)
    return DataLoader(
        [  # type: ignore[arg-type]
            {"x": rows(window, micro_batch, rank), "bad": window == -1 and micro_batch == 0}
            for window in windows
            for micro_batch in range(case.accumulate)
        ],
        batch_size=None,
    )


class Model(pl.LightningModule):
    """All that a step changes: weights, momentum, BatchNorm's statistics, a metric, logged values, random numbers, lr.

    The numbers are exact in float16, and the random ones are masks.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.automatic_optimization = not case.manual
        self.linear = nn.Linear(8, 2, bias=False)
        nn.init.zeros_(self.linear.weight)
        self.norm = nn.BatchNorm1d(8, affine=False)
        self.total = SumMetric()
        self.is_faulty = False
        if "ignored" in case.fault:
            self.ignored = nn.Parameter(torch.zeros(3))
            self._ddp_params_and_buffers_to_ignore = ["ignored"]
            self.ignored.register_hook(self._spoil)
        if case.option == "find_unused_parameters":
            self.branch, self.unused = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
            if case.fault == "branch":
                self.branch.register_hook(self._spoil)
        self.reports: list[Any] = []
        self.final: Result = {}

    def _spoil(self, grad: Tensor) -> Tensor:
        if not self.is_faulty:
            return grad
        if "overflow" in self.case.fault:
            return torch.where(grad > AFTER_SEARCH / self.case.accumulate, math.inf, grad)
        return grad * float(self.case.value)

    def configure_model(self) -> None:
        if self.case.kind == "fsdp2":
            shard(self.linear, self.device_mesh)

    def on_train_start(self) -> None:
        torch.manual_seed(7)

    def mask(self) -> Tensor:
        return torch.rand(8) < 0.75

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor | None:
        case, rows = self.case, batch["x"]
        self.is_faulty = batch["bad"] and self.global_rank == case.rank
        if self.is_faulty and case.option == "in place":
            rows.mul_(1)
        self.norm(rows)
        self.total(rows.sum())
        hidden = self.linear(rows * self.mask())
        if self.is_faulty and case.fault == "gradients":
            hidden.register_hook(lambda grad: grad * float(case.value))
        loss = hidden.float().sum()
        if self.is_faulty and case.fault == "overflow":
            loss = loss + case.strength * case.accumulate * hidden[..., -1].float().sum()
        if self.is_faulty and case.fault == "loss":
            loss = loss + float(case.value)
        if "ignored" in case.fault:
            loss = loss + self.ignored.sum()
        if case.option == "find_unused_parameters" and self.global_rank == case.rank:
            loss = loss + self.branch.sum()
        self.log("loss", loss.detach(), on_step=True, on_epoch=True, sync_dist=True, batch_size=2)
        self.log("total", self.total, on_step=False, on_epoch=True, batch_size=2)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss / case.accumulate)
        if (batch_idx + 1) % case.accumulate == 0:
            self._step()
        return None

    def _step(self) -> None:
        optimizer: Any = self.optimizers()
        schedule: Any = self.lr_schedulers()
        optimizer.step()
        optimizer.zero_grad()
        self._note()
        if not plugin_in(self.trainer).last_step_skipped:
            schedule.step()

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        if self.automatic_optimization:
            self._note()

    def _note(self) -> None:
        if (report := plugin_in(self.trainer).last_step) is not None:
            self.reports.append(asdict(report))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.5)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_end(self) -> None:
        if self.automatic_optimization and isinstance(self.trainer.precision_plugin, AdaptiveMixedPrecision):
            self._note()
        optimizer = self.trainer.optimizers[0]
        self.final = {
            "weights": [whole(parameter).tolist() for parameter in self.parameters()],
            "momentum": [
                whole(state["momentum_buffer"]).tolist()
                for state in optimizer.state.values()
                if state["momentum_buffer"] is not None
            ],
            "buffers": {name: buffer.tolist() for name, buffer in self.named_buffers()},
            "random": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
            "lr": optimizer.param_groups[0]["lr"],
            "global_step": self.trainer.global_step,
        }


class FaultyShard(Model):
    def on_after_backward(self) -> None:  # not in ``Model``: the plugin does more for modules that have it
        if self.is_faulty:
            assert self.linear.weight.grad is not None
            local(self.linear.weight.grad)[-1, 0] = float(self.case.value)


def plugin_in(trainer: pl.Trainer) -> AdaptiveMixedPrecision:
    plugin = trainer.precision_plugin
    assert isinstance(plugin, AdaptiveMixedPrecision)
    return plugin


def trainer_for(case: Case, plugin: AdaptiveMixedPrecision | None, **kwargs: Any) -> pl.Trainer:
    strategy: Strategy
    options: dict[str, Any] = {case.option: True} if case.option in OPTIONS[:3] else {}
    if case.option == "no broadcast":
        options = {"broadcast_buffers": False}
    if case.kind == "ddp":
        strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=60), **options)
    else:
        strategy = ModelParallelStrategy(2, 1, process_group_backend="gloo", timeout=timedelta(seconds=60))
    accumulate = 1 if case.manual else case.accumulate
    return make_trainer(
        plugin,
        devices=2,
        strategy=strategy,
        use_distributed_sampler=False,
        accumulate_grad_batches=accumulate,
        **kwargs,
    )


def plugin_for(case: Case, scale: float = SCALE) -> AdaptiveMixedPrecision:
    return AdaptiveMixedPrecision(case.precision, LossScale(init_scale=scale))


def fit(case: Case, scale: float = SCALE) -> Result:
    plugin = plugin_for(case, scale)
    module = (FaultyShard if case.fault == "shard" else Model)(case)
    trainer = trainer_for(case, plugin)
    trainer.fit(module, batches(case))
    return {
        "kept": {**module.final, "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()}},
        "reports": module.reports,
        "state": plugin.state_dict(),
    }


@cache
def reference(case: Case) -> Result:
    return fit(case, WORKS_AT if case.is_cured else SCALE)


def run(case: Case) -> Result:
    return {**fit(case), "reference": reference(case.reference)}


class FaultyEpoch(Model):
    """Only the first epoch has the fault; and no random numbers, which a checkpoint does not hold."""

    def mask(self) -> Tensor:
        self.is_faulty = self.is_faulty and self.current_epoch == 0
        return torch.ones(8)


def run_and_resume(kind: Kind) -> Result:
    """Two epochs at once, and with a checkpoint between them: in the last step of the first the search begins."""
    path = Path(sys.argv[2]) / f"{kind}.ckpt"
    case = Case(kind, "overflow", rank=1, at=GOOD)
    results: Result = {}
    for name, epochs in {"at once": [2], "in two parts": [1, 2]}.items():
        for max_epochs in epochs:
            plugin, module = plugin_for(case), FaultyEpoch(case)
            trainer = trainer_for(case, plugin, max_epochs=max_epochs)
            trainer.fit(module, batches(case), ckpt_path=path if max_epochs != epochs[0] else None)
            if max_epochs == 1:
                trainer.save_checkpoint(path)
                results["saved"] = plugin.state_dict()
        results[name] = {**module.final, "state": plugin.state_dict()}
        del results[name]["random"]
        if kind == "fsdp2":
            del results[name]["buffers"]  # a checkpoint holds those of rank 0, and no forward shares them
    return results


# Collectives


class Collectives(TorchDispatchMode):
    """Counts what the ranks exchange, by the name of the operation."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watch(self) -> Iterator[None]:
        all_reduce = torch.distributed.all_reduce

        def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.sizes.append(tensor.numel())
            return all_reduce(tensor, *args, **kwargs)

        with self, mock.patch("torch.distributed.all_reduce", counted):
            yield


class Plain(Model):
    def _note(self) -> None:
        if isinstance(self.trainer.precision_plugin, AdaptiveMixedPrecision):
            super()._note()

    def _step(self) -> None:
        optimizer: Any = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()


def count_collectives(kind: Kind, manual: bool, accumulate: int) -> Result:
    case = Case(kind, "none", manual=manual, accumulate=accumulate)
    results = {}
    plugins: dict[str, AdaptiveMixedPrecision | None] = {"stock": None}
    plugins.update({precision: plugin_for(replace(case, precision=precision)) for precision in PRECISIONS})
    for name, plugin in plugins.items():
        trainer, collectives = trainer_for(case, plugin), Collectives()
        with collectives.watch():
            trainer.fit(Plain(case), batches(case))
        results[name] = {"counts": dict(collectives.counts), "sizes": sorted(collectives.sizes)}
    return results


def count_collectives_of_retries(accumulate: int) -> Result:
    case, collectives = Case("ddp", "overflow", accumulate=accumulate), Collectives()
    with collectives.watch():
        trainer_for(case, plugin_for(case)).fit(Model(case), batches(case))
    return {
        "gradients": collectives.counts["c10d.allreduce_"] - len(collectives.sizes),  # DDP does it in C++
        "flags": collectives.sizes.count(5),
    }


# Errors of one rank


@dataclass(frozen=True)
class Raise:
    """One rank raises, in the faulty window: in its first attempt, or when it is run again."""

    kind: Kind
    place: Literal["training_step", "backward", "on_after_backward", "on_before_optimizer_step"]
    rank: int
    attempt: int
    accumulate: int = 1

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.place}, rank {self.rank}, attempt {self.attempt}, accumulate {self.accumulate}"


def raises() -> list[Raise]:
    places: tuple[Any, ...] = ("training_step", "backward", "on_after_backward", "on_before_optimizer_step")
    found = [Raise("ddp", place, rank, attempt) for place in places for rank, attempt in ((0, 1), (1, 2))]
    found += [Raise("ddp", "training_step", 0, 2, accumulate=4), Raise("ddp", "backward", 1, 1, accumulate=4)]
    return found + [Raise("fsdp2", place, attempt % 2, attempt) for place in places for attempt in (1, 2)]


class Raising(Model):
    """Its second window overflows on rank 0 at the first scales, if it is to be run again."""

    def __init__(self, error: Raise) -> None:
        fault: Fault = "none" if error.attempt == 1 else "overflow"
        super().__init__(Case(error.kind, fault, accumulate=error.accumulate))
        self.error = error
        self.attempts = 0
        if error.place.startswith("on_"):
            setattr(self, error.place, lambda *_: self._raise())

    def _raise(self) -> None:  # the hook before the optimizer step sees the last attempt alone
        if self.attempts >= self.error.attempt and self.global_rank == self.error.rank:
            raise ValueError("an error of one rank")

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor | None:
        self.attempts += batch_idx == self.error.accumulate
        if self.error.place == "training_step":
            self._raise()
        loss = super().training_step(batch, batch_idx)
        assert loss is not None
        if self.error.place == "backward":
            loss.register_hook(lambda _: self._raise())
        return loss


def run_until_it_raises(error: Raise) -> Result:
    """Fit in a fork of this process, in a process group of its own: an error leaves none that works."""
    pid, begin = os.fork(), time.monotonic()
    if pid == 0:
        set_port(Path(sys.argv[2]) / f"{error.name}.port")
        module = Raising(error)
        text = "no error"
        try:
            trainer_for(module.case, plugin_for(module.case)).fit(module, batches(module.case))
        except Exception:
            text = traceback.format_exc()
        with open(text_of(error), "w") as file:
            json.dump({"text": text[-3000:], "attempts": module.attempts}, file)
        os._exit(1)  # as after an error that nobody catches, and faster
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() - begin > PROMPTLY:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            return {"text": "it hangs", "attempts": 0}
        time.sleep(0.02)
    with open(text_of(error)) as file:
        return json.load(file)


def text_of(error: Raise) -> Path:
    return Path(sys.argv[2]) / f"{error.name}.{os.environ['LOCAL_RANK']}.json"


def set_port(path: Path) -> None:
    """Have the ranks meet at a port that rank 0 has found to be free."""
    if os.environ["LOCAL_RANK"] == "0":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            path.with_suffix(".new").write_text(str(free.getsockname()[1]))
        path.with_suffix(".new").rename(path)
    while not path.exists():
        time.sleep(0.01)
    os.environ["MASTER_PORT"] = path.read_text()


def jobs(kind: Any) -> Iterator[tuple[str, Callable[[], Result]]]:
    if kind == "raise":
        for error in raises():
            yield error.name, partial(run_until_it_raises, error)
        return
    for case in cases(kind):
        yield case.name, partial(run, case)
    yield "resume", partial(run_and_resume, kind)
    for manual, accumulate in product((False, True), (1, 4)):
        yield f"collectives, {manual}, {accumulate}", partial(count_collectives, kind, manual, accumulate)
    if kind == "ddp":
        for accumulate in (1, 4):
            yield f"retries, {accumulate}", partial(count_collectives_of_retries, accumulate)


# In pytest ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(__file__, tmp_path_factory)


@pytest.mark.parametrize(
    "case", [case for kind in KINDS for case in cases(kind)], ids=lambda case: f"{case.kind}, {case.name}"
)
def test_a_fault_of_one_rank_leaves_no_trace_on_any(ranks: Ranks, case: Case) -> None:
    both = ranks(case.kind, case.name)
    for result in both:
        assert result["kept"] == result["reference"]["kept"]
    first, second = both
    assert first["reports"] == second["reports"]
    assert first["state"] == second["state"]
    for key in ("weights", "momentum", "random", "lr", "global_step", "metrics"):
        assert first["kept"][key] == second["kept"][key], key
    if case.kind == "ddp" and case.option != "no broadcast":  # the last window is the same on both
        assert first["kept"]["buffers"] == second["kept"]["buffers"]

    applied = GOOD + case.is_cured
    assert first["kept"]["global_step"] == applied
    assert first["kept"]["lr"] == 0.5**applied
    assert first["kept"]["buffers"]["norm.num_batches_tracked"] == applied * case.accumulate
    outcomes = ["applied"] * (GOOD + 1)
    outcomes[case.at] = "applied" if case.is_cured else "skipped"
    attempts = [1] * (GOOD + 1)
    attempts[case.at] = case.attempts
    assert [report["outcome"] for report in first["reports"]] == outcomes
    assert [report["attempts"] for report in first["reports"]] == attempts
    counters = first["state"]["counters"]
    assert (counters["applied_steps"], counters["skipped_steps"]) == (applied, 1 - case.is_cured)
    assert counters["retried_attempts"] == case.attempts - 1
    assert counters["recent"] == 1 << (GOOD - case.at)
    if case.is_cured:
        assert first["reports"][case.at]["scale"] == WORKS_AT
    assert first["state"]["scale"] == (AFTER_SEARCH if case.is_cured else SCALE / 2 if case.lowers else SCALE)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_resume_a_search_for_the_scale(ranks: Ranks, kind: Kind) -> None:
    first, second = ranks(kind, "resume")
    for result in (first, second):
        assert result["in two parts"] == result["at once"]
    assert first["saved"] == second["saved"]
    assert first["saved"]["search"] == [WORKS_AT, 2 * AFTER_SEARCH]
    state = first["at once"]["state"]
    assert state == second["at once"]["state"]
    assert (state["scale"], state["_growth_tracker"]) == (AFTER_SEARCH, GOOD)  # one step ended the search
    counters = state["counters"]
    assert (counters["applied_steps"], counters["retried_attempts"]) == (2 * (GOOD + 1), ATTEMPTS["cured"] - 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("manual", "accumulate"), list(product((False, True), (1, 4))))
def test_a_clean_step_costs_one_small_collective(ranks: Ranks, kind: Kind, manual: bool, accumulate: int) -> None:
    both = ranks(kind, f"collectives, {manual}, {accumulate}")
    for result, precision in product(both, PRECISIONS):
        stock, found = result["stock"], result[precision]
        added = Counter(found["counts"])
        added.subtract(stock["counts"])
        at_start = precision == "bf16-mixed"  # whether any rank emulates it
        assert {key: count for key, count in added.items() if count} == {"c10d.allreduce_": GOOD + at_start}
        sizes = Counter(found["sizes"])
        sizes.subtract(stock["sizes"])
        assert {size: count for size, count in sizes.items() if count} == {5: GOOD, **({2: 1} if at_start else {})}


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_retry_exchanges_the_gradients_once(ranks: Ranks, accumulate: int) -> None:
    """In the last micro-batch only, and each failed check looks twice."""
    failed = ATTEMPTS["cured"] - 1
    for result in ranks("ddp", f"retries, {accumulate}"):
        assert result == {"gradients": GOOD + 1 + failed, "flags": GOOD + 1 + 2 * failed}


@pytest.mark.parametrize("error", raises(), ids=lambda error: error.name)
def test_an_error_of_one_rank_ends_all(ranks: Ranks, error: Raise) -> None:
    both = ranks("raise", error.name)
    assert "an error of one rank" in both[error.rank]["text"]
    for result in both:
        assert "Error" in result["text"]
    assert both[error.rank]["attempts"] >= error.attempt


class InWorkers(Model):
    """What it finds outlives the processes that Lightning has started."""

    def __init__(self, case: Case, folder: Path) -> None:
        super().__init__(case)
        self.folder = folder

    def on_train_end(self) -> None:
        super().on_train_end()
        found = {"final": self.final, "reports": self.reports}
        (self.folder / f"{self.global_rank}.json").write_text(json.dumps(found))


@pytest.mark.flaky(reruns=2, only_rerun="SIGABRT")  # which torch may end a process with when all is done
def test_processes_that_lightning_starts_run_a_step_again(tmp_path: Path) -> None:
    """Both get the same batches, so that one process computes the same, where the fault is the mean of both ranks'."""
    case = Case("ddp", "overflow", rank=1)
    plugin = plugin_for(case)
    trainer = make_trainer(plugin, strategy="ddp_spawn", devices=2, use_distributed_sampler=False)
    trainer.fit(InWorkers(case, tmp_path), batches(case, rank=0))
    alone = Model(replace(case, rank=0, strength=case.strength / 2))
    make_trainer(plugin_for(case, WORKS_AT)).fit(alone, batches(case, rank=0))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first["final"] == alone.final
    assert [report["attempts"] for report in first["reports"]] == [1, ATTEMPTS["cured"], 1, 1]
    assert plugin.counters.retried_attempts == ATTEMPTS["cured"] - 1
    assert plugin.state_dict()["scale"] == AFTER_SEARCH


if __name__ == "__main__":
    work(jobs)
