"""What a sequence has to bring to the sampler beyond its parameters: its biases as arrays, and how often
each token occurred in it.

Made once a sequence and kept up token by token, so that a step costs the same however long the sequence
is. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from common.messages import SamplingParams


class SamplingState:
    """``prompt`` and ``answer`` are the tokens so far. For sampling parameters that need none of this there
    is `of`, which then returns None.
    """

    __slots__ = ("_counts", "_ids", "_num_ids", "_places", "bias_ids", "bias_values")

    def __init__(self, params: SamplingParams, prompt: Sequence[int], answer: Iterable[int]) -> None:
        self.bias_ids = np.array([bias.token for bias in params.logit_bias], dtype=np.int64)
        self.bias_values = np.array([bias.bias for bias in params.logit_bias], dtype=np.float32)
        self._ids = np.unique(np.asarray(prompt, dtype=np.int64)) if params.penalizes else np.empty(0, np.int64)
        self._num_ids = len(self._ids)
        self._counts = np.zeros(self._num_ids, dtype=np.int64)
        self._places: dict[int, int] | None = None
        if params.penalizes:
            self._places = {token: place for place, token in enumerate(self._ids.tolist())}
            for token in answer:
                self.add(token)

    @classmethod
    def of(cls, params: SamplingParams, prompt: Sequence[int], answer: Iterable[int]) -> SamplingState | None:
        return cls(params, prompt, answer) if params.penalizes or params.logit_bias else None

    @property
    def ids(self) -> np.ndarray:
        """Every token of prompt and answer, once, where there are penalties."""
        return self._ids[: self._num_ids]

    @property
    def counts(self) -> np.ndarray:
        """How often each of `ids` is in the answer."""
        return self._counts[: self._num_ids]

    def add(self, token: int) -> None:
        """The next token of the answer."""
        if self._places is None:
            return
        place = self._places.setdefault(token, self._num_ids)
        if place == self._num_ids:
            if self._num_ids == len(self._ids):
                room = max(64, self._num_ids)
                self._ids = np.concatenate((self._ids, np.zeros(room, np.int64)))
                self._counts = np.concatenate((self._counts, np.zeros(room, np.int64)))
            self._ids[place] = token
            self._num_ids += 1
        self._counts[place] += 1
