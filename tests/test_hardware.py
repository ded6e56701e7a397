"""What is chosen for which device, that nobody is asked but the device, and what the probes make of the answers."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from namespace import AdaptiveMixedPrecision
from torch import Tensor

from lightning_amp_plus import hardware
from lightning_amp_plus.hardware import PrecisionChoice, select_common_precision, select_precision
from lightning_amp_plus.report import Precision

real_cpu_flags = hardware._cpu_flags  # conftest.py replaces it in every test
PROBES = ("_cuda_capability", "_rocm_architecture", "_macos_has_bfloat16", "_xpu_features", "_cpu_flags")

Row = tuple[str, str, Any, Precision, str, bool]

_TENSOR_CORES = "compute capability {} has bfloat16 tensor cores"
_HALF_CORES = "compute capability {} multiplies float16 natively and emulates bfloat16"
_HALF_RATE = "compute capability {} runs float16 at twice the rate of float32, without bfloat16"
_NEITHER = "compute capability {} runs float16 slower than float32 and emulates bfloat16"
_AMD = "{} has bfloat16 matrix instructions"
_OLD_AMD = "{} runs float16 natively and emulates bfloat16"
_CPU = "this CPU has bfloat16 instructions ({})"
_OLD_CPU = "this CPU has no bfloat16 instructions and emulates it, as it does float16"
_UNKNOWN = "it is not known what a device of type '{}' runs natively"

# fmt: off
ROWS: list[Row] = [
    ("GTX 980", "cuda", (5, 2), "32-true", _NEITHER.format("5.2"), True),
    ("Jetson TX1", "cuda", (5, 3), "16-mixed", _HALF_RATE.format("5.3"), True),
    ("P100", "cuda", (6, 0), "16-mixed", _HALF_RATE.format("6.0"), True),
    ("GTX 1080", "cuda", (6, 1), "32-true", _NEITHER.format("6.1"), True),
    ("Jetson TX2", "cuda", (6, 2), "16-mixed", _HALF_RATE.format("6.2"), True),
    ("V100", "cuda", (7, 0), "16-mixed", _HALF_CORES.format("7.0"), True),
    ("Jetson Xavier", "cuda", (7, 2), "16-mixed", _HALF_CORES.format("7.2"), True),
    ("T4", "cuda", (7, 5), "16-mixed", _HALF_CORES.format("7.5"), True),
    ("RTX 2080", "cuda", (7, 5), "16-mixed", _HALF_CORES.format("7.5"), True),
    ("A100", "cuda", (8, 0), "bf16-mixed", _TENSOR_CORES.format("8.0"), False),
    ("RTX 3090", "cuda", (8, 6), "bf16-mixed", _TENSOR_CORES.format("8.6"), False),
    ("Jetson Orin", "cuda", (8, 7), "bf16-mixed", _TENSOR_CORES.format("8.7"), False),
    ("L4", "cuda", (8, 9), "bf16-mixed", _TENSOR_CORES.format("8.9"), False),
    ("H100", "cuda", (9, 0), "bf16-mixed", _TENSOR_CORES.format("9.0"), False),
    ("B200", "cuda", (10, 0), "bf16-mixed", _TENSOR_CORES.format("10.0"), False),
    ("RTX 5090", "cuda", (12, 0), "bf16-mixed", _TENSOR_CORES.format("12.0"), False),
    ("MI50", "rocm", "gfx906", "16-mixed", _OLD_AMD.format("gfx906"), True),
    ("MI100", "rocm", "gfx908", "bf16-mixed", _AMD.format("gfx908"), False),
    ("MI250", "rocm", "gfx90a", "bf16-mixed", _AMD.format("gfx90a"), False),
    ("MI300", "rocm", "gfx942", "bf16-mixed", _AMD.format("gfx942"), False),
    ("MI350", "rocm", "gfx950", "bf16-mixed", _AMD.format("gfx950"), False),
    ("RX 5700", "rocm", "gfx1010", "16-mixed", _OLD_AMD.format("gfx1010"), True),
    ("RX 6900", "rocm", "gfx1030", "16-mixed", _OLD_AMD.format("gfx1030"), True),
    ("RX 7900", "rocm", "gfx1100", "bf16-mixed", _AMD.format("gfx1100"), False),
    ("Strix Halo", "rocm", "gfx1151", "bf16-mixed", _AMD.format("gfx1151"), False),
    ("RX 9070", "rocm", "gfx1201", "bf16-mixed", _AMD.format("gfx1201"), False),
    ("macOS 14", "mps", True, "bf16-mixed", "Metal has bfloat16 from macOS 14 on", False),
    ("macOS 13", "mps", False, "16-mixed", "Metal has no bfloat16 before macOS 14", False),
    ("Arc, Max", "xpu", {"has_fp16", "has_bfloat16_conversions"}, "bf16-mixed",
     "this XPU converts bfloat16 in hardware", False),
    ("Iris Xe", "xpu", {"has_fp16", "has_fp64"}, "16-mixed",
     "this XPU runs float16 natively and emulates bfloat16", True),
    ("XPU without either", "xpu", {"has_fp64"}, "32-true", "this XPU runs neither float16 nor bfloat16 natively", True),
    ("Haswell", "cpu", {"avx2", "fma3", "f16c"}, "32-true", _OLD_CPU, True),
    ("Ice Lake", "cpu", {"avx2", "avx512_f", "avx512_vnni"}, "32-true", _OLD_CPU, True),
    ("Sierra Forest", "cpu", {"avx2", "avx_ne_convert"}, "32-true", _OLD_CPU, True),  # converts, does not multiply
    ("Zen 4", "cpu", {"avx512_f", "avx512_bf16"}, "bf16-mixed", _CPU.format("avx512_bf16"), False),
    ("Sapphire Rapids", "cpu", {"avx512_bf16", "amx_bf16", "amx_tile"}, "bf16-mixed",
     _CPU.format("amx_bf16, avx512_bf16"), False),
    ("AMX alone", "cpu", {"amx_bf16"}, "bf16-mixed", _CPU.format("amx_bf16"), False),
    ("AVX10.2", "cpu", {"avx10_2"}, "bf16-mixed", _CPU.format("avx10_2"), False),
    ("Graviton 3", "cpu", {"neon", "bf16", "sve", "sve_bf16"}, "bf16-mixed", _CPU.format("bf16, sve_bf16"), False),
    ("Apple M2", "cpu", {"neon", "bf16"}, "bf16-mixed", _CPU.format("bf16"), False),
    ("Raspberry Pi 4", "cpu", {"neon", "crc32"}, "32-true", _OLD_CPU, True),
    ("unknown CPU", "cpu", set(), "32-true", _OLD_CPU, True),
    ("meta", "meta", None, "32-true", _UNKNOWN.format("meta"), False),
    ("Gaudi", "hpu", None, "32-true", _UNKNOWN.format("hpu"), False),
]
# fmt: on
_OWN_PROBE = {
    "cuda": "_cuda_capability",
    "rocm": "_rocm_architecture",
    "mps": "_macos_has_bfloat16",
    "xpu": "_xpu_features",
    "cpu": "_cpu_flags",
}


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("nobody may ask this")


@pytest.mark.parametrize(
    ("name", "kind", "found", "precision", "reason", "emulates"), ROWS, ids=[row[0] for row in ROWS]
)
def test_the_choice_for_a_device_which_alone_is_asked(
    name: str,
    kind: str,
    found: Any,
    precision: Precision,
    reason: str,
    emulates: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked_about: list[tuple[Any, ...]] = []

    def answer(*device: Any) -> Any:
        asked_about.append(device)
        return found

    for probe in PROBES:
        monkeypatch.setattr(hardware, probe, answer if _OWN_PROBE.get(kind) == probe else refuse)
    monkeypatch.setattr(torch.version, "hip", "6.4" if kind == "rocm" else None)
    device = torch.device({"rocm": "cuda:1", "cuda": "cuda:1", "xpu": "xpu:1"}.get(kind, kind))
    assert select_precision(device) == PrecisionChoice(precision, reason, emulates)
    assert asked_about == {"cpu": [()], "mps": [()], "meta": [], "hpu": []}.get(kind, [(device,)])


def test_the_reason_does_not_deny_the_float16_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graviton 2, Apple M1 and Raspberry Pi 5 have ``fp16_arith``; ``asimdhp`` in Linux's words."""
    monkeypatch.setattr(hardware, "_cpu_flags", lambda: {"neon", "fp16_arith", "dot"})
    assert "float16" not in select_precision(torch.device("cpu")).reason.replace("bfloat16", "")


