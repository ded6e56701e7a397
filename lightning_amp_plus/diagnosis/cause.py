"""Why a step was not finite, concluded from what its attempts did, and said in one sentence. Plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import Module

from lightning_amp_plus.diagnosis.lines import place_of
from lightning_amp_plus.diagnosis.locate import Fault
from lightning_amp_plus.precisions import PrecisionName

Cause = Literal["scale", "forward", "backward", "unsupported", "batch", "parameters", "model"]

DTYPES: dict[PrecisionName, torch.dtype] = {
    "16-mixed": torch.float16,
    "bf16-mixed": torch.bfloat16,
    "32-true": torch.float32,
}


@dataclass(frozen=True)
class Diagnosis:
    """Why a step was not finite, and where.

    Attributes:
        cause: ``"scale"``: only the scaled gradients overflowed. ``"forward"``, ``"backward"``: the loss, or the
            gradients at the lowest loss scale, were not finite, and were in a wider precision. ``"unsupported"``: the
            step raised, and did not in a wider precision. ``"batch"``, ``"parameters"``: it is not finite in the
            widest precision either, and what it is computed from is not finite. ``"model"``: none of the above.
        module: The name of the module at fault, as in ``named_modules``; ``None`` if none is.
        detail: One sentence, which is what ``str()`` returns. It tells no contents of tensors but a magnitude.

    """

    cause: Cause
    module: str | None
    detail: str

    def __str__(self) -> str:
        return self.detail


def of_scale(failed: float, worked: float) -> Diagnosis:
    """Return the diagnosis of gradients that a lower loss scale made finite."""
    return Diagnosis(
        "scale",
        None,
        f"The gradients overflowed at loss scale {failed:g} and are finite at {worked:g}: the lower one is the remedy.",
    )


OF_STATIC_SCALE = Diagnosis(
    "scale",
    None,
    "The gradients overflow at the loss scale of LossScale(dynamic=False), and are finite at the lowest one: a lower"
    " init_scale, dynamic=True or retries above 0 is the remedy.",
)


def of_fault(
    cause: Literal["forward", "backward"],
    fault: Fault | None,
    precision: PrecisionName,
    held_by: PrecisionName | None,
    magnitude: float | None = None,
) -> Diagnosis:
    """Return the diagnosis of a step that is not finite in one precision and is in a wider one.

    Args:
        cause: Where it was not finite.
        fault: Where it was first not finite; ``None`` if that was not found.
        precision: What it was not finite in.
        held_by: What it is finite in; ``None`` if that was not tried.
        magnitude: The largest magnitude in the wider precision of what the module puts out.

    """
    narrow = _name(precision)
    remedy = f"it is finite in {_name(held_by)}: run in {held_by!r}" if held_by else "try a wider precision"
    module = (fault.module or None) if fault is not None else None
    if module is not None:
        remedy += f", or keep this module in float32 with keep_fp32=[{module!r}]"
    if fault is None:
        what = "the loss" if cause == "forward" else "a gradient"
        return Diagnosis(cause, None, f"Somewhere {what} became inf or NaN in {narrow}; {remedy}.")
    limit = torch.finfo(fault.dtype).max
    name = _subject(fault)
    if cause == "forward" and module is not None and magnitude is not None and magnitude > limit:
        text = f"{name} put out {magnitude:.2g}, above {_dtype(fault.dtype)}'s {limit:.5g}"
    elif cause == "forward":
        text = f"{name} made {_kinds(fault)} of finite numbers in {narrow}{_by(fault)}"
    else:
        text = f"the backward of {name} made {_kinds(fault)} of finite gradients in {narrow}{_by(fault)}"
    return Diagnosis(cause, module, f"{text[0].upper() if module is None else text[0]}{text[1:]}; {remedy}.")


def of_error(error: BaseException, module: Module | None, precision: PrecisionName) -> Diagnosis:
    """Return the diagnosis of a step that raised in one precision and did not in a wider one."""
    name, line = place_of(error, module or Module())
    where = (f" in {name}" if name else "") + (f" at {line}" if line else "")
    return Diagnosis("unsupported", name, f"{type(error).__name__} was raised{where} in {_raised_in(name, precision)}")


def of_error_elsewhere(name: str | None, precision: PrecisionName) -> Diagnosis:
    """Return the diagnosis of a step that another rank has raised in."""
    where = f" in {name}" if name else ""
    return Diagnosis("unsupported", name, f"Another rank has raised{where} in {_raised_in(name, precision)}")


def _raised_in(name: str | None, precision: PrecisionName) -> str:
    keep = f", or keep this module in float32 with keep_fp32=[{name!r}]" if name else ""
    return f"{_name(precision)}, and not in a wider precision: run in one{keep}."


def of_batch(where: str, tensors: Sequence[str]) -> Diagnosis:
    """Return the diagnosis of inputs that are not finite: ``where`` names the batch, ``tensors`` what is in it."""
    which = f" ({_some(tensors)})" if tensors else ""
    return Diagnosis(
        "batch",
        None,
        f"The inputs of {where} hold inf or NaN{which}, and no precision makes the step finite: clean the data; such a"
        " batch is skipped.",
    )


def of_parameters(names: Sequence[str], checkpoint: str | None = None) -> Diagnosis:
    """Return the diagnosis of weights, or buffers, that are not finite: no step can be, whatever the batch."""
    restore = f"restore {checkpoint}" if checkpoint else "restore a checkpoint from before"
    return Diagnosis(
        "parameters",
        (names[0].rpartition(".")[0] or None) if names else None,
        f"Parameters or buffers of the model are not finite ({_some(names)}), and no precision makes the step finite:"
        f" {restore}. All steps that were applied had finite gradients: look at the learning rate, and what else"
        " writes them.",
    )


def of_model(cause: Literal["forward", "backward"], fault: Fault | None, precision: PrecisionName) -> Diagnosis:
    """Return the diagnosis of a step that is finite in no precision although all that it is computed from is."""
    text = f"The {'loss is' if cause == 'forward' else 'gradients are'} not finite in {_name(precision)} either"
    if fault is not None:
        what = "finite numbers" if cause == "forward" else "finite gradients"
        subject = _subject(fault) if cause == "forward" else f"the backward of {_subject(fault)}"
        text += f": {subject} made {_kinds(fault)} of {what}{_by(fault)}"
    return Diagnosis(
        "model",
        (fault.module or None) if fault is not None else None,
        f"{text}. It is the model, not the precision: look for a log, sqrt, norm or division at 0 and add an epsilon"
        " inside of it, lower the learning rate, or clip with `Trainer(gradient_clip_val=1.0)`.",
    )


def _subject(fault: Fault) -> str:
    if fault.module is None:
        return "code outside of all modules"
    name = fault.module or "the model's own code"
    return f"{name} (call {fault.call})" if fault.call > 1 else name


def _kinds(fault: Fault) -> str:
    return {"nan": "NaN", "inf": "inf", None: "inf or NaN"}[fault.kind]


def _by(fault: Fault) -> str:
    at = f" at {fault.line}" if fault.line else ""
    by = f" with {fault.operation}{at}" if fault.operation else at
    return f"{by} (largest magnitude {fault.largest:.2g})" if fault.largest else by


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _name(precision: PrecisionName) -> str:
    return _dtype(DTYPES[precision])


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
