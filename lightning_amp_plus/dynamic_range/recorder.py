"""Measures the dynamic range of a model's modules while it is trained: hooks, for one step at a time. Plain torch.

What is measured stays on the device. Only counting waits for a GPU, twice for each tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_amp_plus.diagnosis.lines import parts_of
from lightning_amp_plus.diagnosis.locate import eagerly
from lightning_amp_plus.dynamic_range.stats import KINDS, DynamicRange, Kind
from lightning_amp_plus.rollback.batches import tensors_in
from lightning_amp_plus.scaling.exponents import FLOAT16_MAX, chunks_of, counts_of, elements_of
from lightning_amp_plus.scaling.gradients import parameters_of


class RangeRecorder:
    """Records the modules of a ``module`` that have no submodules, or parameters of their own.

    Args:
        module: What is trained.
        device: What the sums are kept on.
        scale: Tells what gradients are multiplied by, in a backward.
        attempt: Tells which attempt of a step is being made, by a number: what an earlier one has shown is forgotten.

    Attributes:
        total: The sums over all recorded steps.
        is_paused: Whether what is run now is not a part of the step.

    """

    def __init__(
        self,
        module: Module,
        device: torch.device | str = "cpu",
        scale: Callable[[], float] = lambda: 1.0,
        attempt: Callable[[], int] = lambda: 0,
    ) -> None:
        self._parts = {name: part for name, part in parts_of(module).items() if _is_seen(part)}
        self._rows = {name: row for row, name in enumerate(self._parts)}
        self._row_of: dict[int, int] = {}
        for name, part in self._parts.items():
            for parameter in part.parameters(recurse=False):
                self._row_of.setdefault(id(parameter), self._rows[name])
        self._scale, self._attempt = scale, attempt
        self._device = device
        self.total = DynamicRange.empty(tuple(self._parts), device)
        self.is_paused = False
        self._step = self.total
        self._of_attempt = 0
        self._before: list[tuple[int, Tensor, Tensor]] = []
        self._undo: list[Callable[[], object]] = []

    @property
    def is_recording(self) -> bool:
        """Whether a step is being recorded."""
        return bool(self._undo)

    def start(self) -> None:
        """Record what is run from now on, until :meth:`stop` or :meth:`cancel`.

        Compiled code is run eagerly, with torch 2.6 or later; with earlier ones nothing is seen of it.
        """
        self._begin()
        stance = eagerly()
        stance.__enter__()
        self._undo = [partial(stance.__exit__, None, None, None)]
        # Without a stance, hooks would be compiled along with their module.
        on_call = self._on_call if hasattr(torch.compiler, "set_stance") else torch.compiler.disable(self._on_call)
        for name, part in self._parts.items():
            hook = partial(on_call, self._rows[name])
            self._undo.append(part.register_forward_hook(hook, with_kwargs=True).remove)

    def stop(self, add_up: Callable[[DynamicRange], None] = lambda step: None) -> DynamicRange:
        """Add the step to the sums, and return what it was.

        Args:
            add_up: Makes of the step of a rank that of all ranks, in place.

        """
        step = self._step
        self.cancel()
        step.steps = 1
        add_up(step)
        self.total.add_(step)
        return step

    def resume(self, stats: DynamicRange) -> None:
        """Go on with earlier sums, if they are those of the same modules."""
        if stats.modules == self.total.modules:
            self.total = stats.to(self._device)

    def cancel(self) -> None:
        """Leave nothing on the modules."""
        undo, self._undo = self._undo, []
        for function in reversed(undo):
            function()
        self._before = []

    def _begin(self) -> None:
        with torch.inference_mode(False):  # which an attempt may begin in
            self._step = DynamicRange.empty(self.total.modules, self._device)
        self._of_attempt, self._before = self._attempt(), []

    # What is seen -----------------------------------------------------------------------------------------------------

    def _on_call(self, row: int, module: Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self.is_recording or self.is_paused:
            return
        if self._attempt() != self._of_attempt:
            self._begin()
        outputs = _floating(output)
        if torch._C._current_graph_task_id() == -1:  # else it is computed again, for a checkpoint
            for tensor in outputs:
                self._add("activations", row, tensor)
            for tensor in _floating((args, kwargs)):
                for numbers in chunks_of(tensor.detach()):
                    self._raise(self._step.largest_input, row, numbers)
        for tensor in outputs:
            if tensor.requires_grad:
                handle = tensor.register_hook(partial(self._on_gradient, row, self._step))
                self._undo.append(handle.remove)  # from a parameter that is put out, too

    def _on_gradient(self, row: int, step: DynamicRange, gradient: Tensor) -> None:
        if self.is_recording and step is self._step:  # not of an attempt that has failed
            self._add("activation_gradients", row, gradient, self._scale())

    def look(self, optimizer: Optimizer, scale: float, made_at: float | None = None) -> None:
        """Record the gradients of the parameters, and remember the weights.

        Args:
            optimizer: Whose parameters.
            scale: What their gradients are multiplied by.
            made_at: What they were multiplied by in the backward; ``scale`` if ``None``.

        """
        if not self.is_recording:
            return
        for parameter in parameters_of(optimizer):
            row = self._row_of.get(id(parameter))
            if row is not None and parameter.grad is not None:
                self._add("parameter_gradients", row, parameter.grad, scale, made_at)
                self._before.append((row, parameter, elements_of(parameter).clone()))

    @torch.no_grad()
    def stepped(self) -> None:
        """Record what the optimizer has made of the weights that it was seen with."""
        before, self._before = self._before, []
        for row, parameter, weights in before:
            updates, half = (elements_of(parameter) - weights).float(), weights.bfloat16()
            is_made = updates != 0
            is_lost = (half.float() + updates).bfloat16() == half  # smaller than half an ulp, on either side
            made_and_lost = torch.stack([is_made.sum(), (is_made & is_lost).sum()])
            self._step.updates[:, row] += made_and_lost.to(self._device)

    @torch.no_grad()
    def _add(self, kind: Kind, row: int, tensor: Tensor, scale: float = 1.0, made_at: float | None = None) -> None:
        step, of = self._step, KINDS.index(kind)
        made_at = scale if made_at is None else made_at
        for numbers in chunks_of(tensor):
            step.counts[of, row] += counts_of(numbers, 1 / scale).to(self._device)
            step.above[of, row] += (~(numbers.abs() <= FLOAT16_MAX * scale / made_at)).sum().to(self._device)
            self._raise(step.largest[of], row, numbers, scale)
        step.loss_scale = max(step.loss_scale, made_at)

    def _raise(self, largest: Tensor, row: int, numbers: Tensor, scale: float = 1.0) -> None:
        if numbers.numel():
            found = (numbers.abs().nan_to_num_(0.0, 0.0).amax() / scale).clamp(max=torch.finfo(largest.dtype).max)
            largest[row] = torch.maximum(largest[row], found.to(largest))


def _is_seen(part: Module) -> bool:
    """Tell whether a module computes by itself: it has nothing inside, or parameters of its own.

    Not losses, which autocast computes in float32, and the metrics of torchmetrics.
    """
    if isinstance(part, (torch.jit.ScriptModule, torch.nn.modules.loss._Loss)) or hasattr(part, "_update_count"):
        return False
    inside = [name for name, _ in part.named_children() if name != "parametrizations"]
    return not inside or next(part.parameters(recurse=False), None) is not None


def _floating(values: Any) -> list[Tensor]:
    """Return the tensors with magnitudes that can be looked at, each once."""
    return [tensor for tensor in {id(tensor): tensor for tensor in tensors_in(values)}.values() if _can_be_seen(tensor)]


def _can_be_seen(tensor: Tensor) -> bool:
    is_number = (tensor.is_floating_point() or tensor.is_complex()) and tensor.itemsize > 1
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # by a function transform of torch
    return is_number and not (is_wrapped or tensor.is_meta or tensor.is_nested or tensor.is_mkldnn)
