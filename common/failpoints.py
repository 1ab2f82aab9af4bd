"""Failpoints: named places where a fault can be made to happen, by configuration. For tests and drills.

    failpoints:
      reserve: error:no_capacity      every time
      commit: 2*delay:0.5             the first two times, half a second
      push: 10%crash                  one time in ten (by the worker's own seeded dice)
      decode_step: 50%1*hang          once, after about two tries
      piece: 1%corrupt | 1%drop       several: each throws its own dice, the first that falls due happens

An action is ``[PERCENT%][COUNT*]`` and ``error:CODE`` (a code of `common.errors`), ``delay:SECONDS``,
``hang`` (for ever) or ``crash`` (the process is gone at once, with `CRASH_STATUS`). What is on its way
(`piece`) can also be ``corrupt`` (a bit flips), ``drop``, ``duplicate`` or ``reorder`` (the next one
overtakes it). Where none is configured a failpoint is one test of a truth value.
"""

from __future__ import annotations

import asyncio
import difflib
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from common.errors import BY_CODE, BatonError, ConfigError, from_wire

FAILPOINTS: dict[str, str] = {
    "reserve": "a decode worker is asked for blocks, or to take a request whole; nothing is held yet",
    "prefill_start": "a prefill worker has taken a prompt into its books",
    "prefill_step": "a prefill worker's engine begins a step",
    "push": "the decode worker has agreed to a handoff, no block has been pushed",
    "open": "a worker is about to offer another one a handoff's KV; its blocks are computed or being computed",
    "piece": "a piece of KV (some blocks of a layer) is about to leave",
    "receive": "a piece of KV has arrived, it is neither verified nor written",
    "commit": "all blocks are computed and pushed, the commit is next",
    "join": "a decode worker has all blocks and the commit; the sequence is about to join",
    "receipt": "a decode worker has accepted a handoff, the prefill worker does not know it yet",
    "pull": "a worker holds the blocks of a prefix that another one pulls; none has been pushed",
    "decode_step": "a decode worker's engine begins a step",
}
"""Where each one is."""

CANNOT_WAIT = frozenset({"join"})
"""Failpoints in the middle of something indivisible: no delay, no hang."""

DAMAGE = ("corrupt", "drop", "duplicate", "reorder")
"""What can happen to data only: `Failpoints.reach` returns it, and whoever has the data does it."""

CARRIES_DATA = frozenset({"piece"})

CRASH_STATUS = 70

_ACTION = re.compile(r"(?:(?P<percent>\d+(?:\.\d+)?)%)?(?:(?P<count>\d+)\*)?(?P<kind>[a-z]+)(?::(?P<argument>.*))?")


@dataclass(slots=True)
class _Action:
    kind: str
    code: str = ""
    seconds: float = 0.0
    chance: float = 1.0
    left: int | None = None
    """How many more times; None without limit."""


class Failpoints:
    """The failpoints of one process. ``rng`` throws the dice, ``crash`` ends the process.

    Raises ConfigError for a name or an action that does not exist, with the nearest that does.
    """

    def __init__(
        self,
        actions: Mapping[str, str] | None = None,
        rng: random.Random | None = None,
        crash: Callable[[int], object] = os._exit,
    ) -> None:
        self._actions = {
            name: [_parse(name, part) for part in text.split("|")] for name, text in (actions or {}).items()
        }
        self.rng = rng or random.Random(0)
        self.happened: Counter[tuple[str, str]] = Counter()
        """How often each (failpoint, kind of action) took place."""
        self._crash = crash

    def __bool__(self) -> bool:
        return bool(self._actions)

    def has(self, name: str) -> bool:
        """Something is configured for the failpoint ``name``."""
        return name in self._actions

    async def reach(self, name: str) -> str:
        """Passes the failpoint ``name``. Returns one of `DAMAGE` if that is due, else "". Raises the
        BatonError that is configured there.
        """
        action = self._due(name)
        if action is None:
            return ""
        if action.kind in DAMAGE:
            return action.kind
        if action.kind == "delay":
            await asyncio.sleep(action.seconds)
        elif action.kind == "hang":
            await asyncio.Event().wait()
        else:
            self._fail(name, action)
        return ""

    def reach_now(self, name: str) -> None:
        """The same for one of `CANNOT_WAIT`."""
        action = self._due(name)
        if action is not None:
            self._fail(name, action)

    def _due(self, name: str) -> _Action | None:
        for action in self._actions.get(name, ()):
            if action.left == 0 or self.rng.random() >= action.chance:
                continue
            if action.left is not None:
                action.left -= 1
            self.happened[name, action.kind] += 1
            return action
        return None

    def _fail(self, name: str, action: _Action) -> None:
        if action.kind == "crash":
            self._crash(CRASH_STATUS)
        raise from_wire(action.code or BatonError.code, f"failpoint {name} is set to fail")


def _parse(name: str, text: str) -> _Action:
    if name not in FAILPOINTS:
        raise ConfigError(f"there is no failpoint {name!r}; nearest known: {_nearest(name, FAILPOINTS)!r}")
    match = _ACTION.fullmatch(text.replace(" ", ""))
    if match is None:
        raise ConfigError(f"failpoints.{name} must be [PERCENT%][COUNT*]ACTION[:ARGUMENT], got {text!r}")
    kind, argument = match["kind"], match["argument"] or ""
    action = _Action(kind, chance=float(match["percent"] or 100.0) / 100.0)
    if match["count"] is not None:
        action.left = int(match["count"])
    match kind:
        case "error":
            if argument not in BY_CODE:
                raise ConfigError(
                    f"failpoints.{name}: there is no error {argument!r}; nearest known: {_nearest(argument, BY_CODE)!r}"
                )
            action.code = argument
            return action
        case "delay":
            try:
                action.seconds = float(argument)
            except ValueError:
                raise ConfigError(f"failpoints.{name}: a delay has seconds, got {argument!r}") from None
        case "corrupt" | "drop" | "duplicate" | "reorder" if name not in CARRIES_DATA:
            raise ConfigError(f"failpoints.{name}: only {', '.join(sorted(CARRIES_DATA))} can {kind}, got {text!r}")
        case "hang" | "crash" | "corrupt" | "drop" | "duplicate" | "reorder":
            if argument:
                raise ConfigError(f"failpoints.{name}: {kind} takes no argument, got {argument!r}")
        case _:
            nearest = _nearest(kind, ("error", "delay", "hang", "crash", *DAMAGE))
            raise ConfigError(f"failpoints.{name}: there is no action {kind!r}; nearest known: {nearest!r}")
    if name in CANNOT_WAIT and kind in ("delay", "hang"):
        raise ConfigError(f"failpoints.{name} cannot wait: only error and crash are possible there, got {text!r}")
    return action


def _nearest(name: str, known: Collection[str]) -> str:
    return difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
