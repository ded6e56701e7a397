"""What is concluded from magnitudes, and what a rehearsal makes of it, without a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from lightning_amp_plus.advice.advice import PrecisionAdvice, advise, corrected
from lightning_amp_plus.diagnosis.cause import Cause, Diagnosis
from lightning_amp_plus.diagnosis.fp32_modules import KeptModules
from lightning_amp_plus.dynamic_range.stats import KINDS, DynamicRange
from lightning_amp_plus.hardware.select import PrecisionChoice
from lightning_amp_plus.precisions import PrecisionName
from lightning_amp_plus.scaling.exponents import bin_of
from lightning_amp_plus.scaling.loss_scale import LossScale
from lightning_amp_plus.step.report import StepReport

HALF = PrecisionChoice("16-mixed", "it multiplies float16", emulates_bfloat16=False)
NAMES = ("body", "body.wo", "head")


def measured(
    activations: Mapping[str, float] | None = None,
    inputs: Mapping[str, float] | None = None,
    gradients: Mapping[str, float] | None = None,
    weights: Mapping[str, float] | None = None,
    names: tuple[str, ...] = NAMES,
) -> DynamicRange:
    """Largest magnitudes by the name of the module: 1 where none is given, gradients 2^-3."""
    stats = DynamicRange.empty(names)
    for kind, values, default in zip(KINDS, (activations, gradients, weights), (1.0, 2.0**-5, 2.0**-5), strict=True):
        found = [(values or {}).get(name, default) for name in names]
        stats.largest[KINDS.index(kind)] = torch.tensor(found)
    stats.largest_input = torch.tensor([(inputs or {}).get(name, 1.0) for name in names])
    stats.steps = 20
    return stats


def report(
    scale: float,
    detail: str = "wo put out inf",
    module: str = "body.wo",
    precision: PrecisionName = "16-mixed",
    cause: Cause = "forward",
    **kwargs: Any,
) -> StepReport:
    diagnosis = Diagnosis(cause, module, detail)
    return StepReport(0, 0, precision, scale, 2, "applied", diagnosis=diagnosis, **kwargs)


# The precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_what_holds_any_magnitude_is_advised_as_it_is(precision: PrecisionName) -> None:
    stats = measured(activations={"body": 1e6}, gradients={"head": 1e9})
    advice = advise(stats, PrecisionChoice(precision, "the device says so"))
    assert (advice.precision, advice.init_scale, advice.keep_fp32) == (precision, LossScale().init_scale, ())
    assert advice.reasons == {"precision": "the device says so"}


def test_a_model_within_range_goes_to_float16_as_a_whole() -> None:
    advice = advise(measured(), HALF)
    assert (advice.precision, advice.keep_fp32) == ("16-mixed", ())
    assert advice.reasons["precision"] == "it multiplies float16"
    assert set(advice.reasons) == {"precision", "init_scale"}


@pytest.mark.parametrize(("emulates", "wider"), [(False, "bf16-mixed"), (True, "32-true")])
def test_too_many_wide_modules_are_a_wider_precision_that_the_device_runs(emulates: bool, wider: str) -> None:
    stats = measured(activations={"body": 1e6, "head": 3e6})
    choice = PrecisionChoice("16-mixed", "it was asked for", emulates)
    advice = advise(stats, choice, max_modules=1)
    assert (advice.precision, advice.init_scale, advice.keep_fp32) == (wider, LossScale().init_scale, ())
    assert set(advice.reasons) == {"precision"}
    assert advice.reasons["precision"] == (
        "2 modules have numbers that float16 does not hold, with 4 times of headroom (body: activations up to 1e+06, 15"
        " times float16's 65504; head: activations up to 3e+06, 46 times float16's 65504)"
    )
    assert advise(stats, choice, max_modules=2).keep_fp32 == ("body", "head")


def test_the_model_itself_cannot_be_kept() -> None:
    advice = advise(measured(names=("", "head"), inputs={"": 1e6}), HALF)
    assert (advice.precision, advice.keep_fp32) == ("bf16-mixed", ())
    assert "(the model itself: activations up to 1e+06, 15 times float16's 65504)" in advice.reasons["precision"]


# Modules --------------------------------------------------------------------------------------------------------------


def test_a_module_is_wide_by_what_it_puts_out_or_by_what_it_gets() -> None:
    advice = advise(measured(activations={"body": 131008.0, "head": 10.0}, inputs={"head": 655040.0}), HALF)
    assert advice.keep_fp32 == ("body", "head")
    assert advice.reasons["body"] == "activations up to 1.3e+05, 2 times float16's 65504"
    assert advice.reasons["head"] == "activations up to 6.6e+05, 10 times float16's 65504"


@pytest.mark.parametrize(("headroom", "wide"), [(1.0, ()), (2.0, ()), (2.0001, ("body",)), (4.0, ("body",))])
def test_headroom_is_what_magnitudes_may_grow_by(headroom: float, wide: tuple[str, ...]) -> None:
    assert advise(measured(activations={"body": 32752.0}), HALF, headroom).keep_fp32 == wide


def test_a_gradient_that_is_too_large_at_the_lowest_scale_makes_a_module_wide() -> None:
    advice = advise(measured(gradients={"head": 1e6, "body": 0.5}), HALF)
    assert (advice.precision, advice.keep_fp32, advice.init_scale) == ("16-mixed", ("head",), 2.0**12)
    assert advice.reasons["head"] == "gradients up to 1e+06, 15 times float16's 65504"


def test_modules_whose_gradients_vanish_at_the_scale_are_told_of() -> None:
    stats = measured(gradients={"head": 0.5})
    rows = {name: row for row, name in enumerate(stats.modules)}
    stats.counts[1, rows["body"], bin_of(-60)] = 9
    stats.counts[1, rows["body"], bin_of(-5)] = 1
    stats.counts[1, rows["head"], bin_of(-1)] = 10
    assert advise(stats, HALF).reasons["underflow"] == "90% of the gradients of body vanish in float16 at 2^12"


# The loss scale -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gradients", "weights"])
@pytest.mark.parametrize(
    ("largest", "headroom", "scale"),
    [
        (2.0**-2, 1.0, 2.0**17),  # 2^15 is the largest power of two below 65504
        (2.0**-2, 2.0, 2.0**15),
        (2.0**-2, 4.0, 2.0**13),
        (0.2501, 4.0, 2.0**13),
        (0.4999, 4.0, 2.0**12),
        (1000.0, 4.0, 4.0),
        (1e4, 4.0, 1.0),
    ],
)
def test_the_scale_is_the_largest_power_of_two_that_leaves_the_headroom(
    kind: str, largest: float, headroom: float, scale: float
) -> None:
    magnitudes: dict[str, Any] = {kind: {"head": largest}}
    advice = advise(measured(**magnitudes), HALF, headroom)
    assert advice.init_scale == scale
    assert largest * scale * headroom**2 <= 65504 < largest * scale * headroom**2 * 2 or scale == 1


def test_the_scale_and_its_reason_have_the_same_numbers() -> None:
    advice = advise(measured(gradients={"head": 0.5}), HALF, headroom=4.0)
    assert advice.init_scale == 2.0**12
    assert advice.reasons["init_scale"] == (
        "the largest gradient is 0.5, at 2^12 2e+03, which leaves 32 times of headroom to 65504"
    )


def test_the_scale_stays_within_the_bounds_of_the_plugin() -> None:
    advice = advise(measured(gradients=dict.fromkeys(NAMES, 1e-10), weights=dict.fromkeys(NAMES, 1e-10)), HALF)
    assert advice.init_scale == 2.0**24
    assert advice.arguments["loss_scale"].init_scale == 2.0**24


def test_gradients_that_no_scale_brings_into_float16_are_not_left_in_it() -> None:
    advice = advise(measured(gradients={"head": 1e6}), HALF)
    assert advice.precision != "16-mixed" or "head" in advice.keep_fp32


def test_gradients_that_vanish_at_the_largest_scale_are_not_left_in_float16() -> None:
    tiny = dict.fromkeys(NAMES, 1e-30)
    assert advise(measured(gradients=tiny, weights=tiny), HALF).precision != "16-mixed"


def test_gradients_of_wide_modules_do_not_bound_the_scale() -> None:
    advice = advise(measured(activations={"head": 1e6}, gradients={"head": 1e4, "body": 0.5}), HALF)
    assert (advice.keep_fp32, advice.init_scale) == (("head",), 2.0**12)


def test_no_gradient_is_the_default_scale() -> None:
    nothing = dict.fromkeys(NAMES, 0.0)
    advice = advise(measured(gradients=nothing, weights=nothing), HALF)
    assert advice.init_scale == 2.0**16
    assert advice.reasons["init_scale"] == "the modules in float16 have shown no gradient: the default"


def test_a_model_that_is_wide_as_a_whole_is_not_said_to_have_no_gradients() -> None:
    advice = advise(measured(activations=dict.fromkeys(NAMES, 1e6)), HALF)
    assert "no gradient was measured" not in advice.reasons["init_scale"]


# The text and the arguments -------------------------------------------------------------------------------------------


def test_the_text_holds_every_number() -> None:
    assert str(advise(measured(activations={"body.wo": 131008.0}), HALF)) == (
        "16-mixed, init_scale 2^16, in float32 body.wo\n"
        "  precision: it multiplies float16\n"
        "  body.wo: activations up to 1.3e+05, 2 times float16's 65504\n"
        "  init_scale: the largest gradient is 0.031, at 2^16 2e+03, which leaves 32 times of headroom to 65504"
    )


def test_the_text_without_float16_says_nothing_of_a_scale() -> None:
    assert str(advise(measured(), PrecisionChoice("32-true", "why"))) == "32-true\n  precision: why"


def test_the_arguments_are_those_of_the_plugin() -> None:
    advice = advise(measured(activations={"body.wo": 1e6}, gradients={"head": 1.0}), HALF)
    assert advice.arguments == {
        "precision": "16-mixed",
        "loss_scale": LossScale(init_scale=2.0**11),
        "keep_fp32": ["body.wo"],
    }


def test_a_name_with_brackets_fits_its_module() -> None:
    names = ("layers.a[0]",)
    advice = advise(measured(activations={"layers.a[0]": 1e6}, names=names), HALF)
    module = nn.ModuleDict({"layers": nn.ModuleDict({"a[0]": nn.Linear(2, 2)})})
    KeptModules(advice.arguments["keep_fp32"]).attach(module, "cpu")  # which raises if a pattern fits none


# What a rehearsal makes of it -----------------------------------------------------------------------------------------


def half(**kwargs: Any) -> PrecisionAdvice:
    return advise(measured(**kwargs), HALF)


def test_a_rehearsal_that_fell_back_takes_all_of_float16_with_it() -> None:
    advice = half(activations={"body": 1e6}, gradients={"head": 1.0})
    found = corrected(advice, [report(1.0, "bmm made inf")], (), "bf16-mixed", 1.0)
    assert (found.precision, found.init_scale, found.keep_fp32) == ("bf16-mixed", LossScale().init_scale, ())
    assert found.reasons == {"precision": "in a rehearsal '16-mixed' did not hold: bmm made inf"}
    assert found.stats is advice.stats


def test_a_module_that_a_rehearsal_has_found_is_added_with_its_reason() -> None:
    advice = half(activations={"body": 1e6})
    reports = [report(2.0**16, "wo made NaN", "body.wo", kept=("body.wo",)), report(2.0**16, "other", "head")]
    found = corrected(advice, reports, ("body.wo",), "16-mixed", 2.0**16)
    assert (found.keep_fp32, found.init_scale) == (("body", "body.wo"), 2.0**16)
    assert found.reasons["body.wo"] == "in a rehearsal: wo made NaN"
    assert set(found.reasons) == {"precision", "body", "init_scale", "body.wo"}
    assert found.reasons["init_scale"] == advice.reasons["init_scale"]


def test_a_scale_that_a_rehearsal_has_lowered_is_halved_once_more() -> None:
    advice = half()
    tried = (("16-mixed", 2.0**16), ("16-mixed", 2.0**12))
    found = corrected(advice, [report(2.0**12, cause="scale", tried=tried)], (), "16-mixed", 2.0**12)
    assert (advice.init_scale, found.init_scale) == (2.0**16, 2.0**11)
    assert found.reasons["init_scale"] == "in a rehearsal gradients overflowed at 2^16, and not at 2^12"


def test_the_scale_that_a_rehearsal_has_settled_on_counts() -> None:
    """The first step that overflows is run again at 2^15, 2^14, 2^12, 2^8 and 1; the next ones find 2^5."""
    scales = [2.0**16, 2.0**15, 2.0**14, 2.0**12, 2.0**8, 1.0]
    first = report(1.0, cause="scale", tried=tuple(("16-mixed", scale) for scale in scales))
    probe = report(2.0**4, cause="scale", tried=(("16-mixed", 2.0**6), ("16-mixed", 2.0**4)))
    assert corrected(half(), [first, probe], (), "16-mixed", 2.0**5).init_scale == 2.0**4


def test_the_reason_tells_of_no_scale_that_was_not_run() -> None:
    found = corrected(half(), [report(1.0, cause="scale")], (), "16-mixed", 1.0)
    assert "twice 2^0" not in found.reasons["init_scale"]


def test_modules_that_one_step_has_found_are_not_given_the_reason_of_another() -> None:
    found = corrected(
        half(), [report(2.0**16, "wo made inf", kept=("body.wo", "head"))], ("body.wo", "head"), "16-mixed", 2.0**16
    )
    assert found.reasons["body.wo"] == "in a rehearsal: wo made inf"
    assert found.reasons["head"] != "in a rehearsal: wo made inf"


def test_a_lowered_scale_stays_above_the_floor() -> None:
    found = corrected(half(), [report(1.0, cause="scale")], (), "16-mixed", 1.0)
    assert found.init_scale == 1.0
    assert found.arguments["loss_scale"].init_scale == 1.0


def test_a_step_that_was_rescued_in_a_wider_precision_says_nothing_of_the_scale() -> None:
    advice = half()
    found = corrected(advice, [report(1.0, precision="32-true", kept=("head",))], ("head",), "16-mixed", 2.0**16)
    assert (found.init_scale, found.keep_fp32) == (advice.init_scale, ("head",))


def test_a_report_without_a_diagnosis_is_no_hindrance() -> None:
    plain = StepReport(0, 0, "16-mixed", 2.0**16, 2, "applied", kept=("head",))
    found = corrected(half(), [plain], ("head",), "16-mixed", 2.0**16)
    assert found.reasons["head"] == "in a rehearsal: it overflowed"
    assert corrected(half(), [plain], (), "32-true", 1.0).precision == "32-true"


def test_an_advice_is_not_changed_by_its_correction() -> None:
    advice = half()
    before = dict(advice.reasons)
    corrected(advice, [report(2.0**4)], ("head",), "16-mixed", 2.0**4)
    assert (advice.reasons, advice.keep_fp32, advice.init_scale) == (before, (), 2.0**16)
