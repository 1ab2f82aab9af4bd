"""Finds the events in a stream of bytes.

Works on bytes and hands out whole events only, so it does not matter where a read ends: in the middle of a
line or of a character. Knows nothing of what is in an event. Lines end with LF or CRLF; a lone CR, which the
standard would allow too, ends none.
"""

from __future__ import annotations

DONE = b"[DONE]"


class EventSplitter:
    """Bytes of a ``text/event-stream`` in, the ``data`` of its events out."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, body: bytes) -> list[bytes]:
        """The data of the events that end in ``body``. An event without data is none."""
        lines = (self._rest + body).split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
