"""What the recorder sees of modules in training, against numbers found by hand, and that it leaves nothing behind."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_amp_plus.dynamic_range.recorder import RangeRecorder
from lightning_amp_plus.dynamic_range.stats import KINDS, DynamicRange, Kind
from lightning_amp_plus.rollback.batches import tensors_in
from lightning_amp_plus.scaling import exponents
from lightning_amp_plus.scaling.exponents import BINS, LOWEST

INF, NAN = math.inf, math.nan
ZERO, NOT_FINITE = -1000, 1000
has_stances = pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="torch 2.6 can run eagerly")


def seen(stats: DynamicRange, kind: Kind, module: str) -> dict[int, int]:
    """The counts other than 0 of a module by exponent."""
    names = {0: ZERO, BINS - 1: NOT_FINITE}
    counts = stats.counts[KINDS.index(kind), stats.modules.index(module)]
    return {names.get(index, index - 1 + LOWEST): int(counts[index]) for index in counts.nonzero().flatten().tolist()}


def total(stats: DynamicRange, kind: Kind = "activations") -> dict[str, int]:
    """How many elements were counted of each module."""
    return dict(zip(stats.modules, stats.counts[KINDS.index(kind)].sum(1).tolist(), strict=True))


def linear(*rows: list[float]) -> nn.Linear:
    """A layer with these weights and no bias."""
    layer = nn.Linear(len(rows[0]), len(rows), bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(rows))
    return layer


def record(module: nn.Module, run: Callable[[], Any], recorder: RangeRecorder | None = None) -> DynamicRange:
    """Run it, go back from the sum of what it returns, and return what was seen on the way."""
    recorder = recorder or RangeRecorder(module)
    recorder.start()
    output = run()
    if isinstance(output, Tensor) and output.requires_grad:
        output.sum().backward()
    return recorder.stop()


@contextmanager
def recording(module: nn.Module, **kwargs: Any) -> Iterator[RangeRecorder]:
    recorder = RangeRecorder(module, **kwargs)
    recorder.start()
    yield recorder
    recorder.cancel()


# ---------------------------------------------------------------- exact histograms


def test_activations_their_gradients_and_those_of_parameters_are_the_ones_computed_by_hand() -> None:
    # x = (1, 2); after the first layer (1, 4, -8); after ReLU (1, 4, 0); the loss is 2 * 1 + 16 * 4 + 32 * 0
    model = nn.Sequential(linear([1.0, 0], [0, 2], [0, -4]), nn.ReLU(), linear([2.0, 16, 32]))
    optimizer = SGD(model.parameters(), lr=1.0)
    recorder = RangeRecorder(model)
    recorder.start()
    model(torch.tensor([[1.0, 2.0]])).sum().backward()
    recorder.look(optimizer, 1.0)
    stats = recorder.stop()
    assert stats.modules == ("0", "1", "2")
    assert [seen(stats, "activations", name) for name in "012"] == [{0: 1, 2: 1, 3: 1}, {0: 1, 2: 1, ZERO: 1}, {6: 1}]
    gradients = [seen(stats, "activation_gradients", name) for name in "012"]
    assert gradients == [{1: 1, 4: 1, ZERO: 1}, {1: 1, 4: 1, 5: 1}, {0: 1}]
    parameters = [seen(stats, "parameter_gradients", name) for name in "012"]  # 2 * (1, 2), 16 * (1, 2), 0; (1, 4, 0)
    assert parameters == [{1: 1, 2: 1, 4: 1, 5: 1, ZERO: 2}, {}, {0: 1, 2: 1, ZERO: 1}]
    assert stats.largest.tolist() == [[8, 4, 66], [16, 32, 1], [32, 0, 4]]
    assert stats.largest_input.tolist() == [2, 8, 4]
    assert (stats.steps, stats.loss_scale, int(stats.above.sum())) == (1, 1.0, 0)


def test_the_sums_are_over_all_steps_and_a_step_is_returned_alone() -> None:
    layer = linear([4.0])
    recorder = RangeRecorder(layer)
    first = record(layer, lambda: layer(torch.ones(2, 1)), recorder)
    second = record(layer, lambda: layer(torch.full((3, 1), 4.0)), recorder)
    assert [seen(step, "activations", "") for step in (first, second)] == [{2: 2}, {4: 3}]
    assert seen(recorder.total, "activations", "") == {2: 2, 4: 3}
    assert (recorder.total.steps, recorder.total.largest[0].tolist()) == (2, [16])


def test_gradients_made_with_a_loss_scale_are_recorded_true() -> None:
    layer = linear([4.0])
    with recording(layer, scale=lambda: 2.0**10) as recorder:
        (layer(torch.full((1, 1), 8.0)) * 2.0**10).sum().backward()
        recorder.look(SGD(layer.parameters(), lr=1.0), 2.0**10)
        stats = recorder.stop()
    assert [seen(stats, kind, "") for kind in KINDS] == [{5: 1}, {0: 1}, {3: 1}]
    assert stats.largest.flatten().tolist() == [32, 1, 8]
    assert stats.loss_scale == 2.0**10


def test_what_float16_cannot_hold_is_counted_with_the_loss_scale() -> None:
    layer = linear([1.0])
    factors = torch.tensor([1.0, 63.0, 64.0, INF])  # at 2^10: 65536 and inf are above 65504, 64512 is not
    with recording(layer, scale=lambda: 2.0**10) as recorder:
        (layer(torch.ones(4, 1)).flatten() * factors * 2.0**10).sum().backward()
        stats = recorder.stop()
    assert stats.above[KINDS.index("activation_gradients"), 0] == 2
    assert stats.share_above("activation_gradients") == [0.5]


@pytest.mark.parametrize(
    ("number", "is_above"), [(65504.0, 0), (-65504.0, 0), (65505.0, 1), (-1e30, 1), (-INF, 1), (NAN, 1)]
)
def test_above_begins_beyond_65504_on_either_side(number: float, is_above: int) -> None:
    identity = nn.Identity()
    stats = record(identity, lambda: identity(torch.tensor([number, 1.0])))
    assert stats.above[0, 0] == is_above


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_outputs_of_every_dtype_are_counted(dtype: torch.dtype) -> None:
    identity = nn.Identity()
    stats = record(identity, lambda: identity(torch.full((3,), 4.0).to(dtype)))
    assert seen(stats, "activations", "") == ({2: 3, ZERO: 3} if dtype.is_complex else {2: 3})
    assert stats.largest_input.tolist() == [4]


def test_in_autocast_what_comes_out_in_half_precision_is_counted() -> None:
    layer = linear([6e4, 6e4])
    with torch.autocast("cpu", torch.float16):
        stats = record(layer, lambda: layer(torch.ones(1, 2)))
    assert seen(stats, "activations", "") == {NOT_FINITE: 1}
    assert (stats.share_above("activations"), stats.largest[0, 0].item()) == ([1.0], 0)


def test_integers_are_not_counted() -> None:
    identity, embedding = nn.Identity(), nn.Embedding(3, 2)
    assert total(record(identity, lambda: identity(torch.arange(3)))) == {"": 0}
    stats = record(embedding, lambda: embedding(torch.arange(3)))
    assert total(stats) == {"": 6}
    assert stats.largest_input.tolist() == [0]


def test_the_gradient_of_a_sparse_embedding_is_what_it_holds() -> None:
    embedding = nn.Embedding(100, 2, sparse=True)
    with recording(embedding) as recorder:
        embedding(torch.tensor([3, 3])).sum().backward()
        recorder.look(SGD(embedding.parameters(), lr=1.0), 1.0)
        assert seen(recorder.stop(), "parameter_gradients", "") == {1: 2}


def test_an_inf_is_no_magnitude_but_that_of_a_mask() -> None:
    identity = nn.Identity()
    stats = record(identity, lambda: identity(torch.tensor([NAN, 1e6, INF, -INF])))
    assert stats.largest[0].tolist() == stats.largest_input.tolist() == [1e6]
    assert stats.above[0].tolist() == [4]


def test_beyond_float32_the_largest_magnitude_is_that_of_float32() -> None:
    identity = nn.Identity()
    stats = record(identity, lambda: identity(torch.tensor([1e300], dtype=torch.float64)))
    assert stats.largest[0].tolist() == [torch.finfo(torch.float32).max]


def test_a_nan_does_not_hide_the_largest_magnitude() -> None:
    identity = nn.Identity()
    stats = record(identity, lambda: identity(torch.tensor([NAN, 1e6])))
    assert stats.largest[0].tolist() == stats.largest_input.tolist() == [1e6]


# ---------------------------------------------------------------- what models are made of


def test_an_inplace_relu_leaves_its_input_counted_as_it_was() -> None:
    model = nn.Sequential(linear([1.0], [-1.0]), nn.ReLU(inplace=True), linear([8.0, 8.0]))
    stats = record(model, lambda: model(torch.ones(1, 1)))
    assert [seen(stats, "activations", name) for name in "01"] == [{0: 2}, {0: 1, ZERO: 1}]
    gradients = [seen(stats, "activation_gradients", name) for name in "01"]
    assert gradients == [{3: 1, ZERO: 1}, {3: 2}]


def test_a_module_called_twice_is_counted_twice() -> None:
    layer = linear([2.0])
    stats = record(layer, lambda: layer(layer(torch.ones(1, 1))))
    assert seen(stats, "activations", "") == {1: 1, 2: 1}
    assert seen(stats, "activation_gradients", "") == {1: 1, 0: 1}
    assert stats.largest_input.tolist() == [2]


def test_a_shared_module_is_counted_under_its_first_name() -> None:
    layer = linear([2.0])
    model = nn.Sequential(layer, nn.ReLU(), layer)
    stats = record(model, lambda: model(torch.ones(1, 1)))
    assert stats.modules == ("0", "1")
    assert seen(stats, "activations", "0") == {1: 1, 2: 1}


def test_a_tied_weight_is_counted_once_with_the_gradient_of_both_uses() -> None:
    embedding, head = nn.Embedding(2, 1), nn.Linear(1, 2, bias=False)
    head.weight = embedding.weight
    nn.init.ones_(head.weight)  # the loss is 1 * (1 + 1): gradients 1 + 2 and 1
    model = nn.ModuleDict({"embedding": embedding, "head": head})
    with recording(model) as recorder:
        head(embedding(torch.tensor([0]))).sum().backward()
        recorder.look(SGD(model.parameters(), lr=1.0), 1.0)
        stats = recorder.stop()
    assert seen(stats, "parameter_gradients", "embedding") == {1: 1, 0: 1}
    assert seen(stats, "parameter_gradients", "head") == {}


@dataclass
class Output:
    hidden: Tensor
    more: dict[str, Any]


class Nested(nn.Module):
    def forward(self, x: Tensor) -> Output:
        return Output(x, {"tuple": (x * 2, [x * 4]), "none": None, "number": 3.0})


def test_outputs_are_found_in_tuples_dicts_and_dataclasses() -> None:
    module = nn.Sequential(linear([1.0]), Nested())

    def run() -> Tensor:
        output: Output = module(torch.ones(1, 1))
        return output.hidden + output.more["tuple"][1][0]

    stats = record(module, run)
    assert seen(stats, "activations", "1") == {0: 1, 1: 1, 2: 1}
    assert seen(stats, "activation_gradients", "1") == {0: 1, 2: 1}  # of x * 4, and of x 1 + 4; x * 2 gets none


def test_inputs_are_found_in_keyword_arguments() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, *, by: dict[str, Tensor]) -> Tensor:
            return x * by["factor"]

    module = Scaled()
    stats = record(module, lambda: module(torch.ones(1), by={"factor": torch.tensor(-300.0)}))
    assert stats.largest_input.tolist() == [300]


class AttributesToo(dict[str, Tensor]):
    """As the outputs of Hugging Face's models: every value is an attribute as well."""

    def __init__(self, **values: Tensor) -> None:
        super().__init__(values)
        self.__dict__.update(values)


