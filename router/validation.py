"""What the model and the workers allow: a request body becomes sampling parameters, or an error that
names the limit and the value.

Pure: limits come in as numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import ContextLengthError, InvalidRequestError, NotFoundError
from common.messages import SamplingParams
from common.sampling_defaults import OPENAI_DEFAULTS, SamplingDefaults
from router.schemas import INT63, ChatBody, GenerationBody


@dataclass(frozen=True, slots=True)
class Limits:
    """``max_sequence_tokens``: what the largest decode worker can hold of one sequence;
    ``max_prompt_tokens``: the same for prefill workers. 0: not known now, and so not checked.
    """

    model_name: str
    vocab_size: int
    max_model_len: int
    max_sequence_tokens: int
    max_prompt_tokens: int
    default_max_tokens: int
    sampling: SamplingDefaults = OPENAI_DEFAULTS


def check_model(name: str, served_name: str) -> None:
    if name != served_name:
        raise NotFoundError(f"the model {name!r} does not exist; this server has {served_name!r}", param="model")


def check_token_ids(ids: Sequence[int], limits: Limits, param: str) -> None:
    """Ids that the model has no embedding for are refused."""
    for token in ids:
        if not 0 <= token < limits.vocab_size:
            raise InvalidRequestError(
                f"{param}: token id {token} is out of range, the vocabulary has ids 0 to {limits.vocab_size - 1}",
                param=param,
            )


def check_prompt(prompt: Sequence[int], limits: Limits, param: str) -> None:
    """A prompt has at least one token, and leaves room for one more."""
    num_tokens = len(prompt)
    if num_tokens == 0:
        raise InvalidRequestError(f"{param} must not be empty: it has 0 tokens", param=param)
    if num_tokens + 1 > limits.max_model_len:
        raise ContextLengthError(
            f"this model's maximum context length is {limits.max_model_len} tokens, prompt and answer together; "
            f"the prompt has {num_tokens} tokens, which leaves no room for an answer",
            param=param,
        )
    if limits.max_sequence_tokens and num_tokens + 1 > limits.max_sequence_tokens:
        raise ContextLengthError(
            f"the decode workers' KV pools hold {limits.max_sequence_tokens} tokens of one sequence; "
            f"the prompt has {num_tokens} tokens, which leaves no room for an answer",
            param=param,
        )
    if limits.max_prompt_tokens and num_tokens > limits.max_prompt_tokens:
        raise ContextLengthError(
            f"the prefill workers' KV pools hold {limits.max_prompt_tokens} tokens of one prompt; "
            f"the prompt has {num_tokens} tokens",
            param=param,
        )


def sampling_params(body: GenerationBody, num_prompt: int, limits: Limits, seed: int) -> SamplingParams:
    """How the answer to a prompt of ``num_prompt`` tokens is sampled. ``seed``: for a body without one.

    Raises ContextLengthError when the tokens asked for do not fit; without ``max_tokens`` an answer may
    take what is left, up to ``default_max_tokens``.
    """
    max_tokens = _max_tokens(body, num_prompt, limits)
    if body.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens may be at most max_tokens = {max_tokens}, got {body.min_tokens}", param="min_tokens"
        )
    stop_token_ids = tuple(dict.fromkeys(body.stop_token_ids or ()))
    check_token_ids(stop_token_ids, limits, "stop_token_ids")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options may only be set when stream is true", param="stream_options")
    defaults = limits.sampling
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        top_k=defaults.top_k if body.top_k is None else max(0, body.top_k),
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        seed=seed if body.seed is None else body.seed & INT63,
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        stop_token_ids=stop_token_ids,
    )


def _max_tokens(body: GenerationBody, num_prompt: int, limits: Limits) -> int:
    asked, param = body.max_tokens, "max_tokens"
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        if asked is not None and asked != body.max_completion_tokens:
            raise InvalidRequestError(
                f"max_tokens and max_completion_tokens mean the same; got {asked} and {body.max_completion_tokens}",
                param="max_completion_tokens",
            )
        asked, param = body.max_completion_tokens, "max_completion_tokens"
    capacity = limits.max_sequence_tokens or limits.max_model_len
    if asked is None:
        return max(1, min(limits.default_max_tokens, limits.max_model_len - num_prompt, capacity - num_prompt))
    wanted = f"you asked for {num_prompt + asked}: {num_prompt} in the prompt and {asked} of the answer ({param})"
    if num_prompt + asked > limits.max_model_len:
        raise ContextLengthError(
            f"this model's maximum context length is {limits.max_model_len} tokens; {wanted}", param=param
        )
    if num_prompt + asked > capacity:
        raise ContextLengthError(
            f"the decode workers' KV pools hold {capacity} tokens of one sequence; {wanted}", param=param
        )
    return asked
