"""Which request fields are served, which are harmless, and which are refused by name.

A field that OpenAI or vLLM define and Baton does not serve is accepted only with the value that asks
for nothing (``n: 1``, ``logprobs: false``); anything else would be ignored in silence, and is refused.
An unknown field is refused with the nearest known name.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from common.errors import InvalidRequestError

HARMLESS = frozenset({"metadata", "prompt_cache_key", "request_id", "safety_identifier", "service_tier", "user"})
"""Clients' own labels and hints: accepted and not used."""

NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_retention": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structural_tag": (),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "verbosity": (),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
"""Field → the values (besides null) that ask for nothing."""


def served_fields(body: Mapping[str, Any], served: Collection[str]) -> dict[str, Any]:
    """The fields of ``body`` that a schema with the names ``served`` reads.

    Raises InvalidRequestError that names the field: not served, or unknown.
    """
    fields = {}
    for name, value in body.items():
        if name in served:
            fields[name] = value
        elif name in NOT_SERVED:
            if value is not None and not any(_same(value, neutral) for neutral in NOT_SERVED[name]):
                raise InvalidRequestError(f"{name} = {_short(value)} is not served yet; leave it out", param=name)
        elif name not in HARMLESS:
            known = sorted({*served, *NOT_SERVED, *HARMLESS})
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise InvalidRequestError(f"unknown field {name!r}; the nearest known one is {nearest[0]!r}", param=name)
    return fields


def _same(value: Any, neutral: Any) -> bool:
    """Equal, and both or neither a boolean: ``n: true`` is not ``n: 1``."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _short(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "…"
