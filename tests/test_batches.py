"""What a ``training_step`` does to the containers of a batch does not reach the kept one, and tensors are watched."""

import enum
import logging
import threading
import types
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lightning_amp_plus.rollback.batches import are_unchanged, copy_containers, versions_of

X, Y = torch.ones(2), torch.zeros(2)


class Pair(NamedTuple):
    tensor: Tensor
    items: list[Any]


class Documented(tuple[Any, ...]):
    """A tuple with a method."""

    def first(self) -> Any:
        return self[0]


@dataclass
class Data:
    tensor: Tensor
    items: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    tensor: Tensor
    items: list[Any]


@dataclass(frozen=True)
class Validated:
    tensor: Tensor
    items: list[Any]

    def __post_init__(self) -> None:
        raise AssertionError("a copy is not made anew")


@dataclass(slots=True)
class Slotted:
    tensor: Tensor
    items: list[Any]


class NamedDict(dict[str, Any]):
    """With attributes besides its items, as a batch of some libraries."""

    name = "of the class"


def validated(tensor: Tensor, items: list[Any]) -> Validated:
    made = object.__new__(Validated)
    vars(made).update(tensor=tensor, items=items)
    return made


Make = Callable[[Tensor, list[Any]], Any]
Get = Callable[[Any], Any]
CONTAINERS: dict[str, tuple[Make, Get, Get]] = {  # made of a tensor and a list, and how to get at both
    "dict": (lambda t, i: {"tensor": t, "items": i}, lambda b: b["tensor"], lambda b: b["items"]),
    "OrderedDict": (lambda t, i: OrderedDict(tensor=t, items=i), lambda b: b["tensor"], lambda b: b["items"]),
    "defaultdict": (
        lambda t, i: defaultdict(list, tensor=t, items=i),
        lambda b: b["tensor"],
        lambda b: b["items"],
    ),
    "UserDict": (lambda t, i: UserDict(tensor=t, items=i), lambda b: b["tensor"], lambda b: b["items"]),
    "dict subclass": (lambda t, i: NamedDict(tensor=t, items=i), lambda b: b["tensor"], lambda b: b["items"]),
    "ChainMap": (lambda t, i: ChainMap({"tensor": t}, {"items": i}), lambda b: b["tensor"], lambda b: b["items"]),
    "list": (lambda t, i: [t, i], lambda b: b[0], lambda b: b[1]),
    "UserList": (lambda t, i: UserList([t, i]), lambda b: b[0], lambda b: b[1]),
    "tuple": (lambda t, i: (t, i), lambda b: b[0], lambda b: b[1]),
    "tuple subclass": (lambda t, i: Documented([t, i]), lambda b: b.first(), lambda b: b[1]),
    "NamedTuple": (Pair, lambda b: b.tensor, lambda b: b.items),
    "dataclass": (Data, lambda b: b.tensor, lambda b: b.items),
    "frozen dataclass": (Frozen, lambda b: b.tensor, lambda b: b.items),
    "frozen and validated": (validated, lambda b: b.tensor, lambda b: b.items),
    "SimpleNamespace": (
        lambda t, i: types.SimpleNamespace(tensor=t, items=i),
        lambda b: b.tensor,
        lambda b: b.items,
    ),
    "nested": (
        lambda t, i: {"a": [(Data(t), Pair(t, [UserDict(b=i)]))]},
        lambda b: b["a"][0][0].tensor,
        lambda b: b["a"][0][1].items[0]["b"],
    ),
}
each_container = pytest.mark.parametrize("name", CONTAINERS)


def values_in(batch: Any) -> Any:
    """The tree of builtins that a batch is, tensors by identity."""
    if isinstance(batch, Tensor):
        return id(batch)
    if isinstance(batch, Mapping):
        return {key: values_in(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple, UserList)):
        return [values_in(value) for value in batch]
    return values_in(vars(batch)) if hasattr(batch, "__dict__") else batch


# The copy -------------------------------------------------------------------------------------------------------------


@each_container
def test_a_copy_is_of_the_same_type_and_shares_the_tensors(name: str) -> None:
    make, tensor_of, items_of = CONTAINERS[name]
    batch = make(X, [Y, 1, "a", None])
    copied = copy_containers(batch)
    assert type(copied) is type(batch)
    assert copied is not batch
    assert values_in(copied) == values_in(batch)
    assert tensor_of(copied) is X
    assert items_of(copied)[0] is Y
    assert items_of(copied) is not items_of(batch)


