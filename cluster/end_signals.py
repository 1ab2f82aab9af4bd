"""The signals that ask `baton serve` to end, from the moment there is something to be ended.

The first one asks, the second one kills. The handlers only take notes: an exception in the middle of
Ray's start, at whatever line a signal happens to hit, would leave half of it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 130
"""Exit status of a command that was stopped before it had done what it says."""


class EndSignals:
    """Takes over `END_SIGNALS` for the rest of this process. Only for the main thread.

    ``asked`` is called in the handler at the first signal, ``kill`` at the second, before the exit.
    """

    def __init__(self) -> None:
        self.received = False
        self.asked: Callable[[], object] = _nothing
        self.kill: Callable[[], object] = _nothing
        for number in END_SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        if self.received:
            self.kill()
            os._exit(INTERRUPTED)
        self.received = True
        # Not `sys.stderr`: the signal may have come in the middle of a write to it.
        os.write(2, b"baton: stopping; once more to kill\n")
        self.asked()


@contextmanager
def signals_kept() -> Iterator[None]:
    """For a call that starts processes and installs handlers of its own.

    Those processes, and their children, never get the signals: a terminal, `timeout` or a service manager
    sends them to all processes, but only this one is to hear them. Its own wait until the call is over,
    for the handlers that were there before; SIGINT does not, lest a call that hangs cannot be broken off.
    """
    handlers = {number: signal.getsignal(number) for number in END_SIGNALS}
    # To SIGINT, Ray makes its processes deaf itself.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {number for number in END_SIGNALS if number != signal.SIGINT})
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _nothing() -> None:
    pass