class PutsOut(nn.Module):
    def forward(self, x: Tensor) -> AttributesToo:
        return AttributesToo(logits=x * 2)


def test_an_output_that_is_a_key_and_an_attribute_is_counted_once() -> None:
    module = PutsOut()
    assert total(record(module, lambda: module(torch.ones(4)))) == {"": 4}


def test_of_multihead_attention_outputs_and_all_parameters_are_seen() -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    with recording(attention) as recorder:
        output, weights = attention(*[torch.ones(1, 3, 4)] * 3)
        output.sum().backward()
        recorder.look(SGD(attention.parameters(), lr=1.0), 1.0)
        stats = recorder.stop()
    assert stats.modules == ("", "out_proj")
    assert total(stats) == {"": output.numel() + weights.numel(), "out_proj": 0}
    assert total(stats, "parameter_gradients") == {"": 12 * 4 + 12, "out_proj": 16 + 4}


def test_of_an_lstm_the_output_and_both_states_are_seen() -> None:
    lstm = nn.LSTM(2, 3)
    stats = record(lstm, lambda: lstm(torch.ones(5, 1, 2))[0])
    assert total(stats) == {"": 15 + 3 + 3}
    assert total(stats, "activation_gradients") == {"": 15}


def test_a_container_is_recorded_only_if_it_has_parameters_of_its_own() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ParameterList([torch.ones(2)])
            self.relu = nn.ReLU()
            self.gate = nn.Parameter(torch.ones(1))

    recorder = RangeRecorder(nn.ModuleDict({"block": Block(), "group": nn.Sequential(nn.Tanh())}))
    assert recorder.total.modules == ("block", "block.inner", "block.relu", "group.0")


