"""LightningCLI in both namespaces: what a YAML file and the command line build, print, explain, refuse and run."""

import csv
import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch.cli
import pytest
import pytorch_lightning.cli
import torch
from lightning.pytorch.demos import boring_classes
from pytorch_lightning.demos import boring_classes as other_boring_classes

import lightning_amp_plus
import lightning_amp_plus.pytorch_lightning
from lightning_amp_plus import LossScale

pytest.importorskip("jsonargparse")


@dataclass(frozen=True)
class World:
    """A namespace of Lightning, with our classes for it, and how a user spells their home."""

    pl: ModuleType
    boring: ModuleType
    ours: ModuleType

    def run(self, *args: str, cli: Any = None, **kwargs: Any) -> Any:
        """What ``python train.py ARGS`` does, if it ends with ``LightningCLI(BoringModel, BoringDataModule)``."""
        return (cli or self.pl.cli.LightningCLI)(
            self.boring.BoringModel,
            self.boring.BoringDataModule,
            args=list(args),
            run=args[:1] == ("fit",),
            seed_everything_default=False,
            trainer_defaults=QUIET,
            **kwargs,
        )

    def path(self, name: str) -> str:
        return f"{self.ours.__name__}.{name}"


QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
WORLDS = (
    World(lightning.pytorch, boring_classes, lightning_amp_plus),
    World(pytorch_lightning, other_boring_classes, lightning_amp_plus.pytorch_lightning),
)
NON_DEFAULT: dict[str, dict[str, Any]] = {
    "LossScale": {
        "init_scale": 1024,
        "growth_factor": 4,
        "backoff_factor": 0.25,
        "growth_interval": 7,
        "min_scale": 2,
        "max_scale": 32768,
        "hysteresis": 3,
        "dynamic": False,
    },
    "AdaptiveMixedPrecision": {
        "precision": "16-mixed",
        "loss_scale": None,  # see below
        "max_skipped": 5,
        "retries": 2,
        "exclude_buffers": ["*.queue"],
        "keep_fp32": ["lay*"],
    },
    "PrecisionFallback": {
        "ladder": ["16-mixed", "32-true"],
        "patience": 2,
        "within_steps": 50,
        "scope": "auto",
        "max_modules": 4,
        "retry_after": 1000,
    },
    "AMPMonitor": {
        "prog_bar": False,
        "underflow": True,
        "every_n_steps": 7,
        "incidents": False,
        "summary": False,
        "report": True,
    },
    "DynamicRangeMonitor": {"every_n_steps": 9},
}
OPTION = {
    "AdaptiveMixedPrecision": "plugins",
    "PrecisionFallback": "callbacks",
    "AMPMonitor": "callbacks",
    "DynamicRangeMonitor": "callbacks",
}


