"""Which precision a device runs natively, and why. Nothing is probed before it is asked for.

float16 and bfloat16 pay where the hardware multiplies them. An emulated bfloat16 is slower than float32, so "supported"
is not enough: a T4 or V100 supports bfloat16 and multiplies only float16.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_amp_plus.report import Precision

_ROCM_BF16 = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
"""AMD architectures with bfloat16 matrix instructions: CDNA from MI100 on, RDNA3 and RDNA4 (AMD, matrix cores)."""


@dataclass(frozen=True)
class PrecisionChoice:
    """A precision and the reason for it, as one line of text."""

    precision: Precision
    reason: str


def select_precision(device: torch.device) -> PrecisionChoice:
    """Choose bfloat16 where the device multiplies it natively, else float16 on a GPU that does, else float32.

    Args:
        device: The device the model is on.

    Example:
        >>> select_precision(torch.device("meta")).precision
        '32-true'

    """
    if device.type == "cuda":
        return _on_rocm(_rocm_architecture(device)) if torch.version.hip else _on_cuda(_cuda_capability(device))
    if device.type == "cpu":
        return _on_cpu(_cpu_flags())
    if device.type == "mps":
        return _on_mps(_mps_has_bfloat16())
    if device.type == "xpu":
        return _on_xpu(_xpu_has_bfloat16(device))
    return PrecisionChoice("32-true", f"what a device of type {device.type!r} runs natively is not known")


def _on_cuda(capability: tuple[int, int]) -> PrecisionChoice:
    name = "compute capability {}.{}".format(*capability)
    if capability >= (8, 0):
        return PrecisionChoice("bf16-mixed", f"{name} has bfloat16 tensor cores")
    if capability >= (7, 0):
        return PrecisionChoice("16-mixed", f"{name} multiplies float16 natively and would emulate bfloat16")
    if capability in ((5, 3), (6, 0), (6, 2)):
        return PrecisionChoice("16-mixed", f"{name} runs float16 at twice the rate of float32, and no bfloat16")
    return PrecisionChoice("32-true", f"{name} runs float16 slower than float32, and no bfloat16")


def _on_rocm(architecture: str) -> PrecisionChoice:
    if architecture.startswith(_ROCM_BF16):
        return PrecisionChoice("bf16-mixed", f"{architecture} has bfloat16 matrix instructions")
    return PrecisionChoice("16-mixed", f"{architecture} runs float16 natively and would emulate bfloat16")


def _on_cpu(flags: set[str]) -> PrecisionChoice:
    native = sorted(flags & {"avx512_bf16", "amx_bf16", "avx10_2", "bf16", "sve_bf16"})
    if native:
        return PrecisionChoice("bf16-mixed", f"this CPU has bfloat16 instructions ({', '.join(native)})")
    return PrecisionChoice("32-true", "this CPU has no bfloat16 instructions and would emulate it, as float16")


def _on_mps(has_bfloat16: bool) -> PrecisionChoice:
    if has_bfloat16:
        return PrecisionChoice("bf16-mixed", "Metal has bfloat16 from macOS 14 on")
    return PrecisionChoice("16-mixed", "Metal has bfloat16 only from macOS 14 on")


def _on_xpu(has_bfloat16: bool) -> PrecisionChoice:
    if has_bfloat16:
        return PrecisionChoice("bf16-mixed", "this XPU converts bfloat16 in hardware")
    return PrecisionChoice("16-mixed", "this XPU runs float16 natively and would emulate bfloat16")


# The probes. Tests replace them.


def _cuda_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _rocm_architecture(device: torch.device) -> str:
    return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]


def _mps_has_bfloat16() -> bool:
    return torch.backends.mps.is_macos_or_newer(14, 0)


def _xpu_has_bfloat16(device: torch.device) -> bool:
    return bool(getattr(torch.xpu.get_device_properties(device), "has_bfloat16_conversions", False))


def _cpu_flags() -> set[str]:
    if hasattr(torch.cpu, "get_capabilities"):
        return {name for name, value in torch.cpu.get_capabilities().items() if value is True}
    cpuinfo = Path("/proc/cpuinfo")  # torch does not tell before 2.10
    return set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
