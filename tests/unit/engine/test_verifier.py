"""What a step comes to, with choices made up: accepted tokens, the added one, log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.backends import base
from headstart.engine.grammar import GuardedGrammar
from headstart.engine.request import Request
from headstart.engine.scheduler import Work
from headstart.engine.verifier import Verdict, verify
from headstart.sampling.choose import NOTHING_ALLOWED
from headstart.sampling.params import Row, SamplingParams

VOCAB = 8
PROMPT = [1, 2, 3]


class Chooser(base.Chooser):
    """Gives what it was made with, and keeps the rows that it was asked for."""

    def __init__(self, *choices: int):
        self._choices, self.rows = list(choices), list[Row]()

    def choose(self, logits: Tensor, rows: Sequence[Row]) -> list[int]:
        assert len(logits) == len(rows) == len(self._choices)
        self.rows += rows
        return self._choices


class Counting:
    """A grammar of rising tokens: after `last` only larger ones fit, up to 5, and then nothing."""

    def __init__(self, last: int):
        self._last = last

    def allowed(self) -> Tensor:
        tokens = torch.arange(VOCAB)
        return (tokens > self._last) & (tokens <= 5)

    def accept(self, token: int) -> bool:
        fits = bool(self.allowed()[token])
        self._last = token
        return fits

    def fork(self) -> Counting:
        return Counting(self._last)


def request(name: str = "r", **settings: Any) -> Request:
    params = SamplingParams(**{"temperature": 0, **settings})
    return Request(name, list(PROMPT), params, 11, 50, frozenset({7}), 0)


def decoding(own: Request, *drafts: int) -> Work:
    """The newest token and its drafts."""
    return Work(own, len(own.tokens) - 1, 1 + len(drafts), drafts)


def verdict_of(work: Work, choose: Chooser, **settings: Any) -> Verdict:
    logits = torch.zeros(work.num_logits, VOCAB)
    return verify([work], logits, chooser=choose, **settings)[work.request.id]


@pytest.mark.parametrize(
    ("choices", "tokens", "origins"),
    [
        ((4, 5, 6), [4, 5, 6], ["accepted", "accepted", "bonus"]),
        ((4, 0, 6), [4, 0], ["accepted", "recovered"]),
        ((0, 5, 6), [0], ["recovered"]),
    ],
    ids=["all right", "the second is wrong", "the first is wrong"],
)
def test_drafts_count_up_to_the_first_that_the_trunk_would_not_choose(
    choices: tuple[int, ...], tokens: list[int], origins: list[str]
) -> None:
    found = verdict_of(decoding(request(), 4, 5), Chooser(*choices))
    assert (found.tokens, found.origins) == (tokens, origins)
    assert (found.num_accepted, found.num_drafts) == (len(tokens) - 1, 2)
    assert found.logprobs == []


def test_without_drafts_the_choice_is_a_bonus() -> None:
    found = verdict_of(decoding(request()), Chooser(4))
    assert (found.tokens, found.origins, found.num_drafts) == ([4], ["bonus"], 0)


def test_rows_of_several_requests_follow_one_another_and_prompts_have_none() -> None:
    first, second, third = (request(name) for name in "abc")
    works = [decoding(first, 4), Work(second, 0, 2, ()), decoding(third, 5, 6)]
    found = verify(works, torch.zeros(5, VOCAB), chooser=Chooser(4, 1, 5, 2, 0))
    assert {name: own.tokens for name, own in found.items()} == {"a": [4, 1], "c": [5, 2]}
    assert verify([works[1]], torch.zeros(0, VOCAB), chooser=Chooser()) == {}


def test_a_row_has_the_history_that_plain_decoding_would_have_had() -> None:
    own, choose = request(repetition_penalty=1.5, min_tokens=2), Chooser(4, 5, 6)
    own.tokens.append(9)
    verdict_of(decoding(own, 4, 5), choose)
    assert [row.position for row in choose.rows] == [4, 5, 6]
    assert [row.num_output for row in choose.rows] == [1, 2, 3]
    assert [list(row.output_ids) for row in choose.rows] == [[9], [9, 4], [9, 4, 5]]
    assert all(row.prompt_ids == PROMPT and row.end_ids == {7} for row in choose.rows)
    assert [row.is_held_back for row in choose.rows] == [True, False, False]
    plain = Chooser(4)
    verdict_of(decoding(request()), plain)
    assert not plain.rows[0].prompt_ids, "without penalties the history is not looked at"


def test_a_draft_that_the_grammar_refuses_cuts_the_chain() -> None:
    """Rows behind it are dead: whatever they would say, it does not count."""
    own, choose = request(), Chooser(4, 5, 2, 3)
    own.grammar = GuardedGrammar(Counting(3), VOCAB)
    found = verdict_of(decoding(own, 4, 2, 3), choose)
    assert (found.tokens, found.origins) == ([4, 5], ["accepted", "bonus"])
    assert (found.num_accepted, found.num_drafts) == (1, 1)
    masks = [row.mask for row in choose.rows]
    assert [mask.nonzero().flatten().tolist() for mask in masks[:2] if mask is not None] == [
        [4, 5], [5],
    ]  # fmt: skip
    assert masks[2:] == [None, None]


def test_where_nothing_is_allowed_the_verdict_says_so() -> None:
    own = request()
    own.grammar = GuardedGrammar(Counting(3), VOCAB)
    works, logits = [decoding(own, 5)], torch.zeros(2, VOCAB)
    found = verify(works, logits)["r"]  # by the sampling package's own choice
    assert found.tokens == [4], "the lowest of equals is not the draft"
    logits[0, 5] = 1
    found = verify(works, logits)["r"]
    assert found.tokens == [5, NOTHING_ALLOWED] and found.num_accepted == 1


def probs(*rows: dict[int, float]) -> Tensor:
    result = torch.zeros(len(rows), VOCAB)
    for at, row in enumerate(rows):
        for token, value in row.items():
            result[at, token] = value
    return result


def drawn_from(given: Tensor) -> Callable[[Request], Tensor]:
    return lambda request: given


def test_the_rejection_rule_takes_what_the_target_finds_likelier() -> None:
    """Drafts of a probability that the target at least shares are accepted, whatever is drawn."""
    own = request(temperature=1.0, acceptance="rejection")
    logits = probs({4: 1.0}, {5: 0.5, 6: 0.5}, {2: 1.0}).log().clamp_min(-1e4)
    drafted = probs({4: 1.0}, {5: 0.5, 6: 0.5})
    works, choose = [decoding(own, 4, 5)], Chooser(0)
    found = verify(works, logits, chooser=choose, draft_probs=drawn_from(drafted))["r"]
    assert (found.tokens, found.num_accepted) == ([4, 5, 2], 2), "not what `choose` says"
    assert found.origins == ["accepted", "accepted", "bonus"]


def test_the_rejection_rule_refuses_what_the_target_never_says() -> None:
    own = request(temperature=1.0, acceptance="rejection")
    logits = probs({4: 1.0}, {6: 1.0}, {2: 1.0}).log().clamp_min(-1e4)
    drafted = probs({4: 1.0}, {5: 1.0})
    works, choose = [decoding(own, 4, 5)], Chooser(0)
    found = verify(works, logits, chooser=choose, draft_probs=drawn_from(drafted))["r"]
    assert (found.tokens, found.origins) == ([4, 6], ["accepted", "recovered"])


def test_the_rejection_rule_judges_rows_of_its_own_request() -> None:
    """The second request's rows begin behind the first one's."""
    plain, own = request("a"), request("b", temperature=1.0, acceptance="rejection")
    logits = torch.cat([torch.zeros(2, VOCAB), probs({5: 1.0}, {2: 1.0}).log().clamp_min(-1e4)])
    works = [decoding(plain, 4), decoding(own, 5), decoding(request("c"), 1)]
    logits = torch.cat([logits, probs({1: 1.0}, {3: 1.0})])
    found = verify(works, logits, draft_probs=drawn_from(probs({5: 1.0})))
    told = {name: verdict.tokens for name, verdict in found.items()}
    assert told == {"a": [0], "b": [5, 2], "c": [1, 3]}


def test_the_rejection_rule_ends_where_nothing_is_allowed() -> None:
    own = request(temperature=1.0, acceptance="rejection")
    logits = probs({4: 1.0}, {2: 1.0}).log().clamp_min(-1e4)
    works, choose = [decoding(own, 4)], Chooser(NOTHING_ALLOWED)
    found = verify(works, logits, chooser=choose, draft_probs=drawn_from(probs({4: 1.0})))["r"]
    assert found.tokens == [4, NOTHING_ALLOWED]


@pytest.mark.parametrize("one_by_one", [False, True])
def test_log_probabilities_are_those_of_each_emitted_token_at_its_row(one_by_one: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(5, VOCAB, generator=draw)
    first, own = request("a"), request("b", logprobs=2)
    works = [decoding(first, 1), decoding(own, 4, 5)]
    choose = Chooser(1, 2, 4, 3, 0)
    choose.chooses_one_by_one = one_by_one
    found = verify(works, logits, chooser=choose)
    assert found["a"].logprobs == [] and found["b"].tokens == [4, 3]
    for told, token, row in zip(found["b"].logprobs, [4, 3], logits[2:4], strict=True):
        expected = row.log_softmax(-1)
        best = expected.topk(2)
        assert told.token == token and told.logprob == pytest.approx(float(expected[token]))
        assert list(told.top) == best.indices.tolist()
        assert list(told.top.values()) == pytest.approx(best.values.tolist())
