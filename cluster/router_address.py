"""Where a command finds the router it asks: ``--url``, else the configuration's host and port."""

from __future__ import annotations

import argparse

import httpx

from common.config import load_config
from common.errors import ConfigError

EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def router_url(arguments: argparse.Namespace) -> str:
    """The root URL, without a path. ``arguments`` are a configured command's, with ``url``.

    ``HOST:PORT`` will do, and what OpenAI's clients call the base URL (``…/v1``) is understood.
    Raises ConfigError when it can be no address.
    """
    if arguments.url is not None:
        return normal_url(arguments.url)
    router = load_config(arguments.config, arguments.overrides).router
    if router.port == 0:
        raise ConfigError("router.port is 0, so the port is not known beforehand: say where with --url")
    host = EVERY_INTERFACE.get(router.host, router.host)
    return f"http://[{host}]:{router.port}" if ":" in host else f"http://{host}:{router.port}"


def normal_url(text: str) -> str:
    """``text`` as a root URL. Raises ConfigError."""
    url = text if "://" in text else f"http://{text}"
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url must be like http://HOST:PORT, got {text!r}: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"--url must be like http://HOST:PORT, got {text!r}")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
