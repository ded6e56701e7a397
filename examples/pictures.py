"""The pictures of the README, drawn into ``examples/pictures/``.

Run it from anywhere; it needs no GPU and takes a minute, for it trains ``digits.py`` twice::

    pip install "lightning_amp_plus[examples]"
    python examples/pictures.py

- ``formats.png``: what fp16, bf16 and fp32 can hold.
- ``loss_scale.png``: the loss scale of a run in fp16, which finds and doubles it.
- ``dynamic_range.png``: the magnitudes of a network that has a layer beyond fp16's 65504.
"""

import argparse
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_amp_plus.monitoring.plotting import plot_dynamic_range, plot_loss_scale

PICTURES = Path(__file__).parent / "pictures"
DPI = 120

# Of Okabe and Ito: colour-blind readers tell them apart. The format's name, its dtype, the colour of its curve.
FORMATS = (("fp32", torch.float32, "#0072B2"), ("bf16", torch.bfloat16, "#009E73"), ("fp16", torch.float16, "#D55E00"))


class Curve(NamedTuple):
    """What a format holds: magnitudes, and the relative distance to the next number, both as log2."""

    magnitudes: list[float]
    spacings: list[float]


def curve_of(dtype: torch.dtype) -> Curve:
    """Return the corners of a format's curve: its smallest number, its smallest normal number, its largest number.

    Among the normal numbers the spacing is ``eps``. Below them it stays at the smallest number, so that relative to
    the magnitude it grows, up to 1 for that number itself.
    """
    info = torch.finfo(dtype)
    eps, normal, largest = (math.log2(value) for value in (info.eps, info.smallest_normal, info.max))
    return Curve([normal + eps, normal, largest], [0.0, eps, eps])


def draw_formats() -> Figure:
    """Draw range against precision, for fp16, bf16 and fp32."""
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.add_subplot()
    for name, dtype, colour in FORMATS:
        magnitudes, spacings = curve_of(dtype)
        closed = [*magnitudes, magnitudes[-1]], [*spacings, 0.0]
        axes.fill_between(*closed, color=colour, alpha=0.10, linewidth=0)
        axes.plot(*closed, color=colour, linewidth=2.2, label=name)
    axes.set(xlim=(-158, 136), ylim=(1.0, -26.5), xlabel="magnitude of a number", ylabel="relative spacing of numbers")
    exponents = (-149, -126, -100, -75, -50, -24, 0, 16, 50, 75, 100, 128)
    axes.set_xticks(exponents, labels=[f"$2^{{{exponent}}}$" for exponent in exponents])
    axes.set_yticks([-23, -10, -7, 0], labels=["$2^{-23}$", "$2^{-10}$", "$2^{-7}$", "1"])
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    write(axes, "#0072B2", "fp32: the range of bf16, about 7 digits", (0, -23.6))
    write(axes, "#009E73", "bf16: the range of fp32,\nbut 8 bits: 2 to 3 digits", (82, -7.5))
    write(axes, "#D55E00", "fp16: 3 to 4 digits,\na narrow range", (1, -10.5))
    point(axes, "activations above 65504\nbecome inf in fp16", (math.log2(65504), -3), (76, -3.6))
    point(axes, "gradients below\n$2^{-24}$ ≈ 6e-8\nbecome 0 in fp16", (-24, -0.2), (-76, -3.4))
    point(axes, "below the normal range\nbits are lost", (-137.5, -11.5), (-90, -14))
    axes.annotate("", (34, -18), (-34, -18), arrowprops={"arrowstyle": "->", "color": "black"})
    axes.text(0, -18.3, "the loss scale multiplies gradients", ha="center", va="bottom", fontsize=10)
    return figure


def write(axes: Axes, colour: str, text: str, place: tuple[float, float]) -> None:
    axes.text(*place, text, color=colour, ha="center", va="bottom", fontsize=10.5, fontweight="bold")


def point(axes: Axes, text: str, at: tuple[float, float], place: tuple[float, float]) -> None:
    axes.annotate(
        text, at, place, ha="center", va="center", fontsize=10, arrowprops={"arrowstyle": "->", "color": "black"}
    )


def train_digits(folder: str, *options: str) -> Path:
    """Train the digits in fp16, and return the folder of its logs."""
    script = Path(__file__).with_name("digits.py")
    command = [sys.executable, str(script), "--precision", "16-mixed", "--report", "--no-progress", "--log-dir", folder]
    subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
    return Path(folder) / "version_0"


def save(figure: Figure, name: str, folder: Path = PICTURES) -> Path:
    """Write a picture, small enough for a README."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=DPI)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the pictures of the README.")
    parser.add_argument("--folder", type=Path, default=PICTURES, help="where to (default: %(default)s)")
    folder = parser.parse_args().folder
    print(save(draw_formats(), "formats", folder))
    with tempfile.TemporaryDirectory() as logs:
        run = train_digits(f"{logs}/plain")
        print(save(plot_loss_scale(run)[0], "loss_scale", folder))
        run = train_digits(f"{logs}/hot", "--hot", "--epochs", "3")
        print(save(plot_dynamic_range(run)[0], "dynamic_range", folder))


if __name__ == "__main__":
    main()
