"""A T5 that float16 cannot hold, but for one module: found by name, kept in float32, trained in fp16 all the same.

The feed-forward output ``wo`` of a T5 exceeds float16's 65504 in real checkpoints, and training ends in NaN. Here a
small T5 with random weights has one ``wo`` scaled up, and learns to copy sequences. ``PrecisionFallback`` with
``scope="module"`` runs the failed step again, finds the module, and from the third such step on keeps it alone in
float32.

Run it from anywhere; it needs no GPU and takes half a minute::

    pip install -e ".[transformers]"
    python examples/t5_overflow.py            # fp16, and fp32 for comparison: the two losses, side by side
    python examples/t5_overflow.py --stock    # Lightning's own plugin in fp16: no step is ever applied
"""

import argparse
import logging
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import T5Config, T5ForConditionalGeneration

from lightning_amp_plus import AdaptiveMixedPrecision, PrecisionFallback

VOCABULARY, LENGTH, BATCH = 64, 12, 8


class CopyT5(LightningModule):
    """A T5 of two layers that learns to repeat what it reads.

    Args:
        heat: What the ``wo`` of the first encoder block is multiplied by.

    """

    def __init__(self, heat: float = 3e6) -> None:
        super().__init__()
        config = T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
        self.t5 = T5ForConditionalGeneration(config)
        with torch.no_grad():
            self.t5.encoder.block[0].layer[1].DenseReluDense.wo.weight.mul_(heat)
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.t5(input_ids=batch, labels=batch).loss
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def train(plugin: Precision, steps: int) -> tuple[CopyT5, Precision]:
    """Train from the same weights on the same sequences, whatever the plugin."""
    seed_everything(0, verbose=False)
    model = CopyT5()
    sequences = torch.randint(1, VOCABULARY, (steps, BATCH, LENGTH))
    trainer = Trainer(
        plugins=plugin,
        callbacks=[PrecisionFallback(scope="module")] if isinstance(plugin, AdaptiveMixedPrecision) else [],
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(list(sequences), batch_size=None))  # type: ignore[arg-type]
    return model, plugin


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a T5 in fp16 that overflows in one module.")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--stock", action="store_true", help="use Lightning's own plugin instead, for comparison")
    arguments = parser.parse_args()
    if arguments.steps < 5:
        parser.error(f"argument --steps: {arguments.steps} is less than 5; the fallback alone takes three")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*LeafSpec.*")
    torch.set_num_threads(1)

    plugin: Precision = MixedPrecision("16-mixed", "cpu") if arguments.stock else AdaptiveMixedPrecision("16-mixed")
    half, plugin = train(plugin, arguments.steps)
    full, _ = train(AdaptiveMixedPrecision("32-true"), arguments.steps)
    last = max(1, arguments.steps // 5)
    ours, expected = (sum(model.losses[-last:]) / last for model in (half, full))
    print(f"precision    {plugin.precision}{' (stock)' if arguments.stock else ''}")
    if isinstance(plugin, AdaptiveMixedPrecision):
        print(f"in float32   {', '.join(plugin.kept_modules) or 'no module'}")
        print(f"rescued      {plugin.counters.rescued_steps}\nskipped      {plugin.counters.skipped_steps}")
    print(f"loss         {ours:.4f} (mean of the last {last} steps)\nin fp32      {expected:.4f}")


if __name__ == "__main__":
    main()
