"""What happens with each line of a chat: a command, or a question that is asked and answered.

Knows no terminal: text goes to ``write``, remarks to ``note`` and errors to ``complain``, which the
command line provides. A KeyboardInterrupt while an answer comes stops that answer and is swallowed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from cluster.chat_client import Answer, ChatClient
from cluster.conversation import Conversation, printable
from common.errors import BatonError

STOPPED = "stopped"

COMMANDS = {
    "/help": "these commands",
    "/stats": "times, tokens and workers of the last answer",
    "/system TEXT": "set the system text; without TEXT show it, `-` removes it",
    "/undo": "take the last question and answer back",
    "/reset": "forget what was said, keep the system text",
    "/save FILE": "write the conversation; .json for messages, else a transcript",
    "/quit": "leave; so do Ctrl-D, and Ctrl-C at an empty prompt",
}

Speak = Callable[[str], None]


class ChatSession:
    """``parameters`` go into every request: the model and whatever else was asked for."""

    def __init__(
        self,
        client: ChatClient,
        conversation: Conversation,
        parameters: Mapping[str, Any],
        write: Speak,
        note: Speak,
        complain: Speak,
    ) -> None:
        self.conversation = conversation
        self.failures = 0
        self.interrupted = False
        self.ended = False
        self._client = client
        self._parameters = dict(parameters)
        self._write = write
        self._note = note
        self._complain = complain
        self._answers: list[Answer] = []
        self._actions: dict[str, Speak] = {
            "/help": self._help,
            "/stats": self._stats,
            "/system": self._system,
            "/undo": self._undo,
            "/reset": self._reset,
            "/save": self._save,
            "/quit": self._quit,
        }

    def take(self, line: str) -> None:
        """Does what ``line`` says. What fails is told and counted, not raised."""
        line = line.strip()
        if not line:
            return
        try:
            if line.startswith("/") and not line.startswith("//"):
                self._command(line)
            else:
                self._ask(line.removeprefix("/") if line.startswith("//") else line)
        except BatonError as error:
            self.failures += 1
            self._complain(" ".join(printable(error.message).split()))

    # ── questions ─────────────────────────────────────────────────────────────────────────────────

    def _ask(self, question: str) -> None:
        """A question without any answer, or with one that failed, does not become part of the conversation."""
        body = {**self._parameters, "messages": self.conversation.messages(question)}
        answer, pieces = self._client.ask(body)
        last = "\n"
        try:
            with closing(pieces):
                for piece in pieces:
                    if shown := printable(piece):
                        last = shown
                        self._write(shown)
        except KeyboardInterrupt:
            answer.finish_reason = STOPPED
            self.interrupted = True
        finally:
            if not last.endswith("\n"):
                self._write("\n")
        self._answers.append(answer)
        if answer.text or answer.finish_reason != STOPPED:
            self.conversation.add(question, answer.text)
        if answer.finish_reason == STOPPED:
            self._note("stopped" if answer.text else "stopped; the question is not kept")
        elif answer.finish_reason == "length":
            self._note("the answer was cut at the limit of tokens")
        elif not answer.text:
            self._note("the answer is empty")

    # ── commands ──────────────────────────────────────────────────────────────────────────────────

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name not in self._actions:
            raise BatonError(f"unknown command {name}; /help lists them, and // begins a message that begins with /")
        self._actions[name](rest.strip())

    def _help(self, rest: str) -> None:
        del rest
        self._note("\n".join(f"{name:14}{meaning}" for name, meaning in COMMANDS.items()))

    def _system(self, text: str) -> None:
        if text:
            self.conversation.system = None if text == "-" else text
        self._note(f"system: {self.conversation.system or '(none)'}")

    def _undo(self, rest: str) -> None:
        del rest
        turn = self.conversation.undo()
        self._note("nothing to take back" if turn is None else f"taken back: {turn.question}")

    def _reset(self, rest: str) -> None:
        del rest
        self.conversation.reset()
        self._note("forgotten")

    def _save(self, name: str) -> None:
        if not name:
            raise BatonError("/save wants a file name")
        self.conversation.save(Path(name))
        self._note(f"saved to {name}")

    def _quit(self, rest: str) -> None:
        del rest
        self.ended = True

    def _stats(self, rest: str) -> None:
        del rest
        if not self._answers:
            self._note("no answer yet")
            return
        last = self._answers[-1]
        record = self._client.record(last.request_id) if last.request_id else None
        self._note(printable(describe(last, record)))
        if len(self._answers) > 1:
            counted = [answer for answer in self._answers if answer.prompt_tokens is not None]  # not stopped ones
            prompt = sum(answer.prompt_tokens or 0 for answer in counted)
            completion = sum(answer.completion_tokens or 0 for answer in counted)
            of = f"{len(counted)} of {len(self._answers)} answers"
            which = of if len(counted) < len(self._answers) else f"all {len(counted)} answers"
            self._note(f"{which}: prompt {prompt} tokens, completion {completion} tokens")


def describe(answer: Answer, record: Mapping[str, Any] | None) -> str:
    """One line about an answer; ``record`` is what a Baton router remembers of it. What is not known is
    left out: a stopped answer, for one, has no usage.
    """
    parts = []
    if answer.ttft_s is not None:
        parts.append(f"TTFT {answer.ttft_s * 1000:,.0f} ms")
    if answer.tokens_per_s is not None:
        parts.append(f"{answer.tokens_per_s:.1f} tokens/s")
    if answer.prompt_tokens is not None:
        cached = "" if answer.cached_tokens is None else f" ({answer.cached_tokens} cached)"
        parts.append(f"prompt {answer.prompt_tokens} tokens{cached}")
    if answer.completion_tokens is not None:
        parts.append(f"completion {answer.completion_tokens} tokens")
    if answer.finish_reason is not None:
        parts.append(f"ended by {answer.finish_reason}")
    if record is not None:
        parts += _workers(record)
    return " · ".join(parts)


def _workers(record: Mapping[str, Any]) -> list[str]:
    attempts = record.get("attempts")
    last = attempts[-1] if isinstance(attempts, list) and attempts else None
    if not isinstance(last, dict):
        return []
    names = " → ".join(str(last[role]) for role in ("prefill", "decode") if last.get(role))
    return [names, f"{len(attempts)} attempts"] if isinstance(attempts, list) and len(attempts) > 1 else [names]
