"""The plain attributes of a module: sums and lists that a step of the user's keeps by itself. Plain torch."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Module

_VALUES = (bool, int, float, str, type(None))


class PlainAttributes:
    """Remembers numbers, lists, dicts and tensors that are attributes of a module itself, and puts them back.

    Args:
        module: The module; its submodules are not looked at.

    """

    def __init__(self, module: Module) -> None:
        self._fields = vars(module)
        self._before = {
            name: (value, _copy(value))
            for name, value in self._fields.items()
            if not name.startswith("_") and _is_plain(value)
        }

    def restore(self) -> None:
        """Put back what was remembered; what was set for the first time since vanishes."""
        for name in [name for name in self._fields if name not in self._before]:
            if not name.startswith("_") and _is_plain(self._fields[name]):
                del self._fields[name]
        for name, (value, copy) in self._before.items():
            if isinstance(value, list):
                value[:] = copy
            elif isinstance(value, (dict, set)):
                value.clear()
                value.update(copy)
            elif isinstance(value, Tensor):
                value.data.copy_(copy)
            self._fields[name] = value


def _is_plain(value: Any) -> bool:
    return isinstance(value, (*_VALUES, list, dict, set)) or type(value) is Tensor


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, (list, dict, set)) else value
