"""`baton serve` as its users meet it: real Ray, the real small model, nothing replaced.

Two clusters serve all tests but those about starting: `pair`, one worker of each role, and `quad`, two of
each. The last test of each one ends it, and looks for what is left.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.asking import Prompt, Reply, ask_all, check_record, random_text_ids
from tests.e2e.serving import Reading, Served, baton, until

pytestmark = pytest.mark.e2e

QUESTION = "What is the capital of France?"
END_S = 15.0

PROMPTS = [Prompt(random_text_ids(seed, 20 + 17 * seed), 8) for seed in range(6)]
LONG = Prompt(random_text_ids(99, 40), 80)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("pair"))
    yield served.ready()
    served.kill()
    print(served.stderr())  # noqa: T201


@pytest.fixture(scope="module")
def quad(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("quad"), "--prefill", "2", "--decode", "2")
    yield served.ready()
    served.kill()
    print(served.stderr())  # noqa: T201


@pytest.fixture(scope="module")
def answers(pair: Served) -> list[Reply]:
    """The undisturbed answers to `PROMPTS` and, last, to `LONG`."""
    return ask_all(pair.fleet, [*PROMPTS, LONG], concurrency=1)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(*argv: str, **options: str) -> Served:
        started.append(Served(tmp_path / str(len(started)), *argv, **options))
        return started[-1]

    yield start
    for served in started:
        served.kill()
        print(served.stderr())  # noqa: T201


def client_of(served: Served) -> openai.OpenAI:
    http = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(base_url=f"{served.fleet.url}/v1", api_key="none", http_client=http, max_retries=0)


# ── one prefill and one decode worker ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize("parameters", [{}, {"temperature": 0}], ids=["as-it-comes", "greedy"])
@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
def test_an_openai_client_gets_the_right_answer(pair: Served, streaming: bool, parameters: dict[str, Any]) -> None:
    chat = client_of(pair).chat.completions
    asked = {"model": "smollm2-135m", "max_tokens": 30, "messages": [{"role": "user", "content": QUESTION}]}
    if streaming:
        text = "".join(
            chunk.choices[0].delta.content or "" for chunk in chat.create(**asked, **parameters, stream=True)
        )
    else:
        text = chat.create(**asked, **parameters).choices[0].message.content or ""
    assert "Paris" in text


def test_it_tells_its_model_and_that_it_is_well(pair: Served) -> None:
    assert [model.id for model in client_of(pair).models.list()] == ["smollm2-135m"]
    assert pair.fleet.get("/health") == {"status": "ok"}
    assert pair.fleet.get("/ready") == {"status": "ready"}
    assert pair.fleet.metric("baton_workers", state="ready") == 2
    with grpc.insecure_channel(pair.grpc_address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_cluster_shows_the_processes_and_their_roles(pair: Served) -> None:
    cluster = pair.fleet.get("/cluster")
    assert (cluster["model"], cluster["mode"]) == ("smollm2-135m", "split")
    (router,) = cluster["routers"]
    assert (router["id"], router["url"], router["state"]) == ("router-0", pair.fleet.url, "ready")
    assert [process.pid for process in pair.actors("RouterActor")] == [router["pid"]]
    workers = {worker["id"]: worker for worker in cluster["workers"]}
    assert {name: (worker["role"], worker["state"]) for name, worker in workers.items()} == {
        "prefill-0": ("prefill", "ready"),
        "decode-0": ("decode", "ready"),
    }
    pids = sorted(worker["pids"][0] for worker in workers.values())
    assert pids == sorted(process.pid for process in pair.actors("WorkerActor"))
    environment = psutil.Process(pids[0]).environ()
    assert environment["OMP_NUM_THREADS"] == str(max(1, os.cpu_count() // 2))
    assert environment["TMPDIR"] == str(pair.private_directory())


def test_the_split_is_real(pair: Served, answers: list[Reply]) -> None:
    for reply in answers:
        record = check_record(pair.fleet, reply)
        (attempt,) = record["attempts"]
        assert (attempt["prefill"], attempt["decode"]) == ("prefill-0", "decode-0")
        assert record["tokens"]["computed_decode"] == 0
    loads = pair.fleet.loads()
    prefill, decode = loads["prefill-0"], loads["decode-0"]
    assert (prefill["decode_steps"], prefill["decoded_tokens"], prefill["prefill_steps"] > 0) == (0, 0, True)
    assert (decode["prefill_steps"], decode["computed_context_tokens"], decode["decode_steps"] > 0) == (0, 0, True)
    assert decode["kv_bytes_received"] == prefill["kv_bytes_sent"] > 0
    assert all(worker["holders"] == [] for worker in pair.fleet.settled()["workers"])


def test_tokens_make_a_round_trip(pair: Served) -> None:
    text = "Paris is the capital — 巴黎 🗼."
    asked = httpx.post(f"{pair.fleet.url}/tokenize", json={"prompt": text}, trust_env=False).json()
    assert asked["count"] == len(asked["tokens"]) > 0
    back = httpx.post(f"{pair.fleet.url}/detokenize", json={"tokens": asked["tokens"]}, trust_env=False).json()
    assert back == {"prompt": text}


def test_status_shows_it(pair: Served) -> None:
    shown = baton("status", "--url", pair.fleet.url)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert all(name in shown.stdout for name in ("router-0", "prefill-0", "decode-0", pair.fleet.url))
    told = baton("status", "--url", pair.fleet.url, "--json")
    assert (told.returncode, told.stderr) == (0, "")
    status = json.loads(told.stdout)
    assert {worker["id"] for worker in status["cluster"]["workers"]} == {"prefill-0", "decode-0"}
    assert {worker["id"] for worker in status["ledger"]["workers"]} == {"prefill-0", "decode-0"}


def test_a_second_one_on_its_port_says_so(pair: Served) -> None:
    port = pair.fleet.url.rsplit(":", 1)[1]
    second = baton("serve", "--port", port)
    assert (second.returncode, second.stdout) == (1, "")
    words = f"cannot listen on 127.0.0.1 port {port} (router.port): Address already in use; stop what listens there"
    assert second.stderr.startswith(f"baton: error: {words}")
    assert second.stderr.count("\n") == 1


def test_sigterm_with_a_stream_under_way_ends_everything(pair: Served, answers: list[Reply]) -> None:
    footprint = pair.footprint()
    assert int(pair.fleet.url.rsplit(":", 1)[1]) in footprint.ports
    reading = Reading(pair.fleet, LONG)
    reading.wait_for_tokens(3)
    started = time.monotonic()
    pair.signal(signal.SIGTERM)
    status = pair.process.wait(60)
    assert (status, time.monotonic() - started < END_S) == (0, True)
    footprint.gone(within_s=2)
    reading.to_the_end(within_s=1)
    assert reading.broken is None
    told = answers[-1].token_ids
    if reading.done:
        assert tuple(reading.token_ids) == told
    else:  # it did not get through within the grace, and was told so
        assert reading.error is not None
        assert "stopping" in reading.error["message"]
        assert tuple(reading.token_ids) == told[: len(reading.token_ids)]
    assert pair.rest_of_stdout() == ""
    assert pair.complaints() == []
    assert "uvicorn" not in pair.stderr()
    assert pair.stderr().splitlines()[-1] == "baton: ended"


# ── two workers of each role ──────────────────────────────────────────────────────────────────────


def test_all_workers_take_part_and_the_tokens_stay_the_same(quad: Served, answers: list[Reply]) -> None:
    replies = ask_all(quad.fleet, PROMPTS, concurrency=len(PROMPTS), streaming=True)
    assert [reply.token_ids for reply in replies] == [reply.token_ids for reply in answers[:-1]]
    attempts = [check_record(quad.fleet, reply)["attempts"][-1] for reply in replies]
    assert {attempt["prefill"] for attempt in attempts} == {"prefill-0", "prefill-1"}
    assert {attempt["decode"] for attempt in attempts} == {"decode-0", "decode-1"}


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_killed_worker_costs_the_stream_nothing_and_comes_back(quad: Served, answers: list[Reply], role: str) -> None:
    reading = Reading(quad.fleet, LONG)
    reading.wait_for_tokens(3)
    victim = quad.fleet.get(f"/requests/{reading.request_id}")["attempts"][-1][role]
    before = {worker["id"]: worker for worker in quad.fleet.get("/cluster")["workers"]}
    quad.kill_worker(victim)
    reading.to_the_end()
    assert (reading.done, reading.error, reading.broken) == (True, None, None)
    assert tuple(reading.token_ids) == answers[-1].token_ids
    attempts = quad.fleet.get(f"/requests/{reading.request_id}")["attempts"]
    if role == "decode":
        assert [attempt["decode"] == victim for attempt in attempts] == [True, False]
    else:  # its work was done
        assert len(attempts) == 1

    def all_ready() -> dict[str, Any] | None:
        workers = {worker["id"]: worker for worker in quad.fleet.get("/cluster")["workers"]}
        ready = workers.keys() == before.keys() and all(worker["state"] == "ready" for worker in workers.values())
        return workers if ready else None

    after = until(all_ready, 60)
    renewed = {name for name, worker in after.items() if worker["epoch"] != before[name]["epoch"]}
    assert renewed == {victim}
    assert after[victim]["epoch"] > before[victim]["epoch"]
    assert {name for name, worker in after.items() if worker["pids"] != before[name]["pids"]} == {victim}


def test_a_killed_router_breaks_its_streams_visibly_and_comes_back_where_it_was(
    quad: Served, answers: list[Reply]
) -> None:
    reading = Reading(quad.fleet, LONG)
    reading.wait_for_tokens(3)
    pid = quad.fleet.get("/cluster")["routers"][0]["pid"]
    os.kill(pid, signal.SIGKILL)
    reading.to_the_end()
    assert (reading.done, reading.broken is not None) == (False, True)

    def again() -> bool:
        try:
            return bool(httpx.get(f"{quad.fleet.url}/ready", timeout=30, trust_env=False).status_code == 200)
        except httpx.HTTPError:
            return False

    until(again, 60)
    assert quad.fleet.get("/cluster")["routers"][0]["pid"] != pid
    (reply,) = ask_all(quad.fleet, PROMPTS[:1], concurrency=1)
    assert reply.token_ids == answers[0].token_ids
    quad.fleet.settled()  # what the old one had asked for has ended too


def test_ctrl_c_ends_everything(quad: Served) -> None:
    footprint = quad.footprint()
    started = time.monotonic()
    quad.signal(signal.SIGINT)
    status = quad.process.wait(60)
    assert (status, time.monotonic() - started < END_S) == (0, True)
    footprint.gone(within_s=2)
    assert quad.rest_of_stdout() == ""


# ── ends of other kinds ───────────────────────────────────────────────────────────────────────────


def test_nothing_outlives_a_killed_serve(serve: Callable[..., Served]) -> None:
    served = serve().ready()
    footprint = served.footprint()
    reading = Reading(served.fleet, Prompt(LONG.token_ids, 2000))  # not over before Ray hears of the kill
    reading.wait_for_tokens(3)
    served.process.kill()
    served.process.wait()
    footprint.gone(within_s=60)
    assert reading.to_the_end(within_s=1).broken is not None


@pytest.mark.parametrize("words", ["starting Ray", "reading weights"])
def test_a_signal_while_starting_ends_everything(serve: Callable[..., Served], words: str) -> None:
    served = serve()
    served.wait_for_words(words)
    footprint = served.footprint()
    started = time.monotonic()
    if words == "reading weights":
        served.signal_all(signal.SIGTERM)
    else:
        served.signal(signal.SIGTERM)
    status = served.process.wait(60)
    assert (status, time.monotonic() - started < END_S) == (0, True)
    footprint.gone(within_s=2)
    assert served.rest_of_stdout() == ""
    assert served.complaints() == []
    assert served.stderr().splitlines()[-1] == "baton: interrupted before the cluster was up"


def test_a_second_signal_kills_at_once(serve: Callable[..., Served]) -> None:
    served = serve()
    served.wait_for_words("reading weights")
    (controller,) = served.actors("ControllerActor")
    controller.suspend()  # hung: it ends nothing when it is asked to
    footprint = served.footprint()
    served.signal(signal.SIGINT)
    served.wait_for_words("once more to kill")
    started = time.monotonic()
    served.signal(signal.SIGINT)
    status = served.process.wait(60)
    assert (status, time.monotonic() - started < 4) == (130, True)
    footprint.gone(within_s=5)


# ── starts that fail ──────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--set", "decod.workers=2"], "unknown config key 'decod'; nearest known: 'decode'"),
        (["--model", "/nowhere/model"], "/nowhere/model does not exist"),
        (["--port", "{port}"], "cannot listen on 127.0.0.1 port {port} (router.port): Address already in use"),
        (["--host", "192.0.2.77"], "cannot listen on 192.0.2.77 (router.host): Cannot assign requested address"),
        (["--set", "engine.pool_bytes=1000000000000"], "KV pool 931.32 GiB each"),
        (["--set", "transfer.transports=[nccl]"], "grpc, it is [nccl]"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    serve: Callable[..., Served], taken_port: int, argv: list[str], words: str
) -> None:
    served = serve(*(word.format(port=taken_port) for word in argv))
    assert served.process.wait(60) == 1
    assert served.rest_of_stdout() == ""
    (line,) = served.stderr().splitlines()
    assert line.startswith("baton: error: ")
    assert words.format(port=taken_port) in line
    assert list(served.temporary.iterdir()) == []


def test_a_worker_that_cannot_start_ends_the_command_with_its_reason(serve: Callable[..., Served]) -> None:
    served = serve(pool="engine.pool_bytes=1000")
    served.wait_for_words("starting Ray")
    footprint = served.footprint()
    assert served.process.wait(60) == 1
    footprint.gone(within_s=2)
    assert served.rest_of_stdout() == ""
    lines = served.stderr().splitlines()
    assert lines[-1] == "baton: error: engine.pool_bytes 1000 holds no block; one takes 737280 bytes"
    assert not any("error" in line or "reading weights" in line for line in lines[:-1])
    assert served.complaints() == []
