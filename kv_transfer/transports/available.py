"""The transports of one worker, by the names of ``transfer.transports``. Adding one is one line here."""

from __future__ import annotations

from collections.abc import Callable

from common.config import TransferConfig
from kv_transfer.channel import Connector
from kv_transfer.transport import Transport
from kv_transfer.transports.carried import Inline
from kv_transfer.transports.group import Backend, Group, is_available
from kv_transfer.transports.local import Local
from kv_transfer.transports.nixl import Nixl, nixl_is_available
from kv_transfer.transports.shm import Shm
from kv_transfer.transports.tcp import Tcp


def make_transports(
    config: TransferConfig, host_id: str, server_address: str, connector: Connector
) -> tuple[Transport, ...]:
    """Those that are configured and possible here, in the configuration's order of preference.

    ``server_address``: where this worker's server accepts byte channels; ``connector`` opens them to others.
    """

    def group(backend: Backend) -> Transport | None:
        available = is_available(backend)
        return Group(backend, server_address, connector, config.staging_bytes) if available else None

    makers: dict[str, Callable[[], Transport | None]] = {
        "local": lambda: Local(config.staging_bytes),
        "shm": lambda: Shm(host_id, config.staging_bytes) if host_id else None,
        "gloo": lambda: group("gloo"),
        "nccl": lambda: group("nccl"),
        "nixl": lambda: Nixl(server_address, connector, config.staging_bytes) if nixl_is_available() else None,
        "tcp": lambda: Tcp(server_address, config.staging_bytes),
        "grpc": lambda: Inline("grpc", server_address, connector, config.staging_bytes),
    }
    made = [makers[name]() for name in config.transports if name in makers]
    return tuple(transport for transport in made if transport is not None)
