"""What ``python -m lightning_amp_plus`` tells, on machines that are whole and on broken ones, and how it measures."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from lightning_amp_plus.__main__ import as_json, as_text, main
from lightning_amp_plus.hardware import machine, matmul
from lightning_amp_plus.hardware.machine import (
    DTYPES,
    DeviceDescription,
    Machine,
    describe_device,
    describe_machine,
    devices,
    dtype_name,
)
from lightning_amp_plus.hardware.matmul import MatmulSpeed, matmul_size, matmul_speed
from lightning_amp_plus.hardware.select import PrecisionChoice

CPU = torch.device("cpu")
ABSENT = torch.device("cuda", 99)  # raises whatever it is asked, with CUDA and without
NATIVE = PrecisionChoice("bf16-mixed", "it has bfloat16 tensor cores")
HALF = PrecisionChoice("16-mixed", "it multiplies float16 natively and emulates bfloat16", True)
NEITHER = PrecisionChoice("32-true", "it has no bfloat16 instructions and emulates it", True)

DEVICE_KEYS = ["device", "name", "precision", "reason", "emulates_bfloat16", "native_dtypes", "threads"]
DEVICE_KEYS += ["tf32_allowed", "matmul", "note", "errors"]
VERSIONS = ["python", "torch", "lightning", "pytorch-lightning", "torchmetrics", "lightning_amp_plus", "cuda", "rocm"]


def described(
    float32: float | None,
    bfloat16: float | None,
    float16: float | None,
    choice: PrecisionChoice | None = NATIVE,
    device: torch.device = CPU,
    errors: dict[str, str] | None = None,
) -> DeviceDescription:
    """A device that was measured at so many GFLOP/s."""
    measured = zip(DTYPES, (float32, bfloat16, float16), strict=True)
    speeds = {dtype: MatmulSpeed(512, gflops) for dtype, gflops in measured if gflops}
    told = {dtype_name(dtype): "RuntimeError: no" for dtype in DTYPES if dtype not in speeds}
    threads = 2 if device.type == "cpu" else None
    return DeviceDescription(device, "EPYC", choice, speeds, threads, None, {**told, **(errors or {})})


def text_of(*described: DeviceDescription) -> list[str]:
    return as_text(Machine(described, {"torch": "2.9.0", "rocm": None}, {})).splitlines()


def refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError("the driver is broken. Update it.\nCompile with TORCH_USE_CUDA_DSA.")


# The command ----------------------------------------------------------------------------------------------------------


class Told(NamedTuple):
    text: str
    imported: set[str]
    json: dict[str, Any]


def no_number(name: str) -> None:
    raise AssertionError(name)


@pytest.fixture(scope="module")
def told() -> Told:
    """What both forms of the command print, on this machine as it is."""
    commands = (["-X", "importtime", "-m", "lightning_amp_plus"], ["-m", "lightning_amp_plus", "--json"])
    processes = [
        subprocess.Popen([sys.executable, *command], cwd=Path(__file__).parents[1], stdout=-1, stderr=-1, text=True)
        for command in commands
    ]
    (text, imports), (machine_readable, stderr) = (process.communicate(timeout=60) for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert stderr == ""
    lines = imports.splitlines()
    assert [line for line in lines if not line.startswith("import time:")] == []
    imported = {line.split("|")[-1].strip().split(".")[0] for line in lines}
    return Told(text, imported, json.loads(machine_readable, parse_constant=no_number))


def test_the_command_tells_people_and_scripts_the_same(told: Told) -> None:
    cpu, *_ = told.json["devices"]
    lines = told.text.splitlines()
    assert lines[0] == f"cpu: {cpu['name']}"
    assert lines[1] == f'  "auto" chooses "{cpu["precision"]}": {cpu["reason"]}'
    assert lines[2].startswith("  native: " + ", ".join(cpu["native_dtypes"]))
    assert re.search(rf"in {cpu['threads']} threads?:$", lines[3])
    assert max(map(len, lines)) <= 100
    for name in ("bfloat16", "float16"):
        assert re.search(rf"^    {name} +[\d.,e-]+x of float32  \( *[\d.,]+ GFLOP/s.*\)$", told.text, re.MULTILINE)
        assert cpu["matmul"][name]["gflops"] > 0
    assert f"torch={torch.__version__}" in told.text
    assert told.json["versions"]["lightning"] == importlib.metadata.version("lightning")


def test_the_command_loads_neither_lightning_nor_what_draws(told: Told) -> None:
    assert {"torch", "lightning_amp_plus"} <= told.imported
    assert not told.imported & {"lightning", "pytorch_lightning", "torchmetrics", "matplotlib"}


def test_help_explains_every_key(told: Told, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    words = set(re.findall(r"[\w-]+", capsys.readouterr().out))
    keys = {*told.json, *told.json["devices"][0], *told.json["versions"], "size", "gflops", "ratio"}
    assert keys - words == set()
    assert exit_.value.code == 0


def test_main_prints_what_was_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = Machine((described(100, 190, None),), {"torch": "2.9.0"}, {})
    monkeypatch.setattr("lightning_amp_plus.__main__.describe_machine", lambda: found)
    main([])
    assert capsys.readouterr().out == as_text(found)
    main(["--json"])
    assert json.loads(capsys.readouterr().out) == as_json(found)


# What is printed ------------------------------------------------------------------------------------------------------


def test_the_table() -> None:
    gpu = torch.device("cuda", 0)
    speeds = {torch.float32: MatmulSpeed(4096, 51_000.4), torch.bfloat16: MatmulSpeed(2048, 751_000.0)}
    no_float16 = {"float16": "TypeError: float16 is unknown"}
    fast = DeviceDescription(gpu, "H200", NATIVE, speeds, None, False, no_float16)
    slow = described(200, 0.4, 2.8, NEITHER)
    versions = {"python": "3.11.7", "lightning": None, "rocm": None}
    found = Machine((slow, fast), versions, {"lightning": "PackageNotFoundError: none", "xpu": "UserWarning: old"})
    assert as_text(found) == (
        "cpu: EPYC\n"
        '  "auto" chooses "32-true": it has no bfloat16 instructions and emulates it\n'
        "  native: float32; emulated: bfloat16\n"
        "  matmul of 512 x 512 matrices, in 2 threads:\n"
        "    float32      1.0x of float32  (    200 GFLOP/s)\n"
        "    bfloat16   0.002x of float32  (    0.4 GFLOP/s)\n"
        "    float16    0.014x of float32  (    2.8 GFLOP/s)\n"
        "\n"
        "cuda:0: H200\n"
        '  "auto" chooses "bf16-mixed": it has bfloat16 tensor cores\n'
        "  native: float32, bfloat16, float16\n"
        "  matmul of 4096 x 4096 matrices, with TF32 not allowed for float32:\n"
        "    float32      1.0x of float32  ( 51,000 GFLOP/s)\n"
        "    bfloat16    14.7x of float32  (751,000 GFLOP/s at 2048 x 2048)\n"
        "    float16   not measured: TypeError: float16 is unknown\n"
        "\n"
        "versions: python=3.11.7\n"
        "lightning cannot be used: PackageNotFoundError: none\n"
        "xpu cannot be used: UserWarning: old\n"
    )


def test_the_json_object() -> None:
    speeds = {torch.float32: MatmulSpeed(4096, 50_000.0), torch.float16: MatmulSpeed(4096, 30_049.0)}
    gpu = DeviceDescription(torch.device("cuda", 0), "T4", HALF, speeds, None, True, {"bfloat16": "TypeError: no"})
    cpu = described(100, 190, 2)
    found: Any = as_json(Machine((cpu, gpu), {"rocm": None}, {"xpu": "UserWarning: old"}))
    assert (found["versions"], found["errors"]) == ({"rocm": None}, {"xpu": "UserWarning: old"})
    assert (found["devices"][0]["threads"], found["devices"][0]["tf32_allowed"]) == (2, None)
    assert found["devices"][1] == {
        "device": "cuda:0",
        "name": "T4",
        "precision": "16-mixed",
        "reason": "it multiplies float16 natively and emulates bfloat16",
        "emulates_bfloat16": True,
        "native_dtypes": ["float32", "float16"],
        "threads": None,
        "tf32_allowed": True,
        "matmul": {
            "float32": {"size": 4096, "gflops": 50_000, "ratio": 1},
            "bfloat16": {"size": None, "gflops": None, "ratio": None},
            "float16": {"size": 4096, "gflops": 30_000, "ratio": 0.601},
        },
        "note": "float16 is native here, yet it was measured at 0.6x of float32",
        "errors": {"bfloat16": "TypeError: no"},
    }


def test_ratios_are_to_float32() -> None:
    device = described(100, 190, 2.5)
    assert [device.ratio(dtype) for dtype in DTYPES] == [1, 1.9, 0.025]
    matmuls: Any = as_json(Machine((device,), {}, {}))["devices"]
    assert matmuls[0]["matmul"]["bfloat16"] == {"size": 512, "gflops": 190, "ratio": 1.9}
    without = described(None, 190, None)
    assert [without.ratio(dtype) for dtype in DTYPES] == [None, None, None]


def test_a_speed_without_float32_has_no_ratio() -> None:
    lines = text_of(described(None, 190, None))
    assert "    bfloat16       -x of float32  (    190 GFLOP/s)" in lines


@pytest.mark.parametrize(
    ("choice", "device", "native"),
    [
        (NATIVE, CPU, ["float32", "bfloat16"]),
        (NATIVE, torch.device("cuda", 0), ["float32", "bfloat16", "float16"]),
        (HALF, torch.device("cuda", 0), ["float32", "float16"]),
        (NEITHER, CPU, ["float32"]),
        (None, CPU, None),
    ],
)
def test_native_dtypes_follow_from_the_choice(
    choice: PrecisionChoice | None, device: torch.device, native: list[str] | None
) -> None:
    found: Any = as_json(Machine((described(100, 190, 2, choice, device),), {}, {}))["devices"]
    assert found[0]["native_dtypes"] == native


@pytest.mark.parametrize(
    ("device", "note"),
    [
        (described(100, 190, 2), None),
        (described(100, 85, 2), None),
        (described(100, 60, 2), "bfloat16 is native here, yet it was measured at 0.6x of float32"),
        (described(100, 190, 60, device=ABSENT), "float16 is native here, yet it was measured at 0.6x of float32"),
        (described(100, 30, 400, HALF, ABSENT), None),
        (described(100, 200, 400, HALF, ABSENT), None),
        (described(100, 30, 60, HALF, ABSENT), "float16 is native here, yet it was measured at 0.6x of float32"),
        (described(100, 120, 2, NEITHER), None),
        (described(100, 4900, 2), None),
        (described(1, 51, 2), "no hardware is that much faster than in float32: the machine was busy, measure again"),
        (
            described(100, 210, 2, NEITHER),
            "bfloat16 is not known to be native here, yet it was measured at 2.1x of float32",
        ),
        (described(None, 60, 2), None),
        (described(100, 60, 2, None, errors={"precision": "RuntimeError: no"}), None),
    ],
)
def test_a_measurement_against_the_choice_is_noted(device: DeviceDescription, note: str | None) -> None:
    assert device.note == note
    noted = [line for line in text_of(device) if "note:" in line]
    assert noted == ([f"  note: {note}"] if note else [])


def test_what_a_terminal_may_not_show_is_replaced_and_long_lines_are_wrapped() -> None:
    sentence = "RuntimeError: " + "a\N{LATIN SMALL LETTER U WITH DIAERESIS}b " * 40
    device = described(100, 190, None, errors={"float16": sentence})
    lines = text_of(device)
    assert any("not measured: RuntimeError: a?b" in line for line in lines)
    assert max(map(len, lines)) <= 100
    assert " ".join(" ".join(lines).split()).count("a?b") == 40


# Broken machines ------------------------------------------------------------------------------------------------------


def test_a_device_that_cannot_be_used_is_told_with_its_reasons() -> None:
    device = describe_device(ABSENT, 0.01)
    assert (device.name, device.choice, device.speeds) == (None, None, {})
    assert device.errors.keys() == {"name", "precision", "float32", "bfloat16", "float16"}
    lines = text_of(device)
    assert lines[0] == f"cuda:99: name not known: {device.errors['name']}"
    assert lines[1] == f'  "auto" cannot choose: {device.errors["precision"]}'
    assert f"    bfloat16  not measured: {device.errors['bfloat16']}" in lines


def test_the_reason_is_the_first_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for probe in ("_device_name", "select_precision", "_tf32_allowed", "matmul_size", "matmul_speed"):
        monkeypatch.setattr(machine, probe, refuse)
    device = describe_device(CPU)
    keys = {"name", "precision", "tf32_allowed", "float32", "bfloat16", "float16"}
    assert device.errors == dict.fromkeys(keys, "RuntimeError: the driver is broken")
    assert "  TF32 not known: RuntimeError: the driver is broken" in text_of(device)


@pytest.mark.parametrize("broken", DTYPES)
def test_a_dtype_that_raises_leaves_the_others(broken: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(device: torch.device, dtype: torch.dtype, size: int, seconds: float) -> MatmulSpeed:
        return refuse() if dtype is broken else MatmulSpeed(size, 100)

    def choose_size(device: torch.device, seconds: float) -> int:
        return refuse() if broken is torch.float32 else 1024

    monkeypatch.setattr(machine, "matmul_speed", measure)
    monkeypatch.setattr(machine, "matmul_size", choose_size)
    device = describe_device(CPU)
    size = 512 if broken is torch.float32 else 1024
    assert device.speeds == {dtype: MatmulSpeed(size, 100) for dtype in DTYPES if dtype is not broken}
    assert device.errors == {str(broken).removeprefix("torch."): "RuntimeError: the driver is broken"}


@pytest.mark.parametrize("device", [described(100, 190, 2), describe_device(ABSENT, 0.01)], ids=["whole", "broken"])
def test_the_keys_of_the_json_object_are_stable(device: DeviceDescription, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "describe_device", lambda *_: device)
    found = json.loads(json.dumps(as_json(describe_machine()), allow_nan=False))
    assert list(found) == ["devices", "versions", "errors"]
    assert list(found["versions"]) == VERSIONS
    described = found["devices"][0]
    assert list(described) == DEVICE_KEYS
    assert list(described["matmul"]) == ["float32", "bfloat16", "float16"]
    assert [list(speed) for speed in described["matmul"].values()] == [["size", "gflops", "ratio"]] * 3
    unknown = [value for value in described["matmul"].values() if None in value.values()]
    assert len(unknown) == len(described["errors"].keys() & described["matmul"].keys())


def test_a_package_that_is_not_installed_is_null_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package == "lightning":
            raise importlib.metadata.PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(machine, "describe_device", lambda *_: described(100, 190, 2))
    found = describe_machine()
    assert (found.versions["lightning"], found.versions["torchmetrics"]) == (None, "1.0")
    assert found.errors == {"lightning": "PackageNotFoundError: No package metadata was found for lightning"}


def test_all_devices_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def describe(device: torch.device, seconds: float) -> DeviceDescription:
        given.append(seconds)
        return described(100, 190, 2, device=device)

    monkeypatch.setattr(machine, "describe_device", describe)
    for count in (1, 8):
        found = tuple(torch.device("cuda", index) for index in range(count))
        monkeypatch.setattr(machine, "devices", lambda found=found: machine.Devices(found, {}))
        describe_machine(seconds=1.6)
    assert given == [0.25] + [0.05] * 8  # for the size and each of three dtypes


def test_every_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in (torch.cuda, torch.xpu, torch.backends.mps):
        monkeypatch.setattr(backend, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    assert list(map(str, devices().found)) == ["cpu", "cuda:0", "cuda:1", "xpu:0", "mps"]
    assert devices().errors == {}


def test_a_backend_that_is_broken_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch does not raise if the driver is too old: it warns, and says that there is no GPU."""

    def warn() -> bool:
        warnings.warn("CUDA initialization: the driver is too old. Update it.", UserWarning, stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", warn)
    monkeypatch.setattr(torch.xpu, "is_available", refuse)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert devices() == (
        (CPU,),
        {
            "cuda": "UserWarning: CUDA initialization: the driver is too old",
            "xpu": "RuntimeError: the driver is broken",
        },
    )


def test_a_probe_asks_about_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"H200 number {device.index}")
    assert machine._device_name(torch.device("cuda", 3)) == "H200 number 3"
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=True))
    monkeypatch.setattr(torch.version, "hip", None)
    assert machine._tf32_allowed(torch.device("cuda", 0)) is True
    assert machine._tf32_allowed(CPU) is None
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert machine._tf32_allowed(torch.device("cuda", 0)) is None


