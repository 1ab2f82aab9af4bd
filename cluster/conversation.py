"""A conversation: what was said so far, as a server wants it and as a file keeps it. Pure.

Turns are whole: a question whose answer failed is not part of it, so that roles always alternate.
"""

from __future__ import annotations

import json
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import ConfigError

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Turn:
    question: str
    answer: str


@dataclass(slots=True)
class Conversation:
    system: str | None = None
    turns: list[Turn] = field(default_factory=list)

    def messages(self, question: str | None = None) -> list[Message]:
        """What was said, and ``question`` at the end."""
        said = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            said += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
        return said if question is None else [*said, {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        self.turns.append(Turn(question, answer))

    def undo(self) -> Turn | None:
        """Takes the last turn back; None when there is none."""
        return self.turns.pop() if self.turns else None

    def reset(self) -> None:
        """Forgets all turns. The system text stays."""
        self.turns.clear()

    def save(self, path: Path) -> None:
        """Into a new file: the messages as JSON when its name ends in ``.json``, else a transcript.

        Raises ConfigError when it exists already or cannot be written.
        """
        messages = self.messages()
        if path.suffix == ".json":
            text = json.dumps(messages, indent=2, ensure_ascii=False) + "\n"
        else:
            text = "\n".join(f"{message['role']}:\n{message['content']}\n" for message in messages)
        try:
            with path.expanduser().open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise ConfigError(f"cannot save to {path}: {error.strerror}") from error


def printable(text: str) -> str:
    """``text`` without what a terminal would obey: control characters (escape among them) other than
    line feed and tab, and halves of surrogate pairs, which no encoding has.
    """
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs"))
