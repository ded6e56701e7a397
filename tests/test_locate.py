"""Where inf and NaN come from: the module, its call, the operation and the line; and what is none of a fault."""

from __future__ import annotations

import gc
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from lightning_amp_plus.diagnosis.lines import place_of
from lightning_amp_plus.diagnosis.locate import Fault, Locator

INF, NAN = math.inf, math.nan
ROWS = torch.ones(2, 4)
Run = Callable[[], Tensor]
has_stances = pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="torch 2.6 can run eagerly")


def look(module: nn.Module, run: Run, dtype: torch.dtype = torch.float16) -> Locator:
    """Run it forward and backward, in autocast, and look on."""
    with Locator(module) as locator:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = run()
        loss.float().sum().backward()
    return locator


def forward_fault(module: nn.Module, run: Run, dtype: torch.dtype = torch.float16) -> Fault:
    fault = look(module, run, dtype).fault("forward")
    assert fault is not None
    assert fault.phase == "forward"
    return fault


def backward_fault(module: nn.Module, run: Run, dtype: torch.dtype = torch.float16) -> Fault:
    """The fault of a run whose forward has none."""
    locator = look(module, run, dtype)
    assert locator.fault("forward") is None
    fault = locator.fault("backward")
    assert fault is not None
    assert fault.phase == "backward"
    return fault


def marked(mark: str) -> str:
    """The line of this file that ends with a comment."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# {mark}")]
    return f"{Path(__file__).name}:{number}"


def linear(weight: float) -> nn.Linear:
    layer = nn.Linear(4, 4, bias=False)
    nn.init.constant_(layer.weight, weight)
    return layer


class Block(nn.Module):
    """In float16 ``wo`` puts out 4 * weight."""

    def __init__(self, weight: float = 3e4) -> None:
        super().__init__()
        self.wo = linear(weight)

    def forward(self, rows: Tensor) -> Tensor:
        return self.wo(rows)


class Net(nn.Module):
    """The first inf is of ``blocks.1.wo``; what follows makes NaN of it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(0.25), Block()])
        self.norm = nn.LayerNorm(4)

    def forward(self, rows: Tensor) -> Tensor:
        for block in self.blocks:
            rows = block(rows)
        return self.norm(rows)


class Apply(nn.Module):
    """A linear layer, and a function of what it puts out."""

    def __init__(self, function: Callable[[Tensor], Any], weight: float = 0.25) -> None:
        super().__init__()
        self.linear = linear(weight)
        self.function = function

    def forward(self, rows: Tensor) -> Any:
        return self.function(self.linear(rows))


# Forward --------------------------------------------------------------------------------------------------------------


def test_the_first_module_whose_output_overflows_is_named_and_not_its_parents_or_followers() -> None:
    fault = forward_fault(net := Net(), lambda: net(ROWS))
    assert (fault.module, fault.call, fault.kind, fault.dtype) == ("blocks.1.wo", 1, "inf", torch.float16)
    assert fault.operation == "aten.mm"


def test_a_run_that_stays_finite_has_no_fault() -> None:
    net = Net()
    locator = look(net, lambda: net(ROWS), torch.bfloat16)
    assert (locator.fault("forward"), locator.fault("backward")) == (None, None)


def test_the_largest_finite_magnitude_of_the_output_is_told() -> None:
    module = Apply(lambda rows: rows * torch.tensor([1, 2, 1e9, 3]).half())
    assert forward_fault(module, lambda: module(ROWS * 8)).largest == 24


@dataclass
class Output:
    hidden: dict[str, Any]


