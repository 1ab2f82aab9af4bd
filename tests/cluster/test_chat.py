from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import cli
from cluster.chat_client import Answer, event_data
from cluster.chat_session import describe
from cluster.conversation import Conversation, printable
from cluster.router_address import normal_url
from common.errors import ConfigError
from tests.cluster.scripted_server import RECORD, USAGE, ScriptedServer, scripted_server
from tests.cluster.terminal import BATON, CTRL_C, CTRL_D, Terminal
from tests.e2e.serving import Served, until

PROMPT = "> \x1b[0m"


@pytest.fixture(scope="module")
def shared() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        yield server


@pytest.fixture
def server(shared: ScriptedServer) -> ScriptedServer:
    shared.bodies.clear()
    shared.cancelled.clear()
    return shared


@pytest.fixture
def chat(server: ScriptedServer) -> Iterator[Terminal]:
    terminal = Terminal("chat", "--url", server.url)
    terminal.expect("scripted; /help")
    terminal.expect(PROMPT)
    yield terminal
    terminal.close()


def piped(server: ScriptedServer, text: str, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [str(BATON), "chat", "--url", server.url, *argv]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=30, check=False)


# ── on a terminal ─────────────────────────────────────────────────────────────────────────────────


def test_a_conversation_has_history_and_can_be_taken_back(
    chat: Terminal, server: ScriptedServer, tmp_path: Path
) -> None:
    for line in ("one\r", "two\r"):
        chat.type(line)
        chat.expect("Hello there.")
        chat.expect(PROMPT)
    chat.type("/stats\r")
    stats = chat.expect("prefill-0 → decode-1")
    assert all(words in stats for words in ("TTFT ", "tokens/s", "prompt 12 tokens (8 cached)", "completion 3 tokens"))
    chat.expect("all 2 answers: prompt 24 tokens, completion 6 tokens")
    chat.type("/undo\r")
    chat.expect("taken back: two")
    chat.type("/system be brief\r")
    chat.expect("system: be brief")
    chat.type("three\r")
    chat.expect("Hello there.")
    chat.type(f"/save {tmp_path}/said.json\r")
    chat.expect("saved to")
    chat.type("/reset\r")
    chat.expect("forgotten")
    chat.type("four\r")
    chat.expect("Hello there.")
    chat.type("/quit\r")
    assert chat.exit_status() == 0
    assert server.questions() == [
        ["one"],
        ["one", "Hello there.\n", "two"],
        ["be brief", "one", "Hello there.\n", "three"],
        ["be brief", "four"],
    ]
    saved = json.loads((tmp_path / "said.json").read_text())
    assert [message["role"] for message in saved] == ["system", "user", "assistant", "user", "assistant"]
    assert [message["content"] for message in saved][1:] == ["one", "Hello there.\n", "three", "Hello there.\n"]


def test_ctrl_c_stops_the_answer_and_keeps_what_came(chat: Terminal, server: ScriptedServer) -> None:
    chat.type("wait\r")
    chat.expect("to be ")
    chat.type(CTRL_C)
    chat.expect("stopped")
    chat.expect(PROMPT)
    assert server.cancelled.wait(10)
    chat.type("silence\r")
    chat.expect("silence")
    until(lambda: len(server.bodies) == 2, 10)
    chat.type(CTRL_C)
    chat.expect("stopped; the question is not kept")
    chat.type("two\r")
    chat.expect("Hello there.")
    chat.expect(PROMPT)
    assert server.questions()[-1] == ["wait", "to be ", "two"]
    chat.type("begun")
    chat.expect("begun")
    chat.type(CTRL_C)
    chat.expect(PROMPT)
    chat.type(CTRL_C)
    assert chat.exit_status() == 0


def test_errors_are_one_line_and_the_conversation_goes_on(chat: Terminal, server: ScriptedServer) -> None:
    for question, words in (
        ("refuse", "/v1/chat/completions answered 400: temperature must be at most 2, it is 3"),
        ("fail", "the worker died"),
        ("break", "the answer broke off"),
        ("/nonsense", "unknown command /nonsense"),
    ):
        chat.type(f"{question}\r")
        chat.expect(f"error: {words}")
        chat.expect(PROMPT)
    chat.type("//slash\r")
    chat.expect("Hello there.")
    chat.expect(PROMPT)
    assert server.questions()[-1] == ["/slash"]
    chat.type(CTRL_D)
    assert chat.exit_status() == 0


def test_what_a_model_says_is_never_obeyed(chat: Terminal) -> None:
    chat.type("escapes\r")
    assert chat.expect("d\tü\U0001f5fc").endswith("a[2Jbc31md\tü\U0001f5fc")
    chat.type("cut\r")
    chat.expect("the answer was cut")
    chat.type("/help\r")
    chat.expect("/save FILE")


# ── in a pipe ─────────────────────────────────────────────────────────────────────────────────────


