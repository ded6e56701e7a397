"""What the gradients are multiplied by between a backward and its optimizer step, and what is known of them meanwhile.

One number says it for all: ``HeldGradients.scale``. A backward at another scale first brings what is pending to that
scale. Afterwards everything is brought back to 1 at once, if user code may look at it, or else by the optimizer step,
which saves a pass. Powers of two make both exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from torch import Tensor
from torch.optim import Optimizer

from lightning_amp_plus.scaling import gradients


@dataclass
class Pending:
    """What is known of the gradients that an optimizer has collected since its last step."""

    scale: float
    """The largest scale that they were made with."""
    evidence: Tensor | None = None
    """A scalar that is finite if the gradients were, as each backward left them, before user code could touch them."""


@dataclass
class HeldGradients:
    """Brings the gradients of all optimizers to a scale and back."""

    scale: float = 1.0
    pending: dict[int, Pending] = field(default_factory=dict)
    _among: Sequence[Optimizer] = ()
    _others: Sequence[Tensor] = ()
    _keep_true: bool = False

    def begin(
        self,
        scale: float,
        among: Sequence[Optimizer],
        others: Sequence[Tensor],
        *,
        fresh: Sequence[bool],
        keep_true: bool,
    ) -> None:
        """Bring what is pending to ``scale``, before a backward adds to it.

        Args:
            scale: The scale of the backward.
            among: All optimizers.
            fresh: For each of them, whether it has no gradients yet.
            others: Parameters of no optimizer. They are left out unless ``keep_true``.
            keep_true: Whether :meth:`settle` follows the backward. A parameter that is frozen gets nothing in between:
                it is left alone.

        """
        if keep_true:
            self.undo()
        for index, is_fresh in enumerate(fresh):
            known = self.pending.get(index)
            if known is None or is_fresh:
                self.pending[index] = Pending(scale)
            else:
                known.scale = max(known.scale, scale)
        self._among, self._others, self._keep_true = among, others, keep_true
        if scale != self.scale and (others or not all(fresh)):
            gradients.rescale_(chain(*self._multiplied()), scale / self.scale)
        self.scale = scale

    def _multiplied(self) -> Iterator[list[Tensor]]:
        """Yield the parameters whose gradients are multiplied, by optimizer; those of no optimizer come last."""
        seen: set[int] = set()  # a parameter may belong to two optimizers
        owned = map(gradients.parameters_of, self._among)
        for parameters in chain(owned, [self._others] if self._keep_true else []):
            mine = [p for p in parameters if (p.requires_grad or not self._keep_true) and id(p) not in seen]
            seen.update(map(id, mine))
            yield mine

    def settle(self) -> None:
        """Bring all to their true values after a backward, and note whether they were finite."""
        for index, parameters in enumerate(self._multiplied()):
            evidence = gradients.rescale_and_check_(parameters, 1 / self.scale)
            if (pending := self.pending.get(index)) is not None:  # else they are those of no optimizer
                pending.evidence = evidence if pending.evidence is None else pending.evidence + evidence
        self.stepped()

    def undo(self) -> None:
        """Bring all to their true values where no step will, after an error or at the end of a fit; no collective."""
        if self.scale != 1:
            gradients.rescale_(chain(*self._multiplied()), 1 / self.scale)
        self.stepped()

    def stepped(self) -> None:
        """Take note that all are true."""
        self.scale = 1.0
        self._among = self._others = ()


def has_gradients(optimizer: Optimizer) -> bool:
    """Tell whether any parameter of ``optimizer`` has a gradient."""
    return any(parameter.grad is not None for parameter in gradients.parameters_of(optimizer))