def test_a_layer_with_a_parametrized_weight_is_recorded() -> None:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2, bias=False))
    model = nn.Sequential(layer, nn.ReLU())
    assert "0" in RangeRecorder(model).total.modules


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_gradient_checkpointing_computes_again_is_counted_once(reentrant: bool) -> None:
    model = nn.Sequential(linear([2.0]), nn.ReLU(), linear([4.0]))
    x = torch.ones(1, 1, requires_grad=True)
    plain = record(model, lambda: model(x))
    stats = record(model, lambda: checkpoint(model, x, use_reentrant=reentrant))
    assert seen(stats, "activations", "2") == {3: 1}
    assert stats.counts.tolist() == plain.counts.tolist()
    assert stats.largest.tolist() == plain.largest.tolist()
    assert total(stats, "activation_gradients") == {"0": 1, "1": 1, "2": 1}


def test_what_needs_no_gradient_has_activations_only() -> None:
    layer = linear([2.0])
    with torch.no_grad():
        stats = record(layer, lambda: layer(torch.ones(1, 1)))
    with torch.inference_mode():
        more = record(layer, lambda: layer(torch.ones(1, 1)))
    for made in (stats, more):
        assert [total(made, kind)[""] for kind in KINDS] == [1, 0, 0]


def test_the_gradients_of_a_second_backward_are_counted_too() -> None:
    layer = linear([2.0])
    with recording(layer) as recorder:
        loss = layer(torch.ones(1, 1)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        assert seen(recorder.stop(), "activation_gradients", "") == {0: 2}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated", "ignore:.*torch.jit.*not supported")
def test_a_scripted_module_is_left_alone() -> None:
    model = nn.Sequential(linear([2.0]), torch.jit.script(nn.ReLU()))
    stats = record(model, lambda: model(torch.ones(1, 1)))
    assert stats.modules == ("0",)
    assert total(stats) == {"0": 1}


@has_stances
def test_a_compiled_module_is_run_eagerly_under_its_own_name_and_then_not_compiled_anew() -> None:
    compilations: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = nn.Sequential(linear([2.0]), nn.ReLU())
    model[0] = torch.compile(model[0], backend=backend)  # type: ignore[assignment]
    model(torch.ones(1, 1))
    assert len(compilations) == 1
    stats = record(model, lambda: model(torch.ones(1, 1)))
    assert stats.modules == ("0", "1")
    assert seen(stats, "activations", "0") == {1: 1}
    model(torch.ones(1, 1))
    assert len(compilations) == 1


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.jacrev])
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_function_transforms_compute_what_they_do_without(transform: Callable[..., Any]) -> None:
    layer = linear([2.0, 3.0])
    x = torch.ones(3, 2) if transform is torch.func.vmap else torch.ones(2)
    expected = transform(layer)(x)
    with recording(layer):
        assert_close(transform(layer)(x), expected)


