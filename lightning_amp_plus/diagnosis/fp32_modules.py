"""Modules that compute in float32 while the rest of the model runs in half precision. Plain torch.

Autocast is off inside of such a module and its floating inputs are cast up; what it puts out stays float32, for the
next operation to cast. It is done by an attribute ``forward`` on the module itself, so that keys of ``state_dict`` and
hooks stay what they are, and it ends without a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_map

from lightning_amp_plus.diagnosis.lines import parts_of, runs_the_model
from lightning_amp_plus.diagnosis.overlay import overlay


class KeptModules:
    """Which modules are kept in float32: those asked for by pattern, and those found to overflow.

    Args:
        patterns: Patterns (of ``fnmatch``) of the names of modules, such as ``"*.wo"``.

    Attributes:
        found: The names of those that were added later.

    """

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        self.patterns = tuple(patterns)
        self.found: tuple[str, ...] = ()
        self._module: Module | None = None
        self._device_type = "cpu"
        self._undo: dict[str, Callable[[], None]] = {}

    def attach(self, module: Module, device_type: str) -> list[str]:
        """Keep the modules of ``module`` from now on, until :meth:`detach`.

        Returns:
            The names of those found earlier that ``module`` does not have.

        Raises:
            ValueError: If a pattern fits no module.

        """
        self.detach()
        modules = parts_of(module)
        names = [name for name, part in modules.items() if name and not isinstance(part, torch.jit.ScriptModule)]
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                near = get_close_matches(pattern, names, 3, 0) if names else []
                raise ValueError(
                    f"keep_fp32: the pattern {pattern!r} fits no module of {type(module).__name__}. It is compared with"
                    f" the whole name, as of named_modules(); names here are {', '.join(map(repr, near)) or 'none'}."
                )
        self._module, self._device_type = module, device_type
        wanted = [name for name in names if any(fnmatchcase(name, pattern) for pattern in self.patterns)]
        for name in (*wanted, *self.found):
            if name in names and name not in self._undo:
                self._undo[name] = _widen(modules[name], device_type)
        missing = [name for name in self.found if name not in self._undo]
        self.found = tuple(name for name in self.found if name in self._undo)
        return missing

    def detach(self) -> None:
        """Leave nothing on the modules; :attr:`found` stays."""
        for undo in self._undo.values():
            undo()
        self._undo, self._module = {}, None

    def find(self, names: Iterable[str]) -> list[str]:
        """Keep exactly the modules called ``names`` besides those asked for; return those that are not there."""
        self.found = tuple(names)
        return [] if self._module is None else self.attach(self._module, self._device_type)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_module": None, "_undo": {}}


def _widen(module: Module, device_type: str) -> Callable[[], None]:
    return overlay(module, "forward", partial(_in_float32, module.forward, device_type))


@runs_the_model
def _in_float32(forward: Callable[..., Any], device_type: str, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_autocast_enabled(device_type):
        return forward(*args, **kwargs)
    args, kwargs = tree_map(_up, (args, kwargs))
    with torch.autocast(device_type, enabled=False):
        return forward(*args, **kwargs)


@runs_the_model
def _up(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        return value.float()
    return value
