"""What a worker process leaves for the process that started it. Plain Python.

``ddp_spawn``, ``ddp_fork`` and ``ddp_notebook`` train copies of the objects of the main process, which end with their
processes. A mailbox is the one part of such an object that both processes hold: memory that a fork shares as it is, and
that is replaced by a shared array when the object is pickled for a new process.
"""

from __future__ import annotations

import mmap
import os
import pickle
from multiprocessing.context import get_spawning_popen
from multiprocessing.heap import BufferWrapper
from typing import Any

_BYTES = 2**16
_HEADER = 4  # the length of the message that follows; 0: there is none


class Mailbox:
    """A box with room for one message of at most 64 KiB, which the last one posted replaces.

    A copy, pickled or not, is a new and empty box of the process that makes it.
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._memory: mmap.mmap | memoryview = mmap.mmap(-1, _BYTES)  # anonymous, shared with forks
        self._shared: BufferWrapper | None = None  # the same for processes that start afresh, once one is

    def post(self, message: object) -> None:
        """Leave ``message``, which must be picklable, for the owner; in the process of the owner itself do nothing."""
        if os.getpid() != self._owner:
            body = pickle.dumps(message)
            self._memory[_HEADER : _HEADER + len(body)] = body
            self._memory[:_HEADER] = len(body).to_bytes(_HEADER, "little")

    def take(self) -> Any:
        """Return what was posted and empty the box; ``None`` if there is nothing, or for any other process."""
        length = int.from_bytes(self._memory[:_HEADER], "little")
        if length == 0 or os.getpid() != self._owner:
            return None
        self._memory[:_HEADER] = bytes(_HEADER)
        return pickle.loads(self._memory[_HEADER : _HEADER + length])  # noqa: S301 (our own worker wrote it)

    def __reduce__(self) -> Any:
        if get_spawning_popen() is None:
            return Mailbox, ()
        if self._shared is None:
            self._shared = BufferWrapper(_BYTES)
            self._memory = self._shared.create_memoryview()
        return _delivered, (self._owner, self._shared)


def _delivered(owner: int, shared: BufferWrapper) -> Mailbox:
    box = Mailbox()
    box._owner, box._shared, box._memory = owner, shared, shared.create_memoryview()
    return box
