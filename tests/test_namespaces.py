"""Both of Lightning's namespaces: the core tests in the other one, checkpoints that move, and refusals that explain."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from pytorch_lightning.demos.boring_classes import BoringModel as OtherBoringModel

import lightning_amp_plus
import lightning_amp_plus.pytorch_lightning
from lightning_amp_plus import LossScale

CORE = [f"tests/test_{name}.py" for name in ("checkpoint", "fallback", "manual_optimization", "monitor", "precision")]
BOTH: dict[str, tuple[Any, Any, Any]] = {
    "lightning.pytorch": (lightning.pytorch, lightning_amp_plus, BoringModel),
    "pytorch_lightning": (pytorch_lightning, lightning_amp_plus.pytorch_lightning, OtherBoringModel),
}
there_and_back = pytest.mark.parametrize(("here", "there"), [tuple(BOTH), tuple(BOTH)[::-1]])


def test_the_core_tests_pass_in_pytorch_lightning_too() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CORE],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "LIGHTNING_NAMESPACE": "pytorch_lightning"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    passed = int(run.stdout.rsplit(" passed", 1)[0].split()[-1])
    assert passed > 900


def make_trainer(namespace: str, plugin: Any, **kwargs: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return BOTH[namespace][0].Trainer(
        accelerator="cpu", devices=1, enable_checkpointing=False, plugins=[plugin], **quiet, **kwargs
    )


@there_and_back
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # after a skip
def test_a_checkpoint_moves_between_them(here: str, there: str, tmp_path: Path) -> None:
    def fit(namespace: str, epochs: int, path: Path | None = None) -> tuple[Any, Any]:
        _, ours, model = BOTH[namespace]
        plugin = ours.AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=2.0**22, growth_interval=5, hysteresis=2))
        callbacks = [ours.PrecisionFallback(), ours.AMPMonitor()]
        trainer = make_trainer(namespace, plugin, max_epochs=epochs, limit_train_batches=16, callbacks=callbacks)
        torch.manual_seed(0)  # of the weights and of the data
        module = model()
        trainer.fit(module, ckpt_path=path)
        return trainer, module

    trainer, _ = fit(here, 1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    state = trainer.precision_plugin.state_dict()
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["AdaptiveMixedPrecision"] == state
    assert state["counters"]["retried_attempts"] > 0
    trainer, module = fit(there, 2, tmp_path / "a.ckpt")
    uninterrupted, expected = fit(there, 2)
    assert trainer.precision_plugin.state_dict() == uninterrupted.precision_plugin.state_dict()
    torch.testing.assert_close(module.state_dict(), expected.state_dict(), rtol=0, atol=0)


@there_and_back
def test_the_refusal_of_the_wrong_one_says_what_to_import(here: str, there: str) -> None:
    plugin = BOTH[here][1].AdaptiveMixedPrecision("bf16-mixed")
    module = "lightning_amp_plus" if there == "lightning.pytorch" else "lightning_amp_plus.pytorch_lightning"
    with pytest.raises(
        Exception,
        match=rf"invalid type for plugin AdaptiveMixedPrecision\('bf16-mixed'\), made for a Trainer of {here}"
        rf" \(for one of {there} import it from {module}\)\. Expected",
    ):
        make_trainer(there, plugin)


@there_and_back
def test_callbacks_of_the_other_namespace_work(here: str, there: str) -> None:
    """Lightning does not refuse them, so that a user who mixes the imports of callbacks is served."""
    _, ours, model = BOTH[here]
    others = BOTH[there][1]
    plugin = ours.AdaptiveMixedPrecision("bf16-mixed")
    callbacks = [others.PrecisionFallback(), others.AMPMonitor()]
    trainer = make_trainer(here, plugin, max_epochs=1, limit_train_batches=2, callbacks=callbacks)
    trainer.fit(model())
    assert trainer.callback_metrics["amp/applied_steps"] == 2


BOUND = ("AMPMonitor", "AdaptiveMixedPrecision", "DynamicRangeMonitor", "PrecisionFallback")


@pytest.mark.parametrize("name", lightning_amp_plus.__all__)
def test_both_have_the_same_names(name: str) -> None:
    here, there = getattr(lightning_amp_plus, name), getattr(lightning_amp_plus.pytorch_lightning, name)
    assert (here.__qualname__, here.__doc__) == (there.__qualname__, there.__doc__)
    assert (here is there) is (name not in BOUND)
