"""What all tests share: one thread, since two make tiny models slower, a CPU with bfloat16, and the ``gpu`` marker."""

import pytest
import torch

from lightning_amp_plus.hardware import select as hardware


def pytest_configure() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def cpu_with_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tests run on, no test is told that bfloat16 is slow here unless it is about that."""
    monkeypatch.setattr(hardware, "_cpu_flags", lambda: {"avx512_bf16"})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
