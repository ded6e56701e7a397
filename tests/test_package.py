"""What the package shows, what it imports, and that it touches nothing that belongs to others."""

import ast
import importlib
import importlib.metadata
import inspect
import logging
import multiprocessing
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.resources import files
from pathlib import Path

import lightning.pytorch as pl
import pytest
import pytorch_lightning  # noqa: F401 (it does to torch and logging what lightning does: that is not ours)
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.optim.optimizer import _global_optimizer_pre_hooks

import lightning_amp_plus

PACKAGE = Path(lightning_amp_plus.__file__).parent
PUBLIC = [
    "AMPMonitor",
    "AdaptiveMixedPrecision",
    "Diagnosis",
    "DynamicLossScaler",
    "DynamicRange",
    "DynamicRangeMonitor",
    "LossScale",
    "NonFiniteStepError",
    "PrecisionAdvice",
    "PrecisionFallback",
    "RunHistory",
    "StepCounters",
    "StepReport",
    "diagnose",
    "find_precision",
    "plot_dynamic_range",
    "plot_loss_scale",
]
SOURCES = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
BINDINGS = ("lightning_pytorch.py", "pytorch_lightning.py")  # all that imports Lightning when it runs
ADAPTERS = ("trainer/", "monitoring/", "dynamic_range/", "advice/", *BINDINGS)


# Names ----------------------------------------------------------------------------------------------------------------


def test_public_names() -> None:
    assert sorted(lightning_amp_plus.__all__) == sorted(PUBLIC)
    assert set(dir(lightning_amp_plus)) >= set(PUBLIC)
    for name in PUBLIC:
        assert getattr(lightning_amp_plus, name).__name__ == name
    star: dict[str, object] = {}
    exec("from lightning_amp_plus import *", star)  # noqa: S102
    assert sorted(star.keys() - {"__builtins__"}) == sorted(PUBLIC)


def test_an_unknown_name_is_answered_with_those_there_are() -> None:
    with pytest.raises(
        AttributeError, match=r"'lightning_amp_plus' has no attribute 'LosScale'.*AMPMonitor.*LossScale"
    ):
        lightning_amp_plus.LosScale  # noqa: B018
    assert not hasattr(lightning_amp_plus, "_scale")


def test_version_is_that_of_the_distribution() -> None:
    assert lightning_amp_plus.__version__ == importlib.metadata.version("lightning_amp_plus")


def test_types_are_shipped() -> None:
    assert files("lightning_amp_plus").joinpath("py.typed").is_file()


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_thing_is_documented_with_its_arguments(name: str) -> None:
    """The ``Args:`` are the help text of LightningCLI as well."""
    thing = getattr(lightning_amp_plus, name)
    assert inspect.isclass(thing) is name[0].isupper()
    assert thing.__doc__
    for method, value in vars(thing).items():
        if not method.startswith("_") and (callable(value) or isinstance(value, property)):
            assert inspect.getdoc(getattr(thing, method)), f"{name}.{method}"
    if not (inspect.isclass(thing) and issubclass(thing, Exception)):
        for argument in inspect.signature(thing).parameters:
            assert f"\n    {argument}: " in inspect.cleandoc(thing.__doc__), f"{name}({argument})"


# Imports --------------------------------------------------------------------------------------------------------------


def imported_by(*lines: str) -> set[str]:
    """The top-level modules that a fresh process has loaded after these lines."""
    code = "\n".join(["import sys, lightning_amp_plus as amp", *lines, "print(*sys.modules)"])
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return {name.split(".")[0] for name in result.stdout.split()}


def test_only_the_bindings_load_lightning() -> None:
    unbound = [path[:-3].replace("/", ".") for path in SOURCES if not path.endswith((*BINDINGS, "__init__.py"))]
    assert {"step.engine", "scaling.gradients", "trainer.plugin", "monitoring.monitor"} <= set(unbound)
    found = imported_by(
        "assert 'torch' not in sys.modules",
        *(f"import lightning_amp_plus.{name}" for name in unbound),
        "amp.LossScale, amp.DynamicLossScaler, amp.NonFiniteStepError, amp.StepCounters, amp.StepReport, dir(amp)",
    )
    assert "torch" in found
    assert not found & {"lightning", "pytorch_lightning"}


def test_the_engine_and_all_it_imports_are_plain_torch() -> None:
    of_metrics = ("rollback/transaction.py", "step/diagnose.py")  # which put back the states of torchmetrics
    plain = {path for path in SOURCES if not path.startswith((*ADAPTERS, "__", *of_metrics))}
    assert {"diagnosis/locate.py", "step/engine.py", "scaling/gradients.py"} <= plain
    found = imported_by(*(f"import lightning_amp_plus.{path[:-3].replace('/', '.')}" for path in sorted(plain)))
    assert "torch" in found
    assert not found & {"lightning", "lightning_utilities", "pytorch_lightning", "torchmetrics"}


@pytest.mark.parametrize(
    ("line", "loaded", "left"),
    [
        ("amp.AdaptiveMixedPrecision", "lightning", "pytorch_lightning"),
        ("import lightning_amp_plus.pytorch_lightning", "pytorch_lightning", "lightning"),
    ],
)
def test_a_binding_loads_only_its_namespace(line: str, loaded: str, left: str) -> None:
    found = imported_by(line)
    assert loaded in found
    assert left not in found


