"""Handwritten digits in mixed precision, and a layer that is too hot for float16.

A small convolutional network learns the 1,797 digits of scikit-learn (8 x 8 pixels, real scans); a quarter of them is
held out for the accuracy. One plugin, ``AdaptiveMixedPrecision``, chooses the precision. Two callbacks go with it:
``PrecisionFallback`` moves the run to a wider precision where the present one cannot hold it, and ``AMPMonitor`` logs
what became of the steps.

Run it from anywhere; it needs no GPU and takes seconds::

    pip install scikit-learn matplotlib
    python examples/digits.py                                      # bf16 where it is native, on a CPU else fp32
    python examples/digits.py --precision 16-mixed                 # fp16 with loss scaling
    python examples/digits.py --precision 16-mixed --hot           # activations beyond fp16's 65504: it falls back
    python examples/digits.py --precision 16-mixed --hot --scope module   # one layer in fp32, the rest stays in fp16
    python examples/digits.py --precision 16-mixed --hot --stock   # Lightning's own plugin, which learns nothing
    python examples/digits.py --precision 16-mixed --hot --report  # a page about the run: report.html

It ends with a short table and the path of a picture: the loss and the loss scale over the steps.
"""

import argparse
import csv
import logging
import math
import time
import warnings
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

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

from lightning_amp_plus import AdaptiveMixedPrecision, AMPMonitor, DynamicRangeMonitor, LossScale, PrecisionFallback

PRECISIONS = {"10.0": "16-mixed", "7.0": "bf16-mixed", "23.0": "32-true"}  # by ``amp/mantissa_bits``
BLUE, ORANGE = "#0072B2", "#D55E00"  # of Okabe and Ito: colour-blind readers tell them apart


class Gain(nn.Module):
    """Multiplies by a number."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, features: Tensor) -> Tensor:
        return features * self.gain


class DigitsNet(LightningModule):
    """Two convolutions with BatchNorm and a normalised linear layer, about 11,000 parameters.

    Args:
        gain: What the hidden features are multiplied by. The LayerNorm takes it out again, so that the network is the
            same for any gain, as long as the precision can hold the product.

    """

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.gain = Gain(gain)
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, padding=1, stride=2, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.head = nn.Sequential(nn.LayerNorm(32 * 4 * 4), nn.Linear(32 * 4 * 4, 10))
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.gain(self.features(images)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.accuracy(self(images), labels)
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


class StockMonitor(Callback):
    """Logs for Lightning's own plugin, which does not tell, two of the metrics that ``AMPMonitor`` logs for ours."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        pl_module.log("amp/loss_scale", scaler.get_scale() if scaler is not None else 1.0)
        applied = max((int(state["step"]) for state in trainer.optimizers[0].state.values()), default=0)
        pl_module.log("amp/skipped_steps", float(trainer.global_step - applied))  # Lightning counts all, AdamW its own


@dataclass
class History:
    """What the CSVLogger's ``metrics.csv`` tells about the training steps."""

    losses: list[float]
    scales: list[float]
    skipped: list[int]
    rescued: list[int]
    fallbacks: list[tuple[int, str, str]]  # the first step in the new precision, the old and the new one


def read_history(log_dir: Path, began_in: str) -> History:
    with open(log_dir / "metrics.csv", newline="") as file:
        logged = [row for row in csv.DictReader(file) if row["amp/skipped_steps"]]
    counts, rows = [0.0], []
    for row in logged:
        if row["loss"] or float(row["amp/skipped_steps"]) > counts[-1]:  # one for each step; a skipped one has no loss
            rows.append(row)
            counts.append(float(row["amp/skipped_steps"]))
    rescues = [0.0, *(float(row.get("amp/rescued_steps") or 0) for row in rows)]
    rescued = [step for step, (before, after) in enumerate(pairwise(rescues)) if after > before]
    steps = [step for step in range(len(rows)) if step not in rescued]  # of the others, which tell what the run is in
    precisions = [(0, began_in)]
    precisions += [(step, PRECISIONS.get(rows[step].get("amp/mantissa_bits", ""), began_in)) for step in steps]
    return History(
        losses=[float(row["loss"] or math.nan) for row in rows],
        scales=[float(row["amp/loss_scale"]) for row in rows],
        skipped=[step for step, (before, after) in enumerate(pairwise(counts)) if after > before],
        rescued=rescued,
        fallbacks=[(step, old, new) for (_, old), (step, new) in pairwise(precisions) if new != old],
    )


