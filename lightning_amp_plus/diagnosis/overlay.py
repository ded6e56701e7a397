"""An attribute of an object's own, in place of its class's, for a time. Plain Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def overlay(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Give an object an attribute; return what puts back what there was, unless somebody has set another since.

    Example:
        >>> class Bar:
        ...     text = "bar"
        >>> bar = Bar()
        >>> undo = overlay(bar, "text", "foo")
        >>> bar.text, undo(), bar.text, vars(bar)
        ('foo', None, 'bar', {})

    """
    before = vars(owner).get(name)
    setattr(owner, name, value)

    def undo() -> None:
        if vars(owner).get(name) is not value:
            return
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return undo
