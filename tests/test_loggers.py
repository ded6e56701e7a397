"""The monitors with the real loggers: CSV, TensorBoard, W&B offline, and MLflow with a file store, each read back."""

from __future__ import annotations

import csv
import json
import math
import struct
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch
from helpers import make_trainer
from namespace import NAMESPACE, AdaptiveMixedPrecision, AMPMonitor, pl
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp_plus import LossScale
from lightning_amp_plus.monitoring.incidents import read_incidents

if TYPE_CHECKING or NAMESPACE == "lightning.pytorch":
    from lightning_amp_plus import DynamicRangeMonitor
else:
    from lightning_amp_plus.pytorch_lightning import DynamicRangeMonitor

Kind = Literal["csv", "tensorboard", "wandb", "mlflow"]
KINDS: tuple[Kind, ...] = ("csv", "tensorboard", "wandb", "mlflow")
every_logger = pytest.mark.parametrize("kind", KINDS)
PICTURES = {"amp/loss_scale_history", "amp/dynamic_range"}
FILES = {"amp_incidents.jsonl", "amp_dynamic_range.json", "report.html"}
MANY = 2**24
"""Steps before the run: the counts need one bit more than float32 has."""

INCIDENTS = [(0, "retried"), (1, "retried"), (2, "skipped")]
"""The scale is found, and found more closely; the NaN."""

Series = dict[str, list[tuple[int, float]]]
"""By key, steps and values in the order in which they were logged."""

pytestmark = pytest.mark.filterwarnings(
    "ignore:Optimizer step .* was skipped",
    "ignore:.*(datetime.datetime.utcnow|pkg_resources|np.bool8).*:DeprecationWarning",  # the loggers' own
)


