"""Handwritten digits in mixed precision, with the loss scale on the progress bar and in a picture.

A small convolutional network with BatchNorm learns the 1,797 digits of scikit-learn (8 x 8 pixels, real scans). One
plugin, ``AdaptiveMixedPrecision``, chooses the precision; one callback, ``AMPMonitor``, logs what the plugin did: the
loss scale, the steps applied and skipped, the gradient norm. A quarter of the images is held out for the accuracy.

Run it from anywhere; it needs no GPU and takes seconds::

    pip install scikit-learn matplotlib
    python examples/digits.py                          # bf16-mixed
    python examples/digits.py --precision 16-mixed     # fp16 with loss scaling
    python examples/digits.py --precision 16-mixed --stock   # Lightning's own plugin, for comparison

It ends with a short table and, except with ``--stock``, the path of a picture of the loss scale over the steps.
"""

import argparse
import csv
import logging
import time
import warnings
from pathlib import Path
from typing import Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision, Precision
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_amp_plus import AdaptiveMixedPrecision, AMPMonitor, LossScale


class DigitsNet(LightningModule):
    """Two convolutions with BatchNorm and one linear layer, about 10,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, padding=1, stride=2, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.accuracy(self.net(images), labels)
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def digits_loaders() -> tuple[DataLoader[tuple[Tensor, ...]], DataLoader[tuple[Tensor, ...]]]:
    """Return the loaders of 1,347 training and 450 test images; the split never changes, whatever ``--seed`` says."""
    digits = load_digits()
    train, test = train_test_split(range(len(digits.target)), test_size=450, stratify=digits.target, random_state=0)
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # pixels are 0..16
    labels = torch.tensor(digits.target)
    return (
        DataLoader(TensorDataset(images[train], labels[train]), batch_size=64, shuffle=True),
        DataLoader(TensorDataset(images[test], labels[test]), batch_size=450),
    )


def stock_plugin(precision: Literal["16-mixed", "bf16-mixed", "32-true"]) -> Precision:
    """Lightning's own plugin, built here because ``Trainer(precision="16-mixed")`` refuses fp16 on the CPU."""
    if precision == "32-true":
        return Precision()
    device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    return MixedPrecision(precision, device)


def plot_loss_scale(log_dir: Path, title: str) -> Path:
    """Draw ``amp/loss_scale`` over the steps from the CSVLogger's ``metrics.csv``; return the path of the PNG."""
    with open(log_dir / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["amp/loss_scale"]]
    steps = [int(row["step"]) for row in rows]
    scales = [float(row["amp/loss_scale"]) for row in rows]

    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
    axes.step(steps, scales, where="post")
    axes.set_yscale("log", base=2)
    axes.set_ylim(min(scales) / 4, max(scales) * 4)
    axes.set(xlabel="optimizer step", ylabel="loss scale", title=title)
    axes.grid(alpha=0.3)
    figure.savefig(path := log_dir / "loss_scale.png", dpi=150)
    return path


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small CNN on handwritten digits in mixed precision.")
    parser.add_argument("--precision", choices=("16-mixed", "bf16-mixed", "32-true"), default="bf16-mixed")
    parser.add_argument("--stock", action="store_true", help="use Lightning's own plugin instead, for comparison")
    parser.add_argument("--epochs", type=int, default=15, help="passes over the training images (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batch order (default: %(default)s)")
    parser.add_argument("--log-dir", default="lightning_logs/digits", help="default: %(default)s")
    parser.add_argument("--no-progress", action="store_true", help="hide the progress bar")
    arguments = parser.parse_args()
    if arguments.epochs < 1:
        parser.error(f"argument --epochs: {arguments.epochs} is less than 1; train for at least one epoch")
    if not 0 <= arguments.seed < 2**32:
        parser.error(f"argument --seed: {arguments.seed} is not between 0 and 2**32 - 1")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # no device report, no tips
    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data are in memory already
    warnings.filterwarnings("ignore", ".*LeafSpec.*")  # Lightning 2.6 with torch 2.9 and later; harmless
    torch.set_num_threads(1)  # the layers are too small to share: two threads would mostly wait for each other
    seed_everything(arguments.seed, verbose=False)

    # The default is to grow after 2,000 clean steps, which is more than this run has.
    loss_scale = LossScale(growth_interval=30)
    plugin = None if arguments.stock else AdaptiveMixedPrecision(arguments.precision, loss_scale)
    callbacks: list[Callback] = [] if arguments.stock else [AMPMonitor(prog_bar=True)]
    if not arguments.no_progress:
        callbacks.append(TQDMProgressBar())
    logger = CSVLogger(arguments.log_dir, name=None)
    trainer = Trainer(
        plugins=plugin or stock_plugin(arguments.precision),
        callbacks=callbacks,
        logger=logger,
        accelerator="auto",
        devices=1,
        max_epochs=arguments.epochs,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        enable_progress_bar=not arguments.no_progress,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    model = DigitsNet()
    train_loader, test_loader = digits_loaders()
    start = time.perf_counter()
    trainer.fit(model, train_loader)
    seconds = time.perf_counter() - start
    accuracy = trainer.test(model, test_loader, verbose=False)[0]["accuracy"]

    applied = skipped = scale = "-"
    if plugin is not None:
        applied, skipped = str(plugin.counters.applied_steps), str(plugin.counters.skipped_steps)
        scale = f"{plugin.scaler.get_scale() if plugin.scaler is not None else 1:.0f}"
    print(f"precision    {arguments.precision}{' (stock)' if arguments.stock else ''}")
    print(f"applied      {applied}\nskipped      {skipped}\nfinal scale  {scale}")
    print(f"accuracy     {accuracy:.4f}\nseconds      {seconds:.1f}")
    if plugin is not None:
        print(f"picture      {plot_loss_scale(Path(logger.log_dir), f'Loss scale, {arguments.precision}')}")


if __name__ == "__main__":
    main()