@pytest.fixture(autouse=True)
def no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI warns if there is one besides its ``args``."""
    monkeypatch.setattr(sys, "argv", ["train.py"])


@pytest.fixture(params=WORLDS, ids=lambda world: world.pl.__name__)
def world(request: pytest.FixtureRequest) -> World:
    return request.param


def config_of(world: World, loss_scale: Any) -> dict[str, Any]:
    arguments = {**NON_DEFAULT, "AdaptiveMixedPrecision": {**NON_DEFAULT["AdaptiveMixedPrecision"]}}
    arguments["AdaptiveMixedPrecision"]["loss_scale"] = loss_scale
    blocks = {name: {"class_path": world.path(name), "init_args": arguments[name]} for name in OPTION}
    return {
        "trainer": {
            "plugins": [blocks["AdaptiveMixedPrecision"]],
            "callbacks": [blocks["PrecisionFallback"], blocks["AMPMonitor"], blocks["DynamicRangeMonitor"]],
        }
    }


def read_back(cli: Any) -> dict[str, dict[str, Any]]:
    """The arguments that what was built was given, and the classes, which say the namespace."""
    plugin = cli.trainer.precision_plugin
    things: dict[str, Any] = {"AdaptiveMixedPrecision": plugin}
    read = {
        "AdaptiveMixedPrecision": {
            "precision": plugin.precision,
            "loss_scale": plugin.scaler and plugin.scaler.loss_scale,
            "max_skipped": plugin.max_skipped,
            "retries": plugin._engine.retries,
            "exclude_buffers": plugin._exclude_buffers,
            "keep_fp32": plugin._engine.kept.patterns,
        }
    }
    for callback in cli.trainer.callbacks:
        if (name := type(callback).__name__) in NON_DEFAULT:
            things[name] = callback
            holder = callback.rules if name == "PrecisionFallback" else callback
            read[name] = {argument: getattr(holder, argument) for argument in NON_DEFAULT[name]}
    for name, thing in things.items():
        read[name]["class"] = type(thing)
    return read


def written(path: Path, config: dict[str, Any] | str) -> str:
    """Write a configuration: YAML as it is, or a dict as JSON, which is YAML too."""
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return f"--config={path}"


# Built ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NON_DEFAULT)
def test_the_table_has_every_argument_at_another_value_than_its_default(name: str) -> None:
    parameters = inspect.signature(getattr(lightning_amp_plus, name)).parameters
    assert list(parameters) == list(NON_DEFAULT[name])
    for argument, value in NON_DEFAULT[name].items():
        assert (value != parameters[argument].default) is (argument != "loss_scale")


@pytest.mark.parametrize("has_class_path", [False, True])
def test_yaml_sets_every_argument(world: World, has_class_path: bool, tmp_path: Path) -> None:
    rules = NON_DEFAULT["LossScale"]
    loss_scale = {"class_path": world.path("LossScale"), "init_args": rules} if has_class_path else rules
    cli = world.run(written(tmp_path / "config.yaml", config_of(world, loss_scale)))
    read = read_back(cli)
    assert read == {
        "AdaptiveMixedPrecision": {
            "precision": "16-mixed",
            "loss_scale": LossScale(**rules),
            "max_skipped": 5,
            "retries": 2,
            "exclude_buffers": ("*.queue",),
            "keep_fp32": ("lay*",),
            "class": world.ours.AdaptiveMixedPrecision,
        },
        "PrecisionFallback": {
            **NON_DEFAULT["PrecisionFallback"],
            "ladder": ("16-mixed", "32-true"),
            "class": world.ours.PrecisionFallback,
        },
        "AMPMonitor": {**NON_DEFAULT["AMPMonitor"], "class": world.ours.AMPMonitor},
        "DynamicRangeMonitor": {**NON_DEFAULT["DynamicRangeMonitor"], "class": world.ours.DynamicRangeMonitor},
    }
    built = dataclasses.asdict(read["AdaptiveMixedPrecision"]["loss_scale"])
    assert {key: type(value) for key, value in built.items()} == {
        key: type(value) for key, value in dataclasses.asdict(LossScale()).items()
    }  # the file has integers where floats are wanted


@pytest.mark.parametrize("precision", ["auto", "16-mixed", "bf16-mixed", "32-true"])
def test_every_precision_can_be_chosen_on_the_command_line(world: World, precision: str) -> None:
    cli = world.run(
        f"--trainer.plugins={world.path('AdaptiveMixedPrecision')}", f"--trainer.plugins.precision={precision}"
    )
    assert cli.trainer.precision_plugin.precision == precision


def test_short_forms_on_the_command_line(world: World) -> None:
    read = read_back(
        world.run(
            f"--trainer.plugins={world.path('AdaptiveMixedPrecision')}",
            "--trainer.plugins.precision=16-mixed",
            "--trainer.plugins.loss_scale.init_scale=1024",
            "--trainer.plugins.loss_scale.hysteresis=3",
            f"--trainer.callbacks+={world.path('AMPMonitor')}",
            "--trainer.callbacks.prog_bar=false",
            f"--trainer.callbacks+={world.path('PrecisionFallback')}",
            "--trainer.callbacks.patience=2",
        )
    )
    plugin = read["AdaptiveMixedPrecision"]
    assert (plugin["class"], plugin["precision"]) == (world.ours.AdaptiveMixedPrecision, "16-mixed")
    assert plugin["loss_scale"] == LossScale(init_scale=1024.0, hysteresis=3)
    assert (read["AMPMonitor"]["class"], read["AMPMonitor"]["prog_bar"]) == (world.ours.AMPMonitor, False)
    assert (read["PrecisionFallback"]["class"], read["PrecisionFallback"]["patience"]) == (
        world.ours.PrecisionFallback,
        2,
    )


def test_the_command_line_overrides_one_argument_of_a_file(world: World, tmp_path: Path) -> None:
    config = written(tmp_path / "config.yaml", config_of(world, NON_DEFAULT["LossScale"]))
    before = read_back(world.run(config))
    after = read_back(world.run(config, "--trainer.plugins.max_skipped=6", "--trainer.plugins.loss_scale.hysteresis=4"))
    before["AdaptiveMixedPrecision"]["max_skipped"] = 6
    before["AdaptiveMixedPrecision"]["loss_scale"] = LossScale(**{**NON_DEFAULT["LossScale"], "hysteresis": 4})
    assert after == before


@pytest.mark.parametrize(
    ("text", "number"), [("65536", 65536.0), ("1e4", 1e4), ("1.5e+3", 1500.0), ("4096.0", 4096.0), ("'512'", 512.0)]
)
def test_ways_to_write_a_scale(world: World, text: str, number: float, tmp_path: Path) -> None:
    """To YAML itself ``1e4`` is a string."""
    file = f"""
