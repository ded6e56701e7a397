"""Loaders that are used before their time: copies of them, and what puts back the random numbers. Plain torch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

_SOURCES = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)


def copy_of_loader(loader: Any) -> Any:
    """Return a loader over the same data, with workers and iterators of its own."""
    copied = copy.copy(loader)
    if getattr(loader, "_iterator", None) is not None:
        copied._iterator = None  # with the persistent workers of a loader that was used before
    return copied


def restorers_of(items: Iterable[Any]) -> Iterator[Callable[[], object]]:
    """Yield what puts back the state of each source of random numbers in loaders, samplers, data sets."""
    seen: set[int] = set()
    waiting = list(items)
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
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
        elif hasattr(item, "__dict__") and not isinstance(item, (type, torch.nn.Module)):
            if hasattr(item, "load_state_dict") and hasattr(item, "state_dict"):
                yield partial(item.load_state_dict, copy.deepcopy(item.state_dict()))
            waiting += [value for value in vars(item).values() if _may_hold_a_state(value)]


def _may_hold_a_state(value: Any) -> bool:
    return isinstance(value, (*_SOURCES, DataLoader, Sampler, BatchSampler, Dataset))
