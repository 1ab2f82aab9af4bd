"""What keeps large messages cheap: memory that one has left is used by the next."""

from __future__ import annotations

import functools

_MOST = (32 << 20) - (64 << 10)
"""Just below what glibc still learns from (DEFAULT_MMAP_THRESHOLD_MAX)."""


@functools.cache
def keep_freed_memory() -> None:
    """Lets this process keep memory that large messages have left.

    glibc gives a freed block of 128 KiB back to the system, until it has seen a larger one freed: then it keeps blocks
    up to that size, and twice as much on top of its heap. A message in memory that was given back pays a page fault
    for every 4 KiB of it and of each of gRPC's copies, which is most of its time. So it is shown the largest block
    that it learns from; the block is never touched. Other allocators take no notice.
    """
    block = bytes(_MOST)
    del block
