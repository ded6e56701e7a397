"""What a training step mutates besides parameters and gradients, remembered and put back. Plain torch and torchmetrics.

A step that is not applied leaves no trace: module buffers (BatchNorm's statistics, integer ones too), the states of
torchmetrics and torch's random number generators are as before its first forward. Contents are copied into storage that
is allocated once, with one foreach call; nothing that grows with the parameters is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torchmetrics import Metric, MetricCollection

from lightning_amp_plus.rollback.contents import Contents, turned_non_finite

RngState = dict[torch.device, Tensor]
"""The states of torch's random number generators, by device."""

_CPU = torch.device("cpu")


class StepTransaction:
    """Remembers, at :meth:`begin`, what :meth:`rollback` puts back.

    Args:
        module: The module that is trained, with whatever submodules it has at the time.
        exclude: Patterns (of ``fnmatch``) of buffer names, such as ``"*queue"``: these buffers are let be.
        devices: Those whose random number generators are put back, besides the CPU's.

    """

    def __init__(self, module: Module, exclude: Sequence[str] = (), devices: Iterable[torch.device] = ()) -> None:
        self._module = module
        self._exclude = tuple(exclude)
        self.devices = tuple({device for device in devices if device.type in ("cuda", "mps", "xpu")})
        self._child_views: list[Iterable[Module | None]] = []  # live, as those of the buffers
        self._children: list[Module | None] = []
        self._child_ids: list[int] = [-1]  # of no modules: the first look finds a difference
        self._buffer_views: list[Iterable[Tensor | None]] = []
        self._name_views: list[Iterable[str]] = []
        self._buffer_ids: list[int] = [-1]
        self._buffer_names: list[str] = []
        self._all_buffers: list[Any] = []
        self._buffer_owners: list[_BuffersOf] = []
        self._metrics: list[Module] = []
        self._metric_owners: list[_FieldsOf] = []
        self._buffers, self._states = Contents(), Contents()
        self._lists: dict[int, tuple[list[Any], list[Any]]] = {}
        self.rng: RngState = {}

    @property
    def is_open(self) -> bool:
        """Whether there is something to put back."""
        return bool(self.rng)

    def begin(self) -> None:
        """Remember the present state."""
        self._look_for_modules()
        self._look_for_buffers()
        self._buffers.remember(self._all_buffers)
        if self._metrics:
            self._remember_metrics()
        self.rng = rng_state(self.devices)

    @torch.no_grad()
    def rollback(self, keep: AbstractSet[Any] = frozenset()) -> None:
        """Put back what was remembered, as often as needed until the next :meth:`begin` or :meth:`close`.

        Args:
            keep: Keys of :meth:`fingerprint`: of these only what has turned inf or NaN.

        """
        if not self.is_open:
            return
        for buffers in self._buffer_owners:
            buffers.restore_non_finite()
            buffers.restore(frozenset(name for name in buffers.before if (buffers.key, name) in keep))
        kept = {id(b.before[name]) for b in self._buffer_owners for name in b.before if (b.key, name) in keep}
        self._buffers.put_back(lambda tensor, copy: id(tensor) not in kept or turned_non_finite(tensor, copy))
        self._restore_metrics(
            [m for m in self._metric_owners if m.key not in keep or m.has_turned_non_finite(self._states)]
        )
        set_rng_state(self.rng)

    @torch.no_grad()
    def rollback_non_finite(self) -> None:
        """Put back only what has turned inf or NaN: for an iteration of which a part was applied."""
        for buffers in self._buffer_owners:
            buffers.restore_non_finite()
        self._buffers.put_back(turned_non_finite)
        self._restore_metrics([m for m in self._metric_owners if m.has_turned_non_finite(self._states)])

    @torch.no_grad()
    def turned_non_finite(self) -> list[Tensor]:
        """Return flags, one for each tensor that is a metric's state, of what has turned inf or NaN; no device read."""
        flags = []
        for metric in self._metric_owners:
            for key, value in metric.before.items():
                now = metric.fields.get(key)
                if isinstance(now, Tensor) and isinstance(value, Tensor) and now.is_floating_point():
                    before = self._states.copy_of(value)
                    bad = ~now.isfinite()
                    if before is not None and before.shape == now.shape:
                        bad &= before.isfinite()
                    flags.append(bad.any())
                elif isinstance(now, list):
                    new = now[len(self._lists.get(id(value), ((), ()))[1]) :]
                    flags += [~v.isfinite().all() for v in new if isinstance(v, Tensor) and v.is_floating_point()]
        return flags

    def _restore_metrics(self, metrics: list[_FieldsOf]) -> None:
        ids = {id(value) for metric in metrics for value in metric.before.values()}
        for metric in metrics:  # as a whole: its states belong together
            metric.restore()
        for key, (values, known) in self._lists.items():
            if key in ids:
                values[:] = known
        self._states.put_back(lambda tensor, _: id(tensor) in ids)

    def fingerprint(self) -> dict[Any, Any]:
        """Return, by buffer and by metric, what differs as soon as it is changed; without a look at the contents."""
        marks: dict[Any, Any] = {}
        for buffers in self._buffer_owners:
            for name, buffer in buffers.fields.items():
                marks[buffers.key, name] = _mark(buffer)
        for metric in self._metric_owners:
            marks[metric.key] = [_mark(value) for value in metric.fields.values()]
        return marks

    def close(self) -> None:
        """Forget what was remembered, but for the storage."""
        self._metric_owners, self.rng = [], {}

    def forget(self) -> None:
        """Forget what was remembered, and hold no tensor of anybody's."""
        self.close()
        self._lists = {}

    # What there is. Most steps find what the last one found: to see that is cheap, to walk all modules is not.

    def _look_for_modules(self) -> None:
        if list(map(id, chain.from_iterable(self._child_views))) != self._child_ids:  # all are held: no id comes again
            modules = list(self._module.modules())
            self._child_views = [module._modules.values() for module in modules]
            self._children = list(chain.from_iterable(self._child_views))
            self._child_ids = list(map(id, self._children))
            self._buffer_views = [module._buffers.values() for module in modules]
            self._name_views = [module._buffers.keys() for module in modules]
            self._metrics = [module for module in modules if isinstance(module, (Metric, MetricCollection))]
            self._metric_owners = []
            self._buffer_ids = [-1]

    def _look_for_buffers(self) -> None:
        ids = list(map(id, chain.from_iterable(self._buffer_views)))
        names = list(chain.from_iterable(self._name_views))
        if ids != self._buffer_ids or names != self._buffer_names:
            self._buffer_ids, self._buffer_names = ids, names
            self._buffer_owners = [
                _BuffersOf(module, self._excluded(name, module))
                for name, module in self._module.named_modules()
                if not isinstance(module, torch.jit.ScriptModule)  # whose dicts are no dicts: only contents change
            ]
            scripted = [m for m in self._module.modules() if isinstance(m, torch.jit.ScriptModule)]
            self._all_buffers = [value for owner in self._buffer_owners for value in owner.included()]
            self._all_buffers += [buffer for module in scripted for buffer in module.buffers(recurse=False)]

    def _excluded(self, name: str, module: Module) -> frozenset[str]:
        names = {key: f"{name}.{key}" if name else key for key in module._buffers}
        return frozenset(
            key for key, full in names.items() if any(fnmatchcase(full, pattern) for pattern in self._exclude)
        )

    def _remember_metrics(self) -> None:
        self._metric_owners = [_FieldsOf(metric) for metric in self._metrics]
        tensors, lists = [], []
        for owner in self._metric_owners:
            for value in owner.before.values():
                if type(value) is Tensor:
                    tensors.append(value)
                elif type(value) is list:
                    lists.append(value)
        self._states.remember(tensors)
        self._remember_lists(lists)

    def _remember_lists(self, lists: list[list[Any]]) -> None:
        """Copy the lists: of tensors, which are states that only grow until they are cleared, only what is new."""
        known_before, self._lists = self._lists, {}
        for values in lists:
            known = known_before.get(id(values), (values, []))[1]
            grows = 0 < len(known) <= len(values) and isinstance(known[-1], Tensor)
            if not (grows and known[-1] is values[len(known) - 1]):
                known = []
            known.extend(values[len(known) :])
            self._lists[id(values)] = (values, known)


