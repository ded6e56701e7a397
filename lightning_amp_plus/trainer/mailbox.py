"""What a worker process leaves for the process that started it. Plain Python.

``ddp_spawn``, ``ddp_fork`` and ``ddp_notebook`` train copies of the objects of the main process, which end with their
processes. A mailbox is the one part of such an object that all these processes hold: shared memory.
"""

from __future__ import annotations

import pickle
from multiprocessing.context import get_spawning_popen
from multiprocessing.heap import BufferWrapper
from typing import Any

_BYTES = 2**16
_NUMBER, _LENGTH = slice(0, 4), slice(4, 8)  # of the message, which follows


class Mailbox:
    """A box with room for one message of almost 64 KiB, which the last one posted replaces.

    Whoever holds the box sees each message once, but for its own. A forked process and a process that is started with
    the box hold the same one; any other copy is a new box. There is no lock: nobody may look while another posts.
    """

    def __init__(self) -> None:
        self._shared = BufferWrapper(_BYTES)
        self._memory = self._shared.create_memoryview()
        self._memory[_NUMBER] = bytes(4)
        self._seen = bytes(4)

    def post(self, message: object) -> None:
        """Leave ``message``, which must be picklable.

        Raises:
            ValueError: If it is too large.

        """
        body = pickle.dumps(message)
        if len(body) > _BYTES - 8:
            raise ValueError(f"A message of {len(body)} bytes does not fit into the {_BYTES - 8} bytes of a Mailbox.")
        self._memory[8 : 8 + len(body)] = body
        self._memory[_LENGTH] = len(body).to_bytes(4, "little")
        self._seen = (int.from_bytes(self._memory[_NUMBER], "little") + 1).to_bytes(4, "little")
        self._memory[_NUMBER] = self._seen

    def news(self) -> Any:
        """Return the last message if it was not seen here before; else ``None``."""
        if self._memory[_NUMBER] == self._seen:
            return None
        self._seen = bytes(self._memory[_NUMBER])
        length = int.from_bytes(self._memory[_LENGTH], "little")
        return pickle.loads(self._memory[8 : 8 + length])  # noqa: S301 (a process of our own wrote it)

    def __reduce__(self) -> Any:
        return (Mailbox, ()) if get_spawning_popen() is None else (_of_parent, (self._shared, self._seen))


def _of_parent(shared: BufferWrapper, seen: bytes) -> Mailbox:
    box = Mailbox.__new__(Mailbox)
    box._shared, box._memory, box._seen = shared, shared.create_memoryview(), seen
    return box