trainer:
  plugins:
    class_path: {world.path("AdaptiveMixedPrecision")}
    init_args:
      precision: 16-mixed
      loss_scale:
        init_scale: {text}
"""
    read = read_back(world.run(written(tmp_path / "config.yaml", file)))
    assert read["AdaptiveMixedPrecision"]["loss_scale"] == LossScale(init_scale=number)


class WithKeywords(lightning_amp_plus.AdaptiveMixedPrecision):
    def __init__(self, mine: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mine = mine


class OtherWithKeywords(lightning_amp_plus.pytorch_lightning.AdaptiveMixedPrecision):
    def __init__(self, mine: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mine = mine


def test_a_users_subclass_that_hands_its_keywords_on(world: World) -> None:
    subclass = WithKeywords if world is WORLDS[0] else OtherWithKeywords
    cli = world.run(
        f"--trainer.plugins={__name__}.{subclass.__name__}",
        "--trainer.plugins.mine=2",
        "--trainer.plugins.precision=16-mixed",
        "--trainer.plugins.loss_scale.init_scale=1024",
        "--trainer.plugins.max_skipped=5",
    )
    assert cli.trainer.precision_plugin.mine == 2
    assert read_back(cli)["AdaptiveMixedPrecision"] == {
        "class": subclass,
        "precision": "16-mixed",
        "retries": 5,
        "exclude_buffers": (),
        "keep_fp32": (),
        "loss_scale": LossScale(init_scale=1024.0),
        "max_skipped": 5,
    }


def test_a_callback_that_the_program_adds(world: World) -> None:
    class Program(world.pl.cli.LightningCLI):  # type: ignore[name-defined]
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.add_lightning_class_args(world.ours.PrecisionFallback, "fallback")
            parser.set_defaults({"fallback.patience": 4})

    plugin = f"--trainer.plugins={world.path('AdaptiveMixedPrecision')}"
    options = ["--fallback.ladder=[16-mixed,32-true]", "--fallback.scope=module"]
    read = read_back(world.run(plugin, *options, cli=Program))
    assert read["PrecisionFallback"] == {
        "class": world.ours.PrecisionFallback,
        "ladder": ("16-mixed", "32-true"),
        "patience": 4,
        "within_steps": 200,
        "scope": "module",
        "max_modules": 8,
        "retry_after": None,
    }


# Printed and explained ------------------------------------------------------------------------------------------------


def printed(world: World, capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """What a run prints that ends at once, without an error."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_info:
        world.run(*args)
    out, err = capsys.readouterr()
    assert exit_info.value.code in (0, None), err
    return out


