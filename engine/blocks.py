"""The block pool's books: which blocks are free, cached or held, by whom, since when (law 3).

Every block has one state at a time. When several owners share a block (a common prefix), the state of
the first of *in transfer, running, reserved* among its owners counts; references are counted apart.
A block that nobody holds is *cached* while the prefix cache knows its content, else *free*; cached
blocks are given away when free ones run out, the longest unused first.

    free ──allocate──▶ reserved / running / in transfer ──release──▶ cached ──evict──▶ free
                                                       └───────────────────────────────▶ free

The books know block numbers and token ids. Bytes are in `engine.kv_cache`.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from common.workers import Holder, Role, WorkerLedger
from engine.prefix_cache import Node, PrefixCache


class BlockState(enum.StrEnum):
    RESERVED = "reserved"
    RUNNING = "running"
    IN_TRANSFER = "in_transfer"


_PRECEDENCE = {BlockState.RESERVED: 1, BlockState.RUNNING: 2, BlockState.IN_TRANSFER: 3}


@dataclass(slots=True)
class Holding:
    """What one owner holds. ``block_ids`` is in sequence order and is the owner's own block table."""

    owner: str
    state: BlockState
    since: float
    block_ids: list[int]
    published: int = 0
    """Blocks from the front that the prefix cache knows."""
    last_node: Node | None = field(default=None, repr=False)


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens. Without ``prefix_cache`` nothing is kept."""

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: PrefixCache | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._free: deque[int] = deque(range(num_blocks))
        self._references = [0] * num_blocks
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._holdings: dict[str, Holding] = {}

    # ── asking ────────────────────────────────────────────────────────────────────────────────────

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that only the prefix cache holds."""
        return len(self._evictable)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now: free ones, and cached ones that nobody holds."""
        return len(self._free) + len(self._evictable)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def match(self, tokens: Sequence[int], root: bytes, max_tokens: int) -> list[int]:
        """Cached blocks that hold the longest known prefix of ``tokens``, ``max_tokens`` at most."""
        if self.prefix_cache is None:
            return []
        return self.prefix_cache.match(tokens, root, max_tokens // self.block_size)

    def can_allocate(self, num_blocks: int, shared: Sequence[int] = (), spare: int = 0) -> bool:
        """Whether `allocate` of ``shared`` plus ``num_blocks`` new blocks would leave ``spare``."""
        claimed = sum(1 for block_id in shared if self._references[block_id] == 0)
        return self.num_available - claimed - num_blocks >= spare

    # ── holding ───────────────────────────────────────────────────────────────────────────────────

    def allocate(
        self, owner: str, num_blocks: int, state: BlockState, now: float, shared: Sequence[int] = ()
    ) -> Holding | None:
        """``shared`` (from `match`) and ``num_blocks`` new blocks for ``owner``, or None if too few."""
        if owner in self._holdings:
            raise ValueError(f"{owner} holds blocks already")
        if not self.can_allocate(num_blocks, shared):
            return None
        for block_id in shared:
            self._references[block_id] += 1
            self._evictable.pop(block_id, None)
        holding = Holding(owner, state, now, list(shared))
        self._holdings[owner] = holding
        self._take(holding, num_blocks)
        return holding

    def extend(self, owner: str, num_blocks: int = 1) -> bool:
        """``num_blocks`` more for ``owner``; False, and nothing taken, when there are too few."""
        if self.num_available < num_blocks:
            return False
        self._take(self._holdings[owner], num_blocks)
        return True

    def set_state(self, owner: str, state: BlockState) -> None:
        self._holdings[owner].state = state

    def publish(self, owner: str, tokens: Sequence[int], root: bytes, num_computed: int) -> None:
        """Tells the prefix cache that the KV of ``tokens[:num_computed]`` is in the owner's blocks."""
        holding = self._holdings[owner]
        full = num_computed // self.block_size
        if self.prefix_cache is None or full <= holding.published:
            return
        node, first = holding.last_node, holding.published
        if node is not None and not self.prefix_cache.holds(node):
            node, first = None, 0
        holding.last_node, holding.published = self.prefix_cache.insert(
            tokens, root, holding.block_ids[:full], node, first
        )

    def release(self, owner: str) -> None:
        """Takes everything back from ``owner``; what the prefix cache knows stays cached.

        Later blocks are put aside first, so that a prefix outlives what hangs on it.
        """
        holding = self._holdings.pop(owner)
        for block_id in reversed(holding.block_ids):
            self._references[block_id] -= 1
            if self._references[block_id]:
                continue
            if self.prefix_cache is not None and block_id in self.prefix_cache:
                self._evictable[block_id] = None
            else:
                self._free.append(block_id)

    def holds(self, owner: str) -> bool:
        return owner in self._holdings

    def drop_cached(self) -> int:
        """Forgets every cached block that nobody holds. Returns how many became free."""
        before = len(self._free)
        while self._evictable:
            self._evict()
        return len(self._free) - before

    # ── the ledger ────────────────────────────────────────────────────────────────────────────────

    def ledger(self, worker_id: str, role: Role, now: float) -> WorkerLedger:
        """Every block by state, and who holds how many. Only between two steps."""
        rank = [0] * self.num_blocks
        for holding in self._holdings.values():
            precedence = _PRECEDENCE[holding.state]
            for block_id in holding.block_ids:
                if rank[block_id] < precedence:
                    rank[block_id] = precedence
        return WorkerLedger(
            worker_id=worker_id,
            role=role,
            total=self.num_blocks,
            free=len(self._free),
            cached=len(self._evictable),
            reserved=rank.count(1),
            running=rank.count(2),
            in_transfer=rank.count(3),
            holders=tuple(
                Holder(holding.owner, holding.state.value, len(holding.block_ids), now - holding.since)
                for holding in self._holdings.values()
            ),
        )

    # ── taking and giving up blocks ───────────────────────────────────────────────────────────────

    def _take(self, holding: Holding, num_blocks: int) -> None:
        for _ in range(num_blocks):
            if not self._free:
                self._evict()
            block_id = self._free.popleft()
            self._references[block_id] = 1
            holding.block_ids.append(block_id)

    def _evict(self) -> None:
        assert self.prefix_cache is not None
        block_id = next(iter(self._evictable))
        self._forget(self.prefix_cache.remove(block_id))

    def _forget(self, block_ids: Iterable[int]) -> None:
        """Blocks left the prefix cache: the ones that nobody holds are free."""
        for block_id in block_ids:
            if self._references[block_id] == 0:
                del self._evictable[block_id]
                self._free.append(block_id)
