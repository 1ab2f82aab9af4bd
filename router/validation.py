"""What the model and the workers allow: a request body becomes sampling parameters, or an error that
names the limit and the value.

Pure: limits come in as numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import ContextLengthError, InvalidRequestError, NotFoundError
from common.messages import LogitBias, SamplingParams
from common.sampling_defaults import OPENAI_DEFAULTS, SamplingDefaults
from router.schemas import INT63, ChatBody, CompletionBody, GenerationBody


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
    _check_tools(body)
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
        min_p=_given(body.min_p, 0.0),
        repetition_penalty=_given(body.repetition_penalty, 1.0),
        presence_penalty=_given(body.presence_penalty, 0.0),
        frequency_penalty=_given(body.frequency_penalty, 0.0),
        logit_bias=_logit_bias(body, limits),
        num_logprobs=_num_logprobs(body),
        score_prompt=isinstance(body, CompletionBody) and body.echo and body.logprobs is not None,
    )


def prompt_limit(body: GenerationBody, limits: Limits) -> int | None:
    """To how many tokens a prompt is to be cut; None: not at all. With -1 it leaves room for the answer that
    is asked for, or for one token."""
    limit = body.truncate_prompt_tokens
    if limit == 0:
        raise InvalidRequestError(
            "truncate_prompt_tokens must be -1, or 1 or more, got 0", param="truncate_prompt_tokens"
        )
    if limit != -1:
        return limit
    capacity = min(limits.max_model_len, limits.max_sequence_tokens or limits.max_model_len)
    asked = body.max_tokens or (isinstance(body, ChatBody) and body.max_completion_tokens) or 1
    room = min(capacity - asked, limits.max_prompt_tokens or capacity)
    return max(1, room)


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _num_logprobs(body: GenerationBody) -> int | None:
    """How many likeliest tokens are wanted with each token's own log probability; None: neither."""
    if isinstance(body, CompletionBody):
        return body.logprobs
    if not isinstance(body, ChatBody):
        return None
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError(
            f"top_logprobs may only be set when logprobs is true, got {body.top_logprobs}", param="top_logprobs"
        )
    return (body.top_logprobs or 0) if body.logprobs else None


def _logit_bias(body: GenerationBody, limits: Limits) -> tuple[LogitBias, ...]:
    biases: dict[int, float] = {}
    for key, bias in (body.logit_bias or {}).items():
        if not key.isascii() or not key.isdigit() or len(key) > len(str(INT63)):
            raise InvalidRequestError(
                f"logit_bias: a key is a token id in decimal, got {key[:80]!r}", param="logit_bias"
            )
        biases[int(key)] = bias
    check_token_ids([*biases], limits, "logit_bias")
    return tuple(LogitBias(token, bias) for token, bias in biases.items() if bias)


def _check_tools(body: GenerationBody) -> None:
    """Tools are shown to the model, but what it writes is not taken apart into calls: a client has to know."""
    if not isinstance(body, ChatBody):
        return
    if body.tools and body.tool_choice != "none":
        raise InvalidRequestError(
            "tools are only shown to the model, its calls are not parsed: set tool_choice to 'none' if that will do, "
            f"got {body.tool_choice!r}",
            param="tool_choice",
        )
    if not body.tools and body.tool_choice not in (None, "none", "auto"):
        raise InvalidRequestError(f"tool_choice = {str(body.tool_choice)[:80]!r} needs tools", param="tool_choice")


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
