"""Which drafts are right, by the backend that serves: its own passes over answers that are known.

The trunk reads the answers once and the head follows, as in prompts. From every row the head then
goes on by itself for as long as its drafts are right: the first wrong one ends a chain in serving,
too, so deeper rows are not computed. Bits are those of serving wherever the backend gives a row
the same bits in any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headstart.backends.base import Backend, CacheSizes, HeadRows, TrunkRows
from headstart.sampling.params import Row
from headstart.simulate.answers import Answer
from headstart.simulate.matches import Matches, sampling_row
from headstart.simulate.own_columns import OwnColumns
from headstart.vocab.own_tokens import OwnRule

_PASS_ROWS = 512  # rows in one pass of trunk or head
_CHAINS = 256  # rows that go on together, each with slots of its own
_CHUNK_VALUES = 1 << 23  # logits in memory at a time


@dataclass(frozen=True)
class Text:
    """Token ids of one document, its answers, and the slots that its K/V fill."""

    ids: list[int]
    answers: Sequence[Answer]
    first_slot: int


@dataclass(frozen=True)
class _Start:
    """A row from which the head drafts: the newest token is at `position` of its text."""

    text: Text
    answer: Answer
    position: int

    def token(self, depth: int) -> int:
        """What a draft of this depth would have to be."""
        return self.text.ids[self.position + depth]

    def row(self, depth: int) -> Row:
        """How the engine chooses that draft."""
        return sampling_row(self.answer, self.position + depth - self.answer.start)

    def reaches(self, depth: int) -> bool:
        return self.position + depth < self.answer.stop


@dataclass
class _Chains:
    """Rows that still go on, with the state [n, D] that each one's next depth is fed with."""

    starts: list[_Start]
    recycled: Tensor
    alive: dict[str, list[int]] = field(default_factory=dict)  # by vocabulary: of `starts`
    columns: dict[str, OwnColumns] = field(default_factory=dict)  # by vocabulary


