"""Log lines: fields beside the message, one line each, and nothing of what users say unless asked."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from common.config import LogConfig
from common.log import content_log, setup_logging

log = logging.getLogger("tests.log")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def set_up(config: LogConfig, process_name: str) -> None:
    """Whatever else this process logs meanwhile (asyncio, of a task that an earlier test left) is not what is looked
    at."""
    setup_logging(config, process_name)
    (handler,) = logging.getLogger().handlers
    handler.addFilter(logging.Filter(log.name))


def test_json_has_fields_beside_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    set_up(LogConfig(format="json"), "decode-3")
    logging.getLogger("asyncio").error("of somebody else")
    log.warning("handoff failed: %s", "why", extra={"request_id": "r-1", "worker_id": None, "total_s": 0.5})
    line = json.loads(capsys.readouterr().err)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "process": "decode-3",
        "logger": "tests.log",
        "message": "handoff failed: why",
        "request_id": "r-1",
        "total_s": 0.5,
    }


def test_text_has_fields_behind_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    set_up(LogConfig(), "100%-3")
    log.warning("handoff failed", extra={"request_id": "r-1", "error": "no room", "total_s": 0.123456789})
    line = capsys.readouterr().err
    assert line.endswith(' W 100%-3 tests.log: handoff failed request_id=r-1 error="no room" total_s=0.123457\n')


@pytest.mark.parametrize("form", ["text", "json"])
def test_what_is_logged_cannot_forge_a_line(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    set_up(LogConfig(format=form), "router-0")  # type: ignore[arg-type]
    log.info("unknown model %s", "x\n12:00:00 E router-0 forged", extra={"request_id": "a\r\nb c"})
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_exceptions_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    set_up(LogConfig(format="json"), "p")
    try:
        raise KeyError("key")
    except KeyError:
        log.exception("failed", extra={"request_id": "r"})
    line = json.loads(capsys.readouterr().err)
    assert "KeyError: 'key'" in line["exception"]
    assert line["request_id"] == "r"


def test_content_is_logged_on_request_only() -> None:
    assert content_log(LogConfig()) is None
    assert content_log(LogConfig(content=True)) is not None
