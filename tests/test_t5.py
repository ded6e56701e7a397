"""A real transformer that overflows in one module; skipped without transformers."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from lightning_amp_plus import AdaptiveMixedPrecision

pytest.importorskip("transformers")

WO = "t5.encoder.block.0.layer.1.DenseReluDense.wo"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_module_is_found_and_the_loss_follows_float32() -> None:
    train: Any = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "t5_overflow.py"))["train"]
    plugin = AdaptiveMixedPrecision("16-mixed")
    with pytest.warns(RuntimeWarning, match=rf"from now on {WO} computes in float32. {WO} put out .*float16's 65504"):
        half, _ = train(plugin, 50)
    full, _ = train(AdaptiveMixedPrecision("32-true"), 50)
    assert (plugin.precision, plugin.kept_modules) == ("16-mixed", (WO,))
    assert (plugin.counters.applied_steps, plugin.counters.rescued_steps) == (50, 3)
    assert half.losses == pytest.approx(full.losses, rel=0.02)
    assert full.losses[-1] < 0.95 * full.losses[0]
    assert not any("forward" in vars(module) for module in half.modules())
