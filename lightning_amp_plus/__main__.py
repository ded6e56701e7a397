"""``python -m lightning_amp_plus``: what this machine runs natively, how fast, and what ``"auto"`` makes of it."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence

import torch

from lightning_amp_plus.hardware.machine import DTYPES, DeviceDescription, Machine, describe_machine, dtype_name

_WIDTH = 100
_KEYS = """\
keys of the JSON object, which are the same on every machine:
  devices                a list, the CPU first; of each device:
    device               what torch calls it, such as "cuda:0"
    name                 what its maker calls it
    precision            what AdaptiveMixedPrecision("auto") takes there: "bf16-mixed", "16-mixed"
                         or "32-true"
    reason               why
    emulates_bfloat16    whether it computes in bfloat16 only by way of float32
    native_dtypes        a list of "float32", "bfloat16", "float16"; a CPU's float16 is never in it
    threads              how many torch uses on a CPU; null for a GPU
    tf32_allowed         whether float32 matmuls may run in TF32; null for all but NVIDIA GPUs
    matmul               by dtype: "size" of the square matrices, "gflops" (1e9 operations per
                         second) and "ratio" of that to float32
    note                 a sentence if the measured speed contradicts the choice, else null
    errors               a sentence for each of "name", "precision", "float16" ... that is null
                         because asking or measuring failed
  versions               python, torch, lightning, pytorch-lightning, torchmetrics,
                         lightning_amp_plus; cuda and rocm, null where torch was built without
  errors                 a sentence for each package that is null and each backend ("cuda", "xpu",
                         "mps") that cannot be used

The exit code is 0 whatever fails.
"""


def as_json(machine: Machine) -> dict[str, object]:
    """Return what ``--json`` prints: dicts, lists, strings, finite numbers, booleans and ``None``."""
    described = [_device_as_json(device) for device in machine.devices]
    return {"devices": described, "versions": machine.versions, "errors": machine.errors}


def as_text(machine: Machine) -> str:
    """Return a table for people: ASCII, lines of at most 100 characters, and a newline at the end."""
    lines = [line for device in machine.devices for line in (*_device_as_text(device), "")]
    lines.append("versions: " + ", ".join(f"{key}={value}" for key, value in machine.versions.items() if value))
    lines += [f"{key} cannot be used: {error}" for key, error in machine.errors.items()]
    wrapped = (textwrap.fill(line, _WIDTH, subsequent_indent="    ", break_on_hyphens=False) for line in lines)
    return "\n".join(wrapped).encode("ascii", "replace").decode() + "\n"  # all that every terminal shows


def _device_as_json(device: DeviceDescription) -> dict[str, object]:
    choice, native, matmul = device.choice, device.native_dtypes, {}
    for dtype in DTYPES:
        speed, ratio = device.speeds.get(dtype), device.ratio(dtype)
        matmul[dtype_name(dtype)] = {
            "size": speed.size if speed else None,
            "gflops": float(f"{speed.gflops:.3g}") if speed else None,
            "ratio": None if ratio is None else float(f"{ratio:.3g}"),
        }
    return {
        "device": str(device.device),
        "name": device.name,
        "precision": choice.precision if choice else None,
        "reason": choice.reason if choice else None,
        "emulates_bfloat16": choice.emulates_bfloat16 if choice else None,
        "native_dtypes": None if native is None else [dtype_name(dtype) for dtype in native],
        "threads": device.threads,
        "tf32_allowed": device.tf32_allowed,
        "matmul": matmul,
        "note": device.note,
        "errors": device.errors,
    }


def _device_as_text(device: DeviceDescription) -> list[str]:
    choice, native, errors = device.choice, device.native_dtypes, device.errors
    lines = [f"{device.device}: " + (f"name not known: {errors['name']}" if device.name is None else device.name)]
    if choice is None or native is None:
        lines.append(f'  "auto" cannot choose: {errors["precision"]}')
    else:
        lines.append(f'  "auto" chooses "{choice.precision}": {choice.reason}')
        emulated = "; emulated: bfloat16" if choice.emulates_bfloat16 else ""
        lines.append(f"  native: {', '.join(map(dtype_name, native))}{emulated}")
    lines.append(f"  matmul{_conditions(device)}:")
    lines += [f"    {dtype_name(dtype):<9}{_speed_as_text(device, dtype)}" for dtype in DTYPES]
    if "tf32_allowed" in errors:
        lines.append(f"  TF32 not known: {errors['tf32_allowed']}")
    return [*lines, f"  note: {device.note}"] if device.note else lines


def _conditions(device: DeviceDescription) -> str:
    speed = device.speeds.get(torch.float32)
    conditions = [f" of {speed.size} x {speed.size} matrices"] if speed else []
    if device.threads is not None:
        conditions.append(f" in {device.threads} thread{'s' * (device.threads != 1)}")
    if device.tf32_allowed is not None:
        conditions.append(f" with TF32 {'allowed' if device.tf32_allowed else 'not allowed'} for float32")
    return ",".join(conditions)


def _speed_as_text(device: DeviceDescription, dtype: torch.dtype) -> str:
    if dtype not in device.speeds:
        return f" not measured: {device.errors[dtype_name(dtype)]}"
    speed, ratio = device.speeds[dtype], device.ratio(dtype)
    relative = f"{'-' if ratio is None else _number(ratio):>6}x of float32"
    size = speed.size
    smaller = size != device.speeds.get(torch.float32, speed).size
    return f" {relative}  ({_number(speed.gflops):>7} GFLOP/s{f' at {size} x {size}' if smaller else ''})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 0.995 else f"{value:.2g}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what this machine has.

    Args:
        arguments: Those of the command line; ``None`` for those of this process.

    Raises:
        SystemExit: After ``--help``, and for an argument that there is not.

    """
    parser = argparse.ArgumentParser(
        "python -m lightning_amp_plus",
        description='Tell what precision this machine runs natively, how fast, and which one "auto" chooses.',
        epilog=_KEYS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    is_json = parser.parse_args(arguments).json
    machine = describe_machine()
    text = json.dumps(as_json(machine), indent=2, allow_nan=False) + "\n" if is_json else as_text(machine)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
