"""`baton chat`: a conversation in the terminal, with a Baton router or any OpenAI-compatible server.

On a terminal: a prompt with line editing, answers as they come, commands that begin with ``/``. Anywhere
else each line of standard input is a message, standard output gets the answers and nothing else, and the
exit status is 1 when one of them failed.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
from typing import Any

from rich.console import Console

from cluster.chat_client import ChatClient
from cluster.chat_session import COMMANDS, ChatSession
from cluster.conversation import Conversation
from cluster.router_address import router_url

API_KEY_VARIABLE = "BATON_API_KEY"
MAX_COUNT = 2**31 - 1


def add_parser(commands: Any, configured: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "chat",
        parents=[configured],
        help="a conversation in the terminal",
        description=f"A conversation in the terminal; /help there lists its commands. ${API_KEY_VARIABLE}, "
        "when set, is sent as the API key.",
    )
    parser.add_argument("--url", metavar="U", help="an OpenAI-compatible server; default: the configuration's router")
    parser.add_argument("--model", metavar="M", help="default: the first that the server lists")
    parser.add_argument("--system", metavar="TEXT", help="the system text")
    parser.add_argument("--temperature", metavar="X", type=_number, help="default: the server's")
    parser.add_argument("--max-tokens", metavar="N", type=_positive, help="longest answer; default: the server's")
    parser.add_argument("--seed", metavar="N", type=int, help="for answers that can be repeated")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may send, and lack, anything
            stream.reconfigure(errors="replace")
    client = ChatClient(router_url(arguments), os.environ.get(API_KEY_VARIABLE))
    try:
        model = arguments.model or client.first_model()
        given = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens, "seed": arguments.seed}
        parameters = {"model": model} | {name: value for name, value in given.items() if value is not None}
        conversation = Conversation(_text(arguments.system))
        if interactive:
            return _talk(client, conversation, parameters)
        return _answer_lines(client, conversation, parameters)
    finally:
        client.close()


def _talk(client: ChatClient, conversation: Conversation, parameters: dict[str, Any]) -> int:
    console = Console(markup=False, highlight=False, emoji=False)

    def note(text: str) -> None:
        console.print(text, style="dim", soft_wrap=True)

    def complain(text: str) -> None:
        console.print(f"error: {text}", style="red", soft_wrap=True)

    session = ChatSession(client, conversation, parameters, _write, note, complain)
    prompt = _Prompt(coloured=console.is_terminal and not console.no_color and not console.is_dumb_terminal)
    note(f"{parameters['model']}; /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves")
    while not session.ended:
        try:
            line = prompt.read()
        except EOFError:
            _write("\n")
            break
        except KeyboardInterrupt:
            _write("\n")
            if not prompt.begun():
                break
            continue
        try:
            session.take(line)
        except KeyboardInterrupt:
            _write("\n")  # it came between two steps: nothing is left to be stopped
    return 0


def _answer_lines(client: ChatClient, conversation: Conversation, parameters: dict[str, Any]) -> int:
    """Ctrl-C here is for the whole command, as for any that runs in a pipe."""
    session = ChatSession(client, conversation, parameters, _write, _ignore, _complain)
    for line in sys.stdin:
        session.take(line)
        if session.interrupted:
            raise KeyboardInterrupt
        if session.ended:
            break
    return 1 if session.failures else 0


class _Prompt:
    """Reads lines with editing and history, where Python was built with readline."""

    def __init__(self, coloured: bool) -> None:
        # The marks tell readline which bytes take no room on the screen.
        self._text = "\001\033[1;36m\002> \001\033[0m\002" if coloured else "> "
        try:
            import readline
        except ImportError:
            self._line_buffer = None
            self._text = "\033[1;36m> \033[0m" if coloured else "> "
            return
        self._line_buffer = readline.get_line_buffer
        names = [name.split()[0] for name in COMMANDS]
        readline.set_completer_delims(" ")
        readline.set_completer(lambda text, state: ([n for n in names if n.startswith(text) and text] + [None])[state])
        readline.parse_and_bind("tab: complete")

    def read(self) -> str:
        """The next line. Raises EOFError at the end, KeyboardInterrupt for Ctrl-C."""
        return input(self._text)

    def begun(self) -> bool:
        """After a KeyboardInterrupt: whether there was something on the line."""
        return self._line_buffer is not None and bool(self._line_buffer().strip())


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _ignore(text: str) -> None:
    del text


def _complain(text: str) -> None:
    sys.stderr.write(f"baton: error: {text}\n")
    sys.stderr.flush()


def _text(argument: str | None) -> str | None:
    """Bytes of the command line that are no text would fail as late as on the wire."""
    return None if argument is None else argument.encode("utf-8", "replace").decode()


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}")
    return value


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if not 1 <= value <= MAX_COUNT:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {MAX_COUNT}, got {text!r}")
    return value
