"""Modules that compute in float32 in the middle of a model that does not: which they are, and that they end."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp_plus.diagnosis.fp32_modules import KeptModules

ROWS = torch.ones(2, 4)


class Block(nn.Module):
    """It notes what its parts compute in."""

    def __init__(self) -> None:
        super().__init__()
        self.wi = nn.Linear(4, 4)
        self.wo = nn.Linear(4, 4)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, rows: Tensor, *, scale: Tensor | None = None) -> Tensor:
        hidden = self.wi(rows)
        output = self.wo(hidden)
        self.seen = {"input": rows.dtype, "wi": hidden.dtype, "wo": output.dtype}
        if scale is not None:
            self.seen["scale"] = scale.dtype
        return output


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, rows: Tensor) -> Tensor:
        for block in self.blocks:
            rows = block(rows)
        return rows

    def seen(self, index: int) -> dict[str, torch.dtype]:
        block = self.blocks[index]
        assert isinstance(block, Block)
        return block.seen


def run(model: nn.Module, dtype: torch.dtype = torch.float16, **kwargs: Any) -> Tensor:
    with torch.autocast("cpu", dtype):
        return model(ROWS, **kwargs)


def state_of(model: nn.Module) -> list[list[str]]:
    return [sorted(vars(module)) for module in model.modules()]


each_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


@each_dtype
def test_a_module_that_fits_a_pattern_computes_in_float32_and_its_neighbours_do_not(dtype: torch.dtype) -> None:
    kept = KeptModules(["*.1.wo"])
    kept.attach(model := Net(), "cpu")
    run(model, dtype)
    assert (model.seen(0)["wo"], model.seen(1)["wi"], model.seen(1)["wo"]) == (dtype, dtype, torch.float32)


@each_dtype
def test_what_it_puts_out_is_bit_for_bit_what_it_puts_out_without_autocast(dtype: torch.dtype) -> None:
    layer: Any = nn.Sequential(nn.Linear(4, 4))
    rows = torch.randn(3, 4).to(dtype)
    KeptModules(["0"]).attach(layer, "cpu")
    with torch.autocast("cpu", dtype):
        output = layer(rows)
    assert torch.equal(output, nn.functional.linear(rows.float(), layer[0].weight, layer[0].bias))


def test_inputs_by_keyword_and_in_containers_are_cast_up_and_what_is_no_half_number_is_let_be() -> None:
    seen: dict[str, Any] = {}

    class Taker(nn.Module):
        def forward(self, rows: Any, **kwargs: Any) -> Tensor:
            seen.update(kwargs, rows=rows)
            return rows[0]

    model: Any = nn.Sequential(Taker())
    KeptModules(["0"]).attach(model, "cpu")
    half, double, index = ROWS.half(), ROWS.double(), torch.tensor([1])
    with torch.autocast("cpu", torch.float16):
        model[0]((half, {"deep": [half.bfloat16()]}), double=double, index=index, name="name")
    assert (seen["rows"][0].dtype, seen["rows"][1]["deep"][0].dtype) == (torch.float32, torch.float32)
    assert seen["double"] is double
    assert seen["index"] is index
    assert seen["name"] == "name"


def test_a_value_above_float16_passes_and_gradients_flow_back() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4, bias=False))
    nn.init.constant_(model[0].weight, 3e4)
    assert run(model).isinf().all()
    KeptModules(["0"]).attach(model, "cpu")
    run(model).sum().backward()
    assert run(model).tolist() == [[120000.0] * 4] * 2
    assert torch.equal(model[0].weight.grad, torch.full((4, 4), 2.0))


def test_outside_of_autocast_nothing_is_cast() -> None:
    KeptModules(["wo"]).attach(block := Block().half(), "cpu")
    assert block(ROWS.half()).dtype == torch.float16


def test_a_pattern_that_fits_nothing_is_refused_with_names_that_are_near() -> None:
    with pytest.raises(ValueError, match=r"keep_fp32: the pattern 'block\.1\.wo' fits no module of Net\..*'blocks"):
        KeptModules(["*.wo", "block.1.wo"]).attach(model := Net(), "cpu")
    model = Net()
    with pytest.raises(ValueError, match="fits no module"):
        KeptModules(["*.wo", "nothing"]).attach(model, "cpu")
    run(model)
    assert model.seen(1)["wo"] == torch.float16  # refused before anything was kept


def test_patterns_are_compared_with_the_whole_name_and_not_with_a_part_of_it() -> None:
    with pytest.raises(ValueError, match="'wo' fits no module"):
        KeptModules(["wo"]).attach(Net(), "cpu")


def test_modules_that_are_found_come_and_go_and_those_asked_for_stay() -> None:
    kept = KeptModules(["blocks.0.wo"])
    kept.attach(model := Net(), "cpu")
    kept.find(["blocks.1.wo"])
    run(model)
    assert (model.seen(0)["wo"], model.seen(1)["wo"]) == (torch.float32, torch.float32)
    kept.find(())
    run(model)
    assert (model.seen(0)["wo"], model.seen(1)["wo"], kept.found) == (torch.float32, torch.float16, ())


def test_modules_found_earlier_that_are_no_longer_there_are_returned() -> None:
    kept = KeptModules()
    kept.find(["blocks.1.wo", "gone"])
    model = Net()
    assert kept.attach(model, "cpu") == ["gone"]
    run(model)
    assert model.seen(1)["wo"] == torch.float32


def test_nothing_is_left_on_the_modules_afterwards() -> None:
    model = Net()
    before, keys = state_of(model), list(model.state_dict())
    kept = KeptModules(["*.wo"])
    kept.attach(model, "cpu")
    assert list(model.state_dict()) == keys
    kept.find(["blocks.0"])
    kept.detach()
    assert state_of(model) == before
    assert kept.found == ("blocks.0",)


def test_a_forward_that_was_put_on_the_module_before_is_called_and_comes_back() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4))
    mine = lambda rows: rows * 2  # noqa: E731
    model[0].forward = mine
    kept = KeptModules(["0"])
    kept.attach(model, "cpu")
    with torch.autocast("cpu", torch.float16):
        output = model(ROWS.half())
    assert (output.dtype, output.unique().tolist()) == (torch.float32, [2.0])
    kept.detach()
    assert vars(model[0])["forward"] is mine


def test_a_forward_that_was_put_on_the_module_since_stays() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4))
    kept = KeptModules(["0"])
    kept.attach(model, "cpu")
    mine = lambda rows: rows  # noqa: E731
    model[0].forward = mine
    kept.detach()
    assert vars(model[0])["forward"] is mine


def test_hooks_of_the_module_are_called_once_with_what_they_were() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4))
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda module, args, output: seen.extend([args[0].dtype, output.dtype]))
    KeptModules(["0"]).attach(model, "cpu")
    with torch.autocast("cpu", torch.float16):
        model(ROWS.half())
    assert seen == [torch.float16, torch.float32]


def test_a_model_that_is_copied_or_pickled_meanwhile_computes_with_its_own_weights() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4))
    KeptModules(["0"]).attach(model, "cpu")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        with torch.no_grad():
            other[0].weight.zero_()
            other[0].bias.fill_(1)
        assert run(other).unique().tolist() == [1.0]


def test_its_own_copy_and_pickle_hold_no_module_and_know_what_was_found() -> None:
    kept = KeptModules(["*.wo"])
    model = Net()
    kept.attach(model, "cpu")
    kept.find(["blocks.0"])
    other = pickle.loads(pickle.dumps(kept))  # noqa: S301
    assert (other.patterns, other.found) == (("*.wo",), ("blocks.0",))
    other.detach()
    assert "forward" in vars(model.blocks[0])  # of the original


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


@pytest.mark.parametrize("is_child", [True, False])
def test_a_compiled_module_that_is_found_after_it_was_compiled_computes_in_float32_from_then_on(is_child: bool) -> None:
    net = Net()
    whole = nn.Sequential(compiled(net)) if is_child else net
    model = whole if is_child else compiled(net)
    assert run(model).dtype == torch.float16
    kept = KeptModules()
    kept.attach(whole, "cpu")
    kept.find(["0.blocks.1.wo" if is_child else "blocks.1.wo"])  # names without what torch.compile adds
    assert run(model).dtype == torch.float32
    kept.detach()
    assert run(model).dtype == torch.float16


def test_a_pattern_need_not_know_that_a_module_is_compiled() -> None:
    model = nn.Sequential(compiled(Net()))
    KeptModules(["0.blocks.1.wo"]).attach(model, "cpu")
    assert run(model).dtype == torch.float32
