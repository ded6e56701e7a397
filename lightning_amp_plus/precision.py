"""The plugin: Lightning's precision hooks, translated into calls of the engine."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_amp_plus import _lightning, gradients
from lightning_amp_plus.engine import Policy, StepEngine
from lightning_amp_plus.finish import Clipping
from lightning_amp_plus.grad_scaler import DynamicLossScaler
from lightning_amp_plus.loss_scale import LossScale
from lightning_amp_plus.optimizers import require_scalable
from lightning_amp_plus.report import Precision, StepCounters, StepReport

_STATE_VERSION = 1


class AdaptiveMixedPrecision(MixedPrecision):
    """Mixed precision whose every optimizer step is right, or does not happen.

    User code that looks at ``.grad`` sees the true gradient, in hooks, in clipping and in manual optimization. A step
    with an inf or NaN in its loss or gradients is skipped in every precision, and ``max_skipped`` of them in a row
    raise.

    Pass it as ``Trainer(plugins=[AdaptiveMixedPrecision("16-mixed")])`` and leave ``Trainer(precision=...)`` out.

    Args:
        precision: ``"16-mixed"`` (float16 with loss scaling), ``"bf16-mixed"`` or ``"32-true"``.
        loss_scale: The rules of loss scaling, used by ``"16-mixed"``; the default :class:`LossScale` if ``None``.
        max_skipped: How many steps of one optimizer may be skipped in a row before the fit stops; at least 1. Skips
            that still lower the loss scale do not count.

    Attributes:
        scaler: The :class:`DynamicLossScaler` in ``"16-mixed"``, else ``None``.

    Raises:
        ValueError: If an argument is out of its range.
        NonFiniteStepError: From ``fit``, after ``max_skipped`` skipped steps in a row.
        TypeError: From ``fit`` in ``"16-mixed"``, if an optimizer holds float16 parameters.
        RuntimeError: From ``fit`` in ``"16-mixed"``, if an optimizer evaluates its closure again, as LBFGS.

    Example:
        >>> AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=2.0**12)).scaler.get_scale()
        4096.0

    """

    def __init__(self, precision: Precision, loss_scale: LossScale | None = None, max_skipped: int = 10) -> None:
        if precision not in get_args(Precision):
            raise ValueError(
                f"AdaptiveMixedPrecision(precision={precision!r}): it must be one of {', '.join(get_args(Precision))}."
            )
        if not isinstance(max_skipped, int) or isinstance(max_skipped, bool) or max_skipped < 1:
            raise ValueError(
                f"AdaptiveMixedPrecision(max_skipped={max_skipped!r}): it must be an integer of at least 1."
            )
        if loss_scale is not None and not isinstance(loss_scale, LossScale):
            raise TypeError(
                f"AdaptiveMixedPrecision(loss_scale={loss_scale!r}): it must be a LossScale, such as"
                f" LossScale(init_scale=2.0**12), or None for the default."
            )
        # Not MixedPrecision.__init__: it refuses "32-true" and makes a scaler that asks for CUDA.
        self.device = "cpu"  # until the strategy's is known
        self._engine = StepEngine(precision, loss_scale, max_skipped, notify=_notify)
        self._others: list[Tensor] = []
        self._is_new = True

    @property
    def precision(self) -> Precision:  # type: ignore[override]
        """What the run computes in now."""
        return self._engine.precision

    @property
    def scaler(self) -> DynamicLossScaler | None:  # type: ignore[override]
        """The loss scaler, where the precision needs one."""
        return self._engine.scaler

    @property
    def counters(self) -> StepCounters:
        """How many steps were applied and skipped since the run began."""
        return self._engine.counters

    @property
    def last_step(self) -> StepReport | None:
        """What the last optimizer step did; ``None`` before the first."""
        return self._engine.last_step

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last optimizer step was skipped: in manual optimization, hold your LR schedules then."""
        return self.last_step is not None and self.last_step.outcome == "skipped"

    @property
    def policy(self) -> Policy | None:
        """What decides on a wider precision after a step that no lower loss scale can help; set by a callback.

        With one set, a checkpoint of a run that has moved on is resumed in the precision it had moved to.
        """
        return self._engine.policy

    @policy.setter
    def policy(self, policy: Policy | None) -> None:
        self._engine.policy = policy

    def request_grad_norm(self) -> None:
        """Ask for ``last_step.grad_norm`` of the next step, on every rank or on none.

        It costs one reading pass in float16 where nothing is clipped, and nothing elsewhere.
        """
        self._engine.request_grad_norm()

    # Set-up -----------------------------------------------------------------------------------------------------------

    @override
    def convert_module(self, module: Module) -> Module:
        # The first hook that gets the LightningModule, in evaluation too, and before a strategy wraps it.
        trainer = _lightning.trainer_of(module)
        if trainer is not None:
            device = trainer.strategy.root_device
            self._engine.agree = partial(_largest_of_all_ranks, device) if trainer.world_size > 1 else None
            self.device = device.type
            if trainer.state.fn == TrainerFn.FITTING:
                if not self._is_new:
                    self._engine.restart()
                self._is_new = False
        return super().convert_module(module)

    @override
    def connect(self, model: Module, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> Any:
        names = {parameter: name.removeprefix("module.") for name, parameter in model.named_parameters()}
        if self.scaler is not None:
            require_scalable(optimizers, names)
        owned = {id(p) for optimizer in optimizers for p in gradients.parameters_of(optimizer)}
        self._others = [p for p in names if id(p) not in owned]
        return super().connect(model, optimizers, lr_schedulers)

    @override
    def teardown(self) -> None:
        self._engine.release()
        self._others = []
        self._engine.agree = None
        super().teardown()

    # Forward and backward ---------------------------------------------------------------------------------------------

    @override
    def autocast_context_manager(self) -> torch.autocast:
        """Return the autocast of a mixed precision: float16 for ``"16-mixed"``, else bfloat16."""
        # Without the weight cache: it keeps a cast made under no_grad for the forward with grad. Lightning 2.5 has it.
        dtype = torch.float16 if self.precision == "16-mixed" else torch.bfloat16
        return torch.autocast(self.device, dtype=dtype, cache_enabled=False)

    @override
    def forward_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext() if self.precision == "32-true" else self.autocast_context_manager()

    @override
    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        with self.forward_context():
            yield
        self._engine.end_iteration()  # of manual optimization; in automatic optimization the step comes later

    @override
    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        # Not MixedPrecision's, which scales here, before the hooks have seen the loss. To call hooks that nobody has is
        # what Lightning spends most time on here: the time that the checks of a step take.
        if _lightning.someone_overrides(module.trainer, "on_before_backward"):
            return super(MixedPrecision, self).pre_backward(tensor, module)
        return tensor

    @override
    def post_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        if _lightning.someone_overrides(module.trainer, "on_after_backward"):
            return super().post_backward(tensor, module)
        return tensor.detach()

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: pl.LightningModule, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> None:
        trainer = model.trainer
        others: list[Tensor] = []
        keep_true = False
        if self.scaler is not None:
            # The step unscales what its optimizer owns: not what it does not own, nor what the user may see before.
            others = [parameter for parameter in self._others if parameter.requires_grad]
            keep_true = not model.automatic_optimization or bool(others) or _lightning.looks_at_gradients(trainer)
        with self._engine.backward(tensor, trainer.optimizers, keep_true=keep_true, others=others) as scaled:
            super().backward(scaled, model, optimizer, *args, **kwargs)

    # Step -------------------------------------------------------------------------------------------------------------

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        trainer = model.trainer
        hooks: Callable[[], None] | None = None
        clipping = None
        if model.automatic_optimization and _clips_by_itself(model):
            hooks = partial(_lightning.call_after_closure, self, model, optimizer)
        else:
            if _lightning.someone_overrides(trainer, "on_before_optimizer_step"):
                hooks = partial(_lightning.call_before_optimizer_step, trainer, optimizer)
            threshold = float(trainer.gradient_clip_val or 0)
            if model.automatic_optimization and threshold > 0:  # stock takes what is below for no clipping
                clipping = Clipping(threshold, "value" if trainer.gradient_clip_algorithm == "value" else "norm")
        return self._engine.step(
            optimizer,
            closure,
            index=next((i for i, known in enumerate(trainer.optimizers) if known is optimizer), -1),
            automatic=model.automatic_optimization,
            hooks=hooks,
            clipping=clipping,
            rerun=partial(self._evaluate_again, optimizer, model, closure),
            **kwargs,
        )

    def _evaluate_again(self, optimizer: Optimizer, model: pl.LightningModule, closure: Callable[[], Any]) -> Any:
        # In manual optimization the closure relies on the autocast of training_step, which ends for optimizer.step().
        with nullcontext() if model.automatic_optimization else self.forward_context():
            output = closure()
        _lightning.call_after_closure(self, model, optimizer)
        return output

    @override
    def clip_gradients(
        self, optimizer: Optimizer, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm"
    ) -> None:
        # Called by user code only, which sees true gradients: fused optimizers need no exception.
        grads = gradients.collect(self.main_params(optimizer))
        if clip_val > 0:
            clip = gradients.clip_value_ if gradient_clip_algorithm == "value" else gradients.clip_norm_
            clip(grads, clip_val)

    # State ------------------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        counters = self.counters
        return {
            **self._engine.loss_scaler.state_dict(),
            "precision": self.precision,
            "kept_modules": [],
            "counters": {
                "applied_steps": counters.applied_steps,
                "skipped_steps": counters.skipped_steps,
                "recent": counters.recent,
                "skipped_in_a_row": dict(self._engine.skipped_in_a_row),
            },
            "version": _STATE_VERSION,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over scale and counters, from stock's ``MixedPrecision`` too; arguments of the constructor stay.

        Raises:
            ValueError: If the state was written by a later version of the package.

        """
        if state_dict.get("version", 0) > _STATE_VERSION:
            raise ValueError(
                f"The checkpoint's precision state has version {state_dict['version']}, and this lightning_amp_plus"
                f" reads up to {_STATE_VERSION}: update the package. Nothing was loaded."
            )
        self._resume_in(state_dict.get("precision"))
        usable = 0 < state_dict.get("scale", 0) < math.inf  # stock's may have collapsed: no matter without a scaler
        if usable or (self.scaler is not None and "scale" in state_dict):
            self._engine.loss_scaler.load_state_dict(state_dict)
        counters = dict(state_dict.get("counters", {}))
        self._engine.skipped_in_a_row = dict(counters.pop("skipped_in_a_row", {}))
        self._engine.counters = StepCounters(**counters)

    def _resume_in(self, saved: Any) -> None:
        rungs: tuple[Precision, ...] = get_args(Precision)
        if self._engine.policy is not None and saved in rungs[rungs.index(self.precision) :]:
            self._engine.precision = saved

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # So that a user can go back to stock, which raises on an empty state.
        state = self._engine.loss_scaler.state_dict()
        del state["hysteresis"]  # which stock does not know
        checkpoint[MixedPrecision.__qualname__] = state

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        names = [kind.__qualname__ for kind in (type(self), AdaptiveMixedPrecision, MixedPrecision)]
        name = next((name for name in names if name in checkpoint), names[0])
        if name != names[0]:  # Lightning loads the first itself, but not that of a subclass, or of stock
            self.load_state_dict(checkpoint[name])


def _clips_by_itself(model: pl.LightningModule) -> bool:
    return any(
        _lightning.overrides(model, pl.LightningModule, hook)
        for hook in ("configure_gradient_clipping", "clip_gradients")
    )


def _largest_of_all_ranks(device: torch.device, flags: Tensor) -> Tensor:
    # Not strategy.reduce, which waits for the device in a barrier first.
    flags = flags.to(device)
    torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
    return flags


def _notify(level: int, text: str) -> None:
    if level >= logging.WARNING:
        rank_zero_warn(text, category=RuntimeWarning)
    else:
        rank_zero_info(text)