# ---------------------------------------------------------------- attempts and pauses


def test_an_attempt_that_has_failed_is_forgotten_with_its_gradients() -> None:
    attempt = 0
    layer = linear([2.0])
    with recording(layer, attempt=lambda: attempt) as recorder:
        late = layer(torch.full((1, 1), 1e5)).sum()
        late.backward(retain_graph=True)
        attempt += 1
        out = layer(torch.ones(1, 1)).sum()
        late.backward()
        out.backward()
        stats = recorder.stop()
    assert [seen(stats, kind, "") for kind in KINDS] == [{1: 1}, {0: 1}, {}]
    assert (int(stats.above.sum()), stats.largest[0, 0].item(), stats.largest_input.item()) == (0, 2, 1)


def test_an_attempt_that_begins_in_inference_mode_is_recorded() -> None:
    attempt = 0
    teacher, student = linear([8.0]), linear([2.0])
    with recording(nn.ModuleList([teacher, student]), attempt=lambda: attempt) as recorder:
        attempt += 1
        with torch.inference_mode():
            teacher(torch.ones(1, 1))
        student(torch.ones(1, 1))
        stats = recorder.stop()
    assert [seen(stats, "activations", name) for name in "01"] == [{3: 1}, {1: 1}]


def test_while_it_is_paused_nothing_is_seen() -> None:
    layer = linear([2.0])
    with recording(layer) as recorder:
        layer(torch.ones(1, 1)).sum().backward()
        recorder.is_paused = True
        layer(torch.full((1, 1), 64.0)).sum().backward()
        recorder.is_paused = False
        stats = recorder.stop()
    assert [total(stats, kind)[""] for kind in KINDS] == [1, 1, 0]


