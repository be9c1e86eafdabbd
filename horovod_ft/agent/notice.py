"""The line on which a job is told that a signal will end it: from ``horovod-ft run`` to the launcher's process.

The launcher tells the workers, and answers whether anybody was told. It is a pair of sockets and no signal, so that the
question does no harm to a launcher that cannot answer yet. Nothing here knows of Horovod.
"""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable

QUESTION, YES, NO = b"?", b"y", b"n"


class Notice:
    """Our end of the line. A context manager.

    Args:
        number: the signal of which a job is told; other signals end it at once.
        say: gets what is to be read by whoever started us.

    Attributes:
        told: whether anybody in the job was told; None before that is known.
    """

    def __init__(self, number: int, say: Callable[[str], None] = lambda _: None) -> None:
        self.number = number
        self.say = say
        self.told: bool | None = None
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)

    def __enter__(self) -> Notice:
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.close()
        self._theirs.close()

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name

    @property
    def theirs(self) -> int:
        """File descriptor for the launcher's process, which has to inherit it."""
        return self._theirs.fileno()

    def fileno(self) -> int:
        """Readable when there is an answer."""
        return self._ours.fileno()

    def handed_over(self) -> None:
        """The launcher's process has its end: from now on the line breaks when it ends."""
        self._theirs.close()

    def ask(self) -> None:
        """Have the job told. Returns at once."""
        with contextlib.suppress(OSError):
            self._ours.send(QUESTION)

    def answered(self) -> bool:
        """Whether ``told`` is known. Never blocks. A launcher's process that has ended has told nobody."""
        if self.told is None:
            try:
                self.told = self._ours.recv(1) == YES
            except BlockingIOError:
                return False
            except OSError:
                self.told = False
        return True
