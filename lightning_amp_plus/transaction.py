"""What a training step mutates besides parameters and gradients, remembered and put back. Plain torch and torchmetrics.

A step that is not applied leaves no trace: module buffers (BatchNorm's statistics, integer ones too), the states of
torchmetrics and torch's random number generators are as before its first forward. Contents are copied into storage that
is allocated once, with one foreach call; nothing that grows with the parameters is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy
from torchmetrics import Metric, MetricCollection

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
        self._buffers, self._states = _Contents(), _Contents()
        self._lists: dict[int, tuple[list[Any], list[Any]]] = {}
        self.rng: RngState = {}

    @property
    def is_open(self) -> bool:
        """Whether there is something to put back."""
        return bool(self.rng)

    @torch.no_grad()
    def begin(self) -> None:
        """Remember the present state."""
        self._look_for_modules()
        self._look_for_buffers()
        self._look_for_metric_states()
        self._buffers.copy()
        self._states.copy()
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
        self._buffers.put_back(lambda tensor, copy: id(tensor) not in kept or _turned_non_finite(tensor, copy))
        self._restore_metrics(
            [m for m in self._metric_owners if m.key not in keep or m.has_turned_non_finite(self._states)]
        )
        set_rng_state(self.rng)

    @torch.no_grad()
    def rollback_non_finite(self) -> None:
        """Put back only what has turned inf or NaN: for an iteration of which a part was applied."""
        for buffers in self._buffer_owners:
            buffers.restore_non_finite()
        self._buffers.put_back(_turned_non_finite)
        self._restore_metrics([m for m in self._metric_owners if m.has_turned_non_finite(self._states)])

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
        self._buffers.follow(self._all_buffers)

    def _excluded(self, name: str, module: Module) -> frozenset[str]:
        names = {key: f"{name}.{key}" if name else key for key in module._buffers}
        return frozenset(
            key for key, full in names.items() if any(fnmatchcase(full, pattern) for pattern in self._exclude)
        )

    def _look_for_metric_states(self) -> None:
        self._metric_owners = [_FieldsOf(metric) for metric in self._metrics]
        if not self._metric_owners:
            return
        tensors, lists = [], []
        for owner in self._metric_owners:
            for value in owner.before.values():
                if type(value) is Tensor:
                    tensors.append(value)
                elif type(value) is list:
                    lists.append(value)
        self._states.follow(tensors)
        self._follow_lists(lists)

    def _follow_lists(self, lists: list[list[Any]]) -> None:
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
            if _turned_non_finite(now, value):
                self.fields[key] = value


class _FieldsOf(_Owner):
    def __init__(self, metric: Module) -> None:
        super().__init__(vars(metric))
        self.key = id(metric)
        # The first update of a collection decides which metrics share their states.
        self._groups = _copy_groups(metric._groups) if isinstance(metric, MetricCollection) else None

    def has_turned_non_finite(self, contents: _Contents) -> bool:
        for key, value in self.before.items():
            now = self.fields.get(key)
            copy = contents.copy_of(value) if isinstance(value, Tensor) else None
            if copy is not None and isinstance(now, Tensor) and _turned_non_finite(now, copy):
                return True
        return False

    def restore(self, keep: frozenset[str] = frozenset()) -> None:
        super().restore(keep)
        if self._groups is not None:
            self.fields["_groups"] = _copy_groups(self._groups)


def _copy_groups(groups: dict[Any, list[str]]) -> dict[Any, list[str]]:
    return {key: list(names) for key, names in groups.items()}


class _Contents:
    """Tensors whose contents are copied, and the storage for it, which is allocated once."""

    def __init__(self) -> None:
        self._followed: list[Any] = []
        self._has_lazy = False
        self._plain: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._special: list[tuple[Tensor, Tensor]] = []
        self._shapes: list[torch.Size] = []
        self._tensors: list[Tensor] = []
        self._copies: list[Tensor] = []

    def follow(self, values: list[Any]) -> None:
        """Copy the tensors among ``values`` from now on."""
        same = values is self._followed or list(map(id, values)) == list(map(id, self._followed))
        if same and [tensor.shape for tensor in self._tensors] == self._shapes and not self._has_lazy:
            return
        storage = {id(tensor): copy for tensor, copy in zip(self._tensors, self._copies, strict=True)}
        unique = {id(value): value for value in values if isinstance(value, Tensor) and _can_be_written(value)}
        self._followed = values
        self._has_lazy = any(is_lazy(value) for value in values)
        self._tensors = list(unique.values())
        self._shapes = [tensor.shape for tensor in self._tensors]
        self._copies = [_storage_like(tensor, storage.get(key)) for key, tensor in unique.items()]
        pairs = list(zip(self._copies, self._tensors, strict=True))
        plain = [pair for pair in pairs if type(pair[1]) in (Tensor, Parameter)]
        self._plain = [copy for copy, _ in plain], [tensor for _, tensor in plain]
        self._special = [pair for pair in pairs if type(pair[1]) not in (Tensor, Parameter)]  # such as DTensors

    def copy(self) -> None:
        copies, tensors = self._plain
        if tensors:
            torch._foreach_copy_(copies, tensors)
        for copy, tensor in self._special:
            copy.copy_(tensor)

    def copy_of(self, tensor: Tensor) -> Tensor | None:
        return next((c for t, c in zip(self._tensors, self._copies, strict=True) if t is tensor), None)

    def put_back(self, choose: Callable[[Tensor, Tensor], bool] = lambda tensor, copy: True) -> None:
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            if not choose(tensor, copy):
                continue
            if (tensor.shape, tensor.dtype, tensor.device) == (copy.shape, copy.dtype, copy.device):
                tensor.copy_(copy)
            else:
                tensor.data = copy.clone()


def _turned_non_finite(now: Tensor, before: Tensor) -> bool:
    """Tell whether an element is inf or NaN that was finite, or NaN that was inf: a mask of -inf is legal."""
    if not (now.is_floating_point() or now.is_complex()) or now.layout is not torch.strided or now.is_meta:
        return False
    if now.itemsize == 1:  # float8 has no comparisons
        now, before = now.float(), before.float()
    if (now.shape, now.device) != (before.shape, before.device):
        return not bool(now.isfinite().all())
    return bool((now.isnan() & ~before.isnan() | now.isinf() & before.isfinite()).any())


def _can_be_written(tensor: Tensor) -> bool:
    """Tell whether a step can change the contents of ``tensor`` in place, and they can be copied."""
    if is_lazy(tensor) or tensor.is_meta or tensor.is_inference() or tensor.is_nested:
        return False
    if tensor.layout is torch.strided:
        return not any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.layout is not torch._mkldnn  # type: ignore[attr-defined]


def _storage_like(tensor: Tensor, old: Tensor | None) -> Tensor:
    if old is not None and (old.shape, old.dtype, old.device) == (tensor.shape, tensor.dtype, tensor.device):
        return old
    return torch.empty_like(tensor)


# Random numbers -------------------------------------------------------------------------------------------------------


def rng_state(devices: Iterable[torch.device]) -> RngState:
    """Return the states of torch's generators, the CPU's and those of ``devices``: host memory, no synchronization."""
    states = {_CPU: torch.get_rng_state()}
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