def test_a_pipe_gets_the_answers_and_nothing_else(server: ScriptedServer) -> None:
    flags = ("--model", "m", "--system", "s", "--temperature", "0.5", "--max-tokens", "7", "--seed", "3")
    done = piped(server, "one\n\nescapes\n", *flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "Hello there.\na[2Jbc31md\tü\U0001f5fc\n"
    assert server.questions()[1] == ["s", "one", "Hello there.\n", "escapes"]
    wanted = {"model": "m", "temperature": 0.5, "max_tokens": 7, "seed": 3, "stream": True}
    assert server.bodies[0].items() >= wanted.items()


def test_a_failed_request_in_a_pipe_is_exit_status_1(server: ScriptedServer) -> None:
    done = piped(server, "refuse\none\n")
    assert (done.returncode, done.stdout) == (1, "Hello there.\n")
    assert done.stderr.startswith("baton: error: /v1/chat/completions answered 400")
    assert done.stderr.count("\n") == 1


def test_ctrl_c_ends_a_pipe(server: ScriptedServer) -> None:
    command = [str(BATON), "chat", "--url", server.url]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("wait\none\n")
        process.stdin.flush()
        assert process.stdout.read(6) == "to be "
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20) == ("\n", "")
    assert process.returncode == 130
    assert server.cancelled.wait(10)
    assert server.questions() == [["wait"]]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--url", "http://127.0.0.1:1"], "no answer from http://127.0.0.1:1"),
        (["--url", "ftp://here"], "--url must be like http://HOST:PORT"),
        (["--set", "router.port=0"], "say where with --url"),
    ],
)
def test_no_server_is_said_in_one_line(argv: list[str], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", *argv]) == 1
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err


@pytest.mark.parametrize("flag", ["--temperature=nan", "--temperature=x", "--max-tokens=0", "--max-tokens=many"])
def test_impossible_flags_are_wrong_usage(flag: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["chat", flag])
    assert exit_.value.code == 2


# ── parts ─────────────────────────────────────────────────────────────────────────────────────────


def test_events_are_split_at_line_feeds_only_wherever_the_bytes_are_cut() -> None:
    stream = 'data: {"a": "x\u2028y\x85"}\r\n\r\n: comment\nevent: e\ndata:zwei ü\n\ndata: [DONE]\n\n'.encode()
    for size in range(1, len(stream) + 1):
        chunks = [stream[at : at + size] for at in range(0, len(stream), size)]
        assert list(event_data(chunks)) == ['{"a": "x\u2028y\x85"}', "zwei ü", "[DONE]"]


def test_printable_drops_what_a_terminal_obeys_and_keeps_all_else() -> None:
    text = "\U0001f468‍\U0001f469‍\U0001f467 ไทย\n\tمرحبا"
    assert printable(text) == text
    assert printable("\x1b]0;t\x07\x00\x7f\x90\ud800") == "]0;t"


def test_stats_leave_out_what_is_not_known() -> None:
    answer = Answer(asked_at=1.0)
    assert describe(answer, None) == ""
    answer.pieces, answer.first_at, answer.last_at, answer.usage = ["a", "b", "c"], 1.25, 2.25, USAGE
    assert describe(answer, None) == ("TTFT 250 ms · 2.0 tokens/s · prompt 12 tokens (8 cached) · completion 3 tokens")
    assert describe(answer, {"attempts": RECORD["attempts"] * 2}).endswith("prefill-0 → decode-1 · 2 attempts")
    assert describe(answer, {"attempts": "?"}) == describe(answer, None)


def test_a_conversation_is_saved_as_it_is_named_and_never_over_a_file(tmp_path: Path) -> None:
    conversation = Conversation("be kind")
    conversation.add("q", "a")
    conversation.save(tmp_path / "said.txt")
    assert (tmp_path / "said.txt").read_text() == "system:\nbe kind\n\nuser:\nq\n\nassistant:\na\n"
    with pytest.raises(ConfigError, match="File exists"):
        conversation.save(tmp_path / "said.txt")
    conversation.reset()
    assert (conversation.messages(), conversation.undo()) == ([{"role": "system", "content": "be kind"}], None)


def test_urls_are_understood_as_clients_write_them() -> None:
    for text in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", "h:1"):
        assert normal_url(text) == "http://h:1"
    for text in ("", "http://", "ftp://h", "http://h:port"):
        with pytest.raises(ConfigError, match="--url must be like"):
            normal_url(text)


# ── with the real model ───────────────────────────────────────────────────────────────────────────


@pytest.mark.e2e
def test_the_real_model_answers_on_a_terminal_and_in_a_pipe(tmp_path: Path) -> None:
    served = Served(tmp_path).ready()
    try:
        terminal = Terminal("chat", "--url", served.fleet.url, "--temperature", "0")
        terminal.expect(PROMPT)
        terminal.type("What is the capital of France?\r")
        terminal.expect("Paris", within_s=60)
        terminal.expect(PROMPT)
        terminal.type("/stats\r")
        terminal.expect("prefill-0 → decode-0")
        terminal.expect(PROMPT)  # or the space awaited below would be the prompt's
        terminal.type("Tell me a very long story.\r")
        terminal.expect("story.\r\n")
        terminal.expect(" ")
        terminal.type(CTRL_C)
        terminal.expect("stopped")
        served.fleet.quiet()
        terminal.type(CTRL_D)
        assert terminal.exit_status() == 0
        terminal.close()
        command = [str(BATON), "chat", "--url", served.fleet.url, "--temperature", "0"]
        done = subprocess.run(
            command, input="What is the capital of France?\n", capture_output=True, text=True, timeout=60, check=True
        )
        assert "Paris" in done.stdout
        assert done.stderr == ""
    finally:
        served.kill()
