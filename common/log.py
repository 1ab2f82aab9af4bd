"""Logging: to standard error, as text or as one JSON object a line, with the process's name.

Prompts and outputs are never logged.
"""

from __future__ import annotations

import json
import logging
import sys
import time

from common.config import LogConfig


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
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def setup_logging(config: LogConfig, process_name: str) -> None:
    """Configures the root logger of this process. ``process_name`` is a worker id, or a command."""
    handler = logging.StreamHandler(sys.stderr)
    if config.format == "json":
        handler.setFormatter(_JsonFormatter(process_name))
    else:
        handler.setFormatter(
            logging.Formatter(f"%(asctime)s %(levelname).1s {process_name} %(name)s: %(message)s", "%H:%M:%S")
        )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())
    for chatty in ("httpx", "httpcore", "uvicorn", "filelock"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