def test_a_printed_config_prints_and_builds_the_same(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(tmp_path / "config.yaml", config_of(world, NON_DEFAULT["LossScale"]))
    text = printed(world, capsys, config, "--print_config")
    for rules in ("init_scale: 1024.0", "backoff_factor: 0.25", "dynamic: false", "patience: 2", "max_skipped: 5"):
        assert f" {rules}\n" in text
    again = written(tmp_path / "printed.yaml", text)
    assert printed(world, capsys, again, "--print_config") == text
    assert read_back(world.run(again)) == read_back(world.run(config))


def test_a_config_printed_for_the_bare_classes_has_their_defaults(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = [
        f"--trainer.plugins={world.path('AdaptiveMixedPrecision')}",
        f"--trainer.callbacks+={world.path('PrecisionFallback')}",
        f"--trainer.callbacks+={world.path('AMPMonitor')}",
        f"--trainer.callbacks+={world.path('DynamicRangeMonitor')}",
    ]
    text = printed(world, capsys, *bare, "--print_config")
    again = written(tmp_path / "printed.yaml", text)
    assert printed(world, capsys, again, "--print_config") == text
    assert read_back(world.run(again)) == {
        name: {
            **{key: value.default for key, value in inspect.signature(getattr(world.ours, name)).parameters.items()},
            "class": getattr(world.ours, name),
        }
        for name in OPTION
    }


@pytest.mark.parametrize("name", NON_DEFAULT)
def test_help_has_the_docstring_of_every_argument(
    world: World, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    if name == "LossScale":
        option = "--trainer.plugins.loss_scale"
        text = printed(world, capsys, "--trainer.plugins.help", world.path("AdaptiveMixedPrecision"), f"{option}.help")
    else:
        option = f"--trainer.{OPTION[name]}"
        text = printed(world, capsys, f"{option}.help", world.path(name))
    text = " ".join(text.split())
    thing = getattr(world.ours, name)
    doc = inspect.cleandoc(thing.__doc__)
    assert doc.splitlines()[0].rstrip(".") in text
    for argument in inspect.signature(thing).parameters:
        found = re.search(rf"^    {argument}: (.+?)(?=^    \w+: |\n\n)", doc, re.DOTALL | re.MULTILINE)
        assert found, argument
        description = " ".join(found[1].split())
        assert re.search(rf"{option}\.{argument}\+? \S+ {re.escape(description)} \(type: ", text), description


# Refused --------------------------------------------------------------------------------------------------------------

FOUR = "'auto', '16-mixed', 'bf16-mixed', '32-true'"
LADDER = "it must be some of 16-mixed, bf16-mixed, 32-true, in this order and not the first alone, or None."
SCOPE = "'auto', 'model', 'module'"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # what only we can know: our words
    ("AdaptiveMixedPrecision", {"max_skipped": 0}, "(max_skipped=0): it must be an integer of at least 1."),
    ("LossScale", {"init_scale": -1}, "(init_scale=-1.0): it must be between min_scale=1 and max_scale=1.67772e+07."),
    ("LossScale", {"init_scale": 64, "max_scale": 32}, "(init_scale=64.0): it must be between min_scale=1 and max"),
    ("LossScale", {"min_scale": 0}, "(min_scale=0.0): it must be between 2**-126 and 2**126."),
    ("LossScale", {"min_scale": 8, "max_scale": 4}, "(max_scale=4.0): it must be between min_scale and 2**126."),
    ("LossScale", {"growth_factor": 1}, "(growth_factor=1.0): it must be finite and above 1."),
    ("LossScale", {"backoff_factor": 1}, "(backoff_factor=1.0): it must be between 0 and 1, both excluded."),
    ("LossScale", {"growth_interval": 0}, "(growth_interval=0): it must be at least 1."),
    ("LossScale", {"hysteresis": 0}, "(hysteresis=0): it must be at least 1."),
    ("PrecisionFallback", {"ladder": ["32-true", "16-mixed"]}, f"(ladder=('32-true', '16-mixed')): {LADDER}"),
    ("PrecisionFallback", {"ladder": ["32-true", "32-true"]}, f"(ladder=('32-true', '32-true')): {LADDER}"),
    ("PrecisionFallback", {"ladder": []}, f"(ladder=()): {LADDER}"),
    ("PrecisionFallback", {"patience": 0}, "(patience=0): it must be an integer of at least 1."),
    ("PrecisionFallback", {"within_steps": 2}, "(within_steps=2): it must be an integer of at least 3."),
    ("PrecisionFallback", {"max_modules": 0}, "(max_modules=0): it must be an integer of at least 1."),
    ("PrecisionFallback", {"retry_after": 0}, "(retry_after=0): it must be an integer of at least 1."),
    # what the types say: the words of jsonargparse, with the legal values
    ("AdaptiveMixedPrecision", {"precision": "64-mixed"}, f"[{FOUR}]. Got value: 64-mixed"),
    ("AdaptiveMixedPrecision", {"precision": 16}, f"[{FOUR}]. Got value: 16"),
    ("AdaptiveMixedPrecision", {"max_skipped": True}, "Expected a <class 'int'>. Got value: True"),
    ("LossScale", {"init_scale": "2**12"}, "Expected a <class 'float'>. Got value: 2**12"),
    ("LossScale", {"growth_interval": 1.5}, "Expected a <class 'int'>. Got value: 1.5"),
    ("PrecisionFallback", {"ladder": ["16-mixed", "64-true"]}, "['16-mixed', 'bf16-mixed', '32-true']. Got value: 64-"),
    ("PrecisionFallback", {"patience": True}, "Expected a <class 'int'>. Got value: True"),
    ("PrecisionFallback", {"scope": "layer"}, f"[{SCOPE}]. Got value: layer"),
    ("PrecisionFallback", {"retry_after": 1.5}, "'retry_after': 1.5"),
    ("AdaptiveMixedPrecision", {"keep_fp32": "*.wo"}, "Expected a "),
    ("AMPMonitor", {"prog_bar": "maybe"}, "Expected a <class 'bool'>. Got value: maybe"),
    # what is not there
    ("AdaptiveMixedPrecision", {"loss_scaling": 1}, "loss_scaling"),
    ("LossScale", {"initial_scale": 1}, "initial_scale"),
    ("PrecisionFallback", {"rungs": 1}, "rungs"),
    ("AMPMonitor", {"progress_bar": True}, "progress_bar"),
    ("AMPMonitor", {"every_n_steps": 0}, "(every_n_steps=0): it must be an integer of at least 1."),
    ("DynamicRangeMonitor", {"every_n_steps": 0}, "(every_n_steps=0): it must be"),
]


@pytest.mark.parametrize(("name", "bad", "words"), REFUSED, ids=[f"{name}({bad})" for name, bad, _ in REFUSED])
def test_a_mistake_is_refused_in_words_that_help(
    world: World, name: str, bad: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {"precision": "16-mixed", "loss_scale": bad} if name == "LossScale" else bad
    owner = "AdaptiveMixedPrecision" if name == "LossScale" else name
    block = {"class_path": world.path(owner), "init_args": arguments}
    config = written(tmp_path / "config.yaml", {"trainer": {OPTION[owner]: [block]}})
    with pytest.raises((SystemExit, ValueError)) as refusal:
        world.run(config)
    if isinstance(refusal.value, SystemExit):  # from the parser
        assert refusal.value.code == 2
        message = capsys.readouterr().err.partition("error:")[2]
    else:  # from the constructor
        message = str(refusal.value)
        words = name + words
    assert words in message


def test_precision_twice_is_refused_by_the_trainer(world: World) -> None:
    """What happens to a user who adds the plugin and leaves ``precision:`` in the file."""
    with pytest.raises(ValueError, match=r"Received both `precision=16-mixed` and `plugins=AdaptiveMixedPrecision"):
        world.run("--trainer.precision=16-mixed", f"--trainer.plugins={world.path('AdaptiveMixedPrecision')}")


# Run ------------------------------------------------------------------------------------------------------------------

RUN = """
trainer:
  max_epochs: 1
  limit_train_batches: 4
  limit_val_batches: 0
  log_every_n_steps: 1
  gradient_clip_val: 1.0
  enable_checkpointing: true
  logger:
    class_path: {pl}.loggers.CSVLogger
    init_args:
      save_dir: {directory}
  plugins:
    - class_path: {ours}.AdaptiveMixedPrecision
      init_args:
        precision: 16-mixed
        loss_scale:
          init_scale: 256
          growth_interval: 3
  callbacks:
    - class_path: {ours}.PrecisionFallback
    - class_path: {ours}.AMPMonitor
"""


def fit(world: World, *args: str) -> Any:
    torch.manual_seed(0)  # of the weights and of the data
    return world.run("fit", *args, save_config_kwargs={"overwrite": True})


@pytest.mark.filterwarnings("ignore:The dirpath has changed from")  # a resumed run has a folder of its own
@pytest.mark.filterwarnings("ignore:You are using `torch.load` with `weights_only=False`")  # Lightning 2.5, torch 2.4
def test_fit_logs_resumes_and_leaves_a_config_that_repeats_it(world: World, tmp_path: Path) -> None:
    text = RUN.format(pl=world.pl.__name__, ours=world.ours.__name__, directory=tmp_path)
    config = written(tmp_path / "config.yaml", text)

    first = fit(world, config)
    log_dir = Path(first.trainer.logger.log_dir)
    with open(log_dir / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    rows = [row for row in rows if row["amp/grad_norm"]]
    assert [float(row["amp/applied_steps"]) for row in rows[:4]] == [1, 2, 3, 4]
    assert [float(row["amp/loss_scale"]) for row in rows[:4]] == [256, 256, 512, 512]
    assert all(float(row["amp/grad_norm"]) > 0 for row in rows)
    assert {float(row["amp/mantissa_bits"]) for row in rows} == {10}

    saved = log_dir / "config.yaml"
    repeated = fit(world, f"--config={saved}")
    assert repeated.trainer.logger.log_dir != str(log_dir)
    assert read_back(repeated) == read_back(first)
    torch.testing.assert_close(repeated.model.state_dict(), first.model.state_dict(), rtol=0, atol=0)

    checkpoint = first.trainer.checkpoint_callback.best_model_path
    resumed = fit(world, config, "--trainer.max_epochs=2", f"--ckpt_path={checkpoint}")
    uninterrupted = fit(world, config, "--trainer.max_epochs=2")
    assert resumed.trainer.global_step == 8
    assert not torch.equal(resumed.model.layer.weight, first.model.layer.weight)
    torch.testing.assert_close(resumed.model.state_dict(), uninterrupted.model.state_dict(), rtol=0, atol=0)
    plugin = resumed.trainer.precision_plugin
    assert plugin.state_dict() == uninterrupted.trainer.precision_plugin.state_dict()
    assert (plugin.scaler.get_scale(), plugin.counters.applied_steps) == (1024, 8)


def test_the_example_trains_from_its_yaml_file(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    folder = Path(__file__).parents[1] / "examples" / "cli"
    packages = Path(lightning_amp_plus.__file__).parents[1]  # so that the example meets the package under test
    path = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH")]))
    options = [
        "--trainer.max_epochs=2",
        "--trainer.accelerator=cpu",
        "--trainer.enable_progress_bar=false",
        "--trainer.plugins.precision=16-mixed",
    ]
    run = subprocess.run(
        [sys.executable, str(folder / "train.py"), "fit", f"--config={folder / 'config.yaml'}", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    accuracy = re.search(r"^accuracy +(\d\.\d{4})$", run.stdout, re.MULTILINE)
    assert accuracy, run.stdout
    assert float(accuracy[1]) > 0.9
    (log,) = tmp_path.glob("lightning_logs/digits_cli/version_0/metrics.csv")
    with open(log, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["amp/loss_scale"]]
    assert {float(row["amp/mantissa_bits"]) for row in rows} == {10}  # not that of "auto"
    assert float(rows[0]["amp/loss_scale"]) == 4096
    assert float(rows[-1]["amp/applied_steps"]) + float(rows[-1]["amp/skipped_steps"]) == 44  # 2 * ceil(1347 / 64)