def test_a_graph_of_the_step_before_adds_nothing_to_the_next() -> None:
    layer = linear([2.0])
    recorder = RangeRecorder(layer)
    recorder.start()
    kept = layer(torch.ones(1, 1)).sum()
    recorder.stop()
    kept.backward(retain_graph=True)
    recorder.start()
    kept.backward()
    assert total(recorder.stop(), "activation_gradients") == {"": 0}


def test_a_rank_adds_up_before_the_sums_do() -> None:
    layer = linear([2.0])
    recorder = RangeRecorder(layer)
    recorder.start()
    layer(torch.ones(1, 1))

    def twice(step: DynamicRange) -> None:
        step.counts = step.counts * 2

    assert seen(recorder.stop(twice), "activations", "") == {1: 2}
    assert seen(recorder.total, "activations", "") == {1: 2}


def test_it_goes_on_with_earlier_sums_of_the_same_modules_only() -> None:
    layer = linear([2.0])
    earlier = record(layer, lambda: layer(torch.ones(1, 1)))
    recorder = RangeRecorder(layer)
    recorder.resume(DynamicRange.empty(("another",)))
    assert recorder.total.modules == ("",)
    recorder.resume(earlier)
    record(layer, lambda: layer(torch.ones(1, 1)), recorder)
    assert (recorder.total.steps, seen(recorder.total, "activations", "")) == (2, {1: 2})
    assert earlier.steps == 1


# ---------------------------------------------------------------- updates


