"""The rules of a fallback as plain data: what they refuse, which rungs there are, and when a run moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_amp_plus.hardware.select import PrecisionChoice
from lightning_amp_plus.precisions import NAMES, PrecisionName
from lightning_amp_plus.step.fallback import Fallback
from lightning_amp_plus.step.report import StepReport
from lightning_amp_plus.step.rules import FallbackRules
from lightning_amp_plus.step.skips import Skips

EMULATES = PrecisionChoice("16-mixed", "float16 is native, bfloat16 is emulated", emulates_bfloat16=True)
NATIVE = PrecisionChoice("bf16-mixed", "bfloat16 is native")

REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"ladder": ()},
        r"ladder=\(\)\): it must be some of 16-mixed, bf16-mixed, 32-true, in this order and not the first",
    ),
    ({"ladder": ("16-mixed",)}, "not the first alone, or None"),
    ({"ladder": ("32-true", "16-mixed")}, "in this order"),
    ({"ladder": ("16-mixed", "16-mixed")}, "in this order"),
    ({"ladder": ("16-mixed", "64-true")}, r"ladder=\('16-mixed', '64-true'\)"),
    ({"ladder": "16-mixed"}, "ladder='16-mixed'"),
    ({"patience": 0}, r"PrecisionFallback\(patience=0\): it must be an integer of at least 1"),
    ({"patience": 2.0}, "patience=2.0"),
    ({"patience": True}, "patience=True"),
    ({"patience": 5, "within_steps": 4}, "within_steps=4.*at least 5"),
    ({"max_modules": 0}, "max_modules=0.*at least 1"),
    ({"retry_after": 0}, "retry_after=0.*at least 1"),
    ({"scope": "layer"}, "scope='layer'.*one of 'auto', 'model', 'module'"),
]


@pytest.mark.parametrize(("arguments", "text"), REFUSED)
def test_values_out_of_range_are_refused_with_what_is_legal(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        FallbackRules(**arguments)


def test_a_ladder_from_a_configuration_file_is_a_list_and_equals_the_tuple() -> None:
    ladder: Any = ["16-mixed", "32-true"]
    assert FallbackRules(ladder=ladder) == FallbackRules(ladder=("16-mixed", "32-true"))


RUNGS: list[
    tuple[tuple[PrecisionName, ...] | None, PrecisionName, tuple[PrecisionName, ...], tuple[PrecisionName, ...]]
] = [
    (None, "16-mixed", (), ("bf16-mixed", "32-true")),
    (None, "32-true", (), ()),
    (None, "16-mixed", ("32-true",), ("bf16-mixed",)),
    (("16-mixed", "32-true"), "16-mixed", (), ("32-true",)),
    (("16-mixed", "32-true"), "bf16-mixed", (), ("32-true",)),  # although it is not on the ladder itself
    (("16-mixed", "bf16-mixed"), "bf16-mixed", (), ()),
]


@pytest.mark.parametrize(("ladder", "precision", "without", "expected"), RUNGS)
def test_the_rungs_are_the_wider_ones_of_the_ladder_that_fit_from_narrow_to_wide(
    ladder: tuple[PrecisionName, ...] | None,
    precision: PrecisionName,
    without: tuple[PrecisionName, ...],
    expected: tuple[PrecisionName, ...],
) -> None:
    assert FallbackRules(ladder=ladder).rungs(precision, without) == expected


def test_a_gpu_that_emulates_bfloat16_has_no_such_rung_unless_it_is_asked_for() -> None:
    assert FallbackRules().on("cuda", EMULATES).ladder == ("16-mixed", "32-true")
    assert FallbackRules(ladder=NAMES).on("cuda", EMULATES).ladder == NAMES
    assert FallbackRules().on("cuda", NATIVE).ladder == NAMES


def test_a_cpu_has_a_rung_of_bfloat16_in_any_case() -> None:
    assert FallbackRules().on("cpu", EMULATES).ladder == NAMES


@pytest.mark.parametrize("scope", ["model", "module"])
def test_a_scope_that_was_asked_for_is_kept_on_any_device(scope: Any) -> None:
    assert {FallbackRules(scope=scope).on("cuda", choice).scope for choice in (EMULATES, NATIVE)} == {scope}


def test_the_automatic_scope_is_the_module_where_bfloat16_is_emulated_and_the_model_elsewhere() -> None:
    rules = FallbackRules(scope="auto", patience=5)
    assert rules.on("cuda", EMULATES).scope == "module"
    assert rules.on("cuda", NATIVE) == replace(rules, scope="model", ladder=NAMES)


@pytest.mark.parametrize(
    ("rescues", "moves"),
    [([7], False), ([1, 11, 12], False), ([2, 11, 12], False), ([3, 11, 12], True), ([10, 11, 12], True)],
)
def test_a_run_moves_at_the_last_of_patience_rescues_within_as_many_steps(rescues: list[int], moves: bool) -> None:
    assert FallbackRules(patience=3, within_steps=10).moves(rescues) is moves


def test_old_rescues_count_no_more_however_many_there_are() -> None:
    assert not FallbackRules(patience=3, within_steps=10).moves([0, 1, 2, 3, 4, 50, 51])


def test_the_narrower_precision_is_tried_again_after_twice_as_long_for_each_failed_trial() -> None:
    rules = FallbackRules(retry_after=10)
    firsts = [next(n for n in range(100) if rules.tries_again(n, failed)) for failed in range(4)]
    assert firsts == [10, 20, 40, 80]
    assert not FallbackRules().tries_again(10**9, 0)


def test_of_the_rescued_steps_only_those_that_may_count_are_kept() -> None:
    fallback = Fallback(Skips(10, lambda level, text: None))
    fallback.rules = FallbackRules(patience=2, within_steps=5)
    for step in (0, 10, 20, 30):
        assert not fallback.moves_at(step)
        fallback.note_rescue(StepReport(step, 0, "32-true", 1.0, 4, "applied", rescued=True), "16-mixed", None, ())
    assert fallback.state_dict()["rescues"] == [20, 30]
    assert fallback.moves_at(34)
    assert not fallback.moves_at(35)