def test_a_cpu_that_nobody_knows_is_not_said_to_emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS and Windows with a torch before 2.10: an explicit "bf16-mixed" warns there, on an Apple M2 too."""
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(hardware, "Path", lambda _: Path("/nowhere"))
    monkeypatch.setattr(hardware, "_cpu_flags", real_cpu_flags)
    choice = select_precision(torch.device("cpu"))
    assert choice.precision == "32-true"
    assert not choice.emulates_bfloat16


def test_nothing_is_probed_before_a_device_is_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, function in (
        (torch.cuda, "get_device_capability"),
        (torch.cuda, "get_device_properties"),
        (torch.xpu, "get_device_properties"),
        (torch.backends.mps, "is_macos_or_newer"),
        (torch.cpu, "get_capabilities"),
    ):
        monkeypatch.setattr(module, function, refuse, raising=False)
    fresh = runpy.run_path(str(hardware.__file__))
    AdaptiveMixedPrecision()
    for kind in ("cuda", "xpu", "mps", "cpu"):
        with pytest.raises(AssertionError, match="nobody may ask"):
            fresh["select_precision"](torch.device(kind))


# The probes -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(torch.cpu, "get_capabilities"), reason="torch before 2.10")
def test_the_probe_of_this_cpu_says_what_torch_says() -> None:
    flags, told = real_cpu_flags(), torch.cpu.get_capabilities()
    assert flags == {name for name in told if told[name] is True}
    assert flags  # no CPU that runs the tests has nothing at all


def test_a_capability_that_is_a_number_is_no_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"avx512_bf16": True, "amx_bf16": False, "num_sockets": 1, "sve_max_length": 32, "architecture": "x86_64"}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: told, raising=False)
    assert real_cpu_flags() == {"avx512_bf16"}


@pytest.mark.parametrize(
    ("text", "precision", "reason"),
    [
        (
            "model name\t: AMD EPYC 9R14\nflags\t\t: fpu avx2 avx512f avx512_bf16 clzero\nbugs\t\t: spectre_v1\n",
            "bf16-mixed",
            _CPU.format("avx512_bf16"),
        ),
        ("flags\t\t: avx512f avx512_bf16 amx_bf16 amx_tile\n", "bf16-mixed", _CPU.format("amx_bf16, avx512_bf16")),
        ("flags\t\t: fpu avx2 avx512f avx512_vnni\n", "32-true", _OLD_CPU),
        ("Features\t: fp asimd sve svebf16 i8mm bf16\nCPU part\t: 0xd40\n", "bf16-mixed", _CPU.format("bf16")),
        ("Features\t: fp asimd crc32\n", "32-true", _OLD_CPU),
    ],
    ids=["Zen 4", "Sapphire Rapids", "Ice Lake", "Graviton 3", "Raspberry Pi 4"],
)
def test_older_torch_reads_cpuinfo(
    text: str, precision: Precision, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(hardware, "Path", {"/proc/cpuinfo": tmp_path / "cpuinfo"}.__getitem__)
    monkeypatch.setattr(hardware, "_cpu_flags", real_cpu_flags)
    choice = select_precision(torch.device("cpu"))
    assert (choice.precision, choice.reason) == (precision, reason)


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="Linux only")
@pytest.mark.skipif(not hasattr(torch.cpu, "get_capabilities"), reason="torch before 2.10")
def test_both_probes_choose_the_same_for_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_cpu_flags", real_cpu_flags)
    told = select_precision(torch.device("cpu"))
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert real_cpu_flags() & {"fpu", "asimd", "flags", "Features"}  # the words of Linux
    assert select_precision(torch.device("cpu")).precision == told.precision


def test_without_cpuinfo_there_are_no_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(hardware, "Path", lambda _: tmp_path / "none")
    assert real_cpu_flags() == set()


def test_the_probes_of_accelerators_ask_torch_about_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def table(**properties: Any) -> Callable[[torch.device], Any]:
        return lambda device: SimpleNamespace(**properties) if device.index == 3 else refuse()

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, device.index))
    assert select_precision(torch.device("cuda:3")).reason == _HALF_CORES.format("7.3")

    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", table(gcnArchName="gfx90a:sramecc+:xnack-"))
    assert select_precision(torch.device("cuda:3")).reason == _AMD.format("gfx90a")

    xpu = {"has_fp16": True, "has_fp64": False, "has_bfloat16_conversions": False, "name": "Iris Xe"}
    monkeypatch.setattr(torch.xpu, "get_device_properties", table(**xpu))
    assert hardware._xpu_features(torch.device("xpu:3")) == {"has_fp16"}

    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *version: version <= (14, 0))
    assert select_precision(torch.device("mps")).precision == "bf16-mixed"
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *version: version < (14, 0))
    assert select_precision(torch.device("mps")).precision == "16-mixed"


# All ranks ------------------------------------------------------------------------------------------------------------

A100, V100, GTX_1080 = (8, 0), (7, 0), (6, 1)


def choose_on_ranks(
    capabilities: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> list[PrecisionChoice]:
    """What ``select_common_precision`` returns on each rank, where the ranks have exchanged what they handed over."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(hardware, "_cuda_capability", lambda device: capabilities[device.index])
    votes: list[Tensor] = []

    def hand_over(vote: Tensor) -> Tensor:
        assert vote.dtype is torch.float32
        votes.append(vote)
        return vote

    devices = [torch.device("cuda", index) for index in range(len(capabilities))]
    for device in devices:
        select_common_precision(device, hand_over)
    assert len(votes) == len(devices)  # each hands over once, whatever its device
    return [select_common_precision(device, lambda _: torch.stack(votes).amax(0)) for device in devices]


@pytest.mark.parametrize(
    ("capabilities", "precision"),
    [
        ((A100, A100), "bf16-mixed"),
        ((V100, V100), "16-mixed"),
        ((A100, V100), "16-mixed"),
        ((V100, A100), "16-mixed"),
        ((A100, GTX_1080), "32-true"),
        ((GTX_1080, V100), "32-true"),
        ((A100, V100, GTX_1080), "32-true"),
    ],
)
def test_ranks_agree_on_what_all_run_natively(
    capabilities: tuple[tuple[int, int], ...], precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = choose_on_ranks(capabilities, monkeypatch)
    assert [choice.precision for choice in choices] == [precision] * len(capabilities)
    for index, choice in enumerate(choices):
        alone = select_precision(torch.device("cuda", index))
        assert choice.emulates_bfloat16 is alone.emulates_bfloat16
        if alone.precision == precision:
            assert choice == alone
        else:
            assert choice.reason == f"{alone.reason}, but the device of another rank is made for '{precision}'"


def test_one_process_decides_alone() -> None:
    assert select_common_precision(torch.device("cpu"), None) == select_precision(torch.device("cpu"))
    assert select_common_precision(torch.device("cpu"), None).precision == "bf16-mixed"