def updates(weights: Tensor, gradient: Tensor) -> list[int]:
    """How many weights a step of SGD changes, and how many of them by less than half a bfloat16 ulp."""
    module = nn.Module()
    module.weight = nn.Parameter(weights.clone())
    optimizer = SGD(module.parameters(), lr=1.0)
    with recording(module) as recorder:
        module.weight.grad = gradient.clone()
        recorder.look(optimizer, 1.0)
        optimizer.step()
        recorder.stepped()
        return recorder.stop().updates.flatten().tolist()


def test_updates_are_lost_where_a_bfloat16_weight_does_not_change() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(4000, generator=generator).bfloat16().float()
    weights = weights[weights.abs().frexp().mantissa != 0.5]  # below a power of two an ulp is half as large
    sizes = 2.0 ** torch.randint(-14, -4, weights.shape, generator=generator)
    gradient = torch.randn(weights.shape, generator=generator) * sizes
    made = weights - (weights - gradient)  # what float32 leaves of it
    moved = (weights.bfloat16() - made.bfloat16()) != weights.bfloat16()  # torch rounds once, from float32
    is_tie = (made.abs() * 2.0 ** (9 - weights.frexp().exponent)) == 1
    count, lost = updates(weights, gradient)
    assert count == int((made != 0).sum())
    assert 1000 < lost < 3000
    assert lost == pytest.approx(int(((made != 0) & ~moved & ~is_tie).sum()), abs=8)  # the update is rounded there too


@pytest.mark.parametrize("weight", [1.5, -1.5, 1.9921875, 0.01171875, math.ldexp(1.5, -120), 96.0])
@pytest.mark.parametrize("share", [0.25, 0.49, 0.51, 2.0])
def test_half_an_ulp_is_where_bfloat16_rounds(weight: float, share: float) -> None:
    ulp = math.ldexp(1.0, math.frexp(weight)[1] - 8)
    update = torch.tensor([share * ulp])
    new = (torch.tensor([weight]) + update).bfloat16()
    assert updates(torch.tensor([weight]), -update) == [1, int(new == torch.tensor([weight]).bfloat16())]
    assert updates(torch.tensor([weight]), -update)[1] == (share < 0.5)


def test_below_a_power_of_two_an_ulp_is_half_as_large() -> None:
    update = 0.003  # 1 - 0.003 is 0.99609375 in bfloat16
    assert (torch.ones(1) - update).bfloat16().item() == 0.99609375
    assert updates(torch.ones(1), torch.tensor([update])) == [1, 0]


def test_a_weight_of_zero_loses_no_update_and_one_that_stays_made_none() -> None:
    assert updates(torch.tensor([0.0, 0.0, 1.0]), torch.tensor([1e-30, 0.0, 0.0])) == [1, 0]


def test_updates_of_float16_bfloat16_and_complex_weights_are_counted() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        assert updates(torch.ones(2, dtype=dtype), torch.full((2,), 0.5, dtype=dtype)) == [2, 0]
    assert updates(torch.tensor([1 + 1j]), torch.tensor([0.5 + 1e-4j])) == [2, 1]


def test_of_two_optimizers_each_update_is_counted_once() -> None:
    model = nn.Sequential(linear([1.0]), linear([1.0, 1.0]))
    first, second = (SGD(layer.parameters(), lr=1.0) for layer in model)
    with recording(model) as recorder:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        for optimizer in (first, second, second):
            recorder.look(optimizer, 1.0)
            optimizer.step()
            recorder.stepped()
        recorder.stepped()
        assert recorder.stop().updates.tolist() == [[1, 4], [0, 0]]


def test_weights_without_a_gradient_and_of_other_models_are_left_out() -> None:
    layer, other = linear([1.0]), linear([1.0])
    other.weight.grad = torch.ones_like(other.weight)
    with recording(layer) as recorder:
        recorder.look(SGD([layer.weight, other.weight], lr=1.0), 1.0)
        recorder.stepped()
        stats = recorder.stop()
    assert (int(stats.counts.sum()), int(stats.updates.sum())) == (0, 0)


# ---------------------------------------------------------------- nothing is left