def _mark(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if isinstance(value, list):
        return id(value), len(value)
    return value if isinstance(value, int) else id(value)  # counts are equal whichever object they are


class _Owner:
    """A dict of a module that holds tensors, what it held at the beginning, and the keys in it that are let be."""

    def __init__(self, fields: dict[str, Any], excluded: frozenset[str] = frozenset()) -> None:
        self.fields = fields
        self.before = dict(fields)
        self.excluded = excluded

    def included(self) -> list[Any]:
        return [value for key, value in self.before.items() if key not in self.excluded]

    def restore(self, keep: frozenset[str] = frozenset()) -> None:
        keep = keep | self.excluded
        for key in self.fields.keys() - self.before.keys() - keep:
            del self.fields[key]
        self.fields.update((key, value) for key, value in self.before.items() if key not in keep)


class _BuffersOf(_Owner):
    def __init__(self, module: Module, excluded: frozenset[str]) -> None:
        super().__init__(module._buffers, excluded)
        self.key = id(module)
        self._transient = module._non_persistent_buffers_set
        self._transient_before = set(self._transient)

    def restore(self, keep: frozenset[str] = frozenset()) -> None:
        super().restore(keep)
        self._transient.clear()
        self._transient.update(self._transient_before)

    def restore_non_finite(self) -> None:
        """Put back the buffers in whose place there is another tensor now that is not finite."""
        for key, value in self.before.items():
            now = self.fields.get(key)
            if now is value or key in self.excluded or not (isinstance(value, Tensor) and isinstance(now, Tensor)):
                continue
            if turned_non_finite(now, value):
                self.fields[key] = value


class _FieldsOf(_Owner):
    def __init__(self, metric: Module) -> None:
        super().__init__(vars(metric))
        self.key = id(metric)
        # The first update of a collection decides which metrics share their states.
        self._groups = _copy_groups(metric._groups) if isinstance(metric, MetricCollection) else None

    def has_turned_non_finite(self, contents: Contents) -> bool:
        for key, value in self.before.items():
            now = self.fields.get(key)
            copy = contents.copy_of(value) if isinstance(value, Tensor) else None
            if copy is not None and isinstance(now, Tensor) and turned_non_finite(now, copy):
                return True
        return False

    def restore(self, keep: frozenset[str] = frozenset()) -> None:
        super().restore(keep)
        if self._groups is not None:
            self.fields["_groups"] = _copy_groups(self._groups)


def _copy_groups(groups: dict[Any, list[str]]) -> dict[Any, list[str]]:
    return {key: list(names) for key, names in groups.items()}


# Random numbers -------------------------------------------------------------------------------------------------------


def rng_state(devices: Iterable[torch.device]) -> RngState:
    """Return the states of torch's generators, the CPU's and those of ``devices``: host memory, no synchronization."""
    states = {_CPU: torch.default_generator.get_state()}
    for device in devices:
        module = getattr(torch, device.type)
        states[device] = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
    return states


def set_rng_state(states: RngState) -> None:
    """Set torch's generators to ``states``."""
    for device, state in states.items():
        if device.type == "cpu":
            torch.set_rng_state(state)
        elif device.type == "mps":
            torch.mps.set_rng_state(state)
        else:
            getattr(torch, device.type).set_rng_state(state, device)
