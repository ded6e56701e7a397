"""Why a step was not finite: each cause has a model that has it and a near miss, and is said in one sentence."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import _get_current_dispatch_mode

from lightning_amp_plus import diagnose
from lightning_amp_plus.diagnosis.cause import (
    Diagnosis,
    of_batch,
    of_error,
    of_fault,
    of_model,
    of_parameters,
    of_scale,
)
from lightning_amp_plus.diagnosis.finite import non_finite_inputs, non_finite_state
from lightning_amp_plus.diagnosis.locate import Fault
from lightning_amp_plus.precisions import PrecisionName

INF, NAN = math.inf, math.nan
ROWS = torch.ones(2, 4)
CAUSAL = torch.full((2, 2), -INF).triu(1)
Run = Callable[[], Tensor]

# Texts ----------------------------------------------------------------------------------------------------------------


def test_a_scale_is_said_with_both_numbers() -> None:
    text = "The gradients overflowed at loss scale 65536 and are finite at 256: the lower one is the remedy."
    assert of_scale(65536.0, 256.0) == Diagnosis("scale", None, text)
    assert str(of_scale(65536.0, 256.0)) == text


def test_an_overflow_is_said_with_the_number_the_limit_and_both_remedies() -> None:
    diagnosis = of_fault("forward", Fault("forward", "encoder.wo", kind="inf"), "16-mixed", "bf16-mixed", 3.1e5)
    assert (diagnosis.cause, diagnosis.module) == ("forward", "encoder.wo")
    assert str(diagnosis) == (
        "encoder.wo put out 3.1e+05, above float16's 65504; it is finite in bfloat16: run in 'bf16-mixed', or keep this"
        " module in float32 with keep_fp32=['encoder.wo']."
    )


def test_a_magnitude_below_the_limit_is_not_said_to_be_above_it() -> None:
    fault = Fault("forward", "wo", kind="nan", operation="aten.div.Tensor", line="model.py:12", largest=2.5)
    text = str(of_fault("forward", fault, "16-mixed", "32-true", 60000.0))
    assert text.startswith(
        "wo made NaN of finite numbers in float16 with aten.div.Tensor at model.py:12 (largest magnitude 2.5);"
    )


SUBJECTS: dict[str, tuple[Fault, str]] = {
    "a later call": (Fault("forward", "wo", call=3, calls=3, kind="inf"), "wo (call 3) made inf of finite numbers"),
    "the model": (Fault("forward", "", kind="inf"), "The model's own code made inf"),
    "no module": (Fault("forward", None, kind="inf"), "Code outside of all modules made inf"),
    "a backward": (Fault("backward", "wo"), "the backward of wo made inf or NaN of finite gradients in bfloat16;"),
}


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_place_begins_the_sentence(name: str) -> None:
    fault, text = SUBJECTS[name]
    assert str(of_fault(fault.phase, fault, "bf16-mixed", "32-true")).startswith(text)


def test_a_module_without_a_name_cannot_be_kept() -> None:
    diagnosis = of_fault("forward", Fault("forward", ""), "16-mixed", "32-true")
    assert diagnosis.module is None
    assert "keep_fp32" not in str(diagnosis)


@pytest.mark.parametrize(("cause", "what"), [("forward", "the loss"), ("backward", "a gradient")])
def test_a_place_that_was_not_found_is_said_to_be_somewhere(cause: Any, what: str) -> None:
    text = f"Somewhere {what} became inf or NaN in float16; try a wider precision."
    assert of_fault(cause, None, "16-mixed", None) == Diagnosis(cause, None, text)


def test_an_error_is_said_by_its_kind_and_never_by_its_text() -> None:
    try:
        raise ValueError("4242.0 is no cost")
    except ValueError as error:
        diagnosis = of_error(error, None, "16-mixed")
    assert (diagnosis.cause, diagnosis.module) == ("unsupported", None)
    pattern = r"ValueError was raised at test_diagnosis\.py:\d+ in float16, and not in a wider precision: run in one\."
    assert re.fullmatch(pattern, str(diagnosis))


def test_of_many_names_three_are_listed() -> None:
    assert "(a, b, c and 2 more)" in str(of_parameters(list("abcde")))
    assert "(a, b, c)" in str(of_batch("batch 3", list("abc")))


def test_what_only_another_rank_has_seen_is_said_without_an_empty_list_or_name() -> None:
    assert "of another rank's batch hold inf or NaN, and no precision" in str(of_batch("another rank's batch", []))
    assert of_parameters(["on another rank"]).module is None


def test_broken_parameters_are_said_with_the_checkpoint_to_restore_and_their_module() -> None:
    diagnosis = of_parameters(["encoder.wo.weight", "head.bias"], "last.ckpt")
    assert (diagnosis.cause, diagnosis.module) == ("parameters", "encoder.wo")
    assert "restore last.ckpt." in str(diagnosis)


def test_a_model_that_is_finite_nowhere_is_said_with_its_operation() -> None:
    fault = Fault("backward", "norm", operation="SqrtBackward0", line="model.py:7", kind="inf")
    diagnosis = of_model("backward", fault, "32-true")
    assert (diagnosis.cause, diagnosis.module) == ("model", "norm")
    assert str(diagnosis).startswith(
        "The gradients are not finite in float32 either: the backward of norm made inf of finite gradients with"
        " SqrtBackward0 at model.py:7. It is the model, not the precision:"
    )


# What a step is computed from -----------------------------------------------------------------------------------------


@dataclass
class Batch:
    image: Tensor


def test_inputs_that_are_not_finite_are_named_wherever_they_are() -> None:
    bad = torch.tensor([1.0, NAN])
    batch = {"image": [ROWS, bad], "mask": (bad * -1,), "graph": Batch(bad), "label": torch.tensor([1]), "name": "name"}
    names = non_finite_inputs(batch)
    assert names == ["batch['image'][1]", "batch['mask'][0]", "batch['graph'].Batch"]
    assert non_finite_inputs(bad) == ["batch"]
    assert non_finite_inputs([torch.zeros(0), ROWS.to(torch.float8_e4m3fn), torch.ones(1, device="meta")]) == []


def test_parameters_and_buffers_that_are_not_finite_are_named_but_for_those_known_to_be() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.LazyLinear(4), nn.Linear(4, 4))
    assert non_finite_state(model) == []
    with torch.no_grad():
        model[2].weight[1, 2] = NAN  # type: ignore[operator]
        model[0].running_var[1] = INF  # type: ignore[operator]
    assert non_finite_state(model) == ["2.weight", "0.running_var"]
    assert non_finite_state(model, ("0.running_var",)) == ["2.weight"]


# Causes ---------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """``body`` and ``head``, and between them a function."""

    def __init__(self, function: Callable[[Tensor], Tensor] = torch.relu, weight: float = 0.25) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.function = function
        nn.init.constant_(self.body.weight, 0.25)
        nn.init.constant_(self.head.weight, weight)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.function(self.body(rows)))


def why(model: nn.Module, run: Run, precision: PrecisionName = "16-mixed", batch: Any = None) -> Diagnosis:
    diagnosis = diagnose(model, run, precision, batch)
    assert diagnosis is not None
    return diagnosis


def test_a_run_that_is_finite_at_once_has_no_diagnosis() -> None:
    model = Net()
    assert diagnose(model, lambda: model(ROWS).sum().float() * 1e-3, "16-mixed") is None


def test_gradients_above_float16_at_the_first_scale_are_of_the_scale() -> None:
    model = Net()
    diagnosis = why(model, lambda: model(ROWS).float().sum() * 16)  # 16 * 2^12 is above 65504
    assert diagnosis.cause == "scale"
    assert "overflowed at loss scale 4096 and are finite at 256" in str(diagnosis)


class Cost(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, rows: Tensor) -> Tensor:
        return (rows.float() * self.factor).sum()


def test_gradients_that_no_scale_helps_are_of_the_backward_and_those_that_one_does_are_not() -> None:
    model, near = nn.Sequential(Net(), Cost(1e5)), nn.Sequential(Net(), Cost(1e4))
    diagnosis = why(model, lambda: model(ROWS))
    assert (diagnosis.cause, diagnosis.module) == ("backward", "1")
    assert "(largest magnitude 1e+05); it is finite in float32" in str(diagnosis)
    assert why(near, lambda: near(ROWS)).cause == "scale"


def test_a_log_of_a_softmax_that_only_float16_rounds_to_zero_is_of_the_forward() -> None:
    model = Net(
        lambda rows: (rows * torch.tensor([0.0, 0.0, 0.0, 30.0], dtype=rows.dtype)).softmax(-1, rows.dtype).log()
    )
    diagnosis = why(model, lambda: model(ROWS).float().mean() * 2.0**-10)
    assert (diagnosis.cause, diagnosis.module) == ("forward", None)
    assert "made inf of finite numbers in float16 with aten.log at test_diagnosis.py:" in str(diagnosis)


def test_an_output_above_float16_is_of_the_forward_and_one_below_it_is_not() -> None:
    wide, near = Net(weight=3e4), Net(weight=1e4)
    diagnosis = why(wide, lambda: wide(ROWS).float().mean())
    assert (diagnosis.cause, diagnosis.module) == ("forward", "head")
    assert str(diagnosis).startswith("head put out 1.2e+05, above float16's 65504; it is finite in float32")
    assert diagnose(near, lambda: near(ROWS).float().mean() * 2.0**-16, "16-mixed") is None


def test_an_overflow_of_float16_is_none_of_bfloat16() -> None:
    model = Net(weight=3e4)
    assert diagnose(model, lambda: model(ROWS).float().mean(), "bf16-mixed") is None


LEGAL: dict[str, Callable[[Tensor], Tensor]] = {
    "causal mask": lambda rows: (rows @ rows.t() + CAUSAL).softmax(-1) @ rows,
    "masked fill": lambda rows: (rows @ rows.t()).masked_fill(CAUSAL.isinf(), -INF).softmax(-1) @ rows,
    "running maximum": lambda rows: torch.maximum(torch.full_like(rows, -INF), rows),
}


@pytest.mark.parametrize("name", LEGAL)
def test_inf_that_is_meant_is_no_cause_and_does_not_hide_one(name: str) -> None:
    model, wide = Net(LEGAL[name]), Net(LEGAL[name], 3e4)
    assert diagnose(model, lambda: model(ROWS).float().sum() * 2.0**-8, "16-mixed") is None
    assert why(wide, lambda: wide(ROWS).float().mean(), batch=(ROWS, CAUSAL)).module == "head"


def test_nan_in_the_inputs_is_of_the_batch_and_the_tensor_is_named() -> None:
    model, rows = Net(), torch.tensor([[1.0, NAN, 1.0, 1.0]])
    diagnosis = why(model, lambda: model(rows).float().sum(), batch={"rows": [rows]})
    assert diagnosis.cause == "batch"
    assert "(batch['rows'][0])" in str(diagnosis)


def test_targets_marked_by_nan_are_not_to_blame_for_an_overflow() -> None:
    model, targets = Net(weight=3e4), torch.tensor([[1.0, NAN, 1.0, 1.0], [NAN, 1.0, 1.0, 1.0]])
    is_given = ~targets.isnan()

    def run() -> Tensor:
        return (model(ROWS).float()[is_given] - targets[is_given]).abs().mean()

    diagnosis = why(model, run, batch=(ROWS, targets))
    assert (diagnosis.cause, diagnosis.module) == ("forward", "head")


def test_parameters_that_are_not_finite_are_named() -> None:
    model = Net()
    with torch.no_grad():
        model.head.weight[1, 1] = NAN
    diagnosis = why(model, lambda: model(ROWS).sum())
    assert (diagnosis.cause, diagnosis.module) == ("parameters", "head")
    assert "(head.weight)" in str(diagnosis)


@pytest.mark.parametrize("number", [INF, -INF, NAN])
def test_a_buffer_that_holds_inf_from_the_start_is_not_to_blame(number: float) -> None:
    model = Net(weight=3e4)
    model.register_buffer("smallest", torch.tensor(number))
    assert why(model, lambda: model(ROWS).float().mean()).cause == "forward"
    model = Net()
    model.register_buffer("smallest", torch.tensor(number))
    assert why(model, lambda: model.body(ROWS * 0).float().log().sum()).cause == "model"


def test_a_loss_that_no_precision_makes_finite_is_of_the_model_with_the_operation() -> None:
    model = Net(lambda rows: (rows.float() - rows.float()).log())
    diagnosis = why(model, lambda: model(ROWS).sum(), batch=ROWS)
    assert diagnosis.cause == "model"
    assert "the model's own code made inf of finite numbers with aten.log at test_diagnosis.py:" in str(diagnosis)


def test_gradients_that_no_precision_makes_finite_are_of_the_model_with_the_node() -> None:
    model = Net(lambda rows: (rows.float() - rows.float()).sqrt())
    diagnosis = why(model, lambda: model(ROWS).float().sum())
    assert diagnosis.cause == "model"
    assert "finite gradients with SqrtBackward0 at test_diagnosis.py:" in str(diagnosis)


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_a_broken_model_is_told_in_every_precision(precision: PrecisionName) -> None:
    model = Net(lambda rows: (rows.float() - rows.float()).log())
    assert why(model, lambda: model(ROWS).sum(), precision).cause == "model"


def test_an_error_that_float32_does_not_raise_is_of_an_unsupported_operation() -> None:
    model = Net(lambda rows: rows.masked_fill(CAUSAL.isinf()[:, :1], -1e9).softmax(-1))
    diagnosis = why(model, lambda: model(ROWS).float().sum())
    assert diagnosis.cause == "unsupported"
    assert str(diagnosis).startswith("RuntimeError was raised at test_diagnosis.py:")


def test_an_error_of_a_backward_that_float32_does_not_raise_is_unsupported_too() -> None:
    class Matched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: Tensor) -> Tensor:
            return rows.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            if gradient.dtype == torch.float16:
                raise ValueError("4242.0 is no cost")
            return gradient

    model = Net(Matched.apply)
    diagnosis = why(model, lambda: model(ROWS).float().sum())
    assert diagnosis.cause == "unsupported"
    assert "4242" not in str(diagnosis)


def test_a_recurrent_net_without_a_kernel_for_float16_is_unsupported() -> None:
    model, rows = nn.Sequential(nn.LSTM(4, 4)), torch.ones(3, 2, 4)
    try:
        with torch.autocast("cpu", torch.float16):
            model(rows)[0].float().sum().backward()
    except RuntimeError:
        diagnosis = why(model, lambda: model(rows)[0].float().sum())
        assert (diagnosis.cause, diagnosis.module) == ("unsupported", "0")
    else:
        pytest.skip("this CPU has the kernel")


@pytest.mark.parametrize("error", [KeyError("mine"), FloatingPointError("mine"), MemoryError("mine")], ids=repr)
def test_an_error_that_float32_raises_too_is_raised_as_it_is(error: Exception) -> None:
    model = Net()

    def run() -> Tensor:
        raise error

    with pytest.raises(type(error)) as raised:
        diagnose(model, run, "16-mixed")
    assert raised.value is error


@pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="eager compiled code: torch 2.6")
@pytest.mark.parametrize("is_child", [True, False])
def test_a_compiled_model_is_told_like_any_other(is_child: bool) -> None:
    net: Any = torch.compile(Net(weight=3e4), backend="eager")
    model = nn.Sequential(net) if is_child else net
    diagnosis = why(model, lambda: model(ROWS).float().mean())
    assert (diagnosis.cause, diagnosis.module) == ("forward", "0.head" if is_child else "head")


# Without a trace ------------------------------------------------------------------------------------------------------


def noisy(rows: Tensor) -> Tensor:
    return nn.functional.dropout(rows, 0.5) + torch.rand_like(rows)


def raises(rows: Tensor) -> Tensor:
    torch.rand(1)
    raise KeyError("mine")


FAILS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "none": (noisy, 0.25, 2.0**-18),
    "scale": (noisy, 0.25, 16.0),
    "forward": (noisy, 3e4, 1.0),
    "model": (lambda rows: (noisy(rows).float() * 0).log(), 0.25, 1.0),
    "unsupported": (lambda rows: noisy(rows).masked_fill(rows > 0, -1e9), 0.25, 2.0**-18),
    "error": (raises, 0.25, 1.0),
}


@pytest.mark.parametrize("name", FAILS)
def test_nothing_of_the_model_is_changed_bit_for_bit_and_nothing_is_left_on_it(name: str) -> None:
    function, weight, factor = FAILS[name]
    torch.manual_seed(1)
    net = Net(function, weight)
    model: Any = nn.Sequential(nn.BatchNorm1d(4), net)
    net.head.weight.grad = torch.full((4, 4), 3.0)
    gradient = net.head.weight.grad
    rows = torch.randn(8, 4)

    def state() -> list[Any]:
        return [p.detach().clone() for p in [*model.parameters(), *model.buffers()]] + [torch.get_rng_state()]

    def attributes() -> list[Any]:
        return [{key: repr(value) for key, value in vars(part).items()} for part in model.modules()]

    before, kept = state(), attributes()
    try:
        diagnosis = diagnose(model, lambda: model(rows).float().mean() * factor, "16-mixed")
    except KeyError:
        assert name == "error"
    else:
        assert (diagnosis.cause if diagnosis else "none") == name
    assert_close(state(), before, rtol=0, atol=0, equal_nan=True)
    assert attributes() == kept
    assert net.head.weight.grad is gradient
    assert torch.equal(gradient, torch.full((4, 4), 3.0))
    assert net.body.weight.grad is None
    assert not torch.is_anomaly_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert _get_current_dispatch_mode() is None


def test_no_message_tells_numbers_of_the_data_but_for_a_largest_magnitude() -> None:
    model, rows = Net(), torch.tensor([[1234.0, 777.0, NAN, 555.0]])
    for batch in ({"rows": rows}, None):
        text = str(why(model, lambda: model(rows).float().sum(), batch=batch))
        assert not re.search("1234|777|555", text)
    targets = torch.tensor([[777.0, 555.0, 1234.0, 333.0]] * 2)
    wide = Net(weight=3e4)
    assert not re.search("1234|777|555", str(why(wide, lambda: (wide(ROWS) - targets).float().mean(), batch=targets)))
