"""A GAN in mixed precision: manual optimization with two optimizers, clipping, and schedules that wait for the steps.

The generator draws the digit that it is asked for, 8 x 8 pixels; the discriminator learns to tell its drawings from the
1,797 real scans of scikit-learn. In ``training_step`` gradients are true in every precision: clip them, look at them,
and call ``optimizer.step()``, which does nothing where they overflowed. No ``scaler`` is in sight.

Run it from anywhere; it needs no GPU and takes less than a minute::

    pip install scikit-learn matplotlib
    python examples/gan.py                          # bf16 where it is native, on a CPU else fp32
    python examples/gan.py --precision 16-mixed     # fp16 with loss scaling; minutes on a CPU

It ends with a picture of real and generated digits, and with the share of generated digits that a classifier, which has
seen only real ones, reads as the digit that was asked for. By chance that is 0.10.
"""

import argparse
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn.functional import one_hot, softplus
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

from lightning_amp_plus import AdaptiveMixedPrecision, AMPMonitor, PrecisionFallback

NOISE = 32


class DigitsGAN(LightningModule):
    """A generator and a discriminator, about 100,000 parameters each; both are told which digit it is.

    Args:
        steps: How many steps each of them makes; the learning rates fall to a hundredth over them.

    """

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.steps = steps
        self.generator = nn.Sequential(
            *(nn.Linear(NOISE + 10, 256), nn.BatchNorm1d(256), nn.ReLU()),
            *(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU()),
            *(nn.Linear(256, 64), nn.Tanh()),
        )
        self.discriminator = nn.Sequential(
            *(nn.Linear(64 + 10, 256), nn.LeakyReLU(0.2), nn.Dropout(0.3)),
            *(nn.Linear(256, 256), nn.LeakyReLU(0.2), nn.Dropout(0.3)),
            nn.Linear(256, 1),
        )

    def forward(self, digits: Tensor) -> Tensor:
        """Draw the ``digits``, each from new noise."""
        noise = torch.randn(len(digits), NOISE, device=self.device)
        return self.generator(torch.cat([noise, one_hot(digits, 10)], dim=1))

    def judge(self, images: Tensor, digits: Tensor) -> Tensor:
        """Return a logit for each image: positive where it looks real, and like its digit."""
        return self.discriminator(torch.cat([images, one_hot(digits, 10)], dim=1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        real, digits = batch
        fake = self(digits)

        loss = softplus(-self.judge(real, digits)).mean() + softplus(self.judge(fake.detach(), digits)).mean()
        self.update(loss, index=0)
        self.log("discriminator_loss", loss, prog_bar=True)

        loss = softplus(-self.judge(fake, digits)).mean()
        self.update(loss, index=1)
        self.log("generator_loss", loss, prog_bar=True)

    def update(self, loss: Tensor, index: int) -> None:
        """Make a step of the discriminator (0) or the generator (1), and one of its schedule unless it was skipped."""
        optimizers: Any = self.optimizers()
        schedulers: Any = self.lr_schedulers()
        plugin: Any = self.trainer.precision_plugin
        optimizer = optimizers[index]
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        optimizer.step()
        if not plugin.last_step_skipped:
            schedulers[index].step()

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[LinearLR]]:
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Adam(part.parameters(), lr=1e-3, betas=(0.5, 0.999))
            for part in (self.discriminator, self.generator)
        ]
        return optimizers, [LinearLR(optimizer, 1, 0.01, self.steps) for optimizer in optimizers]


def plot(real: Tensor, generated: Tensor, path: Path) -> None:
    """Draw five rows of real digits next to five of generated ones; the columns are the digits 0 to 9."""
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    for axes, title, images in zip(figure.subplots(1, 2), ("real", "generated"), (real, generated), strict=True):
        rows = nn.functional.pad(images.reshape(5, 10, 8, 8), (1, 1, 1, 1), value=-1)
        axes.imshow(rows.permute(0, 2, 1, 3).reshape(5 * 10, 10 * 10), cmap="gray", vmin=-1, vmax=1)
        axes.set(title=title, xticks=[], yticks=[])
    figure.savefig(path, dpi=150)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a GAN on handwritten digits in mixed precision.")
    parser.add_argument("--precision", choices=("auto", "16-mixed", "bf16-mixed", "32-true"), default="auto")
    parser.add_argument("--epochs", type=int, default=50, help="passes over the real images (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the noise (default: %(default)s)")
    parser.add_argument("--log-dir", default="lightning_logs/gan", help="default: %(default)s")
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

    data = load_digits()
    images, digits = torch.tensor(data.data, dtype=torch.float32) / 8 - 1, torch.tensor(data.target)  # pixels are 0..16
    loader = DataLoader(TensorDataset(images, digits), batch_size=64, shuffle=True, drop_last=True)
    model = DigitsGAN(steps=arguments.epochs * len(loader))

    plugin = AdaptiveMixedPrecision(arguments.precision)
    callbacks: list[Callback] = [PrecisionFallback(), AMPMonitor(summary=False)]
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
        log_every_n_steps=10,
        enable_progress_bar=not arguments.no_progress,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    start = time.perf_counter()
    trainer.fit(model, loader)
    seconds = time.perf_counter() - start

    asked_for = torch.arange(10).repeat(100)
    with torch.no_grad():
        generated = model.cpu().eval()(asked_for)
    reader = LogisticRegression(max_iter=1000).fit(images.numpy(), digits.numpy())
    recognised = float((reader.predict(generated.numpy()) == asked_for.numpy()).mean())
    examples = torch.stack([images[digits == digit][:5] for digit in range(10)], dim=1)
    plot(examples, generated[:50], picture := Path(logger.log_dir) / "gan.png")

    print(f"precision    {plugin.precision}{' (auto)' if arguments.precision == 'auto' else ''}")
    print(f"applied      {plugin.counters.applied_steps}\nskipped      {plugin.counters.skipped_steps}")
    print(f"recognised   {recognised:.4f} (by chance 0.10)\nseconds      {seconds:.1f}\npicture      {picture}")


if __name__ == "__main__":
    main()