class ModelOutput(OrderedDict[str, Any]):
    """As transformers has it."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


NESTED: dict[str, Callable[[Tensor], Any]] = {
    "dict in list": lambda rows: [{"rows": rows}],
    "dataclass": lambda rows: Output({"rows": rows}),
    "tuple": lambda rows: (None, 1, (rows,)),
    "model output": lambda rows: ModelOutput(logits=rows),
}


@pytest.mark.parametrize("nest", NESTED.values(), ids=NESTED)
def test_outputs_are_found_in_whatever_holds_them(nest: Callable[[Tensor], Any]) -> None:
    part = Apply(lambda rows: nest(rows * 1e5))
    model = nn.Sequential(OrderedDict(part=part))
    assert forward_fault(model, lambda: (model(ROWS), part.linear.weight.sum())[1]).module == "part"


def test_the_call_of_a_module_that_is_called_several_times_and_shared_is_told() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear(50.0)
            self.alias = self.layer

        def forward(self, rows: Tensor) -> Tensor:
            return self.alias(self.layer(self.layer(rows)))  # 200, 40000, 8 million

    model = Shared()
    fault = forward_fault(model, lambda: model(ROWS))
    assert (fault.module, fault.call, fault.calls) == ("layer", 3, 3)


def test_an_operation_in_a_modules_own_code_is_told_with_its_line() -> None:
    def scores(rows: Tensor) -> Tensor:
        rows = rows + 1
        rows = rows * 4e4  # overflows
        return rows - rows

    model = nn.Sequential(OrderedDict(part=Apply(scores)))
    fault = forward_fault(model, lambda: model(ROWS))
    assert (fault.module, fault.operation, fault.line) == ("part", "aten.mul.Tensor", marked("overflows"))
    assert fault.kind == "nan"


def test_an_operation_outside_of_all_modules_is_told_with_its_line_and_operands() -> None:
    model = Apply(torch.relu)

    def loss() -> Tensor:
        logits = model(ROWS) * 3
        return logits.exp().exp().sum()  # exponent

    fault = forward_fault(model, loss)
    assert (fault.module, fault.operation, fault.line) == (None, "aten.exp", marked("exponent"))
    assert fault.largest == pytest.approx(math.exp(3), rel=1e-3)


def test_a_log_of_a_softmax_that_underflows_is_told() -> None:
    model = Apply(lambda rows: (rows * torch.tensor([0.0, 0.0, 0.0, 30.0]).half()).softmax(-1).half().log())
    fault = forward_fault(model, lambda: model(ROWS))
    assert (fault.module, fault.operation, fault.kind) == ("", "aten.log", "inf")


def test_a_softmax_over_a_row_that_is_masked_altogether_is_told_with_its_line() -> None:
    model = Apply(lambda rows: rows.masked_fill(rows > 0, -INF).softmax(-1))  # all masked
    fault = forward_fault(model, lambda: model(ROWS))
    assert (fault.module, fault.operation, fault.line) == ("", "aten._softmax", marked("all masked"))


def test_a_module_whose_error_is_caught_does_not_hide_what_comes_after() -> None:
    def fails(rows: Tensor) -> Tensor:
        raise ValueError

    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.other = Apply(fails), Apply(square_root)

        def forward(self, rows: Tensor) -> Tensor:
            with suppress(ValueError):
                self.part(rows)
            return self.other(rows)

    model = Tries()
    fault = backward_fault(model, lambda: model(ROWS))
    assert (fault.module, fault.operation) == ("other", "SqrtBackward0")


def test_a_model_whose_error_is_caught_does_not_hide_what_comes_after() -> None:
    model = nn.ModuleDict({"part": nn.Linear(3, 3), "other": Apply(square_root)})

    def run() -> Tensor:
        with suppress(RuntimeError):
            model["part"](ROWS)
        return model["other"](ROWS)

    fault = backward_fault(model, run)
    assert (fault.module, fault.operation) == ("other", "SqrtBackward0")


@has_stances
@pytest.mark.parametrize("which", ["whole", "child", "in place"])
def test_compiled_modules_are_looked_into_and_their_names_are_those_of_what_they_wrap(which: str) -> None:
    compiled = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal compiled
        compiled += 1
        return graph

    model: Any = nn.Sequential(OrderedDict(net=Net()))
    if which == "whole":
        model = torch.compile(model, backend=backend)
    elif which == "child":
        model.net = torch.compile(model.net, backend=backend)
    else:
        model.net.compile(backend=backend)
    assert forward_fault(model, lambda: model(ROWS)).module == "net.blocks.1.wo"
    assert compiled == 0
    model(ROWS)
    assert compiled == 1  # and it is compiled again afterwards


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_what_happens_in_script_modules_is_of_the_module_around_them() -> None:
    model = nn.Sequential(OrderedDict(part=nn.Sequential(nn.Identity(), torch.jit.trace(Block(), ROWS))))
    assert forward_fault(model, lambda: model(ROWS)).module == "part"


# Backward -------------------------------------------------------------------------------------------------------------


def standard_deviation(rows: Tensor) -> Tensor:
    return 1 / (rows.float().var().sqrt() + 1e-3)  # deviation


def norm(rows: Tensor) -> Tensor:
    return (rows - rows).square().sum().sqrt()  # norm


def square_root(rows: Tensor) -> Tensor:
    return torch.sqrt(rows.float() - rows.float())  # root


FUNCTIONS = {"deviation": standard_deviation, "norm": norm, "root": square_root}


@pytest.mark.parametrize("mark", FUNCTIONS)
def test_a_backward_that_divides_by_zero_is_told_with_the_line_of_its_forward(mark: str) -> None:
    model = nn.Sequential(OrderedDict(part=Apply(FUNCTIONS[mark]), rest=nn.Identity()))
    fault = backward_fault(model, lambda: model(ROWS))
    assert (fault.module, fault.operation, fault.line) == ("part", "SqrtBackward0", marked(mark))


def test_a_backward_outside_of_all_modules_is_of_none() -> None:
    model = Block(0.25)
    fault = backward_fault(model, lambda: square_root(model(ROWS)))
    assert (fault.module, fault.operation, fault.line) == (None, "SqrtBackward0", marked("root"))


def test_a_gradient_that_overflows_is_of_the_module_and_call_it_flows_through() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear(250.0)

        def forward(self, rows: Tensor) -> Tensor:
            return self.layer(self.layer(rows) * 1e-3).float().sum() * 100  # gradients: 100, 10^5

    model = Twice()
    fault = backward_fault(model, lambda: model(ROWS.requires_grad_(False)))
    assert (fault.module, fault.call, fault.dtype) == ("layer", 2, torch.float16)


def test_a_gradient_of_a_gradient_is_told_with_its_line() -> None:
    model = linear(0.0)

    def penalty() -> Tensor:
        rows = ROWS.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(rows).float().sum(), rows, create_graph=True)
        return (gradient.square().sum().sqrt() - 1).square()  # penalty

    fault = backward_fault(model, penalty)
    assert (fault.operation, fault.line) == ("SqrtBackward0", marked("penalty"))


# Activation checkpointing ---------------------------------------------------------------------------------------------

each_checkpointing = pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])


@each_checkpointing
def test_a_checkpointed_forward_is_told_at_its_first_call(use_reentrant: bool) -> None:
    model: Any = nn.Sequential(OrderedDict(first=Block(0.25), second=Block()))
    rows = model.first(ROWS).detach().requires_grad_()
    fault = forward_fault(model, lambda: checkpoint(model.second, rows, use_reentrant=use_reentrant))
    assert (fault.module, fault.call, fault.calls) == ("second.wo", 1, 1)


@each_checkpointing
def test_a_checkpointed_backward_is_told_with_the_module_that_was_computed_again(use_reentrant: bool) -> None:
    model: Any = nn.Sequential(OrderedDict(first=Block(0.25), second=Apply(square_root), third=Block(0.25)))

    def run() -> Tensor:
        rows = model.first(ROWS)
        return model.third(checkpoint(model.second, rows, use_reentrant=use_reentrant))

    fault = backward_fault(model, run)
    assert (fault.module, fault.operation, fault.line) == ("second", "SqrtBackward0", marked("root"))


# What is none ---------------------------------------------------------------------------------------------------------

CAUSAL = torch.full((2, 2), -INF).triu(1)
TARGETS = torch.tensor([[1.0, NAN, 2.0, 3.0], [NAN, 1.0, 1.0, 1.0]])


def attend(rows: Tensor, mask: Tensor) -> Tensor:
    return (rows @ rows.t() + mask).softmax(-1) @ rows


class MaskScores(nn.Module):
    def forward(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(torch.ones(2, 2).triu(1).bool(), -INF)


class MakeMask(nn.Module):
    def forward(self) -> Tensor:
        return torch.full((2, 2), -INF).triu(1)


class Observer(nn.Module):
    """The smallest number seen, which is inf before the first."""

    smallest: Tensor

    def __init__(self, *, returns: bool) -> None:
        super().__init__()
        self.returns = returns
        self.register_buffer("smallest", torch.tensor(INF))

    def forward(self, rows: Tensor) -> Any:
        if self.returns:
            return rows, self.smallest
        self.smallest = torch.minimum(self.smallest, rows.detach().float().min())
        return rows


class Legal(nn.Module):
    """Something legal with inf, and then a module that overflows if ``weight`` is large."""

    def __init__(self, part: nn.Module, function: Callable[[nn.Module, Tensor], Tensor], weight: float) -> None:
        super().__init__()
        self.linear, self.part, self.function, self.last = linear(0.25), part, function, Block(weight)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(self.function(self.part, self.linear(rows)))


def from_empty(part: nn.Module, rows: Tensor) -> Tensor:
    garbage = part(torch.empty(2, 4, dtype=rows.dtype))  # NaN, when deterministic
    return garbage.copy_(rows)


LEGAL: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "mask made inside": (nn.Identity, lambda _, rows: attend(rows, torch.full((2, 2), -INF).triu(1))),
    "mask of a buffer": (nn.Identity, lambda _, rows: attend(rows, CAUSAL)),
    "scores masked inside": (nn.Identity, lambda _, rows: MaskScores()(rows @ rows.t()).softmax(-1) @ rows),
    "mask of attention": (
        lambda: nn.MultiheadAttention(4, 1, dropout=0.0),
        lambda part, rows: part(rows, rows, rows, attn_mask=CAUSAL)[0] * 0 + rows,
    ),
    "observer": (partial(Observer, returns=False), lambda part, rows: part(rows)),
    "empty": (nn.Identity, from_empty),
    "where": (nn.Identity, lambda _, rows: torch.where(TARGETS.isnan(), rows, rows)),
    "limit": (nn.Identity, lambda _, rows: rows.clamp(-INF, INF)),
    "running minimum": (nn.Identity, lambda _, rows: torch.minimum(torch.full((2, 4), INF), rows)),
    "mask passed on by a module": (nn.Identity, lambda part, rows: attend(rows, part(CAUSAL))),
    "scores masked by a module": (MaskScores, lambda part, rows: part(rows @ rows.t()).softmax(-1) @ rows),
    "mask made by a module": (MakeMask, lambda part, rows: attend(rows, part())),
    "observer that puts it out": (partial(Observer, returns=True), lambda part, rows: part(rows)[0]),
}
each_legal = pytest.mark.parametrize("name", LEGAL)


@pytest.fixture
def _fills_empty() -> Any:
    """Have torch fill uninitialized memory with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_fills_empty")
