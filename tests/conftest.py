"""What all tests share: one thread, since two make tiny models slower, and the ``gpu`` marker."""

import pytest
import torch


def pytest_configure() -> None:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