def plot(history: History, title: str, path: Path) -> None:
    """Draw the loss and the loss scale over the steps; mark the steps that were skipped, and the fallback."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    top, bottom = figure.subplots(2, sharex=True)
    steps = range(len(history.losses))
    top.plot(steps, history.losses, color=BLUE)
    top.set(title=title, ylabel="loss", yscale="log", xmargin=0.02, ymargin=0.2)
    if not any(map(math.isfinite, history.losses)):
        top.set(yscale="linear", yticks=[])
        top.text(0.5, 0.5, "NaN or inf in every step", transform=top.transAxes, ha="center")
    bottom.step(steps, history.scales, where="post", color=BLUE)
    bottom.set_yscale("log", base=2)
    bottom.set(xlabel="optimizer step", ylabel="loss scale (1: none)", ymargin=0.2)
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        marks = {"color": ORANGE, "marker": "|", "markersize": 9, "linestyle": "none", "label": "skipped step"}
        if history.skipped:
            axes.plot(history.skipped, [0.06] * len(history.skipped), transform=axes.get_xaxis_transform(), **marks)
        for step, _, precision in history.fallbacks:
            axes.axvline(step, color="black", linestyle="--", linewidth=1.2, label=f"falls back to {precision}")
    if bottom.lines[1:]:
        figure.legend(handles=bottom.lines[1:], loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small CNN on handwritten digits in mixed precision.")
    parser.add_argument("--precision", choices=("auto", "16-mixed", "bf16-mixed", "32-true"), default="auto")
    parser.add_argument("--hot", action="store_true", help="give one layer activations beyond float16's 65504")
    parser.add_argument(
        "--scope", choices=("model", "module"), default="model", help="what goes on in a wider precision"
    )
    parser.add_argument("--stock", action="store_true", help="use Lightning's own plugin instead, for comparison")
    parser.add_argument("--report", action="store_true", help="measure magnitudes too, and write a page about the run")
    parser.add_argument("--epochs", type=int, default=15, help="passes over the training images (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batch order (default: %(default)s)")
    parser.add_argument("--log-dir", default="lightning_logs/digits", help="default: %(default)s")
    parser.add_argument("--no-progress", action="store_true", help="hide the progress bar")
    arguments = parser.parse_args()
    if arguments.epochs < 1:
        parser.error(f"argument --epochs: {arguments.epochs} is less than 1; train for at least one epoch")
    if not 0 <= arguments.seed < 2**32:
        parser.error(f"argument --seed: {arguments.seed} is not between 0 and 2**32 - 1")
    if arguments.stock and (arguments.report or arguments.scope != "model"):
        parser.error("arguments --report and --scope: they are of our plugin's callbacks; leave --stock out")
    if arguments.stock and arguments.precision == "auto":
        arguments.precision = "bf16-mixed"  # Lightning does not choose
    return arguments


def main() -> None:
    arguments = parse_arguments()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # no device report, no tips
    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data are in memory already
    warnings.filterwarnings("ignore", ".*LeafSpec.*")  # Lightning 2.6 with torch 2.9 and later; harmless
    torch.set_num_threads(1)  # the layers are too small to share: two threads would mostly wait for each other
    seed_everything(arguments.seed, verbose=False)

    plugin: Precision
    callbacks: list[Callback]
    if arguments.stock:
        plugin = stock_plugin(arguments.precision)
        callbacks = [StockMonitor()]
    else:
        # A loss scale grows after 2,000 clean steps by default, which is more than this run has.
        plugin = AdaptiveMixedPrecision(arguments.precision, LossScale(growth_interval=30))
        # The table at the end is this program's own, which stock has too.
        callbacks = [PrecisionFallback(scope=arguments.scope), AMPMonitor(summary=False, report=arguments.report)]
        if arguments.report:
            callbacks.append(DynamicRangeMonitor(every_n_steps=22))
    if not arguments.no_progress:
        callbacks.append(TQDMProgressBar())
    logger = CSVLogger(arguments.log_dir, name=None)
    trainer = Trainer(
        plugins=plugin,
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
    model = DigitsNet(gain=1e5 if arguments.hot else 1.0)
    train_loader, test_loader = digits_loaders()
    start = time.perf_counter()
    trainer.fit(model, train_loader)
    seconds = time.perf_counter() - start
    accuracy = trainer.test(model, test_loader, verbose=False)[0]["accuracy"]

    began_in: str = plugin.precision
    if isinstance(plugin, AdaptiveMixedPrecision):
        began_in = plugin.state_dict()["configured_precision"]
    history = read_history(Path(logger.log_dir), began_in)
    picture = Path(logger.log_dir) / "digits.png"
    began_in += " (stock)" if arguments.stock else " (auto)" if arguments.precision == "auto" else ""
    plot(history, f"{began_in}{', hot' if arguments.hot else ''}", picture)

    kept = plugin.kept_modules if isinstance(plugin, AdaptiveMixedPrecision) else ()
    fallbacks = [f"to {new} at step {step}" for step, _, new in history.fallbacks]
    print(f"precision    {began_in}\nfell back    {', '.join(fallbacks) or 'never'}")
    print(f"applied      {len(history.losses) - len(history.skipped)}\nskipped      {len(history.skipped)}")
    print(f"rescued      {len(history.rescued)}\nin float32   {', '.join(kept) or 'no module'}")
    print(f"final scale  {history.scales[-1]:.8g}\naccuracy     {accuracy:.4f}\nseconds      {seconds:.1f}")
    print(f"picture      {picture}")


if __name__ == "__main__":
    main()
