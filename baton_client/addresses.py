"""Where a cluster is, and how a connection to it is set up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from common.errors import ConfigError
from rpc.connection import MAX_MESSAGE_BYTES, MAX_METADATA_BYTES

KEEPALIVE_S = 20.0
KEEPALIVE_TIMEOUT_S = 10.0
"""While a call is open: a server that leaves a ping unanswered this long is gone."""

OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
    ("grpc.http2.ping_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
    # Each client its own connection, and its own knowledge of who can be reached.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
    # Retries are `baton_client/retries.py`'s: gRPC's own do not know what has started.
    ("grpc.enable_retries", 0),
)


def addresses(urls: str | Sequence[str]) -> list[str]:
    """``host:port`` of each URL; ``grpc://`` may be left out. Raises ConfigError that names the wrong one."""
    given = [urls] if isinstance(urls, str) else list(urls)
    if not given:
        raise ConfigError("give at least one URL, like grpc://127.0.0.1:40213")
    return [_address(url) for url in given]


def _address(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "grpc", url
    if scheme != "grpc":
        raise ConfigError(f"{url!r} is no gRPC URL: `baton serve` prints one, like grpc://127.0.0.1:40213")
    try:
        parts = urlsplit(f"//{rest}")
        complete = bool(parts.hostname) and parts.port is not None and parts.path in ("", "/") and not parts.query
    except ValueError:
        complete = False
    if not complete:
        raise ConfigError(f"{url!r} must be grpc://HOST:PORT and nothing more")
    return parts.netloc
