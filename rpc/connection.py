"""How both sides of every connection are set up: limits, keepalive, and the cluster's secret.

The secret shows that a peer belongs to the cluster; it travels in the metadata of each call and is not
encrypted, so it is no shield against somebody who reads the network.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from common.errors import AuthenticationError
from rpc.status import Metadata, abort

MAX_MESSAGE_BYTES = 64 << 20
"""gRPC's own limit is 4 MiB; long prompts and prefix cache snapshots are larger."""

MAX_METADATA_BYTES = 64 << 10
"""gRPC's own limit is 8 KiB; errors travel in metadata."""

KEEPALIVE_S = 3.0
KEEPALIVE_TIMEOUT_S = 7.0
"""A peer that leaves a ping unanswered this long is dead. gRPC answers from its own threads, so a busy
event loop is not mistaken for a dead one; that takes a stopped process, machine or link."""

SECRET_KEY = "baton-secret-bin"

ACCEPTED: Metadata = (("baton-accepted", "1"),)
"""Initial metadata of every stream. A client sees initial metadata for a refused call too, only empty."""

_COMMON_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", 2 * MAX_METADATA_BYTES),
    ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
    # The one that acts: gRPC waits this long for the answer to a ping, 60 s unless told otherwise.
    ("grpc.http2.ping_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

SERVER_OPTIONS = (
    *_COMMON_OPTIONS,
    # Two servers on one port would share its connections in silence.
    ("grpc.so_reuseport", 0),
    # Without these a server takes its clients' keepalive pings for an attack and hangs up.
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
)

CHANNEL_OPTIONS = (
    *_COMMON_OPTIONS,
    # Each client its own connection: a worker that was restarted is not reached through an old one's backoff.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
    # gRPC's own retries would repeat a reservation that only its answer was lost of.
    ("grpc.enable_retries", 0),
)


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to ``address`` (host:port), which connects at its first call. Needs a running loop."""
    return grpc.aio.insecure_channel(address, options=list(CHANNEL_OPTIONS))


def secret_metadata(secret: str | None) -> Metadata:
    """What a client sends with each call to show that it belongs to the cluster."""
    return () if secret is None else ((SECRET_KEY, secret.encode()),)


async def accepted(call: Any) -> bool:
    """Waits until the peer has answered a stream's opening; False: with a refusal, which reading will raise."""
    return any(key == ACCEPTED[0][0] for key, _ in await call.initial_metadata())


class SecretInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without the cluster's secret. Health checks are open: probes know no secrets."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if handler_call_details.method.startswith("/grpc.health.v1."):
            return await continuation(handler_call_details)
        metadata: Any = handler_call_details.invocation_metadata or ()
        given = dict(metadata).get(SECRET_KEY)
        if given is not None and hmac.compare_digest(given, self._secret):
            return await continuation(handler_call_details)
        reason = "was not given" if given is None else "is another one"

        async def refuse(_requests: Any, context: Any) -> None:
            await abort(context, AuthenticationError(f"the secret of this cluster {reason}"))

        # A bidirectional handler may stand for every kind of call: it needs no request before it answers.
        return grpc.stream_stream_rpc_method_handler(refuse)
