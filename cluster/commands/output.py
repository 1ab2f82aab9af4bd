"""Where a command's words go: results to standard output, progress to standard error."""

from __future__ import annotations

import sys


def write_line(text: str) -> None:
    """One line of result, flushed: scripts wait for it."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def write_progress(text: str) -> None:
    """One line about work under way, for people."""
    sys.stderr.write(f"baton: {text}\n")
    sys.stderr.flush()
