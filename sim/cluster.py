"""The whole cluster in one process on virtual time: start reading here.

    SimCluster
      ├─ RouterService (the real one) ── SimPrefillClient, SimDecodeClient (no network, a latency)
      ├─ PrefillWorker × N (the real ones) ── SimDevice (costs time), SimSender, SimReceiver ─┐
      └─ DecodeWorker × N (the real ones) ─── SimDevice, SimReceiver, SimSender ◀── Links ────┘

Only what touches hardware is modelled: the device, the links, the network's latency. All decisions are
made by the code that runs in production.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.config import Config, Mode
from common.errors import BatonError
from common.failpoints import Failpoints
from common.handoff import KVLayout
from common.hashing import HASH_UNIT_TOKENS
from common.lifecycle import Tasks
from common.messages import GenerationRequest, SamplingParams
from common.workers import ModelInfo, Role, WorkerInfo, WorkerLedger
from decode_worker.scheduler import DecodeScheduler
from decode_worker.worker import DecodeWorker
from engine.blocks import BlockPool
from engine.plan import LayerHook, StepOutput, StepPlan
from engine.ports import Exchange
from engine.prefix_cache import PrefixCache
from prefill_worker.scheduler import PrefillScheduler
from prefill_worker.worker import PrefillWorker
from router.answer import NewTokens
from router.service import RouterService
from sim.clients import Host, SimDecodeClient, SimPeers, SimPrefillClient
from sim.device import CostModel, DeviceMemory, SimDevice
from sim.links import Link, SimReceiver, SimSender
from sim.trace import Arrival

BEYOND_HORIZON_S = 1e12


@dataclass(frozen=True, slots=True)
class SimConfig:
    """The scenario. ``num_blocks`` is one worker's pool."""

    prefill: int = 1
    decode: int = 1
    mode: Mode = "split"
    num_blocks: int = 4096
    block_size: int = 16
    num_layers: int = 4
    vocab_size: int = 32_000
    max_model_len: int = 131_072
    latency_s: float = 200e-6
    jitter_s: float = 0.0
    """Calls between router and workers take up to this much longer, and overtake each other."""
    link_bytes_per_s: float = 50e9
    seed: int = 0
    cost: CostModel = field(default_factory=CostModel)
    base: Config = field(default_factory=Config)
    failpoints: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Worker name → its failpoints."""
    heartbeats: bool = False
    """Heartbeats and suspicion are timers that never end; without them a deadlock shows at once."""


@dataclass(slots=True)
class Outcome:
    """What a client saw of one request. Times are virtual seconds."""

    request: GenerationRequest
    arrived_at: float
    tokens: list[int] = field(default_factory=list)
    first_token_at: float | None = None
    ended_at: float | None = None
    finish: str = ""
    cached_tokens: int = 0
    error: BatonError | None = None


class EventLog:
    """Lines of what happened, in order, and their hash. ``keep`` False keeps the hash alone."""

    def __init__(self, keep: bool = True) -> None:
        self.lines: list[str] = []
        self._keep = keep
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, now: float, what: str) -> None:
        line = f"{now:.9f} {what}"
        self._hash.update(line.encode())
        self._hash.update(b"\n")
        if self._keep:
            self.lines.append(line)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


class _LoggedDevice(SimDevice):
    def __init__(self, name: str, log: EventLog, memory: DeviceMemory, cost: CostModel, vocab_size: int) -> None:
        super().__init__(memory, cost, vocab_size)
        self._name = name
        self._log = log

    async def execute(self, plan: StepPlan, on_layer: LayerHook | None = None) -> StepOutput:
        steps = " ".join(f"{step.sequence_id}:{step.start}+{len(step.token_ids)}" for step in plan.steps)
        self._log.add(asyncio.get_running_loop().time(), f"{self._name} step {plan.step_id} {steps}")
        return await super().execute(plan, on_layer)


class SimCluster:
    """Make it inside a running virtual-time loop; `start`, use `service`, `close`."""

    def __init__(self, config: SimConfig, log: EventLog | None = None) -> None:
        self.config = config
        self.log = log or EventLog()
        self.hosts: dict[str, Host] = {}
        self.prefill_workers: dict[str, PrefillWorker] = {}
        self.decode_workers: dict[str, DecodeWorker] = {}
        self.devices: dict[str, SimDevice] = {}
        self.links: dict[tuple[str, str], Link] = {}
        self._receivers: dict[str, SimReceiver] = {}
        self._epochs: dict[str, int] = {}
        self._failure: BaseException | None = None
        self._tasks = Tasks(on_failure=self._broke_down)
        base = config.base
        if not config.heartbeats:
            quiet = {"heartbeat_s": BEYOND_HORIZON_S, "suspect_after_s": BEYOND_HORIZON_S}
            base = base.model_copy(update={"worker": base.worker.model_copy(update=quiet)})
        self._base = base
        self.service = RouterService(
            base.router,
            self,
            router_id="router-0",
            rng=random.Random(config.seed),
            mode=config.mode,
            chunk_tokens=base.prefill.chunk_tokens,
            suspect_after_s=base.worker.suspect_after_s,
        )

    # ── a client factory for the router ───────────────────────────────────────────────────────────

    def prefill(self, address: str) -> SimPrefillClient:
        return SimPrefillClient(self.hosts[address], self.prefill_workers[address])

    def decode(self, address: str) -> SimDecodeClient:
        return SimDecodeClient(self.hosts[address], self.decode_workers[address])

    # ── life ──────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        colocated = self.config.mode == "colocated"
        decode_names = [f"decode-{i}" for i in range(self.config.decode)]
        prefill_names = [] if colocated else [f"prefill-{i}" for i in range(self.config.prefill)]
        for name in decode_names:
            self._start_decode(name)
        for name in prefill_names:
            self._start_prefill(name)
        self.service.registry.set_members(prefill_names, decode_names)

    @property
    def workers(self) -> dict[str, PrefillWorker | DecodeWorker]:
        return {**self.prefill_workers, **self.decode_workers}

    async def close(self) -> None:
        await self.service.close()
        for worker in self.workers.values():
            await worker.close()
        await self._tasks.close()

    async def kill(self, name: str) -> None:
        """The worker's process is gone, in the middle of whatever it did."""
        self._vanish(name)
        await self.workers[name].close()

    def _vanish(self, name: str) -> None:
        """From this moment on nobody hears of it."""
        self.log.add(asyncio.get_running_loop().time(), f"kill {name}")
        self.hosts[name].kill()
        if name in self._receivers:
            self._receivers[name].alive = False

    def restart(self, name: str) -> None:
        """A killed worker is started again: same name and address, next epoch, empty cache."""
        self.log.add(asyncio.get_running_loop().time(), f"restart {name}")
        if name in self.prefill_workers:
            self._start_prefill(name)
        else:
            self._start_decode(name)

    async def ledgers(self) -> list[WorkerLedger]:
        return [await worker.ledger() for name, worker in self.workers.items() if self.hosts[name].alive]

    async def settled(self) -> list[WorkerLedger]:
        """The ledgers once all requests have ended and nobody holds anything. Raises TimeoutError after
        60 virtual seconds, and what a worker broke down with."""
        async with asyncio.timeout(60.0):
            while True:
                ledgers = await self.ledgers()
                if self._failure is not None:
                    raise self._failure
                if not self.service.records.num_live and not any(ledger.holders for ledger in ledgers):
                    return ledgers
                await asyncio.sleep(0.01)

    # ── requests ──────────────────────────────────────────────────────────────────────────────────

    async def ask(self, request: GenerationRequest) -> Outcome:
        """One request through the router, as a client sees it."""
        loop = asyncio.get_running_loop()
        outcome = Outcome(request, loop.time())
        self.log.add(loop.time(), f"{request.request_id} arrives")
        try:
            async for event in self.service.generate(request):
                if isinstance(event, NewTokens):
                    if outcome.first_token_at is None:
                        outcome.first_token_at = loop.time()
                    outcome.tokens.extend(event.tokens)
                    self.log.add(loop.time(), f"{request.request_id} {event.first_index} {event.tokens}")
                else:
                    outcome.finish = event.reason.value
                    outcome.cached_tokens = event.usage.cached_tokens
        except BatonError as error:
            outcome.error = error
        outcome.ended_at = loop.time()
        self.log.add(loop.time(), f"{request.request_id} ends {outcome.finish or outcome.error}")
        return outcome

    async def replay(self, arrivals: Sequence[Arrival]) -> list[Outcome]:
        """All arrivals at their times; returns when all have ended, in the order of arrival."""

        async def at(number: int, arrival: Arrival) -> Outcome:
            await asyncio.sleep(arrival.at_s)
            return await self.ask(self.request(f"r{number:05d}", arrival))

        return await asyncio.gather(*(at(number, arrival) for number, arrival in enumerate(arrivals)))

    def request(self, name: str, arrival: Arrival) -> GenerationRequest:
        sampling = SamplingParams(max_tokens=arrival.output_tokens, seed=self.config.seed, ignore_eos=True)
        return GenerationRequest(name, arrival.prompt, sampling, timeout_s=self._base.router.timeout_s)

    # ── workers ───────────────────────────────────────────────────────────────────────────────────

    def _start_prefill(self, name: str) -> None:
        info, pool, memory, device = self._make(name, Role.PREFILL)
        for other in self.decode_workers:  # the links of handoffs; those of pulls are there when used
            self._link(name, other)
        prefill = self._base.prefill
        scheduler = PrefillScheduler(
            pool, info.model, prefill.chunk_tokens, prefill.max_sequences, prefill.undelivered_tokens
        )
        worker = PrefillWorker(
            info,
            self._base.worker,
            self._base.transfer,
            pool,
            scheduler,
            device,
            self._exchange(name, memory),
            step_timeout_s=self._base.engine.step_timeout_s,
            failpoints=self._failpoints(name),
        )
        self.prefill_workers[name] = worker
        worker.start()
        self._tasks.spawn(worker.failed(), f"failure of {name}")

    def _start_decode(self, name: str) -> None:
        role = Role.BOTH if self.config.mode == "colocated" else Role.DECODE
        info, pool, memory, device = self._make(name, role)
        scheduler = DecodeScheduler(pool, info.model, self._base.decode.max_sequences, self._base.decode.chunk_tokens)
        worker = DecodeWorker(
            info,
            self._base.worker,
            self._base.transfer,
            pool,
            scheduler,
            device,
            self._exchange(name, memory),
            step_timeout_s=self._base.engine.step_timeout_s,
            failpoints=self._failpoints(name),
        )
        self.decode_workers[name] = worker
        worker.start()
        self._tasks.spawn(worker.failed(), f"failure of {name}")

    def _exchange(self, name: str, memory: DeviceMemory) -> Exchange:
        """Any worker can send to any other, and receive from it."""
        receiver = self._receivers[name] = SimReceiver(name, memory)
        sender = SimSender(memory, self._receivers, lambda other: self._link(name, other))
        return Exchange(sender, receiver, SimPeers(self.hosts, lambda address: self.workers[address]))

    def _failpoints(self, name: str) -> Failpoints:
        def crash(_: int) -> None:
            self._vanish(name)
            self._tasks.spawn(self.workers[name].close(), f"crash of {name}")

        rng = random.Random(f"{self.config.seed} {name} failpoints")
        return Failpoints(self.config.failpoints.get(name), rng, crash)

    def _broke_down(self, error: BaseException) -> None:
        """No fault that is injected breaks a worker's engine: it is the code's own."""
        self._failure = self._failure or error

    def _make(self, name: str, role: Role) -> tuple[WorkerInfo, BlockPool, DeviceMemory, SimDevice]:
        config = self.config
        self._epochs[name] = self._epochs.get(name, 0) + 1
        rng = random.Random(f"{config.seed} {name} {self._epochs[name]}")
        self.hosts[name] = Host(name, config.latency_s, config.jitter_s, rng)
        layout = KVLayout("sim", config.num_layers, 8, 128, config.block_size, "bfloat16")
        model = ModelInfo("sim", "sim", config.vocab_size, config.max_model_len, (0, 1))
        memory = DeviceMemory(layout, config.num_blocks)
        pool = BlockPool(config.num_blocks, config.block_size, PrefixCache(config.block_size))
        info = WorkerInfo(
            worker_id=name,
            role=role,
            epoch=self._epochs[name],
            host="sim",
            host_id="sim",
            pids=(),
            address=name,
            model=model,
            layout=layout,
            total_blocks=config.num_blocks,
            max_sequence_tokens=min(config.max_model_len, config.num_blocks * config.block_size),
            hash_unit_tokens=HASH_UNIT_TOKENS,
        )
        device = self.devices[name] = _LoggedDevice(name, self.log, memory, config.cost, config.vocab_size)
        return info, pool, memory, device

    def _link(self, source: str, target: str) -> Link:
        """From one worker to another; it is there before and after the workers at its ends."""
        return self.links.setdefault((source, target), Link(self.config.link_bytes_per_s, self.config.latency_s))