@each_container
def test_what_is_done_to_the_copy_does_not_reach_the_original_nor_the_reverse(name: str) -> None:
    make, _, items_of = CONTAINERS[name]
    items: list[Any] = [Y, {"deep": [1, 2]}, [3]]
    batch = make(X, items)
    copied, second = copy_containers(batch), copy_containers(batch)
    before = values_in(batch)
    found = items_of(copied)
    found[1]["deep"].append(X)
    found[1]["new"] = 1
    found[2].clear()
    found.pop(0)
    found.append(5)
    assert values_in(batch) == before
    items[1]["deep"].pop()
    assert values_in(items_of(second)) == [id(Y), {"deep": [1, 2]}, [3]]


@pytest.mark.parametrize("name", ["dict", "OrderedDict", "defaultdict", "UserDict", "dict subclass", "ChainMap"])
def test_keys_of_the_copy_are_its_own(name: str) -> None:
    batch = CONTAINERS[name][0](X, [])
    copied = copy_containers(batch)
    del copied["tensor"]
    copied["other"] = 1
    assert list(copied) != ["tensor", "items"]
    assert sorted(batch) == ["items", "tensor"]


@pytest.mark.parametrize("name", ["dataclass", "SimpleNamespace"])
def test_attributes_of_the_copy_are_its_own(name: str) -> None:
    batch = CONTAINERS[name][0](X, [1])
    copied = copy_containers(batch)
    copied.tensor = copied.items = None
    copied.other = 1
    del copied.items
    assert values_in(batch) == {"tensor": id(X), "items": [1]}


def test_order_and_default_of_a_dict_are_kept() -> None:
    batch: Any = defaultdict(list, {3: X, 1: Y, 2: [X]})
    copied = copy_containers(batch)
    assert list(copied) == [3, 1, 2]
    assert copied["new"] == []
    assert "new" not in batch
    ordered = copy_containers(OrderedDict([("b", X), ("a", Y)]))
    ordered.move_to_end("b")
    assert list(ordered) == ["a", "b"]


def test_slots_are_those_of_a_new_object() -> None:
    batch = Slotted(X, [1])
    copied = copy_containers(batch)
    assert copied.tensor is X
    copied.tensor, copied.items = Y, []
    assert batch.tensor is X
    assert batch.items == [1]


def test_lists_in_slots_are_copied() -> None:
    batch = Slotted(X, [1])
    copy_containers(batch).items.append(2)
    assert batch.items == [1]


def test_an_array_of_objects_is_refused() -> None:
    with pytest.raises(TypeError, match="array of objects"):
        copy_containers({"objects": numpy.array([[1], None], dtype=object)})


def test_a_packed_sequence_stays_one() -> None:
    batch = pack_sequence([torch.ones(2, 3), torch.ones(3, 3)], enforce_sorted=False)
    copied = copy_containers({"packed": batch})["packed"]
    assert type(copied) is PackedSequence
    assert all(ours is theirs for ours, theirs in zip(copied, batch, strict=True))
    assert nn.GRU(3, 2)(copied)[0].data.shape == (5, 2)
    assert len(versions_of(batch)) == 4
    versions = versions_of([batch])
    batch.data.mul_(2)
    assert not are_unchanged(versions)


ATOMS: list[Any] = ["text", b"bytes", 1, 2.5, 1j, True, None, X, X.shape, torch.float16, torch.device("cpu")]


@pytest.mark.parametrize("atom", [*ATOMS, numpy.float32(1), Path("a"), slice(1), len], ids=repr)
def test_what_holds_nothing_is_equal_in_the_copy(atom: Any) -> None:
    for copied in (copy_containers(atom), copy_containers({"a": [atom]})["a"][0]):
        assert type(copied) is type(atom)
        assert copied is atom if isinstance(atom, Tensor) else copied == atom


def test_counters_are_copied() -> None:
    batch = Counter("aab")
    copy_containers(batch).update("b")
    assert batch == Counter("aab")


def test_a_write_to_an_array_does_not_reach_the_original() -> None:
    batch = {"array": numpy.ones(2)}
    copy_containers(batch)["array"][:] = 3
    assert batch["array"].tolist() == [1, 1]


def test_parameters_and_tensors_of_all_kinds_are_shared() -> None:
    with torch.inference_mode():
        inference = torch.ones(1)
    batch = [nn.Parameter(X), X.to_sparse(), torch.ones(1, device="meta"), inference, X[:1], torch.ones(1).expand(3)]
    assert all(ours is theirs for ours, theirs in zip(copy_containers(batch), batch, strict=True))


