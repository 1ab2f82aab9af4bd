"""`baton bench transfer`: how fast KV moves between two workers' pools, against what the link itself can do.

For every case (a transport, so many bytes in so many blocks) two processes take turns, round after round, at
the raw link and at a handoff through the engine: reserved blocks of the real pool, layer by layer, verified.

    this process (`session.py`, `measure.py`)  peer (`peer.py`)
      prepare(case) ──────────────────────────▶ a pool, a receiver, raw targets
      raw: bytes of one array ────────────────▶ into one array           (`raw.py`)
      engine: ticket, open, push, commit ─────▶ into scattered blocks    (`ends.py`)
      check: digest of the pool ◀──────────────

Medians over the rounds are compared, so what else the machine does meets both alike. `figures.py` says what
the numbers mean and which targets they meet; `summary.py` and `plots.py` show them. How much of a transfer is
left when its prefill ends is another measurement, with a real model: `overlap.py`.
"""
