"""The prefix cache: a tree of full KV blocks, found by chained hash, believed only after comparing tokens.

A node is one block of tokens after everything its ancestors hold. Hashes are chained from a salted
root (`common.hashing`), so one dictionary finds any node; a hit counts only when the node's tokens
and its parent are the expected ones, so a collision is a miss and never foreign KV.

The tree knows which blocks are worth keeping and nothing of who uses them: reference counts and
eviction order belong to `engine.blocks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from common.hashing import HASH_UNIT_TOKENS, chain_hash

ChainHash = Callable[[bytes, Sequence[int]], bytes]


@dataclass(slots=True, eq=False)
class Node:
    """One cached block. ``units`` are the fleet-wide prefix hashes that become known with it."""

    key: bytes
    tokens: tuple[int, ...]
    block_id: int
    parent: Node | None
    units: tuple[bytes, ...] = ()
    children: dict[bytes, Node] = field(default_factory=dict)


class PrefixCache:
    """Cached blocks by content. ``block_size`` in tokens; ``chain`` is replaced by tests only."""

    def __init__(self, block_size: int, chain: ChainHash = chain_hash) -> None:
        self._reports_units = not (block_size % HASH_UNIT_TOKENS and HASH_UNIT_TOKENS % block_size)
        self._keys_are_units = block_size == HASH_UNIT_TOKENS and chain is chain_hash
        self._block_size = block_size
        self._chain = chain
        self._nodes: dict[bytes, Node] = {}
        self._by_block: dict[int, Node] = {}
        self.stored: list[bytes] = []
        """Unit hashes added since the owner last emptied the list; `removed` likewise."""
        self.removed: list[bytes] = []

    def __len__(self) -> int:
        return len(self._by_block)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._by_block

    def match(self, tokens: Sequence[int], root: bytes, max_blocks: int) -> list[int]:
        """Blocks that hold the longest cached prefix of ``tokens``, at most ``max_blocks``."""
        size = self._block_size
        blocks: list[int] = []
        parent: Node | None = None
        key = root
        for start in range(0, min(max_blocks, len(tokens) // size) * size, size):
            window = tuple(tokens[start : start + size])
            key = self._chain(key, window)
            node = self._nodes.get(key)
            if node is None or node.parent is not parent or node.tokens != window:
                break
            blocks.append(node.block_id)
            parent = node
        return blocks

    def insert(
        self, tokens: Sequence[int], root: bytes, block_ids: Sequence[int], after: Node | None, first: int
    ) -> tuple[Node | None, int]:
        """Enters blocks ``first ..`` of a sequence below node ``after`` (the node of block ``first - 1``).

        ``block_ids`` are the sequence's blocks that are complete; as many are entered as ``tokens`` fill. A
        prefix that is already cached keeps its node. Returns (node of the last block, number of
        blocks now covered); the number stays behind where a collision makes going on unsafe.
        """
        size = self._block_size
        parent = after
        covered = first
        for index in range(first, min(len(block_ids), len(tokens) // size)):
            window = tuple(tokens[index * size : (index + 1) * size])
            key = self._chain(parent.key if parent is not None else root, window)
            node = self._nodes.get(key)
            if node is None:
                if block_ids[index] in self._by_block:
                    break
                units = (key,) if self._keys_are_units else self._unit_hashes(tokens, root, parent, index)
                node = Node(key, window, block_ids[index], parent, units)
                self._nodes[key] = node
                self._by_block[node.block_id] = node
                if parent is not None:
                    parent.children[key] = node
                self.stored.extend(node.units)
            elif node.tokens != window or node.parent is not parent:
                break
            parent = node
            covered = index + 1
        return parent, covered

    def holds(self, node: Node) -> bool:
        """Whether ``node`` is still in the tree."""
        return self._nodes.get(node.key) is node

    def remove(self, block_id: int) -> list[int]:
        """Drops a block and everything below it, which cannot be found any more. Returns the blocks."""
        top = self._by_block[block_id]
        if top.parent is not None:
            top.parent.children.pop(top.key, None)
        dropped: list[int] = []
        stack = [top]
        while stack:
            node = stack.pop()
            del self._nodes[node.key]
            del self._by_block[node.block_id]
            self.removed.extend(node.units)
            dropped.append(node.block_id)
            stack.extend(node.children.values())
        return dropped

    def unit_hashes(self) -> Iterator[bytes]:
        """The prefix hashes of everything cached, for a snapshot."""
        for node in self._nodes.values():
            yield from node.units

    def _unit_hashes(self, tokens: Sequence[int], root: bytes, parent: Node | None, index: int) -> tuple[bytes, ...]:
        """The fleet-wide hashes that end inside block ``index``: one or more where a block is one or
        more units, at most one where several blocks make a unit."""
        unit = HASH_UNIT_TOKENS
        size = self._block_size
        if not self._reports_units:
            return ()
        end = (index + 1) * size
        if end % unit:
            return ()
        start = (end - max(size, unit)) // unit * unit
        previous = self._last_unit(parent, root)
        hashes = []
        for at in range(start, end, unit):
            previous = chain_hash(previous, tokens[at : at + unit])
            hashes.append(previous)
        return tuple(hashes)

    @staticmethod
    def _last_unit(node: Node | None, root: bytes) -> bytes:
        while node is not None:
            if node.units:
                return node.units[-1]
            node = node.parent
        return root
