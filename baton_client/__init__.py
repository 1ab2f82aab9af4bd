"""Baton's gRPC client for Python.

    with Client("grpc://127.0.0.1:40213") as client:
        print(client.chat([{"role": "user", "content": "What is the capital of France?"}]).text)
        with client.stream("Once upon a time", max_tokens=64) as chunks:
            for chunk in chunks:
                print(chunk.text, end="", flush=True)

`AsyncClient` is the same for asyncio. Options are those of the HTTP endpoints, under the same names.
Errors are the classes of `common.errors`, whatever side they were noticed on.
"""

from baton_client.answers import Choice, Chunk, Completion, Model, TokenLogprob, Tokens, TopLogprob, Usage
from baton_client.async_client import AsyncClient, AsyncStream
from baton_client.client import Client, Stream
from baton_client.options import ChatOptions, Message, Options
from baton_client.retries import RetryPolicy

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "ChatOptions",
    "Choice",
    "Chunk",
    "Client",
    "Completion",
    "Message",
    "Model",
    "Options",
    "RetryPolicy",
    "Stream",
    "TokenLogprob",
    "Tokens",
    "TopLogprob",
    "Usage",
]
