"""Logging: to standard error, as text or as one JSON object a line, with the process's name.

What a line is about goes into fields, by logging's own ``extra``: ``log.warning("placed again",
extra={"request_id": …, "worker_id": …})``. JSON has them beside the message, text behind it as
``key=value``. So one request can be followed through all processes by its ``request_id``.

Prompts and answers are logged only where `content_log` says so.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from common.config import LogConfig

CONTENT_LOGGER = "baton.content"
"""The one logger that may be told what users write and what models answer."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """What ``extra`` added to a record, in its order (others' own additions, such as Ray's, begin with ``_``)."""
    return {
        key: value
        for key, value in vars(record).items()
        if value is not None and key not in _STANDARD and not key.startswith("_")
    }


def content_log(config: LogConfig) -> logging.Logger | None:
    """Where prompts and answers go; None unless ``log.content`` asks for them."""
    return logging.getLogger(CONTENT_LOGGER) if config.content else None


class _JsonFormatter(logging.Formatter):
    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process_name,
            "logger": record.name,
            "message": record.getMessage(),
        } | fields_of(record)
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


class _TextFormatter(logging.Formatter):
    """One line a record (an exception's trace follows): what is logged cannot forge a line of its own."""

    def __init__(self, process_name: str) -> None:
        super().__init__("%(asctime)s %(levelname).1s " + process_name.replace("%", "%%") + " %(name)s: ", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {key}={_shown(value)}" for key, value in fields_of(record).items())
        return super().formatMessage(record) + _one_line(record.message) + fields


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = _one_line(str(value))
    return json.dumps(text, ensure_ascii=False) if not text or " " in text else text


def _one_line(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")


def setup_logging(config: LogConfig, process_name: str) -> None:
    """Configures the root logger of this process. ``process_name`` is a worker id, or a command."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(process_name) if config.format == "json" else _TextFormatter(process_name))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())
    for chatty in ("httpx", "httpcore", "uvicorn", "filelock"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
