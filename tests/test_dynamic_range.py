"""The sums of magnitudes: shares, additions, copies, and the way through JSON and a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lightning_amp_plus.dynamic_range.stats import KINDS, DynamicRange
from lightning_amp_plus.scaling.exponents import BINS, bin_of

FIELDS = ("counts", "largest", "largest_input", "above", "updates")


def stats(factor: int = 1) -> DynamicRange:
    """Two modules, no two fields alike, and none at its default."""
    made = DynamicRange.empty(("a", "b.0"))
    made.counts[0, 0, bin_of(0)] = 6 * factor
    made.counts[0, 0, bin_of(16)] = 2 * factor
    made.counts[0, 1, 0] = 5 * factor
    made.counts[1, 0, bin_of(-30)] = 1 * factor
    made.counts[1, 0, bin_of(-24)] = 3 * factor
    made.counts[1, 0, 0] = 10 * factor
    made.counts[2, 1, [0, BINS - 2, BINS - 1]] = 7 * factor
    made.above[0, 0], made.above[2, 1] = 2 * factor, 14 * factor
    made.largest[0] = torch.tensor([1e5, 0.0]) * factor
    made.largest[2, 1] = 3e38
    made.largest_input[:] = torch.tensor([3e38, 0.1]) / factor
    made.updates[:] = torch.tensor([[8, 0], [6, 0]]) * factor
    made.steps, made.loss_scale = 3 * factor, 2.0**10 / factor
    return made


def assert_same(one: DynamicRange, other: DynamicRange) -> None:
    assert (one.modules, one.steps, one.loss_scale) == (other.modules, other.steps, other.loss_scale)
    for field in FIELDS:
        assert_close(getattr(one, field), getattr(other, field), rtol=0, atol=0)


def in_json(state: dict[str, Any], folder: Path) -> Any:
    return json.loads(json.dumps(state, allow_nan=False))


def in_a_checkpoint(state: dict[str, Any], folder: Path) -> Any:
    torch.save(state, folder / "stats.pt")
    return torch.load(folder / "stats.pt", weights_only=True)


def test_the_sums_of_no_step_have_a_row_for_each_kind_and_module() -> None:
    empty = DynamicRange.empty(["a", "b"])
    assert empty.modules == ("a", "b")
    assert (empty.steps, empty.loss_scale) == (0, 1.0)
    assert empty.counts.shape == (3, 2, BINS)
    assert {field: int(getattr(empty, field).sum()) for field in FIELDS} == dict.fromkeys(FIELDS, 0)


def test_share_above_is_of_all_elements_and_zero_where_there_are_none() -> None:
    assert [stats().share_above(kind) for kind in KINDS] == [[0.25, 0], [0, 0], [0, 14 / 21]]


def test_share_below_of_activations_knows_no_loss_scale() -> None:
    assert stats().share_below("activations", 1) == [0.75, 0]
    assert stats().share_below("activations", 0) == [0, 0]


@pytest.mark.parametrize(("scale", "share"), [(1.0, 0.25), (2.0**5, 0.25), (2.0**6, 0.0), (2.0**24, 0.0), (0.5, 1.0)])
def test_share_below_of_gradients_is_at_the_loss_scale(scale: float, share: float) -> None:
    at_scale = stats()
    at_scale.loss_scale = scale
    assert at_scale.share_below("activation_gradients", -24) == [share, 0]


def test_share_below_goes_no_further_than_the_bins() -> None:
    assert stats().share_below("activation_gradients", -140) == [0, 0]
    assert stats().share_below("activations", 500) == [1, 0]


def test_share_lost_is_of_the_weights_that_were_changed() -> None:
    assert stats().share_lost() == [0.75, 0]


def test_added_are_counts_and_steps_and_of_magnitudes_the_larger_is_kept() -> None:
    total = stats()
    total.add_(stats(2))
    assert total.counts[0, 0, bin_of(16)] == 2 + 4
    assert total.above[2, 1] == 14 + 28
    assert total.updates.tolist() == [[24, 0], [18, 0]]
    assert_close(total.largest, torch.tensor([[2e5, 0], [0, 0], [0, 3e38]]))
    assert_close(total.largest_input, torch.tensor([3e38, 0.1]))
    assert (total.steps, total.loss_scale) == (9, 2.0**9)


def test_added_to_nothing_it_is_the_same() -> None:
    total = DynamicRange.empty(("a", "b.0"))
    total.add_(stats())
    assert_same(total, stats())


@pytest.mark.parametrize("copy", [DynamicRange.cpu, lambda made: made.to("cpu")])
def test_a_copy_is_the_same_and_its_own(copy: Any) -> None:
    made = stats()
    copied = copy(made)
    assert_same(copied, made)
    made.add_(stats(2))
    for field in FIELDS:
        getattr(made, field).fill_(77)
    assert_same(copied, stats())


def test_counts_beyond_what_float32_or_int32_hold_arrive_exactly() -> None:
    made = stats()
    made.counts[0, 0, 1] = 2**53 + 1
    made.largest_input[0] = torch.finfo(torch.float32).tiny / 4
    assert made.cpu().counts[0, 0, 1] == 2**53 + 1
    assert made.cpu().largest_input[0] == torch.finfo(torch.float32).tiny / 4


@pytest.mark.parametrize("through", [in_json, in_a_checkpoint])
def test_the_state_comes_back_at_values_that_are_no_defaults(through: Any, tmp_path: Path) -> None:
    assert_same(DynamicRange.from_state(through(stats().state_dict(), tmp_path)), stats())


@pytest.mark.parametrize("through", [in_json, in_a_checkpoint])
def test_the_state_of_no_modules_and_of_no_step_comes_back(through: Any, tmp_path: Path) -> None:
    for modules in ((), ("a",)):
        empty = DynamicRange.empty(modules)
        assert_same(DynamicRange.from_state(through(empty.state_dict(), tmp_path)), empty)


@pytest.mark.parametrize("index", [0, 1, BINS - 2, BINS - 1])
def test_a_histogram_of_one_bin_comes_back_where_it_was(index: int) -> None:
    made = DynamicRange.empty(("a",))
    made.counts[1, 0, index] = 4
    counts = DynamicRange.from_state(made.state_dict()).counts
    assert counts.nonzero().tolist() == [[1, 0, index]]
    assert counts[1, 0, index] == 4


def test_the_state_is_small() -> None:
    state = stats().state_dict()
    assert state["counts"][0][0] == [bin_of(0), [6, *[0] * 15, 2]]
    assert state["counts"][1][1] == []
    assert state["largest"] == [[1e5, 0], [0, 0], [0, pytest.approx(3e38)]]


def test_the_state_does_not_follow_later_steps() -> None:
    made = stats()
    state = made.state_dict()
    made.add_(stats())
    assert_same(DynamicRange.from_state(state), stats())


def test_the_state_of_a_later_version_is_refused_with_both_versions() -> None:
    state = {**stats().state_dict(), "version": 2}
    with pytest.raises(ValueError, match=r"has version 2, and this lightning_amp_plus reads up to 1: update"):
        DynamicRange.from_state(state)


def test_the_copy_to_the_host_reads_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    cpu = Tensor.cpu

    def counted(tensor: Tensor) -> Tensor:
        reads.append(tensor.numel())
        return cpu(tensor)

    monkeypatch.setattr(Tensor, "cpu", counted)
    stats().cpu()
    assert reads == [3 * 2 * BINS + 3 * 2 + 2 + 3 * 2 + 2 * 2]
