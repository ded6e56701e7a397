"""Why is this loss, or its gradient, not finite? Asked of any module, without a Trainer. Plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_amp_plus.diagnosis.cause import DTYPES, Diagnosis
from lightning_amp_plus.diagnosis.finite import non_finite_inputs
from lightning_amp_plus.diagnosis.lines import runs_the_model
from lightning_amp_plus.precisions import NAMES, PrecisionName
from lightning_amp_plus.rollback.transaction import StepTransaction
from lightning_amp_plus.step.engine import StepEngine
from lightning_amp_plus.step.recovery import rescue
from lightning_amp_plus.step.rules import FallbackRules


def diagnose(
    module: Module, run: Callable[[], Tensor], precision: PrecisionName, batch: Any = None
) -> Diagnosis | None:
    """Run a module forward and backward, and tell why that is not finite, and where.

    It is run as a training step is: in the autocast of ``precision``, with loss scaling in float16, again at lower loss
    scales, then in float32, and once more with instruments. Afterwards parameters, gradients, buffers, torchmetrics in
    the module and torch's random numbers are as they were.

    Args:
        module: What is run.
        run: Computes the loss, a scalar that requires gradients. It is called several times.
        precision: ``"16-mixed"``, ``"bf16-mixed"`` or ``"32-true"``.
        batch: What ``run`` computes from, to tell a broken batch from a broken model.

    Returns:
        The diagnosis; ``None`` if loss and gradients are finite at once.

    Raises:
        ValueError: If the precision is none of the three.
        TypeError: If ``run`` does not return a loss.
        Exception: What ``run`` raises in float32 too.

    Example:
        >>> layer = torch.nn.Linear(1, 1)
        >>> torch.nn.init.constant_(layer.weight, 1e6).dtype
        torch.float32
        >>> str(diagnose(layer, lambda: layer(torch.ones(1, 1)).float().sum(), "16-mixed").cause)
        'forward'

    """
    if precision not in NAMES:
        raise ValueError(f"diagnose(precision={precision!r}): it must be one of {', '.join(NAMES)}.")
    parameter = next(module.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    engine = StepEngine(precision, max_skipped=1, notify=lambda level, text: None)
    engine.fallback.rules = FallbackRules()
    engine.watch(module, device.type)
    engine.begin_window()
    optimizer = _Unmoved(module)
    window = _Window(module, run, engine, optimizer, device, batch)
    gradients = [parameter.grad for parameter in module.parameters()]
    try:
        for parameter in module.parameters():
            parameter.grad = None
        engine.step(optimizer, window.run, window=window)
    except FloatingPointError:
        if engine.last_step is None or engine.last_step.outcome == "applied":  # it is of the user's own
            raise
    finally:
        window.rollback()
        engine.unwatch()
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            parameter.grad = gradient
    return None if engine.last_step is None else engine.last_step.diagnosis


class _Unmoved(Optimizer):
    """Leaves the parameters where they are."""

    def __init__(self, module: Module) -> None:
        super().__init__(list(module.parameters()) or [torch.zeros(0)], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


class _Window:
    """One forward and backward."""

    name = "what the loss is computed from"

    def __init__(
        self,
        module: Module,
        run: Callable[[], Tensor],
        engine: StepEngine,
        optimizer: Optimizer,
        device: torch.device,
        batch: Any,
    ) -> None:
        self._run, self._engine, self._optimizer, self._device, self._batch = run, engine, optimizer, device, batch
        self._transaction = StepTransaction(module, devices=[device])
        self._transaction.begin()

    def obstacle(self) -> str | None:
        return None

    def rollback(self) -> None:
        self._transaction.rollback()

    def non_finite_inputs(self) -> list[str]:
        return [] if self._batch is None else non_finite_inputs(self._batch)

    def run_again(self) -> None:
        self.rollback()
        self._forward_and_backward()

    def run(self) -> None:
        try:
            self._forward_and_backward()
        except Exception as error:
            self.rollback()
            failed = error
        else:
            return
        rescue(
            self._engine,
            failed,
            self._optimizer,
            self._forward_and_backward,
            alone=True,
            has_gradients=self._engine.passes.count > 0,
        )

    @runs_the_model
    def _forward_and_backward(self) -> None:
        precision = self._engine.attempt_precision
        enabled = precision != "32-true"
        dtype = DTYPES[precision] if enabled else None
        with torch.enable_grad(), torch.autocast(self._device.type, dtype, enabled=enabled, cache_enabled=False):
            loss = self._run()
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            found = "a tensor without gradients" if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(
                f"diagnose(run=...): it must return the loss, a tensor that requires gradients, not {found}."
            )
        with self._engine.backward(loss, [self._optimizer], keep_true=False) as scaled:
            scaled.backward()