@pytest.mark.parametrize(
    ("cpuinfo", "told", "name"),
    [
        ("processor\t: 0\nmodel name\t: AMD EPYC 9R14\n", {"cpu_name": "AMD EPYC"}, "AMD EPYC 9R14"),
        ("processor\t: 0\n", {"cpu_name": "Neoverse V1"}, "Neoverse V1"),
        (None, {"cpu_name": "Apple M2"}, "Apple M2"),
        (None, {}, "riscv64"),
    ],
)
def test_the_name_of_a_cpu(
    cpuinfo: str | None, told: dict[str, str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(machine, "Path", {"/proc/cpuinfo": tmp_path / "cpuinfo"}.__getitem__)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: told, raising=False)
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert machine._device_name(CPU) == name


# The measurement ------------------------------------------------------------------------------------------------------


class Accelerator:
    """A clock, and matrices whose products wait in a queue: those of a dtype at so many operations per second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, loading: float = 0.0, **rates: float) -> None:
        self.now, self.queued, self.busy_until = 0.0, 0.0, 0.0
        self.loading, self.rates, self.loaded = loading, rates, set[tuple[int, str]]()
        monkeypatch.setattr(torch, "linspace", lambda *_, **__: Matrix(self))
        monkeypatch.setattr(matmul, "_synchronize", lambda _: self.synchronize())
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def synchronize(self) -> None:
        self.now, self.queued = self.now + self.queued + 2e-5, 0.0

    def multiply(self, size: int, dtype: str) -> None:
        if (size, dtype) not in self.loaded:
            self.loaded.add((size, dtype))
            self.now += self.loading
        self.queued += 2 * size**3 / self.rates[dtype] * (3 if self.now < self.busy_until else 1)


class Matrix:
    def __init__(self, accelerator: Accelerator, size: int = 0, dtype: str = "float32") -> None:
        self.accelerator, self.size, self.dtype = accelerator, size, dtype

    def view(self, rows: int, columns: int) -> Matrix:
        assert rows == columns
        return Matrix(self.accelerator, rows)

    def to(self, dtype: torch.dtype) -> Matrix:
        return Matrix(self.accelerator, self.size, str(dtype).removeprefix("torch."))

    def __matmul__(self, other: Matrix) -> None:
        self.accelerator.multiply(self.size, self.dtype)


@pytest.mark.parametrize(
    ("rate", "size"), [(1e8, 512), (1e10, 512), (2e11, 512), (2e12, 1024), (8e12, 2048), (5e13, 4096), (4e14, 4096)]
)
@pytest.mark.parametrize("loading", [0.0, 0.3])
def test_the_size_takes_float32_a_millisecond_or_more(
    rate: float, size: int, loading: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    Accelerator(monkeypatch, loading, float32=rate)
    assert matmul_size(CPU) == size


@pytest.mark.parametrize("loading", [0.0, 0.3])
@pytest.mark.parametrize(("rate", "size"), [(5e13, 4096), (8e14, 2048), (2e11, 512), (2e11, 100)])
def test_the_speed_is_that_of_the_matmuls_alone(
    rate: float, size: int, loading: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither loading a kernel, nor launching, nor synchronizing counts."""
    Accelerator(monkeypatch, loading, bfloat16=rate)
    speed = matmul_speed(CPU, torch.bfloat16, size)
    assert speed.size == size
    assert speed.gflops == pytest.approx(rate / 1e9, rel=0.03)


@pytest.mark.parametrize("rate", [1e9, 2e9, 3e9, 1e10, 2e11, 1e15])
@pytest.mark.parametrize("seconds", [0.05, 0.25])
def test_a_slow_dtype_is_measured_on_smaller_matrices_and_in_time(
    rate: float, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = Accelerator(monkeypatch, float16=rate)
    speed = matmul_speed(CPU, torch.float16, 4096, seconds)
    assert accelerator.now < 2 * seconds
    assert speed.gflops == pytest.approx(rate / 1e9, rel=0.03)
    assert (speed.size < 4096) is (rate < 1e15)


def test_another_program_that_ends_meanwhile_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    Accelerator(monkeypatch, float32=2e11).busy_until = 0.15
    assert matmul_speed(CPU, torch.float32, 512).gflops == pytest.approx(200, rel=0.03)


def test_dtypes_are_measured_at_the_size_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    Accelerator(monkeypatch, float32=2e11, bfloat16=8e11)
    assert matmul_speed(CPU, torch.bfloat16).size == matmul_speed(CPU, torch.float32).size == 512


def test_a_clock_that_stands_still_gives_a_finite_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    Accelerator(monkeypatch, float32=1e11)
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    assert matmul_speed(CPU, torch.float32, 100, 0).gflops == pytest.approx(2 * 100**3)  # 1 ns a call


def test_measuring_draws_no_random_numbers_and_synchronizes_the_device_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_rng_state()
    assert matmul_speed(CPU, torch.float32, 64, 0.001).gflops > 0
    assert torch.equal(torch.get_rng_state(), before)
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", asked.append)
    monkeypatch.setattr(torch.mps, "synchronize", lambda: asked.append("mps"))
    for device in (torch.device("cuda", 1), torch.device("mps")):
        matmul._synchronize(device)
    assert asked == [torch.device("cuda", 1), "mps"]


@pytest.mark.gpu
def test_tensor_cores_are_reached() -> None:
    device = describe_device(torch.device("cuda", 0))
    assert device.errors == {}
    assert device.note is None
    ratio = device.ratio(torch.float16)
    assert ratio is not None
    assert (ratio > 2) is (torch.cuda.get_device_capability(0) >= (7, 0))
