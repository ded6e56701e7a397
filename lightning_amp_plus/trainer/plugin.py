"""The plugin: Lightning's precision hooks, translated into calls of the engine, for either namespace of Lightning."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_amp_plus.diagnosis.cause import DTYPES
from lightning_amp_plus.hardware.select import select_common_precision
from lightning_amp_plus.precisions import NAMES, PrecisionName
from lightning_amp_plus.scaling import gradients
from lightning_amp_plus.scaling.finish import Clipping
from lightning_amp_plus.scaling.loss_scale import LossScale
from lightning_amp_plus.scaling.optimizers import require_scalable
from lightning_amp_plus.step.engine import StepEngine
from lightning_amp_plus.trainer import internals
from lightning_amp_plus.trainer.evaluation import EvaluationRescue
from lightning_amp_plus.trainer.hooks import UserHooks
from lightning_amp_plus.trainer.state import StatefulPrecision, notify
from lightning_amp_plus.trainer.window import TrainingWindow

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class AdaptiveMixedPrecisionMixin(StatefulPrecision):
    """Mixed precision whose every optimizer step is right, or does not happen.

    User code that looks at ``.grad`` sees the true gradient, in hooks, in clipping and in manual optimization. A step
    with an inf or NaN in its loss or gradients is skipped in every precision, and ``max_skipped`` of them in a row
    raise.

    Pass it as ``Trainer(plugins=[AdaptiveMixedPrecision()])`` and leave ``Trainer(precision=...)`` out.

    Args:
        precision: ``"auto"`` for what the device runs natively (bfloat16; else float16 on a GPU; else float32), decided
            when a run starts; or ``"16-mixed"`` (float16 with loss scaling), ``"bf16-mixed"``, ``"32-true"``.
        loss_scale: The rules of loss scaling, used by ``"16-mixed"``; the default :class:`LossScale` if ``None``.
        max_skipped: How many steps of one optimizer may be skipped in a row before the fit stops; at least 1. Skips
            that still lower the loss scale do not count.
        retries: How often a step whose gradients overflow is run again, at lower and lower loss scales; 0 skips it at
            once. Its batches are kept for that.
        exclude_buffers: Patterns (of ``fnmatch``) of the names of buffers that a skipped step does not put back, such
            as ``"*queue"`` for a large one.
        keep_fp32: Patterns (of ``fnmatch``) of the names of modules that compute in float32, such as ``"*.wo"``:
            inside of them autocast is off, and their inputs are cast up.

    Attributes:
        scaler: The :class:`DynamicLossScaler` of a run that was started in ``"16-mixed"``, else ``None``.

    Raises:
        ValueError: If an argument is out of its range.
        NonFiniteStepError: From ``fit``, after ``max_skipped`` skipped steps in a row.
        TypeError: From ``fit`` in ``"16-mixed"``, if an optimizer holds float16 parameters.
        RuntimeError: From ``fit`` in ``"16-mixed"``, if an optimizer evaluates its closure again, as LBFGS.

    Example:
        >>> from lightning_amp_plus import AdaptiveMixedPrecision, LossScale
        >>> AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=2.0**12)).scaler.get_scale()
        4096.0

    """

    _pl: ModuleType  # the namespace that the class is bound to: lightning.pytorch or pytorch_lightning

    def __init__(
        self,
        precision: Literal["auto", "16-mixed", "bf16-mixed", "32-true"] = "auto",
        loss_scale: LossScale | None = None,
        max_skipped: int = 10,
        retries: int = 5,
        exclude_buffers: Sequence[str] = (),
        keep_fp32: Sequence[str] = (),
    ) -> None:
        if precision not in ("auto", *NAMES):
            raise ValueError(
                f"AdaptiveMixedPrecision(precision={precision!r}): it must be 'auto' or one of {', '.join(NAMES)}."
            )
        if not isinstance(max_skipped, int) or isinstance(max_skipped, bool) or max_skipped < 1:
            raise ValueError(
                f"AdaptiveMixedPrecision(max_skipped={max_skipped!r}): it must be an integer of at least 1."
            )
        if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
            raise ValueError(f"AdaptiveMixedPrecision(retries={retries!r}): it must be an integer of at least 0.")
        for name, patterns in (("exclude_buffers", exclude_buffers), ("keep_fp32", keep_fp32)):
            if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
                raise ValueError(
                    f"AdaptiveMixedPrecision({name}={patterns!r}): it must be a list of patterns, such as ['*queue']."
                )
        if loss_scale is not None and not isinstance(loss_scale, LossScale):
            raise TypeError(
                f"AdaptiveMixedPrecision(loss_scale={loss_scale!r}): it must be a LossScale, such as"
                f" LossScale(init_scale=2.0**12), or None for the default."
            )
        # Not MixedPrecision.__init__: it refuses "auto" and "32-true" and makes a scaler that asks for CUDA.
        self.device = "cpu"  # until the strategy's is known
        engine = StepEngine(
            "32-true" if precision == "auto" else precision,
            loss_scale,
            max_skipped,
            retries,
            notify=notify,
            keep_fp32=keep_fp32,
        )
        StatefulPrecision.__init__(self, engine, asked_for=precision)
        self._told: PrecisionName | None = None  # what other callbacks were told that the run computes in
        self._exclude_buffers = tuple(exclude_buffers)
        self._others: list[Tensor] = []
        self._hooks: UserHooks | None = None  # during a run
        self._evaluation: EvaluationRescue | None = None

    def __repr__(self) -> str:
        # The Trainer prints it when it refuses a plugin of the other namespace.
        other, module = (
            ("pytorch_lightning", "lightning_amp_plus.pytorch_lightning")
            if self._pl.__name__ == "lightning.pytorch"
            else ("lightning.pytorch", "lightning_amp_plus")
        )
        return (
            f"{type(self).__name__}({str(self.precision)!r}), made for a Trainer of {self._pl.__name__} (for one of"
            f" {other} import it from {module})"
        )

    @property
    def settings(self) -> dict[str, object]:
        """The arguments that it was made with, but for ``loss_scale``."""
        engine = self._engine
        return {
            "precision": self._asked_for,
            "max_skipped": engine.skips.max_skipped,
            "retries": engine.retries,
            "exclude_buffers": self._exclude_buffers,
            "keep_fp32": engine.kept.patterns,
        }

    # Set-up -----------------------------------------------------------------------------------------------------------

    @override
    def convert_module(self, module: Module) -> Module:
        # The first hook that gets the LightningModule, in evaluation too, and before a strategy wraps it.
        trainer = internals.trainer_of(module)
        if trainer is not None:
            self._begin_run(self._pl, trainer)
            device = trainer.strategy.root_device
            self.device = device.type
            self._engine.agree = partial(_largest_of_all_ranks, device) if trainer.world_size > 1 else None
            self._choose_precision(device)
            self._engine.exempt = internals.control_flow(self._pl)
            self._engine.checkpoint = partial(_last_checkpoint, trainer)
            self._engine.watch(module, device.type)
            if self.rules is not None:
                self._evaluation = EvaluationRescue(trainer, self._engine)
            self._hooks = UserHooks(self._pl, trainer)
            if trainer.state.fn == "fit":
                self._window = TrainingWindow(self._pl, trainer, self._engine, exclude=self._exclude_buffers)
                if not internals.is_tuning(trainer):
                    self._begin_anew()
            self._tell_precision(trainer)
        return super().convert_module(module)

    def _choose_precision(self, device: torch.device) -> None:
        agree = self._engine.agree
        rules, is_told = self.rules, self._asked_for in ("16-mixed", "32-true")
        if rules is None and (is_told or (agree is None and str(device) == self._chosen_for)):
            return  # with several ranks never because of what one of them remembers: the choice is a collective
        choice = select_common_precision(device, agree)
        if rules is not None:
            self.rules = rules.on(device.type, choice)
        if is_told:
            return
        had_chosen, self._chosen_for = self._chosen_for is not None, str(device)
        if self._asked_for == "auto":
            if had_chosen and choice.precision == self._engine.configured_precision:
                return
            self._engine.configure(choice.precision)
            notify(logging.INFO, f"AdaptiveMixedPrecision('auto') computes in {choice.precision!r}: {choice.reason}.")
        elif choice.emulates_bfloat16 and not had_chosen:
            notify(
                logging.WARNING,
                f"AdaptiveMixedPrecision('bf16-mixed') is slow here: {choice.reason}. {choice.precision!r} is the"
                " better choice, and the one that 'auto' makes.",
            )

    def _tell_precision(self, trainer: Trainer) -> None:
        if self._told != self._engine.precision:
            self._told = self._engine.precision
            internals.set_compute_dtype(self._pl, trainer, DTYPES[self._told])

    def _hooks_of(self, module: LightningModule) -> UserHooks:
        if self._hooks is None:
            self._hooks = UserHooks(self._pl, module.trainer)
        return self._hooks

    @override
    def connect(self, model: Module, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> Any:
        names = {parameter: name.removeprefix("module.") for name, parameter in model.named_parameters()}
        if self._engine.scaler is not None:
            require_scalable(optimizers, names)
        owned = {id(p) for optimizer in optimizers for p in gradients.parameters_of(optimizer)}
        self._others = [p for p in names if id(p) not in owned]
        return super().connect(model, optimizers, lr_schedulers)

    @override
    def teardown(self) -> None:
        if self._window is not None:
            self._window.end()
            self._window = None
        if self._evaluation is not None:
            self._evaluation.end()
            self._evaluation = None
        self._engine.release()
        self._engine.unwatch()
        self._engine.agree = None
        self.rules = None  # of a callback, which Lightning does not tear down after an error
        self._others = []
        self._hooks = None
        self._told = None
        self._end_run()
        super().teardown()

    # Forward and backward ---------------------------------------------------------------------------------------------

    @override
    def autocast_context_manager(self) -> torch.autocast:
        """Return the autocast of a mixed precision: float16 for ``"16-mixed"``, else bfloat16."""
        # Without the weight cache: it keeps a cast made under no_grad for the forward with grad. Lightning 2.5 has it.
        dtype = torch.float16 if self._engine.attempt_precision == "16-mixed" else torch.bfloat16
        return torch.autocast(self.device, dtype=dtype, cache_enabled=False)

    @override
    def forward_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        is_full = self._up_to_date().attempt_precision == "32-true"
        return nullcontext() if is_full else self.autocast_context_manager()

    @override
    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        window = self._window
        if window is None or window.is_automatic:
            with self.forward_context():
                yield
            return
        window.begin_iteration()
        try:
            with window.instruments(), self.forward_context():
                yield
        except BaseException:
            window.rollback(partly="applied" in self._engine.iteration)
            window.close()
            raise
        outcomes = tuple(self._engine.iteration)
        self._engine.end_iteration()
        window.end_iteration(outcomes)

    @override
    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        # Not MixedPrecision's, which scales here, before the hooks have seen the loss. To call hooks that nobody has is
        # what Lightning spends most time on here: the time that the checks of a step take.
        if self._hooks_of(module).someone_overrides("on_before_backward"):
            return super(self._pl.plugins.MixedPrecision, self).pre_backward(tensor, module)
        return tensor

    @override
    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        if self._hooks_of(module).someone_overrides("on_after_backward"):
            super().post_backward(tensor, module)
        if self._window is not None:
            self._window.note_backward()
        return tensor.detach()

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> None:
        trainer = model.trainer
        others: list[Tensor] = []
        keep_true = False
        if self._engine.scaler is not None:
            # The step unscales what its optimizer owns: not what it does not own, nor what the user may see before.
            others = [parameter for parameter in self._others if parameter.requires_grad]
            keep_true = not model.automatic_optimization or bool(others) or self._hooks_of(model).looks_at_gradients()
        attempt = self._engine.backward(tensor, trainer.optimizers, keep_true=keep_true, others=others)
        with attempt as scaled:
            super().backward(scaled, model, optimizer, *args, **kwargs)

    # Step -------------------------------------------------------------------------------------------------------------

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        trainer, user_hooks = model.trainer, self._hooks_of(model)
        hooks: Callable[[], None] | None = None
        clipping = None
        if model.automatic_optimization and user_hooks.clips_by_itself():
            hooks = partial(internals.call_after_closure, self, model, optimizer)
        else:
            if user_hooks.someone_overrides("on_before_optimizer_step"):
                hooks = partial(internals.call_before_optimizer_step, self._pl, trainer, optimizer)
            threshold = float(trainer.gradient_clip_val or 0)
            if model.automatic_optimization and threshold > 0:  # stock takes what is below for no clipping
                clipping = Clipping(threshold, "value" if trainer.gradient_clip_algorithm == "value" else "norm")
        window = self._window if model.automatic_optimization else None
        is_trial = self._searches and internals.is_trial(self._pl, trainer)
        try:
            output = self._engine.step(
                optimizer,
                closure,
                index=0 if model.automatic_optimization else _position(optimizer, trainer.optimizers),
                automatic=model.automatic_optimization,
                hooks=hooks,
                clipping=clipping,
                rerun=partial(self._evaluate_again, optimizer, model, closure),
                trial=is_trial,
                window=window,
                **kwargs,
            )
        except BaseException:
            if window is not None:  # else the iteration of manual optimization, which this is a part of, sees to it
                window.rollback()
                window.close()
            raise
        report = self._engine.last_step
        is_held = report is not None and report.outcome == "skipped" and not is_trial  # a search counts all its steps
        if is_held:
            internals.hold_global_step(trainer)
        if window is not None:
            window.is_held = is_held
            window.close()
        self._tell_precision(trainer)
        return output

    def _evaluate_again(self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any]) -> Any:
        # In manual optimization the closure relies on the autocast of training_step, which ends for optimizer.step().
        with nullcontext() if model.automatic_optimization else self.forward_context():
            output = closure()
        internals.call_after_closure(self, model, optimizer)
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


def _last_checkpoint(trainer: Trainer) -> str | None:
    """Return the last checkpoint of the run, if there is one."""
    callback = trainer.checkpoint_callback
    paths = [getattr(callback, name, "") for name in ("last_model_path", "best_model_path")]
    return next((path for path in paths if path), None)


def _position(optimizer: Optimizer, among: Sequence[Optimizer]) -> int:
    return next((index for index, known in enumerate(among) if known is optimizer), -1)


def _largest_of_all_ranks(device: torch.device, flags: Tensor) -> Tensor:
    # Not strategy.reduce, which waits for the device in a barrier first.
    flags = flags.to(device)
    torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
    return flags
