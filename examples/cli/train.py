"""Handwritten digits with LightningCLI: the precision, its loss scale and its callbacks come from a YAML file.

Run it from anywhere; it needs no GPU and takes seconds::

    pip install "jsonargparse[signatures]" scikit-learn
    python examples/cli/train.py fit --config examples/cli/config.yaml
    python examples/cli/train.py fit --config examples/cli/config.yaml --trainer.plugins.precision=16-mixed

It ends with the accuracy on a quarter of the images, which it has not learned from.
"""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class DigitsNet(LightningModule):
    """A small convolutional network with BatchNorm.

    Args:
        lr: The learning rate of AdamW.

    """

    def __init__(self, lr: float = 3e-3) -> None:
        super().__init__()
        self.lr = lr
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
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.accuracy(self.net(images), labels)
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Fused and clipped by the Trainer: with Lightning's own plugin that is refused.
        return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=True)


class Digits(LightningDataModule):
    """The 1,797 digits of scikit-learn: 8 x 8 pixels, real scans, a quarter of them held out.

    Args:
        batch_size: Images in a training batch.

    """

    def __init__(self, batch_size: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # pixels are 0..16
        self.data = TensorDataset(images, torch.tensor(digits.target))
        self.train, self.held_out = train_test_split(
            range(len(self.data)), test_size=450, stratify=digits.target, random_state=0
        )

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(TensorDataset(*self.data[self.train]), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(TensorDataset(*self.data[self.held_out]), batch_size=450)


class DigitsCLI(LightningCLI):
    def after_fit(self) -> None:
        print(f"accuracy     {self.trainer.callback_metrics['accuracy']:.4f}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # the layers are too small to share: two threads would mostly wait for each other
    DigitsCLI(DigitsNet, Digits)
