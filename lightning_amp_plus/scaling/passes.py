"""The backward passes that an optimizer step completes: scaled, remembered, checked, and cleared if they failed.

Plain torch. User code and the optimizer see gradients that are multiplied by 1: ``held.py`` keeps the books, and
``finish.py`` takes the gradients from the last backward to the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_amp_plus.scaling import gradients
from lightning_amp_plus.scaling.checks import Agree, Evidence
from lightning_amp_plus.scaling.finish import Clipping, Look, Verdict, finish
from lightning_amp_plus.scaling.held import HeldGradients, has_gradients
from lightning_amp_plus.scaling.loss_scale import FLOAT16_LOSS_MAX_SCALE, scale_loss
from lightning_amp_plus.scaling.scaler import DynamicLossScaler


@dataclass(slots=True)
class Request:
    """What is asked of a step, besides what it is computed from.

    Attributes:
        optimizer: The optimizer, plain or fused.
        index: Its position among all.
        automatic: Whether the step is a whole iteration, whose gradients are the engine's to clear.
        hooks: Code of the user's that sees, and may change, the true gradients before clipping.
        clipping: What to clip the gradients to.
        wants_norm: Whether their norm is wanted, where it costs a pass.
        looks: What is to see the gradients before the hooks do.

    """

    optimizer: Optimizer
    index: int
    automatic: bool
    hooks: Callable[[], None] | None
    clipping: Clipping | None
    wants_norm: bool
    looks: tuple[Look, ...] = ()

    def as_a_test(self) -> Request:
        """Return the request for an attempt that is not applied: no code of others sees it."""
        return replace(self, hooks=None, clipping=None, looks=())


class BackwardPasses:
    """What the backward passes since the last step have left.

    Args:
        loss_scaler: What the loss is scaled by, where it is enabled.

    Attributes:
        anomaly: The error of torch's anomaly mode that a pass has ended in.
        at_scale: What the loss is scaled by in place of the loss scaler's scale; ``None`` for that.
        agree: Reduces a small float32 tensor over all ranks by its maximum; ``None`` on one process.
        began_fresh: Whether the optimizers had no gradients before the first pass.
        count: How many passes there were.
        attempt: How often they were begun again, in this run.
        running_at: What gradients are multiplied by in the pass that is running; 1 outside of one.
        has_raised: Whether what they belong to has raised and was run again.
        has_raised_anywhere: Whether that is so on any rank.
        has_half_loss: Whether the last loss was float16, which limits the scale; ``None`` before the first.

    """

    def __init__(self, loss_scaler: DynamicLossScaler) -> None:
        self.loss_scaler = loss_scaler
        self.agree: Agree | None = None
        self._held = HeldGradients()
        self.attempt = 0
        self.release()

    def release(self) -> None:
        """Leave true gradients behind, also where a window was not finished, and hold no tensor."""
        self._held.undo()
        self._held = HeldGradients()
        self._loss: Tensor | None = None  # finite if all losses since the last step are
        self._loss_is_old = False
        self._others: list[tuple[Tensor, Tensor | None]] = []  # and their gradients before the step
        self.began_fresh = True
        self.count = 0
        self.running_at = 1.0
        self.has_half_loss: bool | None = None
        self.has_raised = self.has_raised_anywhere = False
        self.at_scale: float | None = None
        self.anomaly: RuntimeError | None = None
        self.blamed = False  # whether an overflow of the last backward is recorded: once is enough

    @contextmanager
    def backward(
        self, loss: Tensor, among: Sequence[Optimizer], *, keep_true: bool, others: Sequence[Tensor] = ()
    ) -> Generator[Tensor, None, None]:
        """Yield what to call ``backward`` on; see :meth:`StepEngine.backward`."""
        fresh = [not has_gradients(optimizer) for optimizer in among]
        is_first = self._loss is None or self._loss_is_old
        if is_first and self.at_scale is None:
            self.began_fresh = all(fresh)
            self._others = [(other, None if other.grad is None else other.grad.clone()) for other in others]
        self.count += 1
        self._remember(loss.detach(), alone=all(fresh))
        if not self.loss_scaler.is_enabled():
            yield loss
            return
        self.loss_scaler.begin_backward(loss)
        scale = self.loss_scaler.get_scale() if self.at_scale is None else self.at_scale
        if not self.has_raised:  # else this rank is alone in a wider precision, and scales as the others do
            self.has_half_loss = loss.dtype is torch.float16
        if self.has_half_loss:
            scale = min(scale, FLOAT16_LOSS_MAX_SCALE)
        self._held.begin(scale, among, others, fresh=fresh, keep_true=keep_true)
        self.blamed = False
        self.running_at = scale
        try:
            yield scale_loss(loss, scale)
        except BaseException as error:
            self._held.undo()
            if not self._is_anomaly(error):
                raise
            return
        finally:
            self.running_at = 1.0
        if keep_true:
            self._held.settle()

    def _is_anomaly(self, error: BaseException) -> bool:
        """Take the error of torch's anomaly mode for the overflow that a lower scale may cure; on one process only."""
        if not isinstance(error, RuntimeError) or "returned nan values in its" not in str(error):
            return False
        if not torch.is_anomaly_enabled() or self.agree is not None:
            return False
        self.anomaly = error
        return True

    def _remember(self, loss: Tensor, *, alone: bool) -> None:
        loss = gradients.whole(loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss)
        loss = loss.sum() if loss.ndim else loss
        if self._loss is not None and not (alone or self._loss_is_old):
            loss = self._loss * 0 + loss.to(self._loss.device)
        self._loss = loss
        self._loss_is_old = False

    def check(
        self, request: Request, can_be_cured: Callable[[float], bool], *, is_half: bool
    ) -> tuple[Verdict, float | None]:
        """Check what the passes have completed, and return the scale that it was made with too.

        Args:
            request: What is asked of the step.
            can_be_cured: Tells whether something may help gradients that overflowed at a scale.
            is_half: Whether they were made in float16; a rescue is not, and still knows a scale, which is 1.

        """
        pending = self._held.pending.pop(request.index, None)
        made_at = None if pending is None else pending.scale
        self.loss_scaler.begin_step(request.optimizer, counted=made_at is not None)
        if self.anomaly is not None:
            return Verdict("gradients"), made_at
        # A hook or a clipping may have replaced an inf that backward left. It is an overflow all the same, as long as a
        # lower scale or a wider precision may help; else the gradients are what the user made of them, as in fp32.
        evidence = Evidence(
            loss=None if request.automatic and self._loss_is_old else self._loss,
            loss_counts=request.automatic,
            backward=None if pending is None else pending.evidence,
            backward_counts=pending is not None and can_be_cured(pending.scale),
            has_raised=self.has_raised,
        )
        verdict = finish(
            request.optimizer,
            self._held,
            evidence,
            self.agree,
            request.hooks,
            request.clipping,
            wants_norm=request.wants_norm,
            looks=request.looks,
            made_at=made_at if is_half else None,
        )
        self.has_raised_anywhere = verdict.has_raised
        return verdict, made_at

    def clear(self, optimizer: Optimizer) -> None:
        """Undo the passes: the gradients are as before the first one."""
        self._held.stepped()
        self._held.pending.clear()
        for parameter in gradients.parameters_of(optimizer):
            parameter.grad = None
        for other, gradient in self._others:  # which may have come from earlier steps
            other.grad = None if gradient is None else gradient.clone()

    def begin_again(self, scale: float | None = None) -> None:
        """Forget the passes, for other ones, at a scale of their own if it is given."""
        self._loss, self.anomaly, self.at_scale = None, None, scale
        self.attempt += 1

    def stepped(self) -> None:
        """Take note that a step has used what the passes have left."""
        self._held.stepped()
        self._loss_is_old = True
        self.has_raised = self.has_raised_anywhere = False

    def forget_pending(self) -> None:
        """Forget what is known of gradients that were made in another precision."""
        self._held.pending.clear()