@each_legal
def test_inf_that_is_meant_is_no_fault(name: str) -> None:
    part, function = LEGAL[name]
    model = Legal(part(), function, weight=0.25)
    locator = look(model, lambda: model(ROWS))
    assert (locator.fault("forward"), locator.fault("backward")) == (None, None)


@pytest.mark.usefixtures("_fills_empty")
@each_legal
def test_an_overflow_after_inf_that_is_meant_is_told(name: str) -> None:
    part, function = LEGAL[name]
    model = Legal(part(), function, weight=3e4)
    assert forward_fault(model, lambda: model(ROWS)).module == "last.wo"


def test_an_overflow_between_the_modules_after_a_mask_made_of_a_log_is_told() -> None:
    model = linear(0.25)

    def run() -> Tensor:
        rows = attend(model(ROWS), torch.ones(2, 2).tril().log())
        return rows.half() * 7e4  # after a mask

    assert forward_fault(model, run).line == marked("after a mask")


def marked_targets(rows: Tensor, targets: Tensor) -> Tensor:
    is_given = ~targets.isnan()
    return (rows[is_given] - targets[is_given]).square().mean()


def test_targets_marked_by_nan_are_no_fault() -> None:
    model = Block(0.25)
    locator = look(model, lambda: marked_targets(model(ROWS), TARGETS))
    assert (locator.fault("forward"), locator.fault("backward")) == (None, None)


