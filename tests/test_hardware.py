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

from lightning_amp_plus.hardware import select as hardware
from lightning_amp_plus.hardware.select import PrecisionChoice, select_common_precision, select_precision
from lightning_amp_plus.precisions import PrecisionName

real_cpu_flags = hardware._cpu_flags  # conftest.py replaces it in every test
PROBES = (
    "_cuda_capability",
    "_rocm_architecture",
    "_mps_has_autocast",
    "_macos_has_bfloat16",
    "_mps_chip",
    "_xpu_features",
    "_cpu_flags",
)

Row = tuple[str, str, Any, PrecisionName, str, bool]

_TENSOR_CORES = "compute capability {} has bfloat16 tensor cores"
_HALF_CORES = "compute capability {} multiplies float16 natively and emulates bfloat16"
_HALF_RATE = "compute capability {} runs float16 at twice the rate of float32, without bfloat16"
_NEITHER = "compute capability {} runs float16 slower than float32 and emulates bfloat16"
_AMD = "{} has bfloat16 matrix instructions"
_OLD_AMD = "{} runs float16 natively and emulates bfloat16"
_CPU = "this CPU has bfloat16 instructions ({})"
_OLD_CPU = "this CPU has no bfloat16 instructions and emulates it"
_UNREADABLE_CPU = "this torch does not tell what this CPU runs natively"
_METAL = "{} multiplies bfloat16"
_OLD_METAL = "{} runs float16 natively and emulates bfloat16"
_OLD_MACOS = "Metal has no bfloat16 before macOS 14"
_NAMELESS = "this torch does not tell whether the chip multiplies bfloat16"
_NO_AUTOCAST = "this torch has no autocast for Metal"
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
    # whether torch has autocast, whether macOS has bfloat16, the chip
    ("Mac, M1", "mps", (True, True, "Apple M1"), "16-mixed", _OLD_METAL.format("Apple M1"), True),
    ("Mac, M1 Max", "mps", (True, True, "Apple M1 Max"), "16-mixed", _OLD_METAL.format("Apple M1 Max"), True),
    ("Mac, M2", "mps", (True, True, "Apple M2"), "16-mixed", _OLD_METAL.format("Apple M2"), True),
    ("Mac, M2 Ultra", "mps", (True, True, "Apple M2 Ultra"), "16-mixed", _OLD_METAL.format("Apple M2 Ultra"), True),
    ("Mac, M3", "mps", (True, True, "Apple M3"), "bf16-mixed", _METAL.format("Apple M3"), False),
    ("Mac, M4 Pro", "mps", (True, True, "Apple M4 Pro"), "bf16-mixed", _METAL.format("Apple M4 Pro"), False),
    ("Mac, M5", "mps", (True, True, "Apple M5"), "bf16-mixed", _METAL.format("Apple M5"), False),
    ("Mac, no name", "mps", (True, True, ""), "16-mixed", _NAMELESS, False),
    ("macOS 13, M1", "mps", (True, False, "Apple M1"), "16-mixed", _OLD_MACOS, False),
    ("macOS 13, M3", "mps", (True, False, "Apple M3"), "16-mixed", _OLD_MACOS, False),
    ("macOS 13, no name", "mps", (True, False, ""), "16-mixed", _OLD_MACOS, False),
    ("Metal without autocast, M1", "mps", (False, True, "Apple M1"), "32-true", _NO_AUTOCAST, False),
    ("Metal without autocast, M3", "mps", (False, True, "Apple M3"), "32-true", _NO_AUTOCAST, False),
    ("Metal without autocast, macOS 13", "mps", (False, False, ""), "32-true", _NO_AUTOCAST, False),
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
    ("a CPU without flags", "cpu", set(), "32-true", _OLD_CPU, True),
    ("unreadable CPU", "cpu", None, "32-true", _UNREADABLE_CPU, False),
    ("meta", "meta", None, "32-true", _UNKNOWN.format("meta"), False),
    ("Gaudi", "hpu", None, "32-true", _UNKNOWN.format("hpu"), False),
]
# fmt: on
_OWN_PROBES = {
    "cuda": ["_cuda_capability"],
    "rocm": ["_rocm_architecture"],
    "mps": ["_mps_has_autocast", "_macos_has_bfloat16", "_mps_chip"],
    "xpu": ["_xpu_features"],
    "cpu": ["_cpu_flags"],
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
    precision: PrecisionName,
    reason: str,
    emulates: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Any, ...]] = []

    def answers(probe: str, found_by_it: Any) -> Callable[..., Any]:
        def answer(*device: Any) -> Any:
            asked.append((probe, *device))
            return found_by_it

        return answer

    own = _OWN_PROBES.get(kind, [])
    for probe in PROBES:
        monkeypatch.setattr(hardware, probe, refuse)
    for probe, found_by_it in zip(own, found if kind == "mps" else [found], strict=False):
        monkeypatch.setattr(hardware, probe, answers(probe, found_by_it))
    monkeypatch.setattr(torch.version, "hip", "6.4" if kind == "rocm" else None)
    device = torch.device({"rocm": "cuda:1", "cuda": "cuda:1", "xpu": "xpu:1"}.get(kind, kind))
    assert select_precision(device) == PrecisionChoice(precision, reason, emulates)
    assert asked == [(probe,) if kind in ("cpu", "mps") else (probe, device) for probe in own]


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
    assert choice == PrecisionChoice("32-true", _UNREADABLE_CPU, False)


