"""Replays the conversation trace in a process of its own: ``python -m tests.virtual.replay_conversation LIMIT``.

Prints one JSON object, so that runs under different hash seeds can be compared.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path

from sim.cluster import EventLog, Outcome, SimCluster, SimConfig
from sim.device import expected_tokens
from sim.loop import run
from sim.trace import read_mooncake

TRACE = Path(__file__).parent / "data" / "mooncake_conversation_2000.jsonl.gz"
SCALE, SPEEDUP = 16, 4.0
"""Three workers of each role cannot carry the trace as it is. With prompts and outputs of a sixteenth, at four
times the rate, the prefill pool is busy for about 60 % of the time if nothing hits."""


def replay(limit: int) -> dict[str, object]:
    settings = SimConfig(prefill=3, decode=3, num_blocks=8192)
    arrivals = read_mooncake(TRACE, limit=limit, scale=SCALE, vocab_size=settings.vocab_size, speedup=SPEEDUP)
    log = EventLog(keep=False)

    async def main() -> list[Outcome]:
        cluster = SimCluster(settings, log)
        await cluster.start()
        outcomes = await cluster.replay(arrivals)
        assert all(ledger.free + ledger.cached == ledger.total for ledger in await cluster.settled())
        await cluster.close()
        return outcomes

    # Of this process: it is never idle, so on a machine of its own this is real time.
    started = time.process_time()
    outcomes = run(main())
    cpu_s = time.process_time() - started
    wrong = [
        outcome.request.request_id
        for outcome in outcomes
        if outcome.tokens != expected_tokens(outcome.request.prompt, outcome.request.sampling, settings.vocab_size)
    ]
    return {
        "requests": len(outcomes),
        "tokens": sum(len(outcome.tokens) for outcome in outcomes),
        "wrong": wrong,
        "errors": [str(outcome.error) for outcome in outcomes if outcome.error is not None],
        "cpu_s": cpu_s,
        "events_hash": log.digest,
    }


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    print(json.dumps(replay(int(sys.argv[1]))))  # noqa: T201