class ServedMatches:
    """Scores texts with a backend whose head has one module; its K/V memory is its own here."""

    def __init__(self, backend: Backend, max_drafts: int, longest: int, own: int = 0):
        """own: so many tokens of its text are drafted beside a vocabulary."""
        assert backend.head is not None and backend.num_modules == 1
        self._backend, self._max_drafts, self._own = backend, max_drafts, own
        self._rules: dict[str, OwnRule] = {}  # by vocabulary
        self.max_rows = max(_PASS_ROWS, longest)
        backend.allocate(CacheSizes(self.max_rows + _CHAINS * max_drafts, block_size=1))

    @torch.inference_mode()
    def matches(
        self, texts: Sequence[Text], vocab_of: Mapping[str, Callable[[Answer], str | None]]
    ) -> dict[str, list[Matches]]:
        """For each way of choosing a vocabulary, by its name at the backend, the matches of all
        answers."""
        states = self._read(texts)
        found = {way: {id(a): self._blank(a) for a in _answers(texts)} for way in vocab_of}
        for starts, hidden in self._first_rows(texts, states):
            chains = _Chains(starts, hidden.recycled)
            chains.alive = {way: list(range(len(starts))) for way in vocab_of}
            normed = hidden.normed
            for depth in range(1, self._max_drafts + 1):
                for way, choose in vocab_of.items():
                    self._guess(chains, way, choose, depth, normed, found[way])
                going = sorted({at for own in chains.alive.values() for at in own})
                if depth == self._max_drafts or not going:
                    break
                normed, recycled = self._go_on(chains, going, depth)
                chains.recycled = recycled
        return {
            way: [Matches(answer, own[id(answer)]) for answer in _answers(texts)]
            for way, own in found.items()
        }

    def _blank(self, answer: Answer) -> Tensor:
        return torch.zeros(max(0, answer.num_tokens - 1), self._max_drafts, dtype=torch.bool)

    def _read(self, texts: Sequence[Text]) -> list[Tensor]:
        """The trunk over all texts, in passes of a limited number of rows: states [T, D] each."""
        parts: list[list[Tensor]] = [[] for _ in texts]
        for cut in _passes([len(text.ids) for text in texts]):
            rows = [
                TrunkRows(texts[at].ids[begin:end], begin, self._blocks(texts[at]), 0, True)
                for at, begin, end in cut
            ]
            for (at, _, _), own in zip(cut, self._backend.trunk_pass(rows)[0], strict=True):
                parts[at].append(own)
        return [torch.cat(own) for own in parts]

    def _blocks(self, text: Text) -> range:
        return range(text.first_slot, text.first_slot + len(text.ids))

    def _first_rows(
        self, texts: Sequence[Text], states: Sequence[Tensor]
    ) -> Iterator[tuple[list[_Start], _Hidden]]:
        """The head over all texts; its rows from which answers are drafted, some at a time."""
        for text, own in zip(texts, states, strict=True):
            normed, recycled = [], []
            for _, begin, end in (part for cut in _passes([len(text.ids) - 1]) for part in cut):
                rows = HeadRows(
                    text.ids[begin + 1 : end + 1], begin + 1, self._blocks(text), own[begin:end]
                )
                output = self._backend.head_pass(0, [rows])
                normed.append(output.normed)
                recycled.append(output.recycled)
            whole = _Hidden(torch.cat(normed), torch.cat(recycled))
            starts = [
                _Start(text, answer, position)
                for answer in text.answers
                for position in range(answer.start, answer.stop - 1)
            ]
            for first in range(0, len(starts), _CHAINS):
                some = starts[first : first + _CHAINS]
                # Slot i is row i - 1 of the head: it consumes token i.
                at = torch.tensor([start.position - 1 for start in some])
                yield some, _Hidden(whole.normed[at], whole.recycled[at])

    def _guess(
        self, chains: _Chains, way: str, choose: Callable[[Answer], str | None], depth: int,
        normed: Tensor, found: Mapping[int, Tensor],
    ) -> None:  # fmt: skip
        """Compare the drafts of one depth with the text; chains with a wrong one end."""
        alive = [at for at in chains.alive[way] if chains.starts[at].reaches(depth)]
        chains.alive[way] = []
        vocabs = {at: choose(chains.starts[at].answer) for at in alive}
        for vocab in dict.fromkeys(vocabs.values()):
            known = self._backend.draft_vocabs[vocab].ids if vocab is not None else None
            columns = self._backend.config.vocab if known is None else len(known)
            own = [at for at in alive if vocabs[at] == vocab]
            columns_of = self._columns(chains, vocab)
            step = max(1, _CHUNK_VALUES // columns)
            for part in (own[i : i + step] for i in range(0, len(own), step)):
                rows, states = [chains.starts[at].row(depth) for at in part], normed[part]
                logits = self._backend.draft_logits(states, vocab, 0)
                if columns_of is None:
                    guesses = self._backend.choose_drafts(logits, rows, known)
                else:
                    newest = torch.tensor([chains.starts[at].position for at in part])
                    added = self._backend.token_logits(states, columns_of.extra)
                    joined = columns_of.joined(logits, added, newest)
                    guesses = self._backend.choose_drafts(joined, rows, columns_of.ids)
                for at, guess in zip(part, guesses, strict=True):
                    start = chains.starts[at]
                    if guess == start.token(depth):
                        found[id(start.answer)][start.position - start.answer.start, depth - 1] = (
                            True
                        )
                        chains.alive[way].append(at)

    def _columns(self, chains: _Chains, vocab: str | None) -> OwnColumns | None:
        """Where the text of these rows has tokens beside the vocabulary; it is the same of all."""
        if not self._own or vocab is None:
            return None
        if vocab not in chains.columns:
            listed = self._backend.draft_vocabs[vocab].ids
            if vocab not in self._rules:
                size = self._backend.config.vocab
                self._rules[vocab] = OwnRule.of(listed.tolist(), size, self._own)
            text = [(0, chains.starts[0].text.ids)]
            chains.columns[vocab] = OwnColumns.of(self._rules[vocab], listed, text)
        found = chains.columns[vocab]
        return found if len(found.extra) else None

    def _go_on(self, chains: _Chains, going: list[int], depth: int) -> tuple[Tensor, Tensor]:
        """The head's next depth for rows whose drafts were right so far: [n, D] of all rows."""
        rows = []
        for at in going:
            start = chains.starts[at]
            scratch = self.max_rows + at * self._max_drafts
            text = range(start.text.first_slot, start.text.first_slot + start.position + 1)
            blocks = [*text, *range(scratch, scratch + depth)]
            slot = start.position + depth
            state = chains.recycled[at : at + 1]
            rows.append(HeadRows([start.token(depth)], slot, blocks, state))
        output = self._backend.head_pass(0, rows)
        place = torch.tensor(going)
        normed, recycled = (torch.empty_like(chains.recycled) for _ in range(2))
        normed[place], recycled[place] = output.normed, output.recycled
        return normed, recycled


@dataclass(frozen=True)
class _Hidden:
    """What the head says of rows [n, D]: for the LM head, and for its own next depth."""

    normed: Tensor
    recycled: Tensor


def _answers(texts: Sequence[Text]) -> list[Answer]:
    return [answer for text in texts for answer in text.answers]


def _passes(lengths: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Rows [begin, end) of each text, by its number, in passes of at most `_PASS_ROWS` rows."""
    cut: list[tuple[int, int, int]] = []
    room = _PASS_ROWS
    for number, length in enumerate(lengths):
        begin = 0
        while begin < length:
            end = min(length, begin + room)
            cut.append((number, begin, end))
            room -= end - begin
            begin = end
            if not room:
                yield cut
                cut, room = [], _PASS_ROWS
    if cut:
        yield cut
