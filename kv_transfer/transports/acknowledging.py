"""One acknowledgement for several pieces.

An acknowledgement speaks for all pieces before its own, so while more frames lie ready the last one is enough.
It has to leave before the channel waits for the next frame: the sender may be waiting for the room.
"""

from __future__ import annotations

from kv_transfer.frames import Frame, PieceAck


class Acknowledgements:
    """What of them has not been said yet."""

    def __init__(self, most: int) -> None:
        """At most ``most`` pieces wait for their acknowledgement."""
        self._most = most
        self._waiting = 0
        self._last: PieceAck | None = None

    def __bool__(self) -> bool:
        return self._last is not None

    def before(self, frame: Frame) -> list[Frame]:
        """What has to be sent now that the session sends ``frame``; that is among it, or kept."""
        if not isinstance(frame, PieceAck):
            return [*self.take(), frame]
        # One with a lower number was overtaken on its way: the later one did not speak for it.
        due = self.take() if self._last is not None and frame.sequence < self._last.sequence else []
        self._last = frame
        self._waiting += 1
        return due + self.take() if due or self._waiting >= self._most else due

    def take(self) -> list[Frame]:
        """What is kept, to be sent now."""
        kept: list[Frame] = [self._last] if self._last is not None else []
        self._last, self._waiting = None, 0
        return kept