def callables() -> dict[tuple[str, str], object]:
    """Everything callable of torch, Lightning and the modules that are easily set up for all."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some names of torch say that they are old when looked at
        owners: dict[str, object] = {
            name: module
            for name, module in list(sys.modules.items())
            if name.split(".")[0] in ("torch", "lightning", "torchmetrics", "warnings", "logging", "sys", "builtins")
        }
        owners |= {
            f"{name}.{key}": value
            for name, owner in list(owners.items())
            for key, value in list(vars(owner).items())
            if isinstance(value, type)
        }
        return {
            (name, key): value
            for name, owner in owners.items()
            for key, value in list(vars(owner).items())
            if callable(value)
        }


def settings() -> dict[str, object]:
    state: dict[str, object] = {
        "filters": list(warnings.filters),
        "logging": logging.root.manager.disable,
        "environment": dict(os.environ),
        "dtype": torch.get_default_dtype(),
        "matmul": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "rng": torch.get_rng_state().tolist(),
        "cuda": torch.cuda.is_initialized(),
        "pre-hooks": len(_global_optimizer_pre_hooks),
    }
    for name, logger in (("root", logging.root), *logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger):
            level = (logger.level, logger.propagate, logger.disabled, len(logger.handlers), len(logger.filters))
            if level != (0, True, False, 0, 0):  # one that is merely new is nobody's concern
                state[name] = level
    return state


def changed_by(action: Callable[[], object]) -> set[str]:
    before, settings_before = callables(), settings()
    action()
    after, settings_after = callables(), settings()
    keys = settings_before.keys() | settings_after.keys()
    return {f"{name}.{key}" for (name, key), value in before.items() if after.get((name, key)) is not value} | {
        key for key in keys if settings_before.get(key) != settings_after.get(key)
    }


def import_everything() -> None:
    assert not any(name.startswith("lightning_amp_plus.") for name in sys.modules)
    for path in SOURCES:
        if not Path(path).name.startswith("__main__"):
            importlib.import_module(f"lightning_amp_plus.{path[:-3].replace('/', '.')}".removesuffix(".__init__"))
    assert "lightning_amp_plus.trainer.plugin" in sys.modules


def change_something_of_each_kind() -> None:
    for owner, name in ((torch, "no_grad"), (torch.optim.SGD, "step"), (pl.Trainer, "fit"), (warnings, "showwarning")):
        setattr(owner, name, print)
    for logger in ("lightning.pytorch", "lightning_amp_plus.new"):
        logging.getLogger(logger).setLevel("ERROR")
    warnings.simplefilter("ignore", ImportWarning)
    torch.set_float32_matmul_precision("medium")
    torch.rand(1)


def look_for_changes() -> tuple[set[str], set[str]]:
    return changed_by(import_everything), changed_by(change_something_of_each_kind)


def test_importing_everything_changes_nothing_global() -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh_process:
        ours, seen = fresh_process.submit(look_for_changes).result(timeout=60)
    assert ours == set()
    expected = {"torch.no_grad", "torch.optim.SGD.step", "lightning.pytorch.Trainer.fit", "warnings.showwarning"}
    expected |= {"lightning.pytorch", "lightning_amp_plus.new", "filters", "matmul", "rng"}
    assert seen >= expected  # or the check could not fail


# Sources --------------------------------------------------------------------------------------------------------------


def imported(source: str) -> Iterator[str]:
    """The dotted names that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_lightning(name: str) -> bool:
    return name.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric")


PRIVATE = {
    name
    for owner in (MixedPrecision, pl.Trainer, pl.LightningModule, pl.Callback, pl.strategies.Strategy)
    for name in dir(owner)
    if name.startswith("_") and not name.startswith("__") and name not in dir(object)
}


def private_uses(source: str) -> Iterator[str]:
    """Private names of Lightning that a source uses, and any private attribute of what is not the object itself."""
    yield from (name for name in imported(source) if is_lightning(name) and "._" in name)
    nodes = list(ast.walk(ast.parse(source)))
    keys = {id(key) for node in nodes if isinstance(node, ast.Dict) for key in node.keys}  # of an object's own state
    for node in nodes:
        name, owner = "", None
        if isinstance(node, ast.Attribute):
            name, owner = node.attr, node.value
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            name = node.value  # of a getattr
        elif isinstance(node, ast.FunctionDef):
            name = node.name  # of an override
        if not name.startswith("_") or name.startswith("__"):
            continue
        is_own = isinstance(node, ast.FunctionDef) or id(node) in keys
        is_own = is_own or (isinstance(owner, ast.Name) and owner.id == "self")
        if name in PRIVATE or not is_own:
            yield name


def test_only_the_adapters_import_lightning() -> None:
    importers = {path for path, source in SOURCES.items() if any(is_lightning(name) for name in imported(source))}
    assert {path for path in importers if not path.startswith(ADAPTERS)} == set()
    assert {"trainer/internals.py", "trainer/plugin.py", *BINDINGS} <= importers  # the scan sees them


@pytest.mark.parametrize(
    "path",
    [
        path
        for path, source in SOURCES.items()
        if path != "trainer/internals.py" and any(is_lightning(name) for name in imported(source))
    ],
)
def test_an_adapter_touches_no_private_name_of_lightning(path: str) -> None:
    assert list(private_uses(SOURCES[path])) == []


def test_only_one_file_touches_private_names_of_lightning() -> None:
    assert {"_trainer", "_call_callback_hooks", "_after_closure"} <= set(private_uses(SOURCES["trainer/internals.py"]))


@pytest.mark.parametrize(
    "line",
    [
        "trainer._results",
        "self.trainer.fit_loop._data_source",
        "getattr(trainer, '_results')",
        "vars(trainer)['_results']",
        "vars(plugin).update({'_after_closure': None})",
        "self._clip_gradients",
        "from lightning.pytorch.loops.fit_loop import _FitLoop",
        "class A:\n    def _after_closure(self): ...",
    ],
)
def test_the_scan_for_private_names_can_fail(line: str) -> None:
    assert len(list(private_uses(line))) == 1
