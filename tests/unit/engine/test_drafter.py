"""The head's side of requests, on a backend that keeps notes of its passes.

A head's output at slot i of module j is the number 1000 (j + 1) + i, and its guess is always the
next larger token: so every state and every draft shows where it came from. The trunk's state of
slot t is the number t; tokens of a text count from 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.backends.base import (
    Backend,
    CacheSizes,
    DraftChain,
    DraftVocabRows,
    HeadOutput,
    HeadRows,
    HeadStates,
    TrunkOutput,
    TrunkRows,
)
from headstart.engine.drafter import Drafter
from headstart.engine.grammar import GuardedGrammar
from headstart.engine.request import Request
from headstart.sampling.params import Row, SamplingParams
from headstart.vocab.own_tokens import OwnTokens

VOCAB, SIZE = 200, 2  # tokens; slots of a block


@dataclass(frozen=True)
class Part:
    """One request's rows in a pass."""

    tokens: list[int]
    start: int
    states: list[float]


@dataclass
class Notes:
    passes: list[tuple[int, list[Part]]] = field(default_factory=list)  # with their module
    fills: list[tuple[int, list[Part]]] = field(default_factory=list)
    chains: list[tuple[list[Part], list[int], str | None]] = field(default_factory=list)
    logits: list[tuple[int, str | None, int]] = field(default_factory=list)  # rows, vocab, module
    boundaries: dict[tuple[int, int], float] = field(default_factory=dict)  # by block and module


class NotingBackend(Backend):
    name = "noting"

    def __init__(self, modules: int = 1, *, is_parallel: bool = False, chains: bool = False):
        self._modules, self._is_parallel = modules, is_parallel
        self.drafts_chains = chains
        self.head, self.config = object(), SimpleNamespace(vocab=VOCAB)
        self.sizes = CacheSizes(num_blocks=20, block_size=SIZE)
        self.draft_vocabs = {}
        self.notes = Notes()

    num_modules = property(lambda self: self._modules)
    is_parallel = property(lambda self: self._is_parallel)

    def head_pass(self, module: int, requests: Sequence[HeadRows]) -> HeadOutput:
        self.notes.passes.append((module, [_part(rows) for rows in requests]))
        tokens = [token for rows in requests for token in rows.tokens]
        slots = [rows.start + at for rows in requests for at in range(len(rows.tokens))]
        ends = [sum(len(r.tokens) for r in requests[: i + 1]) - 1 for i in range(len(requests))]
        recycled = torch.tensor([[1000.0 * (module + 1) + slot] for slot in slots])
        return HeadOutput(torch.tensor(tokens)[:, None], recycled, ends)

    def fill_head(self, module: int, requests: Sequence[HeadRows]) -> None:
        self.notes.fills.append((module, [_part(rows) for rows in requests]))

    def draft_logits(self, normed: Tensor, vocab: str | None, module: int = 0) -> Tensor:
        self.notes.logits.append((len(normed), vocab, module))
        ids = torch.arange(VOCAB) if vocab is None else self.draft_vocabs[vocab].ids
        return -(ids[None] - normed - 1).abs().float()  # the nearest to the next token

    def draft_chain(
        self, requests: Sequence[HeadRows], counts: Sequence[int], rows: Sequence[Row],
        vocab: str | None, own: Sequence[OwnTokens | None] = (),
    ) -> list[DraftChain]:  # fmt: skip
        self.notes.chains.append(([_part(own) for own in requests], list(counts), vocab))
        return [
            DraftChain(
                _counting(own.tokens[-1], count, row.mask), 500.0 + torch.arange(count)[:, None]
            )
            for own, row, count in zip(requests, rows, counts, strict=True)
        ]

    def save_boundaries(self, blocks: list[int], module: int, states: Tensor) -> None:
        for block, state in zip(blocks, states.flatten().tolist(), strict=True):
            self.notes.boundaries[block, module] = state

    def boundary(self, block: int) -> Tensor:
        return torch.tensor([[100.0 * block + module] for module in range(self._modules)])

    def _allocate(self, sizes: CacheSizes) -> None:
        raise NotImplementedError

    def trunk_pass(self, requests: Sequence[TrunkRows]) -> TrunkOutput:
        raise NotImplementedError


