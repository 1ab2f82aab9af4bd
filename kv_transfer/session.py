"""One handoff, both ends of it: a sender's `Push` (push.py) and a receiver's `Arrival` (arrival.py). Its life:

    sender                                                receiver
                                                            expect(ticket, listener)
    open(ticket, blocks)
      Open(secret, layout, wire formats) ────────────────▶  ticket known, secret equal, layouts compatible,
      ◀───────────────────────────────── OpenAck(format)    nobody else at this rank's share of it?
    push(layer, first, count), as layers become complete
      wait for room in staging, copy, checksum
      Piece(layer, first, count) ────────────────────────▶  in bounds, ticket still live?
                                                            copy into the pool; verified? listener.progressed
      ◀───────────────────────────────────────── PieceAck   (always: it gives the room back)
    commit(first token)
      Commit, behind the last piece ─────────────────────▶  every piece there?
        ◀──────────────────── Missing(runs), if not so      (lost, or did not verify; `retries` times)
        push those again, Commit again ──────────────────▶
                                                            every rank's share there? listener.committed
      ◀────────────────────────────────────────── Receipt

A sender is one rank of a worker, a receiver likewise: under a ticket each rank that has heads for it
opens, pushes and commits its own share (`plan.py`), and the last of their commits is the handoff's.

It ends early by Abort from the sender, by Error from the receiver (a wrong secret, bytes that do not
verify however often they come, a forgotten ticket, …) or with its channel. In each case `commit` raises,
and the listener of a live ticket hears `failed`. Until the listener forgets the ticket a sender with the
secret may open it again, on this or another channel: pieces are idempotent by (ticket, layer, block,
rank), those that have arrived stay arrived. A share is committed once.

Two promises carry the rest of the house. After `Push.abort` or `Push.commit` nothing reads the
sender's blocks, and after `Receiver.forget` nothing writes the receiver's: each waits for the copy that
is under way. Knows neither channels nor how many handoffs share one (`sender.py`, `receiver.py`).
"""