def has_hooks(module: nn.Module) -> bool:
    names = [name for name in vars(module) if "hooks" in name]
    assert len(names) > 5
    return any(getattr(part, name) for part in module.modules() for name in names if getattr(part, name, None))


def end_by_error(recorder: RangeRecorder, model: nn.Module) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(1, 7))
    recorder.cancel()


@pytest.mark.parametrize("end", [lambda r, m: r.stop(), lambda r, m: r.cancel(), end_by_error])
def test_nothing_is_left_on_the_module_or_in_torch(end: Callable[[RangeRecorder, nn.Module], object]) -> None:
    from torch._dynamo import eval_frame

    stance = getattr(eval_frame, "_stance", None)
    model = nn.Sequential(linear([2.0]), nn.Dropout())
    before = [{**vars(part)}.keys() for part in model.modules()]
    recorder = RangeRecorder(model)
    recorder.start()
    assert recorder.is_recording
    assert has_hooks(model)
    assert stance is None or eval_frame._stance.stance == "force_eager"
    model(torch.ones(1, 1)).sum().backward()
    end(recorder, model)
    assert not recorder.is_recording
    assert not has_hooks(model)
    assert getattr(eval_frame, "_stance", None) == stance
    assert [vars(part).keys() for part in model.modules()] == before
    recorder.cancel()  # a second time does no harm


class PutsOutItsParameter(nn.Module):
    """As a learned embedding of positions does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self) -> Tensor:
        return self.weight


def test_no_hook_is_left_on_a_parameter_that_a_module_puts_out() -> None:
    module = PutsOutItsParameter()
    stats = record(module, module)
    assert seen(stats, "activation_gradients", "") == {0: 3}
    assert not module.weight._backward_hooks


def test_no_graph_and_no_activation_outlives_the_step() -> None:
    model = nn.Sequential(linear([2.0]), nn.Tanh(), linear([3.0]))
    recorder = RangeRecorder(model)
    recorder.start()
    references: list[weakref.ref[Tensor]] = []
    handle = model[1].register_forward_hook(lambda module, args, output: references.append(weakref.ref(output)))
    model(torch.ones(1, 1)).sum().backward()
    gc.collect()
    assert [reference() for reference in references] == [None]
    recorder.look(SGD(model.parameters(), lr=1.0), 1.0)
    recorder.stop()
    handle.remove()
    layer = weakref.ref(model[2])
    weight = weakref.ref(model[2].weight)
    del model, handle, recorder
    gc.collect()
    assert [layer(), weight()] == [None, None]


def test_a_copy_of_the_model_made_between_steps_is_free_of_it() -> None:
    model = nn.Sequential(linear([2.0]))
    recorder = RangeRecorder(model)
    record(model, lambda: model(torch.ones(1, 1)), recorder)
    assert not has_hooks(deepcopy(model))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_training_is_bitwise_the_same_with_and_without_it(dtype: torch.dtype) -> None:
    weights = []
    for records in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 2)
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        recorder = RangeRecorder(model)
        for _ in range(3):
            if records:
                recorder.start()
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                loss = model(torch.randn(6, 4)).float().square().mean()
            loss.backward()
            if records:
                recorder.look(optimizer, 1.0)
            optimizer.step()
            if records:
                recorder.stepped()
                recorder.stop()
        assert recorder.total.steps == 3 * records
        weights.append(torch.cat([t.flatten().float() for t in model.state_dict().values()]))
    assert torch.equal(*weights)


class NewMemory(TorchDispatchMode):
    """Notes the largest number of elements that an operation has made anew."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and torch.Tag.inplace_view not in func.tags:
            made = [item for item in tensors_in(result) if not any(item is arg for arg in args)]
            self.largest = max([self.largest, *(item.numel() for item in made)])
        return result


def test_a_large_activation_takes_no_more_memory_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exponents, "_CHUNK", 2 * BINS)
    module = nn.Identity()
    x = torch.ones(20 * BINS, dtype=torch.float16)
    with recording(module), NewMemory() as memory:
        module(x)
    assert 0 < memory.largest <= 3 * 2 * BINS
