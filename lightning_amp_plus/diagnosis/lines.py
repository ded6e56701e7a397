"""Whose code called an operation, and at which line. Plain torch."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch.nn import Module

import lightning_amp_plus

_TORCH, _OURS = (os.path.dirname(file) + os.sep for file in (torch.__file__, lightning_amp_plus.__file__))
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_RUNS_THE_MODEL: set[CodeType] = set()

Function = TypeVar("Function", bound=Callable[..., Any])


def runs_the_model(function: Function) -> Function:
    """Mark a function of this package whose operations are the user's: it stands in the place of one of theirs."""
    _RUNS_THE_MODEL.add(function.__code__)
    return function


def parts_of(module: Module) -> dict[str, Module]:
    """Return a module and its submodules by name, as in ``named_modules``, but for what ``torch.compile`` adds to it.

    A compiled module goes by the name of the one that it wraps, which is what is returned for it.
    """
    parts = {}
    for name, part in module.named_modules():
        parts[".".join(piece for piece in name.split(".") if piece != "_orig_mod")] = part
    return parts


def is_ours(frame: FrameType | None) -> bool:
    """Tell whether an operation is part of the checks of a step, and not of what the user computes."""
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_OURS) and frame.f_code not in _RUNS_THE_MODEL


def _is_user_code(file: str) -> bool:
    if file.startswith(("<", _TORCH, _OURS)):
        return False
    return not file.startswith(_STANDARD_LIBRARY) or f"{os.sep}site-packages{os.sep}" in file


def line_of(frame: FrameType | None) -> str | None:
    """Return the innermost line of the user's code."""
    while frame is not None:
        if _is_user_code(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def line_in(traceback: str) -> str | None:
    """Return the innermost line of the user's code in a formatted traceback."""
    lines = [
        (file, number) for file, number in re.findall(r'File "(.+?)", line (\d+)', traceback) if _is_user_code(file)
    ]
    return f"{os.path.basename(lines[-1][0])}:{lines[-1][1]}" if lines else None


def place_of(error: BaseException, module: Module) -> tuple[str | None, str | None]:
    """Return the innermost part of ``module`` that an error was raised in, and the innermost line of user code."""
    names = {id(part): name for name, part in parts_of(module).items() if name}
    place, line, traceback = None, None, error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        place = names.get(id(frame.f_locals.get("self")), place)
        if _is_user_code(frame.f_code.co_filename):
            line = f"{os.path.basename(frame.f_code.co_filename)}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place, line
