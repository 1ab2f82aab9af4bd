"""What `/cluster` and `/ledger` show: the fleet as this router sees it, and every block of it."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from common.errors import BatonError
from common.workers import Role, WorkerLedger
from router.service import RouterService
from router.worker import Worker

LEDGER_TIMEOUT_S = 3.0


def worker_json(worker: Worker) -> dict[str, Any]:
    """One worker; what only the handshake tells is empty until then."""
    info = worker.info
    return {
        "id": worker.worker_id,
        "role": worker.role.value,
        "state": worker.state.value,
        "reason": worker.reason or None,
        "epoch": info.epoch if info is not None else None,
        "host": info.host if info is not None else None,
        "pids": list(info.pids) if info is not None else [],
        "address": worker.address,
        "max_sequence_tokens": worker.max_sequence_tokens,
        "transports": list(info.transports) if info is not None else [],
        "load": asdict(worker.load) | {"state": worker.load.state.value},
    }


def ledger_json(ledger: WorkerLedger) -> dict[str, Any]:
    fields = asdict(ledger)
    return {"id": fields.pop("worker_id"), **fields, "role": ledger.role.value, "holders": [*fields["holders"]]}


async def ledger_view(service: RouterService) -> dict[str, Any]:
    """Every living worker's blocks, asked for now. One that does not answer in time is named instead."""
    alive = [worker for worker in service.registry.workers if worker.alive]
    answers = await asyncio.gather(*(_ledger(worker) for worker in alive))
    silent = [{"id": w.worker_id, "error": a} for w, a in zip(alive, answers, strict=True) if isinstance(a, str)]
    return {
        "workers": [ledger_json(answer) for answer in answers if isinstance(answer, WorkerLedger)],
        "unanswered": silent,
        "requests": {"open": service.records.num_live},
    }


async def _ledger(worker: Worker) -> WorkerLedger | str:
    try:
        client = worker.prefill_client if worker.role is Role.PREFILL else worker.decode_client
        async with asyncio.timeout(LEDGER_TIMEOUT_S):
            return await client.ledger()
    except TimeoutError:
        return f"no answer within {LEDGER_TIMEOUT_S:g} s"
    except BatonError as error:
        return error.message
