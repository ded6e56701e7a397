"""Where pictures and summaries take their numbers from: a live run, a checkpoint, or a run's files. Plain torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_amp_plus.dynamic_range.stats import DynamicRange
from lightning_amp_plus.monitoring.history import RunHistory

RANGE_FILE_NAME = "amp_dynamic_range.json"
"""What DynamicRangeMonitor writes to the folder of the logs: the JSON of ``DynamicRange.state_dict()``."""

_METRICS = "metrics.csv"  # of Lightning's CSVLogger
_SHARDED = "meta.pt"  # what Lightning puts beside the shards of a checkpoint that is a folder


def history_of(source: object) -> RunHistory:
    """Return the history of a run.

    Args:
        source: A :class:`RunHistory`; an ``AMPMonitor``; a Trainer that has one; a checkpoint of such a run, loaded or
            as a path to its ``.ckpt``; the ``metrics.csv`` of a ``CSVLogger``, or the folder that it is in.

    Raises:
        TypeError: If it is something else.
        ValueError: If AMPMonitor has left nothing in it, or it cannot be read.
        FileNotFoundError: If there is no such file.

    Example:
        >>> history_of(RunHistory()).last_step
        -1

    """
    if isinstance(source, (str, Path)):
        path = _existing(source)
        if _is_checkpoint(path):
            return history_of(_loaded(path))
        if path.is_dir() and not (path / _METRICS).is_file():
            raise FileNotFoundError(
                f"{path} has no {_METRICS} (it has {_listed(sorted(file.name for file in path.iterdir()))}): pass the"
                " folder that a CSVLogger has logged to, a checkpoint, or the AMPMonitor itself."
            )
        if path.is_file() and path.suffix != ".csv":
            raise ValueError(
                f"{path} is neither a {_METRICS} nor a .ckpt: pass one of these, or the folder of the logs."
            )
        return RunHistory.from_metrics(path)
    found = _found(source, "history", "points", "AMPMonitor")
    return found if isinstance(found, RunHistory) else RunHistory.from_state(found)


def dynamic_range_of(source: object) -> DynamicRange:
    """Return the dynamic range that was measured in a run.

    Args:
        source: A :class:`DynamicRange`; a ``DynamicRangeMonitor``, or what ``find_precision`` returns; a Trainer that
            has the monitor; a checkpoint of such a run, loaded or as a path to its ``.ckpt``; the
            ``amp_dynamic_range.json`` of its logs, the ``metrics.csv`` beside it, or the folder that they are in.

    Raises:
        TypeError: If it is something else.
        ValueError: If DynamicRangeMonitor has left nothing in it, or it cannot be read.
        FileNotFoundError: If there is no such file.

    """
    if isinstance(source, (str, Path)):
        path = _existing(source)
        if _is_checkpoint(path):
            return dynamic_range_of(_loaded(path))
        return DynamicRange.from_state(_read_range(path))
    found = _found(source, "stats", "counts", "DynamicRangeMonitor")
    return found if isinstance(found, DynamicRange) else DynamicRange.from_state(found)


# Objects --------------------------------------------------------------------------------------------------------------


def _found(source: object, attribute: str, part: str, callback: str) -> Any:
    """Return the history or the stats in an object, or the state of one that a checkpoint holds."""
    wanted = RunHistory if attribute == "history" else DynamicRange
    if isinstance(source, wanted):
        return source
    if isinstance(source, Mapping):
        return _state_in(source, attribute, part, callback)
    callbacks = getattr(source, "callbacks", None)
    for one in callbacks if isinstance(callbacks, list) else [source]:
        if isinstance(value := getattr(one, attribute, None), wanted):
            return value
    if isinstance(callbacks, list):
        names = _listed([type(one).__name__ for one in callbacks])
        raise ValueError(
            f"No callback of the {type(source).__name__} has a {wanted.__name__} (there is {names}): pass"
            f" callbacks=[{callback}()] to the Trainer and run fit."
        )
    if hasattr(source, attribute):
        raise ValueError(f"This {type(source).__name__} has no {wanted.__name__} yet: run fit first.")
    raise TypeError(
        f"{type(source).__name__} is no source of a {wanted.__name__}: pass one, the {callback}, a Trainer that has it,"
        " a checkpoint, or the folder of a run's logs."
    )


def _state_in(checkpoint: Mapping[Any, Any], attribute: str, part: str, callback: str) -> Any:
    """Search by what is in a state, and not by its key, which holds the callback's class and arguments."""
    callbacks = checkpoint.get("callbacks")
    if not isinstance(callbacks, Mapping):
        raise ValueError(
            f"The dict has no 'callbacks' (it has {_listed(map(str, checkpoint))}): pass a whole checkpoint of"
            " Lightning's, as torch.load returns it."
        )
    for key in sorted(callbacks, key=lambda key: not str(key).startswith(callback)):
        state = callbacks[key].get(attribute) if isinstance(callbacks[key], Mapping) else None
        if isinstance(state, Mapping) and {"version", part} <= state.keys():
            return state
    raise ValueError(
        f"The checkpoint holds no {attribute} of {callback} (its callbacks: {_listed(map(str, callbacks))}): pass one"
        f" of a run with callbacks=[{callback}()], or the callback itself."
    )


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    if not names:
        return "nothing"
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


# Files ----------------------------------------------------------------------------------------------------------------


def _existing(path: str | Path) -> Path:
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"There is no {path}: pass a .ckpt, a {_METRICS}, or the folder of a run's logs.")
    return path


def _is_checkpoint(path: Path) -> bool:
    return path.suffix == ".ckpt" or (path / _SHARDED).is_file()


def _loaded(path: Path) -> Any:
    file = path / _SHARDED if path.is_dir() else path
    try:
        # The weights stay in the file: they are not looked at.
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise ValueError(
            f"{file} could not be loaded with weights_only=True ({type(error).__name__}): if you trust it, load it"
            f' yourself and pass the dict: torch.load("{file}", map_location="cpu", weights_only=False).'
        ) from error


def _read_range(path: Path) -> dict[str, Any]:
    if path.is_dir() or path.name == _METRICS:
        path = (path if path.is_dir() else path.parent) / RANGE_FILE_NAME
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no {path}, which DynamicRangeMonitor writes: run with that callback and a logger, or pass a"
            " checkpoint of the run or the callback itself."
        )
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}): pass the {RANGE_FILE_NAME} of a run, or its folder.") from error
    if not isinstance(state, dict) or not {"version", "counts"} <= state.keys():
        raise ValueError(f"{path} holds no dynamic range: pass the {RANGE_FILE_NAME} of a run, or its folder.")
    return state
