"""A Ray for one `baton serve`: started here and ended here, or joined and left as it was.

A Ray that Baton starts lives under the guardian's private directory, listens with a secret of its own,
sends no usage statistics, and is gone afterwards with every file. Its processes are deaf to the signals
that ask `baton serve` to end: a terminal, `timeout` or a service manager sends them to all of them, and
streams could not finish in a Ray that ends by itself. When joining, Baton touches nothing
but the actors that it makes; they end with this process, whatever happens to it.
"""

from __future__ import annotations

import os
import secrets
import uuid
from dataclasses import dataclass
from typing import Any

from cluster.end_signals import signals_kept
from cluster.guardian import Guardian
from common.errors import ConfigError, UnavailableError

OBJECT_STORE_BYTES = 80 << 20
"""Ray's smallest is 75 MiB. Baton puts nothing into the store."""


@dataclass(frozen=True, slots=True)
class RaySession:
    """A running connection to Ray. ``environment`` is for the processes of actors."""

    environment: dict[str, str]
    guardian: Guardian | None

    def close(self) -> bool:
        """Ends what was started; True when nothing of it is left."""
        import ray
        from ray._private import worker

        if self.guardian is None:
            ray.shutdown()
            return True
        # Otherwise `shutdown` would wait a second for each of Ray's processes to hear its SIGTERM.
        worker._global_node = None
        ray.shutdown()
        clean = self.guardian.kill()
        _reap_children()
        return clean

    def abandon(self) -> None:
        """Ends it without asking anybody: for the impatient."""
        if self.guardian is not None:
            self.guardian.kill()


def open_ray(address: str | None) -> RaySession:
    """Joins the Ray at ``address``, or starts one. Call it on the main thread: Ray's processes share
    the fate of the thread that started them.

    Raises ConfigError when nothing answers at ``address``, UnavailableError when Ray does not start.
    """
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    common: dict[str, Any] = {
        "namespace": f"baton-{uuid.uuid4().hex[:8]}",
        "log_to_driver": True,
        "logging_level": "warning",
    }
    if address is not None:
        import ray

        try:
            with signals_kept():
                ray.init(address, **common)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"cannot join Ray at {address}: {_first_line(error)}", param="cluster.address") from error
        return RaySession({}, None)

    guardian = Guardian()
    try:
        _keep_secret(guardian)
        import ray

        with signals_kept():
            ray.init(
                "local",
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                _temp_dir=str(guardian.directory / "ray"),
                **common,
            )
    except BaseException as error:
        RaySession({}, guardian).close()
        if isinstance(error, (ConnectionError, ValueError, RuntimeError, OSError)):
            raise UnavailableError(f"Ray does not start: {_first_line(error)}") from error
        raise
    # What workers put into temporary files goes when the guardian goes.
    return RaySession({"TMPDIR": str(guardian.directory)}, guardian)


def _reap_children() -> None:
    """Collects those that have ended: nobody else would before the exit, nor always after it."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _keep_secret(guardian: Guardian) -> None:
    """Ray's processes authenticate each other, with a secret that only this user can read."""
    if "RAY_AUTH_MODE" in os.environ:
        return
    path = guardian.directory / "token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
