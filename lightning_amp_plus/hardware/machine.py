"""What this machine has and what ``"auto"`` makes of it: native dtypes, measured matmul speed, versions.

Plain torch: the versions of the other packages come from their metadata. What a device, a driver or a dtype raises is
kept as one sentence, and all else is still told.
"""

from __future__ import annotations

import importlib.metadata
import platform
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

import torch

from lightning_amp_plus.hardware.matmul import MatmulSpeed, matmul_size, matmul_speed
from lightning_amp_plus.hardware.select import PrecisionChoice, select_precision

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What is measured, float32 first."""

_PACKAGES = ("lightning", "pytorch-lightning", "torchmetrics", "lightning_amp_plus")
_ABSURD = 50  # times as fast as float32; tensor cores are 16 times as fast
_SLOWER, _FASTER = 0.8, 1.5  # than float32, beyond what two measurements of one thing differ by

P = ParamSpec("P")
T = TypeVar("T")


class Devices(NamedTuple):
    """The devices of this machine.

    Attributes:
        found: The CPU, then every GPU that torch can use.
        errors: What was raised or warned of by a backend that torch was built with, by its device type.

    """

    found: tuple[torch.device, ...]
    errors: dict[str, str]


@dataclass(frozen=True)
class DeviceDescription:
    """One device.

    Attributes:
        device: Which one.
        name: What its maker calls it; ``None`` if that raised.
        choice: What ``precision="auto"`` takes on it alone, and why; ``None`` if that raised.
        speeds: What was measured, for each dtype that did not raise.
        threads: How many threads torch uses on it; ``None`` for what is not a CPU.
        tf32_allowed: Whether float32 matmuls may run in TF32; ``None`` for what is not an NVIDIA GPU.
        errors: One sentence for each thing that raised: ``"name"``, ``"precision"``, ``"float16"`` ...

    """

    device: torch.device
    name: str | None
    choice: PrecisionChoice | None
    speeds: dict[torch.dtype, MatmulSpeed]
    threads: int | None
    tf32_allowed: bool | None
    errors: dict[str, str]

    @property
    def native_dtypes(self) -> tuple[torch.dtype, ...] | None:
        """What the choice implies; of the float16 of a CPU nothing is known. ``None`` without a choice."""
        if self.choice is None:
            return None
        if self.choice.precision == "bf16-mixed":
            return DTYPES[:2] if self.device.type == "cpu" else DTYPES
        return (torch.float32, torch.float16) if self.choice.precision == "16-mixed" else (torch.float32,)

    @property
    def note(self) -> str | None:
        """One sentence if the measured speed contradicts the choice, or cannot be, else ``None``."""
        if self.native_dtypes is None:
            return None
        if max((self.ratio(dtype) or 0 for dtype in DTYPES[1:]), default=0) > _ABSURD:
            return "no hardware is that much faster than in float32: the machine was busy, measure again"
        for dtype in DTYPES[1:]:
            ratio, is_native = self.ratio(dtype), dtype in self.native_dtypes
            is_odd = ratio is not None and (ratio < _SLOWER if is_native else ratio > _FASTER)
            if is_odd and (is_native or self.native_dtypes == (torch.float32,)):
                word = "native" if is_native else "not known to be native"
                return f"{dtype_name(dtype)} is {word} here, yet it was measured at {ratio:.2g}x of float32"
        return None

    def ratio(self, dtype: torch.dtype) -> float | None:
        """Return the speed in a dtype over that in float32, or ``None`` where either was not measured."""
        if dtype not in self.speeds or torch.float32 not in self.speeds:
            return None
        return self.speeds[dtype].gflops / self.speeds[torch.float32].gflops


@dataclass(frozen=True)
class Machine:
    """All devices, and what is installed.

    Attributes:
        devices: The CPU first.
        versions: By package, ``"python"``, ``"cuda"`` or ``"rocm"``; ``None`` for what is not there.
        errors: One sentence for each package or backend that raised.

    """

    devices: tuple[DeviceDescription, ...]
    versions: dict[str, str | None]
    errors: dict[str, str]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def devices() -> Devices:
    """Find the CPU and every CUDA, ROCm, XPU and Metal device. What a backend raises is returned as its error."""
    found, errors = [torch.device("cpu")], dict[str, str]()
    for kind in ("cuda", "xpu", "mps"):
        found += _ask(errors, kind, _accelerators, kind) or []
    return Devices(tuple(found), errors)


def describe_machine(seconds: float = 1.5) -> Machine:
    """Describe every device, measure it, and look up the versions. Nothing that a device raises is raised here.

    Args:
        seconds: About how long all measurements together may take; what starts a driver comes on top.

    """
    found, errors = devices()
    versions: dict[str, str | None] = {"python": platform.python_version(), "torch": torch.__version__}
    for package in _PACKAGES:
        versions[package] = _ask(errors, package, importlib.metadata.version, package)
    versions |= {"cuda": torch.version.cuda, "rocm": torch.version.hip}
    share = seconds / len(found) / (len(DTYPES) + 1)
    return Machine(tuple(describe_device(device, min(share, 0.25)) for device in found), versions, errors)


def describe_device(device: torch.device, seconds: float = 0.25) -> DeviceDescription:
    """Tell what a device is, what ``"auto"`` takes there and how fast it is. Nothing it raises is raised here.

    Args:
        device: A device of the machine, such as ``torch.device("cuda", 0)``.
        seconds: About how long the measurement of each dtype may take, and at most about twice that.

    """
    errors: dict[str, str] = {}
    name = _ask(errors, "name", _device_name, device)
    choice = _ask(errors, "precision", select_precision, device)
    threads = torch.get_num_threads() if device.type == "cpu" else None
    tf32_allowed = _ask(errors, "tf32_allowed", _tf32_allowed, device)
    size = _ask(errors, "float32", matmul_size, device, seconds) or 512  # the same for all dtypes
    speeds = {}
    for dtype in DTYPES:
        speed = _ask(errors, dtype_name(dtype), matmul_speed, device, dtype, size, seconds)
        if speed is not None:
            speeds[dtype] = speed
    return DeviceDescription(device, name, choice, speeds, threads, tf32_allowed, errors)


# The probes -----------------------------------------------------------------------------------------------------------


def _ask(errors: dict[str, str], key: str, probe: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    try:
        return probe(*args, **kwargs)
    except Exception as error:  # of whatever type a driver raises
        first, *_ = (str(error).strip() or "no message").splitlines()  # torch appends what helps only to debug CUDA
        sentence = first.split(". ")[0].rstrip(".")
        errors[key] = textwrap.shorten(f"{type(error).__name__}: {sentence}", 200, placeholder=" ...")
        return None


def _accelerators(kind: str) -> list[torch.device]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # all that torch says of a driver that it cannot use
        if kind == "mps":
            return [torch.device(kind)] if torch.backends.mps.is_available() else []
        backend = torch.cuda if kind == "cuda" else torch.xpu
        return [torch.device(kind, index) for index in range(backend.device_count() if backend.is_available() else 0)]


def _device_name(device: torch.device) -> str:
    if device.type in ("cuda", "xpu"):
        return str(getattr(torch, device.type).get_device_name(device))
    if device.type == "mps":
        return torch.backends.mps.get_name() if hasattr(torch.backends.mps, "get_name") else "Apple GPU"
    told = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}  # since torch 2.10
    cpuinfo = Path("/proc/cpuinfo")  # more exact, where there is one
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or str(told.get("cpu_name", "")) or platform.processor() or platform.machine()


def _tf32_allowed(device: torch.device) -> bool | None:
    return torch.backends.cuda.matmul.allow_tf32 if device.type == "cuda" and not torch.version.hip else None
