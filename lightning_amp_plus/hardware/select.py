"""Which precision a device runs natively, and why. Nothing is probed before it is asked for.

Half precision pays where the hardware multiplies it. An emulated bfloat16 is slower than float32, so it is not enough
that torch supports it: on a T4 or V100 torch computes in bfloat16, but their tensor cores multiply only float16.
Sources: CUDA C++ Programming Guide, arithmetic instructions by compute capability; AMD matrix core instruction sets.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_amp_plus.precisions import PrecisionName
from lightning_amp_plus.scaling.checks import Agree

_ROCM_BF16 = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")  # CDNA from MI100 on, RDNA3, RDNA4
_CPU_BF16 = {"avx512_bf16", "amx_bf16", "avx10_2", "bf16", "sve_bf16"}  # x86 and Arm, in torch's and Linux's names


@dataclass(frozen=True)
class PrecisionChoice:
    """A precision, why it is the one to use on a device, and whether bfloat16 is slow there.

    Args:
        precision: ``"16-mixed"``, ``"bf16-mixed"`` or ``"32-true"``.
        reason: One clause of text, such as ``"compute capability 8.0 has bfloat16 tensor cores"``.
        emulates_bfloat16: Whether the device computes in bfloat16 only by way of float32.

    """

    precision: PrecisionName
    reason: str
    emulates_bfloat16: bool = False


def select_precision(device: torch.device) -> PrecisionChoice:
    """Choose bfloat16 where the device multiplies it natively, else float16 on a GPU that does, else float32.

    Args:
        device: The device that the model is on; its type decides which probe is asked.

    Example:
        >>> select_precision(torch.device("meta")).precision
        '32-true'

    """
    if device.type == "cuda":
        return _on_rocm(_rocm_architecture(device)) if torch.version.hip else _on_cuda(_cuda_capability(device))
    if device.type == "cpu":
        return _on_cpu(_cpu_flags())
    if device.type == "mps":
        return _on_mps(_mps_has_autocast(), _macos_has_bfloat16(), _mps_chip())
    if device.type == "xpu":
        return _on_xpu(_xpu_features(device))
    return PrecisionChoice("32-true", f"it is not known what a device of type {device.type!r} runs natively")


def select_common_precision(device: torch.device, agree: Agree | None) -> PrecisionChoice:
    """Choose what every rank's device runs natively: a device with bfloat16 runs float16 as well.

    Args:
        device: This rank's device.
        agree: Reduces a small float32 tensor over all ranks by its maximum; ``None`` on one process.

    """
    choice = select_precision(device)
    if agree is None:
        return choice
    orders: tuple[PrecisionName, ...] = ("bf16-mixed", "16-mixed", "32-true")  # from what the fewest run
    place, emulates = agree(torch.tensor([float(orders.index(choice.precision)), choice.emulates_bfloat16])).tolist()
    common = orders[int(place)]
    reason = choice.reason
    if common != choice.precision:
        reason += f", but the device of another rank is made for {common!r}"
    elif emulates and not choice.emulates_bfloat16:
        reason = "the device of another rank emulates bfloat16"
    return PrecisionChoice(common, reason, bool(emulates))


def _on_cuda(capability: tuple[int, int]) -> PrecisionChoice:
    name = "compute capability {}.{}".format(*capability)
    if capability >= (8, 0):
        return PrecisionChoice("bf16-mixed", f"{name} has bfloat16 tensor cores")
    if capability >= (7, 0):
        return PrecisionChoice("16-mixed", f"{name} multiplies float16 natively and emulates bfloat16", True)
    if capability in ((5, 3), (6, 0), (6, 2)):
        return PrecisionChoice("16-mixed", f"{name} runs float16 at twice the rate of float32, without bfloat16", True)
    return PrecisionChoice("32-true", f"{name} runs float16 slower than float32 and emulates bfloat16", True)


def _on_rocm(architecture: str) -> PrecisionChoice:
    if architecture.startswith(_ROCM_BF16):
        return PrecisionChoice("bf16-mixed", f"{architecture} has bfloat16 matrix instructions")
    return PrecisionChoice("16-mixed", f"{architecture} runs float16 natively and emulates bfloat16", True)


def _on_cpu(flags: set[str] | None) -> PrecisionChoice:
    if flags is None:
        return PrecisionChoice("32-true", "this torch does not tell what this CPU runs natively")
    if native := sorted(flags & _CPU_BF16):
        return PrecisionChoice("bf16-mixed", f"this CPU has bfloat16 instructions ({', '.join(native)})")
    return PrecisionChoice("32-true", "this CPU has no bfloat16 instructions and emulates it", True)


def _on_mps(has_autocast: bool, has_bfloat16: bool, chip: str) -> PrecisionChoice:
    if not has_autocast:
        return PrecisionChoice("32-true", "this torch has no autocast for Metal")
    if not has_bfloat16:
        return PrecisionChoice("16-mixed", "Metal has no bfloat16 before macOS 14")  # where torch refuses it
    if not chip:
        return PrecisionChoice("16-mixed", "this torch does not tell whether the chip multiplies bfloat16")
    if chip.startswith(("Apple M1", "Apple M2")):
        return PrecisionChoice("16-mixed", f"{chip} runs float16 natively and emulates bfloat16", True)
    return PrecisionChoice("bf16-mixed", f"{chip} multiplies bfloat16")


def _on_xpu(features: set[str]) -> PrecisionChoice:
    if "has_bfloat16_conversions" in features:
        return PrecisionChoice("bf16-mixed", "this XPU converts bfloat16 in hardware")
    if "has_fp16" in features:
        return PrecisionChoice("16-mixed", "this XPU runs float16 natively and emulates bfloat16", True)
    return PrecisionChoice("32-true", "this XPU runs neither float16 nor bfloat16 natively", True)


# The probes -----------------------------------------------------------------------------------------------------------


def _cuda_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _rocm_architecture(device: torch.device) -> str:
    return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]


def _macos_has_bfloat16() -> bool:
    return torch.backends.mps.is_macos_or_newer(14, 0)


def _mps_has_autocast() -> bool:
    return torch.amp.is_autocast_available("mps")


def _mps_chip() -> str:
    return torch.backends.mps.get_name() if hasattr(torch.backends.mps, "get_name") else ""  # torch tells it since 2.7


def _xpu_features(device: torch.device) -> set[str]:
    properties = torch.xpu.get_device_properties(device)
    return {name for name in dir(properties) if name.startswith("has_") and getattr(properties, name) is True}


def _cpu_flags() -> set[str] | None:
    if hasattr(torch.cpu, "get_capabilities"):
        return {name for name, value in torch.cpu.get_capabilities().items() if value is True}
    cpuinfo = Path("/proc/cpuinfo")  # torch does not tell before 2.10
    return set(cpuinfo.read_text().split()) if cpuinfo.exists() else None