def _counting(last: int, count: int, mask: Tensor | None) -> list[int]:
    """The next larger tokens; the first is one that a mask allows."""
    first = next(t for t in range(last + 1, VOCAB) if mask is None or mask[t])
    return list(range(first, first + count))


def _part(rows: HeadRows) -> Part:
    return Part(list(rows.tokens), rows.start, rows.states.flatten().tolist())


def states(first: int, stop: int) -> Tensor:
    """The trunk's, of slots [first, stop)."""
    return torch.arange(float(first), float(stop))[:, None]


def request(name: str = "a", length: int = 4, **settings: Any) -> Request:
    """A text of so many tokens; its K/V blocks are 7, 8, ..."""
    params = SamplingParams(**{"temperature": 0, **settings})
    own = Request(name, list(range(10, 10 + length)), params, 3, 90, frozenset(), 0)
    own.blocks = list(range(7, 7 + length // SIZE + 3))
    return own


def read(drafter: Drafter, own: Request) -> Request:
    """The trunk has read the text and added a token, which counts on."""
    drafter.feed(own, 0, states(0, len(own.tokens)))
    own.tokens.append(own.tokens[-1] + 1)
    return own


def begin(
    modules: int = 1, *, is_parallel: bool = False, chains: bool = False
) -> tuple[NotingBackend, Drafter]:
    backend = NotingBackend(modules, is_parallel=is_parallel, chains=chains)
    return backend, Drafter(backend)


def test_one_module_reads_the_text_and_goes_on_by_itself() -> None:
    backend, drafter = begin()
    own = read(drafter, request())
    drafter.propose({own: 3})
    assert own.drafts == [15, 16, 17]
    assert backend.notes.passes == [
        (0, [Part([11, 12, 13, 14], 1, [0, 1, 2, 3])]),  # state t feeds slot t + 1
        (0, [Part([15], 5, [1004])]),
        (0, [Part([16], 6, [1005])]),
    ]
    assert drafter.num_final(own) == 5, "guessed rows are temporary"


def test_what_was_guessed_is_read_again_with_the_states_of_the_trunk() -> None:
    backend, drafter = begin()
    own = read(drafter, request())
    drafter.propose({own: 3})
    drafter.feed(own, 4, states(4, 6))  # one draft was right, another token came
    own.tokens += [15, 90]
    backend.notes.passes.clear()
    drafter.propose({own: 1})
    assert backend.notes.passes == [(0, [Part([15, 90], 5, [4, 5])])]
    assert own.drafts == [91]


def test_chained_modules_feed_one_another() -> None:
    backend, drafter = begin(3)
    own = read(drafter, request())
    drafter.propose({own: 4})
    assert own.drafts == [15, 16, 17, 18]
    assert backend.notes.passes == [
        (0, [Part([11, 12, 13, 14], 1, [0, 1, 2, 3])]),
        (1, [Part([12, 13, 14, 15], 2, [1001, 1002, 1003, 1004])]),
        # the last two rows are guesses, and so is the state that feeds the second of them
        (2, [Part([13, 14, 15, 16], 3, [2002, 2003, 2004, 2005])]),
        (2, [Part([17], 7, [3006])]),  # the last module again, on its own output
    ]
    assert drafter.num_final(own) == 5


def test_chained_modules_take_up_only_what_is_final() -> None:
    backend, drafter = begin(2)
    own = read(drafter, request())
    drafter.propose({own: 2})
    drafter.feed(own, 4, states(4, 5))  # no draft was right
    own.tokens.append(90)
    backend.notes.passes.clear()
    drafter.propose({own: 2})
    assert backend.notes.passes == [
        (0, [Part([90], 5, [4])]),
        (1, [Part([90, 91], 5, [1004, 1005])]),  # its row of slot 5 was a guess before
    ]


def test_parallel_modules_are_all_fed_with_the_trunks_states() -> None:
    backend, drafter = begin(3, is_parallel=True)
    own = read(drafter, request())
    drafter.propose({own: 4})
    assert own.drafts == [15, 16, 17, 18]
    assert backend.notes.passes == [
        (0, [Part([11, 12, 13, 14], 1, [0, 1, 2, 3])]),
        (1, [Part([12, 13, 14, 15], 2, [0, 1, 2, 3])]),
        (2, [Part([13, 14, 15, 16], 3, [0, 1, 2, 3])]),
        (2, [Part([17], 7, [3006])]),
    ]


def test_requests_draft_together_as_long_as_each_wants() -> None:
    backend, drafter = begin()
    first, second = read(drafter, request("a")), read(drafter, request("b", 2))
    drafter.propose({first: 1, second: 2})
    assert (first.drafts, second.drafts) == ([15], [13, 14])
    assert [[part.tokens for part in parts] for _, parts in backend.notes.passes] == [
        [[11, 12, 13, 14], [11, 12]], [[13]],
    ]  # fmt: skip


def test_modules_that_a_short_draft_does_not_need_are_filled_all_the_same() -> None:
    backend, drafter = begin(2)
    own = read(drafter, request())
    drafter.propose({own: 1})
    assert [module for module, _ in backend.notes.passes] == [0]
    assert backend.notes.fills == [(1, [Part([12, 13, 14], 2, [1001, 1002, 1003])])]
    assert drafter.num_final(own) == 5


def test_a_head_that_does_not_draft_catches_up_when_much_waits() -> None:
    backend, drafter = begin()
    short, long = read(drafter, request("a", 63)), read(drafter, request("b", 64))
    drafter.catch_up([short, long])
    ((module, (part,)),) = backend.notes.fills
    assert (module, part.start, len(part.tokens)) == (0, 1, 64)
    assert (drafter.num_final(short), drafter.num_final(long)) == (1, 65)
    assert backend.notes.passes == [], "what the head would say is not wanted"


def test_a_head_that_is_told_to_catches_up_with_everything() -> None:
    backend, drafter = begin(2)
    own, unknown = read(drafter, request()), request("b")
    drafter.catch_up([own, unknown], force=True)
    assert backend.notes.passes == [(0, [Part([11, 12, 13, 14], 1, [0, 1, 2, 3])])]
    assert backend.notes.fills == [(1, [Part([12, 13, 14], 2, [1001, 1002, 1003])])]
    drafter.catch_up([own], force=True)
    assert len(backend.notes.passes) == len(backend.notes.fills) == 1, "nothing is left"
    assert drafter.num_final(unknown) == 0


def test_it_is_behind_where_more_waits_than_a_round_leaves() -> None:
    _, drafter = begin()
    own = read(drafter, request())
    assert drafter.is_behind([own, request("b")], by=3) and not drafter.is_behind([own], by=4)


@pytest.mark.parametrize(
    ("modules", "is_parallel", "expected"),
    [
        (1, False, {(7, 0): 1, (8, 0): 3}),
        (2, False, {(7, 0): 1, (8, 0): 3, (7, 1): 1001, (8, 1): 1003}),
        (2, True, {(7, 0): 1, (8, 0): 3, (7, 1): 0, (8, 1): 2}),
        (3, True, {(7, 0): 1, (8, 0): 3, (7, 1): 0, (8, 1): 2, (8, 2): 1}),
    ],
    ids=["one", "chained", "parallel", "three parallel"],
)
def test_the_state_that_the_slot_after_a_block_needs_is_kept(
    modules: int, is_parallel: bool, expected: dict[tuple[int, int], float]
) -> None:
    """Of module j that is the state j slots further back; at the start of a text there is none."""
    backend, drafter = begin(modules, is_parallel=is_parallel)
    own = read(drafter, request())
    drafter.propose({own: modules})
    assert backend.notes.boundaries == expected


def test_boundaries_do_not_depend_on_how_a_text_is_cut() -> None:
    whole, cut = begin(3, is_parallel=True), begin(3, is_parallel=True)
    own = request(length=9)
    whole[1].feed(own, 0, states(0, 9))
    for first in range(0, 9, 3):
        cut[1].feed(own, first, states(first, first + 3))
    assert whole[0].notes.boundaries == cut[0].notes.boundaries
    assert cut[0].notes.boundaries[10, 2] == 5


def test_rows_behind_the_blocks_of_a_request_are_not_kept() -> None:
    backend, drafter = begin()
    own = request()
    own.blocks = [7]
    drafter.feed(own, 0, states(0, 4))
    assert backend.notes.boundaries == {(7, 0): 1}


@pytest.mark.parametrize(
    ("modules", "is_parallel", "parts"),
    [
        (1, False, [Part([14, 15, 16], 4, [800, 4, 5])]),
        (2, False, [Part([14, 15, 16], 4, [800, 4, 5]),
                    Part([14, 15, 16, 17], 4, [801, 1004, 1005, 1006])]),
        (2, True, [Part([14, 15, 16], 4, [800, 4, 5]),
                   Part([14, 15, 16, 17], 4, [801, 800, 4, 5])]),
    ],
    ids=["one", "chained", "parallel"],
)  # fmt: skip
def test_after_a_prefix_hit_the_head_goes_on_from_the_last_block(
    modules: int, is_parallel: bool, parts: list[Part]
) -> None:
    backend, drafter = begin(modules, is_parallel=is_parallel)
    own = request(length=6)
    drafter.resume(own, at=4)  # two blocks, of which 8 is the last
    assert drafter.num_final(own) == 4
    drafter.feed(own, 4, states(4, 6))
    own.tokens.append(16)
    drafter.propose({own: modules})
    assert [part for _, (part,) in backend.notes.passes] == parts


def test_a_request_that_comes_back_from_the_device_goes_on_with_its_states() -> None:
    backend, drafter = begin()
    own = request(length=9)
    drafter.restore(own, HeadStates(states(6, 8), states(0, 0)))
    assert drafter.num_final(own) == 7
    drafter.propose({own: 1})
    assert backend.notes.passes == [(0, [Part([17, 18], 7, [6, 7])])]


def test_newest_states_are_what_the_newest_token_will_be_fused_with() -> None:
    _, drafter = begin()
    own = request()  # its newest token is known to the device alone
    drafter.feed(own, 0, states(0, 4))
    drafter.catch_up([own], force=True)
    assert drafter.newest_states(own).tolist() == [[3]]


def test_a_chained_head_comes_back_with_what_its_modules_follow() -> None:
    backend, drafter = begin(modules=3)
    own = request(length=3)  # tokens 10 to 12; the last module begins at slot 3
    drafter.restore(own, HeadStates(states(1, 2), states(70, 72)))
    assert drafter._progress[own.id].done == [2, 2, 3]
    assert [part.flatten().tolist() for part in drafter._progress[own.id].states] == [[1], [70], []]
    drafter.catch_up([own], force=True)
    assert backend.notes.passes == [(0, [Part([12], 2, [1])]), (1, [Part([12], 2, [70])])]


def test_a_request_that_is_forgotten_begins_anew() -> None:
    _, drafter = begin()
    own = read(drafter, request(temperature=1.0, acceptance="rejection"))
    drafter.propose({own: 1})
    drafter.forget(own)
    drafter.forget(own)  # more than once, or never known
    assert drafter.num_final(own) == 0
    with pytest.raises(KeyError):
        drafter.probs(own)
    drafter.feed(own, 0, states(0, 4))
    assert drafter.num_final(own) == 1


def test_drafts_are_made_as_a_chain_where_the_backend_can() -> None:
    backend, drafter = begin(chains=True)
    few, many = read(drafter, request("a", 2)), read(drafter, request("b", temperature=0.5))
    drafter.propose({few: 1, many: 3})
    assert (few.drafts, many.drafts) == ([13], [15, 16, 17])
    assert backend.notes.chains == [
        ([Part([11, 12, 13, 14], 1, [0, 1, 2, 3]), Part([11, 12], 1, [0, 1])], [3, 1], None)
    ], "most first"
    assert backend.notes.passes == [] and drafter.num_final(many) == 5


def test_a_chain_under_a_grammar_begins_again_where_a_draft_does_not_fit() -> None:
    backend, drafter = begin(chains=True)
    chained, guided, none = (read(drafter, request(name)) for name in "abc")
    guided.grammar = GuardedGrammar(Even(), VOCAB)
    drafter.propose({chained: 2, guided: 3, none: 0})
    # Of 16, 17, 18 the first fits, of 18, 19 again; the mask then leaves 20.
    assert [counts for _, counts, _ in backend.notes.chains] == [[3, 2], [2], [1]]
    assert [parts for parts, *_ in backend.notes.chains[1:]] == [
        [Part([16], 5, [500])], [Part([18], 6, [500])],
    ], "each chain goes on from the state of the last draft that fits"  # fmt: skip
    assert (chained.drafts, guided.drafts, none.drafts) == ([15, 16], [16, 18, 20], [])
    assert drafter.num_final(guided) == 5 and not backend.notes.passes
    assert len(backend.notes.fills) == 1, "the one that does not draft catches up"


def test_a_chain_has_one_vocabulary() -> None:
    backend, drafter = begin(chains=True)
    first, second = read(drafter, request("a")), read(drafter, request("b"))
    second.draft_vocab = "small"
    drafter.propose({first: 1, second: 1})
    assert [vocab for *_, vocab in backend.notes.chains] == [None, "small"]


def test_a_request_drafts_from_its_own_vocabulary() -> None:
    backend, drafter = begin()
    backend.draft_vocabs["even"] = DraftVocabRows(torch.arange(0, VOCAB, 2), ())
    first, second = read(drafter, request("a")), read(drafter, request("b"))
    second.draft_vocab = "even"
    drafter.propose({first: 1, second: 1})
    assert first.drafts == [15] and second.drafts[0] in (14, 16)
    assert backend.notes.logits == [(1, None, 0), (1, "even", 0)]


def test_the_rejection_rule_knows_what_each_draft_was_drawn_from() -> None:
    _, drafter = begin()
    own = read(drafter, request(temperature=0.01, acceptance="rejection"))
    drafter.propose({own: 3})
    probs = drafter.probs(own)
    assert probs.shape == (3, VOCAB) and probs.argmax(-1).tolist() == own.drafts
    torch.testing.assert_close(probs.sum(-1), torch.ones(3))
    drafter.feed(own, 4, states(4, 5))
    own.tokens.append(90)
    drafter.propose({own: 1})
    assert drafter.probs(own).shape == (1, VOCAB), "of this round only"


class Even:
    """A grammar of even tokens."""

    def allowed(self) -> Tensor:
        return torch.arange(VOCAB) % 2 == 0

    def accept(self, token: int) -> bool:
        return token % 2 == 0

    def fork(self) -> Even:
        return self


def test_drafts_fit_the_grammar() -> None:
    _, drafter = begin()
    own = read(drafter, request())
    own.grammar = GuardedGrammar(Even(), VOCAB)
    drafter.propose({own: 3})
    assert all(token % 2 == 0 for token in own.drafts) and len(own.drafts) == 3