def test_targets_marked_by_nan_within_the_step_are_no_fault() -> None:
    model = Block(0.25)
    locator = look(model, lambda: marked_targets(model(ROWS), torch.tensor([[1.0, NAN, 2.0, 3.0]] * 2)))
    assert locator.fault("forward") is None


NOTHING = torch.full((2, 4), -INF)
GUARDED: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda rows: (rows * 0).norm(),
    "normalize": lambda rows: nn.functional.normalize(rows * 0),
    "std": lambda rows: (rows * 0).std(),
    "logaddexp": lambda rows: torch.logaddexp(rows, NOTHING),
}


@pytest.mark.parametrize("name", GUARDED)
def test_gradients_that_torch_itself_guards_at_zero_are_no_fault(name: str) -> None:
    model = linear(0.25)
    locator = look(model, lambda: GUARDED[name](model(ROWS)), torch.float32)
    assert model.weight.grad is not None
    assert model.weight.grad.isfinite().all()
    assert locator.fault("backward") is None


# Without a trace ------------------------------------------------------------------------------------------------------


class Trained(nn.Module):
    """Random numbers, statistics, checkpointing, and inf in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.wide = Block()

    def forward(self, rows: Tensor) -> Tensor:
        rows = checkpoint(self.first, rows, use_reentrant=False)
        return (rows * self.wide(rows).float().clamp(-100, 100)).float().square().mean()


def test_a_run_that_is_looked_on_at_computes_what_it_does_without_bit_for_bit() -> None:
    results: list[list[Any]] = []
    for looks_on in (False, True):
        torch.manual_seed(1)
        model, rows = Trained(), torch.randn(8, 4)
        with torch.autocast("cpu", torch.float16):
            if looks_on:
                with Locator(model) as locator:
                    (loss := model(rows)).backward()
            else:
                (loss := model(rows)).backward()
        results.append(
            [loss, *(p.grad for p in model.parameters()), *model.buffers(), torch.get_rng_state()],
        )
    fault = locator.fault("forward")
    assert fault is not None
    assert fault.module == "wide.wo"
    assert_close(results[1], results[0], rtol=0, atol=0, equal_nan=True)


def attributes_of(module: nn.Module) -> list[Any]:
    return [{name: repr(value) for name, value in vars(part).items()} for part in module.modules()]


@pytest.mark.filterwarnings("ignore:Error detected in")
@pytest.mark.parametrize("fails", [None, "forward", "backward"])
@pytest.mark.parametrize("is_anomaly_on", [False, True])
def test_nothing_is_left_afterwards(fails: str | None, is_anomaly_on: bool) -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: Tensor) -> Tensor:
            if fails == "forward":
                raise ValueError("mine")
            return rows.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            if fails == "backward":
                raise ValueError("mine")
            return gradient

    model = nn.Sequential(Apply(Failing.apply), Net())
    seen: list[str] = []
    model.register_forward_hook(lambda *_: seen.append("mine"))
    before = attributes_of(model)
    with torch.autograd.set_detect_anomaly(is_anomaly_on, check_nan=False):
        try:
            with Locator(model):
                model(ROWS).sum().backward()
        except ValueError as error:
            assert str(error) == "mine"  # noqa: PT017
        else:
            assert fails is None
        assert torch.is_anomaly_enabled() is is_anomaly_on
    assert attributes_of(model) == before
    assert _get_current_dispatch_mode() is None
    assert seen == ([] if fails == "forward" else ["mine"])


def test_a_locator_that_looks_on_for_long_holds_no_tensor_afterwards() -> None:
    model = Block()
    with Locator(model) as locator:
        output = model(ROWS.half().float() * 3e38)
        reference = weakref.ref(output)
    assert locator.fault("forward") is not None
    del output
    gc.collect()
    assert reference() is None


def test_a_module_in_a_vmap_runs_as_it_does_without() -> None:
    model = Block(0.25)
    with Locator(model):
        assert torch.equal(torch.vmap(model)(ROWS), ROWS)


# Errors ---------------------------------------------------------------------------------------------------------------


def raised(run: Run) -> Exception:
    try:
        run()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_the_place_of_an_error_is_the_innermost_module_and_the_innermost_line_of_the_users() -> None:
    def half(rows: Tensor) -> Tensor:
        return rows.half().masked_fill(rows > 0, -1e9)  # mask

    model = nn.Sequential(OrderedDict(part=nn.Sequential(OrderedDict(inner=Apply(half)))))
    assert place_of(raised(lambda: model(ROWS)), model) == ("part.inner", marked("mask"))


def test_the_place_of_an_error_in_torchs_own_module_is_that_module_and_the_line_that_called_it() -> None:
    model = nn.Sequential(OrderedDict(head=nn.Linear(3, 3)))
    error = raised(lambda: model(ROWS))  # call
    assert place_of(error, model) == ("head", marked("call"))


def test_an_error_outside_of_all_modules_has_a_line_only() -> None:
    error = raised(lambda: ROWS.view(3))  # view
    assert place_of(error, Net()) == (None, marked("view"))
