"""A batch that a ``training_step`` may take apart: copied containers around shared tensors, and a look at the latter.

Plain torch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from torch import Tensor

Versions = list[tuple[Tensor, int]]
"""Tensors, and how often each had been written to in place."""

_LEAVES = (Tensor, str, bytes, int, float, complex, type(None))


def copy_containers(batch: Any) -> Any:
    """Return ``batch`` with its dicts, lists, tuples and plain objects copied, at any depth, and its tensors shared.

    Raises:
        TypeError: If it holds an iterable of another kind, which cannot be copied or looked into, such as a generator.

    """
    return _copy(batch, {})


def _copy(batch: Any, copies: dict[int, Any]) -> Any:
    if isinstance(batch, _LEAVES):
        return batch
    if id(batch) in copies:  # one object in two places, or in itself
        return copies[id(batch)]
    if isinstance(batch, tuple):
        items = [_copy(item, copies) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if isinstance(batch, np.ndarray):
        if batch.dtype == object:
            raise TypeError("A batch with an array of objects in it cannot be looked into.")
        return batch.copy()
    attributes = _attributes(batch)
    if not (attributes or isinstance(batch, (list, dict))):
        if isinstance(batch, (set, frozenset, range)) and all(isinstance(item, _LEAVES[1:]) for item in batch):
            return copy.copy(batch)
        if isinstance(batch, Iterable):
            raise TypeError(f"A batch with a {type(batch).__name__} in it cannot be copied and looked into.")
        return batch
    copied = copies[id(batch)] = copy.copy(batch)
    if copied is batch:  # a class, a function: nothing of the batch's own
        return batch
    if isinstance(batch, list):
        copied[:] = [_copy(item, copies) for item in batch]
    elif isinstance(batch, dict):
        for key, value in batch.items():
            dict.__setitem__(copied, key, _copy(value, copies))
    for name, value in attributes.items():  # of a dataclass, a graph, a subclass of the user's
        object.__setattr__(copied, name, _copy(value, copies))
    return copied


def versions_of(batch: Any) -> Versions:
    """Return the tensors in ``batch`` with the counts of what was written to them."""
    return [(tensor, tensor._version) for tensor in tensors_in(batch) if not tensor.is_inference()]


def are_unchanged(versions: Versions) -> bool:
    """Tell whether nothing was written to the tensors in place since :func:`versions_of`."""
    return all(tensor._version == version for tensor, version in versions)


def _attributes(instance: Any) -> dict[str, Any]:
    declared = [getattr(kind, "__slots__", ()) for kind in type(instance).__mro__]
    slots = [name for names in declared for name in ((names,) if isinstance(names, str) else names) if name[:2] != "__"]
    values = {name: getattr(instance, name) for name in slots if isinstance(name, str) and hasattr(instance, name)}
    return {**values, **getattr(instance, "__dict__", {})}


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in containers and objects, at any depth."""
    return _tensors(tree, set())


def _tensors(batch: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif not isinstance(batch, _LEAVES) and id(batch) not in seen:
        seen.add(id(batch))
        if isinstance(batch, dict):
            for value in batch.values():
                yield from _tensors(value, seen)
        elif isinstance(batch, (list, tuple)):
            for value in batch:
                yield from _tensors(value, seen)
        for value in _attributes(batch).values():
            yield from _tensors(value, seen)
