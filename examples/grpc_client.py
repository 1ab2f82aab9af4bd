"""Asks a running cluster over gRPC: a conversation as it is answered, several answers, and an error.

baton serve                                     prints: ready http://… grpc://127.0.0.1:40213
python examples/grpc_client.py grpc://127.0.0.1:40213
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from baton_client import AsyncClient, Client
from common.errors import BatonError, InvalidRequestError


def converse(client: Client, question: str) -> None:
    """Text as it is made. Leaving the block, for whatever reason, ends the request on the server."""
    with client.stream_chat([{"role": "user", "content": question}], max_tokens=32, temperature=0.0) as chunks:
        print(f"request {chunks.request_id}")
        for chunk in chunks:
            print(chunk.text, end="", flush=True)
            if chunk.usage is not None:
                print(f"\n{chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens")


def ask_too_much(client: Client) -> None:
    """An error is raised, never an empty answer; it names field, limit and value."""
    try:
        client.generate("Once upon a time", max_tokens=0)
    except InvalidRequestError as error:
        print(f"refused: {error.message} (field: {error.param})")


async def ask_at_once(url: str, prompts: list[str]) -> None:
    """Many requests over one connection, each with a deadline of its own."""
    async with AsyncClient(url) as client:
        asked = [client.generate(prompt, max_tokens=8, temperature=0.0, timeout_s=60.0) for prompt in prompts]
        for prompt, answer in zip(prompts, await asyncio.gather(*asked), strict=True):
            print(f"{prompt!r} → {answer.text!r} ({answer.finish_reason})")


def main() -> int:
    parser = argparse.ArgumentParser(description="Asks a running cluster over gRPC.")
    parser.add_argument("url", help="as `baton serve` prints it, like grpc://127.0.0.1:40213")
    parser.add_argument("--question", default="What is the capital of France?")
    arguments = parser.parse_args()
    try:
        with Client(arguments.url, timeout_s=120.0) as client:
            (model,) = client.models()
            print(f"{model.id}, up to {model.max_model_len} tokens; a question has", end=" ")
            print(f"{len(client.tokenize(arguments.question).ids)} tokens")
            converse(client, arguments.question)
            ask_too_much(client)
        asyncio.run(ask_at_once(arguments.url, ["Water boils at", "The sun rises in the"]))
    except BatonError as error:
        print(f"{error.code}: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