def test_nothing_is_probed_before_a_device_is_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, function in (
        (torch.cuda, "get_device_capability"),
        (torch.cuda, "get_device_properties"),
        (torch.xpu, "get_device_properties"),
        (torch.amp, "is_autocast_available"),
        (torch.backends.mps, "is_macos_or_newer"),
        (torch.backends.mps, "get_name"),
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
    flags, told = real_cpu_flags() or set(), torch.cpu.get_capabilities()
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
    text: str, precision: PrecisionName, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    words = real_cpu_flags() or set()
    assert words & {"fpu", "asimd", "flags", "Features"}  # of Linux
    assert select_precision(torch.device("cpu")).precision == told.precision


def test_without_cpuinfo_there_are_no_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(hardware, "Path", lambda _: tmp_path / "none")
    assert real_cpu_flags() is None


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


@pytest.mark.parametrize(
    ("autocast_on", "macos", "chip", "precision", "reason"),
    [
        ({"cpu", "cuda", "mps"}, (14, 0), "Apple M3 Pro", "bf16-mixed", _METAL.format("Apple M3 Pro")),
        ({"mps"}, (15, 1), "Apple M4", "bf16-mixed", _METAL.format("Apple M4")),
        ({"mps"}, (15, 1), "Apple M2", "16-mixed", _OLD_METAL.format("Apple M2")),
        ({"mps"}, (15, 1), None, "16-mixed", _NAMELESS),  # torch before 2.7
        ({"mps"}, (13, 7), "Apple M3", "16-mixed", _OLD_MACOS),
        ({"cpu", "cuda"}, (15, 1), "Apple M3", "32-true", _NO_AUTOCAST),
    ],
)
def test_the_probes_of_metal_ask_torch(
    autocast_on: set[str],
    macos: tuple[int, int],
    chip: str | None,
    precision: PrecisionName,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda kind: kind in autocast_on)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *version: macos >= version)
    if chip is None:
        monkeypatch.delattr(torch.backends.mps, "get_name", raising=False)
    else:
        monkeypatch.setattr(torch.backends.mps, "get_name", lambda: chip, raising=False)
    choice = select_precision(torch.device("mps"))
    assert (choice.precision, choice.reason) == (precision, reason)


# All ranks ------------------------------------------------------------------------------------------------------------

A100, V100, GTX_1080 = (8, 0), (7, 0), (6, 1)
OLD_CPU = {"avx2"}


def choose_on_ranks(
    device: torch.device, probe: str, found: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[PrecisionChoice], list[PrecisionChoice]]:
    """What each rank chooses alone, and together: where the ranks have exchanged what they handed over."""
    monkeypatch.setattr(torch.version, "hip", None)
    votes: list[Tensor] = []

    def hand_over(vote: Tensor) -> Tensor:
        assert vote.dtype is torch.float32
        votes.append(vote)
        return vote

    def on_all(agree: Callable[[Tensor], Tensor] | None) -> list[PrecisionChoice]:
        choices = []
        for found_here in found:
            monkeypatch.setattr(hardware, probe, lambda *_, found_here=found_here: found_here)
            choices.append(select_common_precision(device, agree))
        return choices

    alone = on_all(None)
    assert on_all(hand_over) == alone  # hears nobody else
    assert len(votes) == len(found)  # each hands over once, whatever its device
    return alone, on_all(lambda _: torch.stack(votes).amax(0))


@pytest.mark.parametrize(
    ("capabilities", "precision", "emulates"),
    [
        ((A100, A100), "bf16-mixed", False),
        ((V100, V100), "16-mixed", True),
        ((A100, V100), "16-mixed", True),
        ((V100, A100), "16-mixed", True),
        ((A100, GTX_1080), "32-true", True),
        ((GTX_1080, V100), "32-true", True),
        ((A100, V100, GTX_1080), "32-true", True),
    ],
)
def test_ranks_agree_on_what_all_run_natively(
    capabilities: tuple[tuple[int, int], ...], precision: PrecisionName, emulates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, together = choose_on_ranks(torch.device("cuda"), "_cuda_capability", capabilities, monkeypatch)
    for own, choice in zip(alone, together, strict=True):
        note = f", but the device of another rank is made for '{precision}'" if own.precision != precision else ""
        assert choice == PrecisionChoice(precision, own.reason + note, emulates)


def test_ranks_of_the_same_precision_agree_on_whether_bfloat16_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank cannot tell what its CPU runs, the other can: both warn of an explicit "bf16-mixed", or neither."""
    alone, together = choose_on_ranks(torch.device("cpu"), "_cpu_flags", (None, OLD_CPU), monkeypatch)
    assert [choice.emulates_bfloat16 for choice in alone] == [False, True]
    assert together == [
        PrecisionChoice("32-true", "the device of another rank emulates bfloat16", True),
        PrecisionChoice("32-true", _OLD_CPU, True),
    ]


def test_ranks_that_do_not_emulate_stay_with_their_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, together = choose_on_ranks(torch.device("cpu"), "_cpu_flags", (None, {"amx_bf16"}), monkeypatch)
    note = ", but the device of another rank is made for '32-true'"
    assert together == [
        alone[0],
        PrecisionChoice("32-true", _CPU.format("amx_bf16") + note, False),
    ]


def test_one_process_decides_alone() -> None:
    assert select_common_precision(torch.device("cpu"), None) == select_precision(torch.device("cpu"))
    assert select_common_precision(torch.device("cpu"), None).precision == "bf16-mixed"