class Rows(pl.LightningModule):
    """Its float16 gradients are the batch times the loss scale, which overflows at first; the third batch is a NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).float().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=2.0**-10)


def batches(count: int = 6, bad: int | None = 2) -> DataLoader[Tensor]:
    x = torch.arange(1, 6 * count + 1).remainder(7).add(1).float().view(count, 2, 3)
    if bad is not None:
        x[bad, 0, 0] = math.nan
    return DataLoader(list(x), batch_size=None)  # type: ignore[arg-type]


def make_logger(kind: Kind, folder: Path) -> Any:
    if kind == "csv":
        return pl.loggers.CSVLogger(folder)
    if kind == "tensorboard":
        pytest.importorskip("tensorboard")
        return pl.loggers.TensorBoardLogger(folder)
    pytest.importorskip(kind)
    if kind == "mlflow":
        return pl.loggers.MLFlowLogger(tracking_uri=f"file:{folder}")
    return pl.loggers.WandbLogger(save_dir=folder, offline=True)


@pytest.fixture(autouse=True)
def quiet_wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No word and no network, and no run left for the next test."""
    for name, value in (("SILENT", "true"), ("MODE", "offline"), ("DIR", str(tmp_path)), ("ERROR_REPORTING", "false")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    yield
    finish_wandb()


def finish_wandb() -> None:
    try:
        import wandb
    except ModuleNotFoundError:
        return
    wandb.finish()


def fit(logger: Any, folder: Path, monitor: AMPMonitor | None = None, **kwargs: Any) -> pl.Trainer:
    """Fit with overflows at the first step and a NaN at the third; the plugin has ``MANY`` steps behind it."""
    plugin = AdaptiveMixedPrecision("16-mixed", LossScale(init_scale=2.0**20))
    state = plugin.state_dict()
    plugin.load_state_dict({**state, "counters": {**state["counters"], "applied_steps": MANY}})
    monitor = AMPMonitor(underflow=True, every_n_steps=2, report=True) if monitor is None else monitor
    options: dict[str, Any] = {"log_every_n_steps": 1, "default_root_dir": folder / "root", **kwargs}
    trainer = make_trainer(plugin, logger=logger, callbacks=[monitor, DynamicRangeMonitor(every_n_steps=2)], **options)
    trainer.fit(Rows(), batches())
    return trainer


def folder_of(logger: Any, folder: Path) -> Path:
    """Where a checkpoint of this logger's run would be, beside ``checkpoints``."""
    return folder / logger.name / logger.version if logger.log_dir is None else Path(logger.log_dir)


# What a logger has written --------------------------------------------------------------------------------------------


def read_csv(logger: Any) -> Series:
    series: Series = defaultdict(list)
    with (Path(logger.log_dir) / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            for key, value in row.items():
                if value and key.startswith("amp/"):
                    series[key].append((int(row["step"]), float(value)))
    return dict(series)


def read_tensorboard(logger: Any) -> tuple[Series, dict[str, bytes]]:
    accumulator = import_module("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(logger.log_dir, size_guidance={"scalars": 0, "images": 0})
    events.Reload()
    tags = events.Tags()
    series = {key: [(e.step, e.value) for e in events.Scalars(key)] for key in tags["scalars"]}
    images = {key: events.Images(key)[0].encoded_image_string for key in tags["images"]}
    return {key: values for key, values in series.items() if key.startswith("amp/")}, images


def records_of(path: Path) -> Iterator[bytes]:
    """The records of W&B's file, which is one of LevelDB's log format: chunks in blocks of 32 KiB."""
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, chunk = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if chunk in (1, 4):  # whole, or the last of several
            yield record
            record = b""


def read_wandb(folder: Path) -> tuple[Series, dict[str, bytes]]:
    records = import_module("wandb.proto.wandb_internal_pb2")
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    series: Series = defaultdict(list)
    images: dict[str, bytes] = {}
    for data in records_of(path):
        record = records.Record.FromString(data)
        items = record.history.item if record.WhichOneof("record_type") == "history" else ()
        row = {tuple(item.nested_key) or (item.key,): json.loads(item.value_json) for item in items}
        for (key, *inside), value in row.items():
            if inside == ["filenames"]:
                images[key] = (path.parent / "files" / value[0]).read_bytes()
            elif key.startswith("amp/") and not inside:
                series[key].append((row["trainer/global_step",], value))
    return dict(series), images


def read_mlflow(logger: Any, folder: Path) -> tuple[Series, dict[str, bytes]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"file:{folder}")
    keys = [key for key in client.get_run(logger.run_id).data.metrics if key.startswith("amp/")]
    series = {key: [(m.step, m.value) for m in client.get_metric_history(logger.run_id, key)] for key in keys}
    artifacts = [artifact.path for artifact in client.list_artifacts(logger.run_id)]
    artifact_folder = folder / logger.experiment_id / logger.run_id / "artifacts"
    images = {path.removesuffix(".png").replace("-", "/"): (artifact_folder / path).read_bytes() for path in artifacts}
    return series, images


def read(kind: Kind, logger: Any, folder: Path) -> tuple[Series, dict[str, bytes]]:
    if kind == "wandb":
        finish_wandb()
        return read_wandb(folder)
    if kind == "mlflow":
        return read_mlflow(logger, folder)
    return read_tensorboard(logger) if kind == "tensorboard" else (read_csv(logger), {})


# Tests ----------------------------------------------------------------------------------------------------------------


def test_the_csv_logger_gets_every_key_at_its_steps(tmp_path: Path) -> None:
    """What the other loggers are compared with, below. The skipped third step has the x-axis of the fourth."""
    logger = make_logger("csv", tmp_path)
    fit(logger, tmp_path)
    series = read_csv(logger)
    steps = [0, 1, 2, 2, 3, 4, 4]  # and at the end of the epoch
    assert series["amp/applied_steps"] == list(zip(steps, [MANY + n for n in (1, 2, 2, 3, 4, 5, 5)], strict=True))
    assert series["amp/skipped_steps"] == list(zip(steps, [0, 0, 1, 1, 1, 1, 1], strict=True))
    assert [step for step, _ in series["amp/grad_norm"]] == [0, 1, 2, 3, 4, 4]
    assert set(series) == {
        *("amp/applied_steps", "amp/skipped_steps", "amp/retried_attempts", "amp/rescued_steps", "amp/overflow_rate"),
        *("amp/loss_scale", "amp/mantissa_bits", "amp/grad_norm", "amp/zero_gradients"),
        *("amp/underflow", "amp/underflow_added_at_half_scale", "amp/range/updates_below_bf16"),
        *("amp/range/activations_above_fp16", "amp/range/gradients_below_fp16"),
    }


@pytest.mark.parametrize("kind", KINDS[1:])
def test_every_logger_gets_what_the_csv_logger_gets(tmp_path: Path, kind: Kind) -> None:
    logger, beside = make_logger(kind, tmp_path / kind), make_logger("csv", tmp_path / "beside")
    fit([logger, beside], tmp_path)
    series, images = read(kind, logger, tmp_path / kind)
    expected = read_csv(beside)
    if kind == "tensorboard":  # which holds float32
        expected = {
            key: [(step, float(torch.tensor(value))) for step, value in values] for key, values in expected.items()
        }
    assert series == expected
    assert set(images) == PICTURES
    assert all(image.startswith(b"\x89PNG") and len(image) > 5000 for image in images.values())


@every_logger
def test_the_files_are_beside_those_of_the_first_logger_and_nowhere_else(tmp_path: Path, kind: Kind) -> None:
    logger = make_logger(kind, tmp_path / "logs")
    fit([logger, make_logger("csv", tmp_path / "second")], tmp_path)
    folder = folder_of(logger, tmp_path / "logs")
    assert {file for file in FILES if (folder / file).is_file()} == FILES
    ours = [
        path.parent for path in tmp_path.rglob("*") if path.name.startswith(("amp_incidents", "amp_dynamic", "report"))
    ]
    assert set(ours) == {folder}
    assert [(i["step"] - MANY, *i["kinds"]) for i in read_incidents(folder)] == INCIDENTS
    assert json.loads((folder / "amp_dynamic_range.json").read_text())["steps"] == 3
    assert not list(folder.rglob("*.new"))


@every_logger
def test_two_runs_share_no_folder(tmp_path: Path, kind: Kind) -> None:
    folders = []
    for _ in range(2):
        logger = make_logger(kind, tmp_path)
        fit(logger, tmp_path, AMPMonitor(summary=False))
        folders.append(folder_of(logger, tmp_path))
        finish_wandb()
    assert folders[0] != folders[1]
    assert [len(read_incidents(folder)) for folder in folders] == [3, 3]


def test_without_a_logger_no_file_is_written(tmp_path: Path) -> None:
    fit(False, tmp_path, AMPMonitor())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("report", [False, True])
def test_a_trial_run_writes_no_file(tmp_path: Path, report: bool) -> None:
    fit(make_logger("csv", tmp_path), tmp_path, AMPMonitor(report=report), fast_dev_run=6)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_without_a_logger_the_report_goes_to_the_trainers_folder(tmp_path: Path) -> None:
    fit(False, tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "root" / "report.html"]


@pytest.mark.parametrize("report", [False, True])
def test_of_a_remote_store_nothing_is_made_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: bool) -> None:
    """``Path("memory://bucket")`` would be a folder of this machine."""
    monkeypatch.chdir(tmp_path)
    logger = pl.loggers.CSVLogger("memory://bucket")  # fsspec's own store
    fit(logger, tmp_path, AMPMonitor(report=report), default_root_dir="memory://bucket")
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize("method", ["log_image", "add_figure"])
def test_a_logger_that_cannot_take_the_picture_ends_no_run_and_says_so_once(tmp_path: Path, method: str) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space")

    logger: Any = pl.loggers.CSVLogger(tmp_path)
    setattr(logger if method == "log_image" else logger.experiment, method, fail)
    with pytest.warns(RuntimeWarning, match="could not be written: OSError: no space") as told:
        trainer = fit(logger, tmp_path)
    assert trainer.state.finished
    texts = [str(warning.message) for warning in told if "no space" in str(warning.message)]
    assert [text.split("'")[0] for text in texts] == ["AMPMonitor", "DynamicRangeMonitor"]
    assert {file for file in FILES if (Path(logger.log_dir) / file).is_file()} == FILES


def test_the_other_loggers_get_their_picture_although_one_cannot_take_it(tmp_path: Path) -> None:
    class Full(pl.loggers.CSVLogger):
        def log_image(self, *args: Any, **kwargs: Any) -> None:
            raise OSError("no space")

    logger = make_logger("tensorboard", tmp_path / "second")
    with pytest.warns(RuntimeWarning, match="could not be written"):
        fit([Full(tmp_path / "first"), logger], tmp_path)
    assert set(read_tensorboard(logger)[1]) == PICTURES