def test_a_copy_of_a_copy_is_one_of_the_original() -> None:
    """As the window makes them: one is kept, and each attempt gets another."""
    batch: Any = {"a": [X, Data(Y, [1])]}
    kept = copy_containers(batch)
    first = copy_containers(kept)
    batch.clear()
    first["a"].pop()
    first["a"].append(3)
    assert values_in(copy_containers(kept)) == {"a": [id(X), {"tensor": id(Y), "items": [1]}]}


class Split(enum.Enum):
    TRAIN = "train"


def generator() -> Any:
    yield X


class TwoArguments(tuple[Any, ...]):
    def __new__(cls, first: Any, second: Any) -> Any:
        return super().__new__(cls, (first, second))


class NoUpdate(dict[str, Any]):
    """As ``transformers.utils.ModelOutput``."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("You cannot use update")


class NoCopy:
    def __copy__(self) -> "NoCopy":
        raise RuntimeError("only one of me")


class Handle:
    """A Python object around one that cannot be pickled, as an image of PIL, or a file."""

    def __init__(self) -> None:
        self.lock, self.tensor = threading.Lock(), X

    def __copy__(self) -> "Handle":
        return Handle()


class Graph:
    """A batch whose parts know it."""

    def __init__(self) -> None:
        self.tensor = X
        self.store = types.SimpleNamespace(parent=self, items=[1])


OPAQUE: dict[str, Callable[[], Any]] = {
    "lock": threading.Lock,
    "future": torch.futures.Future,
    "no copy": NoCopy,
    "handle": Handle,
    **{
        name: lambda thing=thing: thing  # type: ignore[misc]
        for name, thing in {"enum": Split.TRAIN, "class": Data, "logger": logging.getLogger()}.items()
    },
}


@pytest.mark.parametrize("name", OPAQUE)
def test_what_holds_nothing_to_copy_is_shared(name: str) -> None:
    thing = OPAQUE[name]()
    batch = {"tensor": X, "thing": thing, "items": [1]}
    copied = copy_containers(batch)
    assert type(copied["thing"]) is type(thing)
    copied["items"].append(2)
    assert batch["items"] == [1]
    assert versions_of(batch)[0][0] is X


UNKNOWN: dict[str, Callable[[], Any]] = {
    "generator": generator,
    "iterator": lambda: iter([X]),
    "deque": lambda: deque([X]),
    "set": lambda: {X},
    "mapping proxy": lambda: types.MappingProxyType({"a": X}),
    "event": threading.Event,
    "tuple of two arguments": lambda: TwoArguments(X, [1]),
}


@pytest.mark.parametrize("make", UNKNOWN.values(), ids=UNKNOWN)
def test_what_may_hold_something_and_cannot_be_copied_is_refused(make: Callable[[], Any]) -> None:
    """TypeError: the window then does without a retry."""
    with pytest.raises(TypeError):
        copy_containers([1, {"a": make()}])


@pytest.mark.parametrize("batch", [NoUpdate(a=X), Counter(a=2), {1, 2}, range(3), frozenset("ab")], ids=repr)
def test_what_holds_values_is_copied_whatever_its_methods_do(batch: Any) -> None:
    copied = copy_containers(batch)
    assert (type(copied), copied) == (type(batch), batch)


def test_partials_and_functions_stay_callable() -> None:
    def scale(value: float) -> float:
        return value * 2

    copied = copy_containers({"function": scale, "partial": partial(scale, 4)})
    assert copied["function"] is scale
    assert copied["partial"]() == 8


def test_attributes_of_what_copy_does_not_copy_are_left_alone() -> None:
    def function() -> None: ...

    cache: list[int] = []
    vars(function)["cache"] = cache
    copy_containers({"function": function})
    assert vars(function)["cache"] is cache


@pytest.mark.parametrize("function", [copy_containers, versions_of])
@pytest.mark.parametrize("make", [Graph, lambda: cycle()], ids=["object", "list"])
def test_a_batch_that_holds_itself_is_followed_once(function: Callable[[Any], Any], make: Callable[[], Any]) -> None:
    batch = make()
    result = function(batch)
    if function is copy_containers:
        parent = result.store.parent if isinstance(batch, Graph) else result[1]
        assert parent is result
        assert parent is not batch
    else:
        assert [tensor is X for tensor, _ in result] == [True]


def cycle() -> list[Any]:
    batch: list[Any] = [X]
    batch.append(batch)
    return batch


def test_what_is_held_twice_is_one_in_the_copy_too() -> None:
    items: list[int] = []
    copied = copy_containers({"a": items, "b": [items]})
    assert copied["a"] is copied["b"][0]


def test_attributes_of_a_dict_are_copied() -> None:
    batch = NamedDict(tensor=X)
    vars(batch)["extra"] = [1]
    vars(copy_containers(batch))["extra"].append(2)
    assert vars(batch)["extra"] == [1]


# Versions -------------------------------------------------------------------------------------------------------------


@each_container
@pytest.mark.parametrize("where", ["tensor", "items"])
def test_a_write_at_any_depth_is_seen(name: str, where: str) -> None:
    make, tensor_of, items_of = CONTAINERS[name]
    batch = make(torch.ones(2), [[torch.ones(2)], 1])
    versions = versions_of(batch)
    assert are_unchanged(versions)
    tensor = tensor_of(batch) if where == "tensor" else items_of(batch)[0][0]
    tensor + 1
    tensor.clone().zero_()
    assert are_unchanged(versions)
    tensor[0] = 3
    assert not are_unchanged(versions)
    assert are_unchanged(versions_of(batch))


WRITES: dict[str, Callable[[Tensor], object]] = {
    "add": lambda t: t.add_(1),
    "item": lambda t: t.__setitem__((0, 0), 2.0),
    "view": lambda t: t.view(-1)[1:].zero_(),
    "detached": lambda t: t.detach().zero_(),
    "out": lambda t: torch.add(t, 1, out=t),
    "resize": lambda t: t.resize_(1),
    "set": lambda t: t.set_(torch.zeros(4).untyped_storage()),
    "foreach": lambda t: torch._foreach_mul_([t], 2.0),
    "normalization": lambda t: nn.functional.relu_(t),
    "by copy of the batch": lambda t: copy_containers([t])[0].zero_(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_every_kind_of_write_is_seen(write: Callable[[Tensor], object]) -> None:
    batch = {"a": torch.ones(2, 2)}
    versions = versions_of(copy_containers(batch))
    write(batch["a"])
    assert not are_unchanged(versions)


def test_a_write_to_what_a_tensor_is_a_view_of_is_seen() -> None:
    base = torch.ones(4)
    versions = versions_of({"half": base[:2]})
    base[3] = 0
    assert not are_unchanged(versions)


def test_containers_may_change() -> None:
    batch: Any = {"a": [torch.ones(1)], "b": torch.ones(1)}
    versions = versions_of(batch)
    batch["a"].append(1)
    batch["b"] = torch.zeros(1)
    batch["a"][0].unsqueeze(0).requires_grad_()
    assert are_unchanged(versions)
    assert len(versions) == 2


def test_tensors_that_count_no_writes_are_no_obstacle() -> None:
    with torch.inference_mode():
        inference = torch.ones(2)
        assert versions_of([inference]) == []
    assert [tensor is X for tensor, _ in versions_of((inference, [X], "a", None, 3, numpy.ones(2)))] == [True]
    assert versions_of(inference) == []
    assert are_unchanged([])


def test_each_tensor_is_found() -> None:
    tensors = [torch.ones(()) for _ in range(6)]
    a, b, c, d, e, f = tensors
    batch = {
        "a": a,
        "b": [b, {"c": (c, Pair(d, [e]))}],
        "c": types.SimpleNamespace(x={"y": Data(f)}),
    }
    assert [tensor for tensor, _ in versions_of(batch)] == tensors


@pytest.mark.parametrize(
    "make",
    [
        lambda t: Slotted(t, []),
        lambda t: Slotted(X, [Slotted(t, [])]),
        lambda t: vars_of(NamedDict(), t),
    ],
    ids=["slots", "slots in slots", "attribute of a dict"],
)
def test_tensors_in_attributes_are_found(make: Callable[[Tensor], Any]) -> None:
    tensor = torch.ones(2)
    versions = versions_of(make(tensor))
    tensor.zero_()
    assert not are_unchanged(versions)


def vars_of(batch: NamedDict, tensor: Tensor) -> NamedDict:
    vars(batch)["tensor"] = tensor
    return batch


def test_a_copy_costs_no_kernel_and_no_memory() -> None:
    batch: list[Any] = [torch.ones(3), {"a": torch.ones(2)}]
    counts = [tensor._version for tensor, _ in versions_of(batch)]
    copied = copy_containers(batch)
    assert copied[0].data_ptr() == batch[0].data_ptr()
    assert counts == [0, 0] == [tensor._version for tensor, _ in versions_of(copied)]
