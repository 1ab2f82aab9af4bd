"""A worker's load as placement sees it, made up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Load:
    address: str
    waiting_tokens: int = 0
    running_tokens: int = 0
    num_sequences: int = 0
    available_blocks: int = 1000
    block_size: int = 16
    max_sequence_tokens: int = 16_000
    accepting: bool = True
    clogged: tuple[str, ...] = ()

    @property
    def worker_id(self) -> str:
        return self.address
