"""Loaders that are used before their time: copies of them, and what puts back the random numbers. Plain torch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

_LEAVES = (str, bytes, int, float, type(None), type, ModuleType, FunctionType, Tensor, Module, np.ndarray)
_MOST_OBJECTS = 10_000


def copy_of_loader(loader: Any) -> Any:
    """Return a loader over the same data, with workers and iterators of its own."""
    copied = copy.copy(loader)
    if getattr(loader, "_iterator", None) is not None:
        copied._iterator = None  # with the persistent workers of a loader that was used before
    return copied


def restorers_of(items: Iterable[Any]) -> Iterator[Callable[[], object]]:
    """Yield what puts back the state of each source of random numbers in loaders, samplers, data sets.

    They are searched for in attributes and containers, among the first 10,000 objects; and loaders that have a
    ``state_dict`` are put back by it. What a data set keeps in other attributes stays as it was left.
    """
    waiting = list(items)
    for item in waiting:
        if hasattr(item, "load_state_dict") and hasattr(item, "state_dict"):
            yield partial(item.load_state_dict, copy.deepcopy(item.state_dict()))
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_OBJECTS:
        item = waiting.pop(0)
        if id(item) in seen or isinstance(item, _LEAVES):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Generator):
            yield partial(item.set_state, item.get_state())
        elif isinstance(item, random.Random):
            yield partial(item.setstate, item.getstate())
        elif isinstance(item, np.random.RandomState):
            yield partial(item.set_state, item.get_state())
        elif isinstance(item, np.random.Generator):
            yield partial(setattr, item.bit_generator, "state", copy.deepcopy(item.bit_generator.state))
        elif isinstance(item, (list, tuple)):
            waiting += item[:_MOST_OBJECTS]
        elif isinstance(item, dict):
            waiting += list(item.values())[:_MOST_OBJECTS]
        elif hasattr(item, "__dict__"):
            waiting += vars(item).values()
