"""One worker, as this router sees it: identity, state, load, and the attempts that run there.

It is the placement's `Outlook`. It does no I/O: its link (`router/worker_link.py`) tells it what
happened, the service tells it what was sent.
"""

from __future__ import annotations

from typing import cast

from common.errors import BatonError, UnavailableError
from common.messages import TokenDelta
from common.workers import Role, WorkerInfo, WorkerLoad, WorkerState
from router.attempt import Attempt, AttemptKey
from router.clients import DecodeClient, PrefillClient
from router.outstanding import Outstanding


class Worker:
    """The worker at ``address``. What comes back after a loss is a new worker, whatever its id and epoch."""

    def __init__(self, address: str, role: Role) -> None:
        self.address = address
        self.role = role
        self.info: WorkerInfo | None = None
        self.load = WorkerLoad()
        self.reason = "not connected yet"
        """Why it is not ready; empty when it is."""
        self.heard_at = 0.0
        self.silent = False
        self.stuck_since: float | None = None
        """Since when its reports say that its engine hangs."""
        self.leaving = False
        """No longer a member: it finishes what it has."""
        self.attempts: dict[AttemptKey, Attempt] = {}
        self.outstanding = Outstanding()
        self._client: PrefillClient | DecodeClient | None = None
        self._lost = False
        self._reported = False
        self._full = False
        self._tight = False

    # ── identity and state ────────────────────────────────────────────────────────────────────────

    @property
    def worker_id(self) -> str:
        return self.info.worker_id if self.info is not None else self.address

    @property
    def state(self) -> WorkerState:
        if self._client is None or not self._reported:
            return WorkerState.DEAD if self._lost else WorkerState.STARTING
        if self.leaving:
            return WorkerState.DRAINING
        if self.load.state is WorkerState.READY and self.silent:
            return WorkerState.SUSPECT
        return self.load.state

    @property
    def alive(self) -> bool:
        return self._client is not None

    @property
    def prefill_client(self) -> PrefillClient:
        return cast(PrefillClient, self._connected())

    @property
    def decode_client(self) -> DecodeClient:
        return cast(DecodeClient, self._connected())

    @property
    def connection(self) -> object:
        """What is the same object as long as one connection lasts; None without one."""
        return self._client

    def _connected(self) -> PrefillClient | DecodeClient:
        if self._client is None:
            raise UnavailableError(f"{self.worker_id} is {self.state}: {self.reason}")
        return self._client

    # ── the outlook for placement ─────────────────────────────────────────────────────────────────

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens to be computed there."""
        if self.role is Role.DECODE:
            return self.load.waiting_tokens
        return max(0, self.load.waiting_tokens + self.outstanding.tokens)

    @property
    def running_tokens(self) -> int:
        """Tokens whose KV decoding reads."""
        if self.role is Role.PREFILL:
            return 0
        return max(0, self.load.running_tokens + self.outstanding.tokens)

    @property
    def num_sequences(self) -> int:
        return max(0, self.load.num_running + self.load.num_waiting + self.outstanding.requests)

    @property
    def available_blocks(self) -> int:
        """Blocks that are free, or become so by forgetting cached prefixes."""
        return max(0, self.load.free_blocks + self.load.cached_blocks - self.outstanding.blocks)

    @property
    def block_size(self) -> int:
        return self.info.layout.block_size if self.info is not None else 1

    @property
    def max_sequence_tokens(self) -> int:
        return self.info.max_sequence_tokens if self.info is not None else 0

    @property
    def accepting(self) -> bool:
        """False after a refusal, until there is news. From then on one at a time, so that the refused
        request is not overtaken there, until the worker takes one again.
        """
        return not self._full and not (self._tight and self.outstanding.num_unsent)

    @property
    def clogged(self) -> tuple[str, ...]:
        """Ids of decode workers to which its KV does not get away."""
        return self.load.clogged

    # ── what the link tells ───────────────────────────────────────────────────────────────────────

    def connected(self, info: WorkerInfo, client: PrefillClient | DecodeClient, now: float) -> None:
        self.info = info
        self.load = WorkerLoad()
        self.outstanding = Outstanding()
        self.heard_at = now
        self.silent = self._reported = self._full = self._tight = False
        self.stuck_since = None
        self.reason = ""
        self._client = client

    def reported(self, load: WorkerLoad, now: float) -> None:
        """A load report: the worker lives, and what it takes is to be found out again."""
        self.heard(now)
        self._note_stuck(load.state is WorkerState.SUSPECT, now)
        self.load = load
        self.outstanding.reported()
        self._reported = True
        self._full = False

    def stuck_s(self, now: float) -> float:
        """For how long its engine has been known to hang."""
        return 0.0 if self.stuck_since is None else now - self.stuck_since

    def _note_stuck(self, stuck: bool, now: float) -> None:
        if stuck:
            self.stuck_since = now if self.stuck_since is None else self.stuck_since
            self.reason = "its engine has been in one step for longer than engine.step_timeout_s"
        elif self.stuck_since is not None:
            self.stuck_since = None
            self.reason = ""

    def heard(self, now: float) -> None:
        self.heard_at = now
        if self.silent:
            self.silent = False
            self.reason = ""

    def quiet(self, silence_s: float) -> None:
        self.silent = True
        self.reason = f"silent for {silence_s:.1f} s"

    def refused_to_connect(self, error: BatonError) -> None:
        """It could not be reached, or does not fit the others; ``reason`` tells."""
        self.reason = error.message

    def lost(self, error: BatonError) -> None:
        """The connection is gone: every attempt that runs there ends now."""
        self.reason = error.message
        self._client = None
        self._lost = True
        attempts, self.attempts = self.attempts, {}
        for attempt in attempts.values():
            attempt.fail(error, self.address)

    def deliver(self, delta: TokenDelta) -> None:
        attempt = self.attempts.get((delta.request_id, delta.attempt))
        if attempt is not None:
            attempt.deliver(delta, self.address)

    # ── what the service tells ────────────────────────────────────────────────────────────────────

    def begin(self, attempt: Attempt, tokens: int, blocks: int = 0) -> None:
        """The attempt was placed here: ``tokens`` to compute or to hold, in ``blocks``."""
        self.attempts[attempt.key] = attempt
        self.outstanding.begin(attempt.key, tokens, blocks)

    def took(self, attempt: Attempt) -> None:
        self.outstanding.sent(attempt.key)
        self._tight = False

    def end(self, attempt: Attempt) -> None:
        """The attempt does not concern this worker any more (again: nothing happens)."""
        self.attempts.pop(attempt.key, None)
        self.outstanding.end(attempt.key)

    def refused(self) -> None:
        """It has no capacity: nothing goes there until `may_retry` or a report."""
        self._full = True
        self._tight = True

    def may_retry(self) -> None:
        self._full = False
