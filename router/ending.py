"""When an answer is complete: the rule that workers apply to each token, once more for the router.

A worker may be lost between its last token and its last word. A retry would then go on after the end.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from common.messages import FinishReason, GenerationRequest
from common.workers import ModelInfo


def reason_to_end(tokens: Sequence[int], request: GenerationRequest, model: ModelInfo | None) -> FinishReason | None:
    """Why the answer ``tokens`` ends here; None when it goes on."""
    if not tokens:
        return None
    sampling = request.sampling
    ends: Container[int] = sampling.stop_token_ids
    if not sampling.ignore_eos and model is not None:
        ends = (*sampling.stop_token_ids, *model.eos_token_ids)
    if len(tokens) >= sampling.min_tokens and tokens[-1] in ends:
        return FinishReason.STOP
    if len(tokens) >= sampling.max_tokens:
        return FinishReason.LENGTH
    if model is not None and len(request.prompt) + len(tokens) >= model.max_model_len:
        return FinishReason.LENGTH
    return None
