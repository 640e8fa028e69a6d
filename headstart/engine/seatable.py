"""Which requests the device can carry on by itself: those whose choices need no host."""

from __future__ import annotations

from headstart.backends.cuda.kernels.choice import MAX_TOP_K
from headstart.engine.request import Request
from headstart.sampling.params import SamplingParams


def needs_truncation(params: SamplingParams) -> bool:
    """Whether a choice is not among all tokens."""
    is_cut = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    return is_cut and not params.is_greedy


def needs_only_noise(params: SamplingParams) -> bool:
    """Whether the device can choose: from logits and noise, with no history, bias or mask."""
    return (
        not params.needs_history
        and not params.logit_bias
        and params.allowed_token_ids is None
        and not params.banned_token_ids
        and (not needs_truncation(params) or 0 < params.top_k <= MAX_TOP_K)
    )


def may_sit(request: Request, draft_vocab: str | None, max_drafts: int) -> bool:
    """Whether a round can choose all by itself for a request.

    A round drafts from `draft_vocab`, and `max_drafts` at most; `auto` never chooses more.
    """
    params = request.params
    drafts = params.speculate if isinstance(params.speculate, int) else 0
    return (
        request.grammar is None
        and params.acceptance == "match"
        and params.logprobs is None
        and needs_only_noise(params)
        and request.draft_vocab == draft_vocab
        and drafts <= max_drafts
    )
