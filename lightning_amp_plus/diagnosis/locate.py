"""Where a forward or a backward first turns finite numbers into inf or NaN: hooks and a mode, for one run. Plain torch.

Modules are told apart by their hooks: the first call to end whose output is not finite although its input was. What
lies between the modules, and inside of them, is told by a dispatch mode, which sees each operation and the line of code
that called it. A backward has no modules, but its nodes carry the sequence numbers that autograd gave them in the
forward, and the hooks note which of them belong to which call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import Self

from lightning_amp_plus.diagnosis.finite import is_finite, largest, values_of
from lightning_amp_plus.diagnosis.lines import is_ours, line_in, line_of, parts_of
from lightning_amp_plus.rollback.batches import tensors_in

Phase = Literal["forward", "backward"]


@dataclass(frozen=True)
class Fault:
    """Where finite numbers first became inf or NaN.

    Attributes:
        phase: In the forward or in the backward.
        module: The name of the module, as in ``named_modules``; ``None`` if it was in no module's own code.
        call: Which call of the module it was, from 1.
        calls: How often the module was called until then.
        kind: What they became: ``"nan"`` if there was one, else ``"inf"``; ``None`` if another rank has seen it.
        dtype: What they were computed in.
        largest: The largest finite magnitude there; 0 if there was none.
        operation: The operation, such as ``aten.mul``, or in a backward the node, such as ``SqrtBackward0``.
        line: The line of code that called the operation, such as ``model.py:12``.

    """

    phase: Phase
    module: str | None
    call: int = 1
    calls: int = 1
    kind: Literal["inf", "nan"] | None = None
    dtype: torch.dtype = torch.float16
    largest: float = 0.0
    operation: str | None = None
    line: str | None = None


@dataclass
class _Call:
    module: str
    number: int
    is_sane: bool  # whether its inputs were finite
    task: int  # the backward that it was called in; -1 for none
    first: int  # of the sequence numbers of its operations
    last: int = sys.maxsize


@dataclass(frozen=True)
class _Origin:
    operation: str
    line: str | None
    module: str | None
    call: int
    kind: Literal["inf", "nan"]
    dtype: torch.dtype
    largest: float
    node: tuple[str, int] | None = None  # of the backward


class Locator(AbstractContextManager["Locator"]):
    """Looks on while a ``module`` is run, forward and backward, and finds the first fault of each.

    It reads every result, which makes the run slow, and changes nothing: the run computes what it does without. A
    compiled module is run eagerly meanwhile, with torch 2.6 or later. Afterwards nothing is left on the module.

    Args:
        module: What is run, or what the modules that are run are parts of.

    Example:
        >>> module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> _ = torch.nn.init.constant_(module[0].weight, 3e38)
        >>> with Locator(module) as locator:
        ...     _ = module(torch.ones(1, 2))
        >>> locator.fault("forward").module
        '0'

    """

    def __init__(self, module: Module) -> None:
        self._forward: Fault | None = None
        self._backward: Fault | None = None
        self._module = module
        self._open: list[_Call] = []
        self._calls: list[_Call] = []
        self._counts: dict[str, int] = {}
        self._operations = _Operations(self)
        self._stack = ExitStack()

    def fault(self, phase: Phase) -> Fault | None:
        """Return the first fault of a phase, in a module or else in what lies between; ``None`` if there was none."""
        if phase == "backward":
            return self._backward
        if self._forward is None and self._operations.latest is not None:
            return self._as_fault("forward", self._operations.latest)
        return self._forward

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(eagerly())
            for name, module in parts_of(self._module).items():
                if isinstance(module, torch.jit.ScriptModule):
                    continue
                stack.callback(module.register_forward_pre_hook(_before(self, name), with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(_after(self, name), always_call=True).remove)
            # Not to check: to have autograd note the line of the forward on each node of the backward.
            stack.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
            stack.enter_context(self._operations)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._operations.origins = {}
        self._open, self._calls = [], []

    # What the hooks tell.

    def begin_call(self, module: str, inputs: Any) -> None:
        """Take note that a module is called."""
        self._counts[module] = number = self._counts.get(module, 0) + 1
        is_sane = self._forward is not None or not any(map(_is_bad_input, _floating(inputs)))
        self._open.append(_Call(module, number, is_sane, torch._C._current_graph_task_id(), _sequence_number()))

    def end_call(self, module: str, output: Any) -> None:
        """Take note of what a module returns."""
        while self._open:
            call = self._open.pop()
            call.last = _sequence_number()
            self._calls.append(call)
            if call.module == module:
                break  # else it has raised
        else:
            return
        if self._forward is not None or not call.is_sane:
            return
        origins = self._operations.origins
        for tensor in _floating(output):
            _, origin = origins.get(id(tensor), (tensor, None))
            if origin is not None:
                self._forward = Fault(
                    "forward",
                    call.module,
                    call.number,
                    self._counts[module],
                    _kind(tensor),
                    tensor.dtype,
                    largest(tensor),
                    origin.operation,
                    origin.line,
                )
                return

    # What the mode tells.

    def innermost(self) -> _Call | None:
        """Return the call that is going on."""
        return self._open[-1] if self._open else None

    def call_of(self, node: Any) -> _Call | None:
        """Return the innermost call that made a node of the backward."""
        number = node._sequence_nr()
        around = [call for call in (*self._calls, *self._open) if call.first <= number < call.last]
        return max(around, key=lambda call: (call.first, -call.last), default=None)

    def note_backward(self, origin: _Origin) -> None:
        """Take note of what the backward made; the first counts."""
        if self._backward is None:
            self._backward = self._as_fault("backward", origin)

    def _as_fault(self, phase: Phase, origin: _Origin) -> Fault:
        return Fault(
            phase,
            origin.module,
            origin.call,
            self._counts.get(origin.module or "", 1),
            origin.kind,
            origin.dtype,
            origin.largest,
            origin.operation,
            origin.line,
        )


def _before(locator: Locator, name: str) -> Any:
    def hook(module: Module, args: Any, kwargs: Any) -> None:
        locator.begin_call(name, (args, kwargs))

    return hook


def _after(locator: Locator, name: str) -> Any:
    def hook(module: Module, args: Any, output: Any) -> None:
        locator.end_call(name, output)

    return hook


class _Operations(TorchDispatchMode):
    """Follows inf and NaN from the operation that made them."""

    def __init__(self, locator: Locator) -> None:
        super().__init__()
        self._locator = locator
        self.latest: _Origin | None = None  # of what is not finite in the forward: in the end, of the loss
        self.origins: dict[int, tuple[Tensor, _Origin | None]] = {}  # by the tensor, which is held: no id comes again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._current_graph_task_id() == -1 and is_ours(sys._getframe(1)):
            return func(*args, **kwargs)
        known = [self.origins[id(tensor)] for tensor in _floating((args, kwargs)) if id(tensor) in self.origins]
        if known and torch._C._current_graph_task_id() != -1:
            node = torch._C._current_autograd_node()
            here = None if node is None else (node.name(), node._sequence_nr())
            for _, origin in known:
                if origin is not None and origin.node not in (None, here):
                    self._locator.note_backward(origin)  # what a node guards itself never gets out of it
        had_nan = bool(known) and any(values_of(tensor).isnan().any() for tensor, _ in known)
        result = func(*args, **kwargs)
        if func._schema.name.rpartition("::")[2] in _NOT_COMPUTED:
            return result
        for tensor in _floating(result):
            if is_finite(tensor):
                self.origins.pop(id(tensor), None)
            elif any(origin is not None for _, origin in known):
                self._follow(tensor, next(origin for _, origin in known if origin is not None))
            elif known and (had_nan or _kind(tensor) == "inf"):
                self._follow(tensor, None)
            else:
                self._follow(tensor, self._origin(func, args, kwargs, tensor))
        return result

    def _follow(self, tensor: Tensor, origin: _Origin | None) -> None:
        self.origins[id(tensor)] = (tensor, origin)
        if origin is not None and origin.node is None and torch._C._current_graph_task_id() == -1:
            self.latest = origin

    def _origin(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> _Origin | None:
        """Say where an inf or NaN comes from that no earlier operation has made; ``None`` if it is meant."""
        task, call = torch._C._current_graph_task_id(), self._locator.innermost()
        node = torch._C._current_autograd_node() if task != -1 else None
        in_backward = node is not None and (call is None or call.task != task)  # else an activation is computed again
        operands = list(_floating((args, kwargs)))
        if in_backward:
            is_sane = all(is_finite(operand) for operand in operands if operand is not result)
            if is_sane and self._locator.fault("backward") is None:
                return self._origin_in_backward(node, operands, result)
            return None
        if any(isinstance(leaf, float) and not abs(leaf) < float("inf") for leaf in tree_leaves((args, kwargs))):
            return None  # a mask of the user's own
        bad = [operand for operand in operands if operand is not result and not is_finite(operand)]
        if bad and (_kind(result) == "inf" or any(map(_is_bad, bad))):
            return None  # of the batch, or of a buffer
        return _Origin(
            str(func).removesuffix(".default"),
            line_of(sys._getframe(1)),
            None if call is None else call.module,
            1 if call is None else call.number,
            _kind(result),
            result.dtype,
            max(map(largest, operands), default=0.0),
        )

    def _origin_in_backward(self, node: Any, operands: list[Tensor], result: Tensor) -> _Origin:
        call = self._locator.call_of(node)
        return _Origin(
            node.name(),
            line_in("".join(node.metadata.get("traceback_", []))),
            None if call is None else call.module,
            1 if call is None else call.number,
            _kind(result),
            result.dtype,
            max(map(largest, operands), default=0.0),
            (node.name(), node._sequence_nr()),
        )


_NOT_COMPUTED = {
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_", "lift_fresh",
}  # fmt: skip


def _floating(tree: Any) -> Iterator[Tensor]:
    for leaf in tensors_in(tree):
        tensor = getattr(leaf, "_local_tensor", leaf)  # of a DTensor
        if tensor._is_zerotensor() or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            continue  # of torch.func, which shows what is computed under it anyway
        if (tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_meta:
            yield tensor


def _is_bad_input(tensor: Tensor) -> bool:
    """Tell whether a tensor holds an inf or NaN that is none of a mask's."""
    return not is_finite(tensor) and (tensor.requires_grad or _is_bad(tensor))


def _is_bad(tensor: Tensor) -> bool:
    """Tell whether a tensor holds NaN or +inf, as no mask does."""
    values = values_of(tensor)
    return bool((values.isnan() | (values.isinf() if values.is_complex() else values.isposinf())).any())


def _kind(tensor: Tensor) -> Literal["inf", "nan"]:
    return "nan" if bool(values_of(tensor).isnan().any()) else "inf"


def _sequence_number() -> int:
    return int(torch._C._autograd._get_sequence_nr())


def eagerly() -> AbstractContextManager[Any]:
    """Have compiled code run eagerly, which torch can do from 2.6 on."""
    stance = getattr(torch.compiler, "set_stance", None)
    return nullcontext() if stance is None else stance("force_eager")
