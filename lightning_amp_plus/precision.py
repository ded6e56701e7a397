"""The plugin: Lightning's precision hooks, translated into calls of the engine, for either namespace of Lightning."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_amp_plus import _lightning, gradients
from lightning_amp_plus.checkpoint import load_state, state_of, stock_state_of
from lightning_amp_plus.engine import Policy, StepEngine
from lightning_amp_plus.finish import Clipping
from lightning_amp_plus.grad_scaler import DynamicLossScaler
from lightning_amp_plus.hardware import select_common_precision
from lightning_amp_plus.loss_scale import LossScale
from lightning_amp_plus.mailbox import Mailbox
from lightning_amp_plus.optimizers import require_scalable
from lightning_amp_plus.report import PRECISIONS, Precision, StepCounters, StepReport, is_wider

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins import MixedPrecision as _MixedPrecision
else:
    _MixedPrecision = object  # the binding of a namespace adds the class itself

_DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16, "32-true": torch.float32}


class AdaptiveMixedPrecisionMixin(_MixedPrecision):
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
    ) -> None:
        if precision not in ("auto", *PRECISIONS):
            raise ValueError(
                f"AdaptiveMixedPrecision(precision={precision!r}): it must be 'auto' or one of {', '.join(PRECISIONS)}."
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
        # Not MixedPrecision.__init__: it refuses "auto" and "32-true" and makes a scaler that asks for CUDA.
        self.device = "cpu"  # until the strategy's is known
        self._asked_for = precision
        self._chosen_for: str | None = None  # the device that the precision was chosen for
        self._told: Precision | None = None  # what other callbacks were told that the run computes in
        self._engine = StepEngine(
            "32-true" if precision == "auto" else precision, loss_scale, max_skipped, notify=_notify
        )
        self._others: list[Tensor] = []
        self._is_new = True
        self._evaluates = self._searches = False
        self._mailbox = Mailbox()
        self._posts = self._is_running = False

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
    def precision(self) -> Literal["auto"] | Precision:  # type: ignore[override]
        """What the run computes in now; ``"auto"`` until a run has started."""
        engine = self._up_to_date()
        return "auto" if self._asked_for == "auto" and self._chosen_for is None else engine.precision

    @property
    def scaler(self) -> DynamicLossScaler | None:  # type: ignore[override]
        """The loss scaler of a run that was started in ``"16-mixed"``; switched off once the run has moved on."""
        engine = self._up_to_date()
        return engine.loss_scaler if engine.configured_precision == "16-mixed" else None

    @property
    def counters(self) -> StepCounters:
        """How many steps were applied and skipped since the run began."""
        return self._up_to_date().counters

    @property
    def last_step(self) -> StepReport | None:
        """What the last optimizer step did; ``None`` before the first."""
        return self._up_to_date().last_step

    @property
    def max_skipped(self) -> int:
        """How many steps of one optimizer may be skipped in a row."""
        return self._engine.max_skipped

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last optimizer step was skipped: in manual optimization, hold your LR schedules then."""
        return self.last_step is not None and self.last_step.outcome == "skipped"

    @property
    def policy(self) -> Policy | None:
        """What decides on a wider precision after a step that no lower loss scale can help.

        A callback sets it in its ``setup``, for one run: it is gone when that ends.
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
        self._up_to_date()
        trainer = _lightning.trainer_of(module)
        if trainer is not None:
            device = trainer.strategy.root_device
            self._engine.agree = partial(_largest_of_all_ranks, device) if trainer.world_size > 1 else None
            self._posts = trainer.local_rank == 0 and _lightning.is_spawned(self._pl, trainer)
            self._is_running = True
            self.device = device.type
            self._choose_precision(device)
            self._evaluates = trainer.state.fn != "fit"
            self._searches = _lightning.searches(self._pl, trainer)
            if not self._evaluates and not _lightning.is_tuning(trainer):
                if not self._is_new:
                    self._engine.restart()
                self._is_new = False
            self._tell_precision(trainer)
        return super().convert_module(module)

    def _choose_precision(self, device: torch.device) -> None:
        agree = self._engine.agree
        if self._asked_for in ("16-mixed", "32-true") or (agree is None and str(device) == self._chosen_for):
            return  # with several ranks never because of what one of them remembers: the choice is a collective
        choice = select_common_precision(device, agree)
        had_chosen, self._chosen_for = self._chosen_for is not None, str(device)
        if self._asked_for == "auto":
            if had_chosen and choice.precision == self._engine.configured_precision:
                return
            self._engine.configure(choice.precision)
            _notify(logging.INFO, f"AdaptiveMixedPrecision('auto') computes in {choice.precision!r}: {choice.reason}.")
        elif choice.emulates_bfloat16 and not had_chosen:
            _notify(
                logging.WARNING,
                f"AdaptiveMixedPrecision('bf16-mixed') is slow here: {choice.reason}. {choice.precision!r} is the"
                " better choice, and the one that 'auto' makes.",
            )

    def _tell_precision(self, trainer: Trainer) -> None:
        if self._told != self._engine.precision:
            self._told = self._engine.precision
            _lightning.set_compute_dtype(self._pl, trainer, _DTYPES[self._told])

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
        self._engine.release()
        self._others = []
        self._engine.agree = None
        self.policy = None  # of a callback, which Lightning does not tear down after an error
        self._told = None
        self._evaluates = self._searches = self._is_running = False
        if self._posts:
            self._posts = False
            self._mailbox.post((state_of(self._engine), self._engine.last_step, self._chosen_for, self._is_new))
        super().teardown()

    def _up_to_date(self) -> StepEngine:
        """Return the engine, which holds what a worker process has left in the meantime."""
        if not self._is_running and (message := self._mailbox.news()) is not None:
            state, last_step, self._chosen_for, self._is_new = message
            self._engine.configured_precision = state["configured_precision"]
            load_state(self._engine, state, keeps_fallback=True)
            self._engine.last_step = last_step
        return self._engine

    def __getstate__(self) -> dict[str, Any]:
        self._up_to_date()
        return self.__dict__.copy()

    # Forward and backward ---------------------------------------------------------------------------------------------

    @override
    def autocast_context_manager(self) -> torch.autocast:
        """Return the autocast of a mixed precision: float16 for ``"16-mixed"``, else bfloat16."""
        # Without the weight cache: it keeps a cast made under no_grad for the forward with grad. Lightning 2.5 has it.
        dtype = torch.float16 if self._engine.precision == "16-mixed" else torch.bfloat16
        return torch.autocast(self.device, dtype=dtype, cache_enabled=False)

    @override
    def forward_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext() if self._up_to_date().precision == "32-true" else self.autocast_context_manager()

    @override
    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        with self.forward_context():
            yield
        self._engine.end_iteration()  # of manual optimization; in automatic optimization the step comes later

    @override
    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        # Not MixedPrecision's, which scales here, before the hooks have seen the loss. To call hooks that nobody has is
        # what Lightning spends most time on here: the time that the checks of a step take.
        if _lightning.someone_overrides(self._pl, module.trainer, "on_before_backward"):
            return super(self._pl.plugins.MixedPrecision, self).pre_backward(tensor, module)
        return tensor

    @override
    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        if _lightning.someone_overrides(self._pl, module.trainer, "on_after_backward"):
            return super().post_backward(tensor, module)
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
            keep_true = (
                not model.automatic_optimization or bool(others) or _lightning.looks_at_gradients(self._pl, trainer)
            )
        with self._engine.backward(tensor, trainer.optimizers, keep_true=keep_true, others=others) as scaled:
            super().backward(scaled, model, optimizer, *args, **kwargs)

    # Step -------------------------------------------------------------------------------------------------------------

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        trainer = model.trainer
        hooks: Callable[[], None] | None = None
        clipping = None
        if model.automatic_optimization and self._clips_by_itself(model):
            hooks = partial(_lightning.call_after_closure, self, model, optimizer)
        else:
            if _lightning.someone_overrides(self._pl, trainer, "on_before_optimizer_step"):
                hooks = partial(_lightning.call_before_optimizer_step, self._pl, trainer, optimizer)
            threshold = float(trainer.gradient_clip_val or 0)
            if model.automatic_optimization and threshold > 0:  # stock takes what is below for no clipping
                clipping = Clipping(threshold, "value" if trainer.gradient_clip_algorithm == "value" else "norm")
        output = self._engine.step(
            optimizer,
            closure,
            index=next((i for i, known in enumerate(trainer.optimizers) if known is optimizer), -1),
            automatic=model.automatic_optimization,
            hooks=hooks,
            clipping=clipping,
            rerun=partial(self._evaluate_again, optimizer, model, closure),
            trial=self._searches and _lightning.is_trial(self._pl, trainer),
            **kwargs,
        )
        self._tell_precision(trainer)
        return output

    def _evaluate_again(self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any]) -> Any:
        # In manual optimization the closure relies on the autocast of training_step, which ends for optimizer.step().
        with nullcontext() if model.automatic_optimization else self.forward_context():
            output = closure()
        _lightning.call_after_closure(self, model, optimizer)
        return output

    def _clips_by_itself(self, model: LightningModule) -> bool:
        return any(
            _lightning.overrides(model, self._pl.LightningModule, hook)
            for hook in ("configure_gradient_clipping", "clip_gradients")
        )

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
        return state_of(self._up_to_date())

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over scale and counters, from stock's ``MixedPrecision`` too; arguments of the constructor stay.

        With a callback that decides on the precision, a run that had moved to a wider one goes on in it; that is all
        that is loaded for an evaluation.

        Raises:
            ValueError: If the state was written by a later version of the package.

        """
        load_state(
            self._up_to_date(),
            state_dict,
            keeps_fallback=self.policy is not None or self._searches,
            only_precision=self._evaluates,
        )
        self._is_new = self._is_new and not self._evaluates
        saved = state_dict.get("precision", self._engine.precision)
        if saved != state_dict.get("configured_precision", saved) and is_wider(saved, self._engine.precision):
            _notify(
                logging.WARNING,
                f"The run of this checkpoint had moved to {saved!r} and is now computed in {self._engine.precision!r},"
                " which could not hold it. Add the PrecisionFallback callback to go on where it was.",
            )

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # So that a user can go back to stock.
        checkpoint["MixedPrecision"] = stock_state_of(self._up_to_date())

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        names = (type(self).__qualname__, "AdaptiveMixedPrecision", "MixedPrecision")
        name = next((name for name in names if name in checkpoint), names[0])
        if name != names[0]:  # Lightning loads the first itself, but not that of a subclass, or of stock
            self.load_state_dict(checkpoint[name])


def _largest_of_all_ranks(device: torch.device, flags: Tensor) -> Tensor:
    # Not strategy.reduce, which waits for the device in a barrier first.
    flags = flags.to(device)
    torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
    return flags


@rank_zero_only
def _notify(level: int, text: str) -> None:
    if level < logging.WARNING:
        rank_zero_info(text)
    else:  # with a registry of its own: once for each run, and not once for each process
        warnings.warn_explicit(text, RuntimeWarning, __file__, 1, module=__name__, registry={})
