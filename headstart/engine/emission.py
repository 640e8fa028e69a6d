"""Taking over a verdict: tokens are appended one by one until something ends the answer.

Whatever lies behind a stop is neither emitted nor kept, so an answer ends at the same token
whether that token came alone or in the middle of a verified chunk.
"""

from __future__ import annotations

from headstart.engine.outputs import Update
from headstart.engine.request import Request
from headstart.engine.verifier import Verdict


def emit(request: Request, verdict: Verdict) -> None:
    """Append what was decided and set `finish_reason` if the answer ends with it."""
    for index, token in enumerate(verdict.tokens):
        if token < 0:  # nothing was allowed
            _end_of_choices(request)
            return
        request.tokens.append(token)
        request.origins.append(verdict.origins[index])
        if verdict.logprobs:
            request.logprobs.append(verdict.logprobs[index])
        if request.grammar is not None:
            request.grammar.accept(token)
        _check_end(request, token)
        if request.finish_reason is not None:
            return


def update_since(request: Request, num_before: int) -> Update:
    """What was added to a request that had `num_before` tokens of output."""
    is_last = request.finish_reason is not None
    return Update(
        request.group,
        request.sample,
        request.tokens[request.num_prompt + num_before :],
        request.text.take(is_last=is_last) if request.text is not None else "",
        request.origins[num_before:],
        request.logprobs[num_before:],
        request.finish_reason,
        request.error,
        request.stop_reason,
    )


def _end_of_choices(request: Request) -> None:
    """No token may come next: the grammar is at its end, or what else was asked left none over."""
    request.finish_reason = "stop"
    # The row was judged by a copy of the grammar: a failure shows again here.
    fitting = request.grammar.allowed() if request.grammar is not None else None
    if fitting is None or (fitting.any() and not fitting[sorted(request.end_ids)].any()):
        request.finish_reason = "error"
        request.error = (
            "no token is left to choose: allowed_token_ids, banned_token_ids or logit_bias forbid "
            f"all that {'the grammar' if request.grammar is not None else 'the model'} allows."
        )
    _check_grammar(request)
    if request.text is not None:
        request.text.finish()


def _check_end(request: Request, token: int) -> None:
    params = request.params
    is_end = token in request.end_ids and request.num_output > params.min_tokens
    stopped = None
    if request.text is not None and (not is_end or params.include_stop_str_in_output):
        stopped = request.text.add(token)
    stopped = None if is_end else stopped
    if is_end or stopped is not None:
        request.finish_reason = "stop"
        request.stop_reason = stopped if stopped is not None else token
    elif request.room <= 0:
        request.finish_reason = "length"
    else:
        _check_grammar(request)
    if request.finish_reason is not None and request.text is not None and stopped is None:
        request.text.finish()


def _check_grammar(request: Request) -> None:
    """A grammar that failed ends its own request, and no other."""
    if request.grammar is not None and request.grammar.error is not None:
        request.finish_reason, request.error = "error", request.grammar.error
