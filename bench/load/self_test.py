"""What the load generator itself costs and adds, against a server that does nothing: `bench load --self-test`.

The server (another process) writes 1,000 tokens a second and tells when it wrote each; what lies between that
and the generator's time stamp (loopback, waking up, the generator) is ``client.added_ms``. Streams tick together,
as those of one batch do, so the last of a tick waits for the 19 before it. Seen on two busy cores: 4.5 % of one
core (45 µs per token, of which parsing is 9), 0.3 ms added at the median.
"""

from __future__ import annotations

import subprocess
import sys
from array import array
from dataclasses import replace

import numpy as np

from bench.load.figures import MS, distribution
from bench.load.session import LoadOptions, LoadResult, run_load
from bench.load.stream import StreamRecord
from common.errors import BatonError

TOKENS_PER_S = 1000
NUM_STREAMS = 20
STREAM_S = 5.0


def run_self_test(tokens_per_s: float = TOKENS_PER_S, stream_s: float = STREAM_S) -> LoadResult:
    """A run of ``NUM_STREAMS`` streams side by side, each ``stream_s`` long. Raises BatonError when there is no
    server to be had."""
    pace_s = NUM_STREAMS / tokens_per_s
    command = [sys.executable, "-m", "bench.load.null_server", str(pace_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            port = server.stdout.readline().strip()
            if not port:
                raise BatonError("the self-test's server did not start")
            options = LoadOptions(
                url=f"http://127.0.0.1:{port}",
                concurrency=NUM_STREAMS,
                num_requests=NUM_STREAMS,
                output_tokens=max(2, round(stream_s / pace_s)),
                prompt_tokens=1,
            )
            result = run_load(replace(options, model="null"))
        finally:
            server.stdin.close()
    client = result.figures["client"] | {"added_ms": distribution(added_ms(result.records), largest=True)}
    return replace(result, figures=result.figures | {"client": client})


def added_ms(records: list[StreamRecord]) -> array[float]:
    """Per token, from when the server wrote it to when it was seen here."""
    added: array[float] = array("d")
    for record in records:
        if record.ok:
            added.extend((np.asarray(record.times_s) - np.asarray(record.usage["sent_s"])) * MS)
    return added
