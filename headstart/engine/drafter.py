"""Keeps the head's memory in step with the trunk's, and proposes draft tokens.

After a step every accepted token has a trunk state. The head consumes (state, next token) pairs,
which rewrites whatever it had guessed before; the row of the newest token is its first guess.
Further depths use the next module, or the last one again on its own output; what those rows
write is temporary and lies behind `HeadTrack.done`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from headstart.engine.head_rows import HeadRows
from headstart.engine.request import Request
from headstart.engine.runner import Runner
from headstart.sampling.choose import choose_drafts, draft_probs
from headstart.sampling.rows import Row

# Rows that wait this long are run even if nobody drafts: one pass over many rows costs little.
_LAZY_ROWS = 64


class Drafter:
    def __init__(self, runner: Runner):
        self._runner = runner
        assert runner.head is not None
        self._head = runner.head

    def feed(self, request: Request, first_slot: int, states: torch.Tensor) -> None:
        """Hand over trunk states of accepted slots [first_slot, first_slot + n)."""
        track, count = request.head, self._head.num_modules
        if not track.done:
            track.start(count, states)
        if not self._runner.is_parallel:
            track.feed(0, states)
            self._save_boundaries(request, 0, first_slot, states)
            return
        # A boundary of module j is the state j slots further back, which the last module still has.
        known = torch.cat([track.states[-1], states])
        before = known.shape[0] - states.shape[0]
        for module in range(count):
            track.feed(module, states)
            skipped = max(0, module - before)  # at the start of a text there is none so far back
            own = known[before + skipped - module : max(0, known.shape[0] - module)]
            self._save_boundaries(request, module, first_slot + skipped, own)

    def resume(self, request: Request) -> None:
        """Start from what a prefix hit left behind."""
        last = request.blocks[request.num_computed // self._runner.block_size - 1]
        boundary = self._runner.boundary(last)
        request.head.resume(request.num_computed, boundary, parallel=self._runner.is_parallel)

    def num_final(self, request: Request) -> int:
        """Slots whose head entries are final."""
        return min(request.head.done, default=0)

    def catch_up(self, requests: Sequence[Request], *, force: bool = False) -> None:
        """Fill head slots of requests that do not draft now, when enough of them wait."""
        limit = 1 if force else _LAZY_ROWS
        waiting = [r for r in requests if r.head.done and self._pending(r) >= limit]
        for module in range(self._head.num_modules):
            rows = [rows for r in waiting if (rows := self._final_rows(r, module)) is not None]
            if rows and self._feeds_next(module):
                self._run(module, rows)
            elif rows:
                self._runner.fill_head(module, rows)
                for part in rows:
                    part.request.head.advance(module, len(part.tokens))

    def propose(self, drafting: dict[Request, int]) -> None:
        """Set `drafts` of each request to as many guesses as its number says."""
        for request in drafting:
            request.drafts = []
        one_by_one = self._chain(drafting)
        depth = 1
        last: dict[Request, torch.Tensor] = {}  # recycled state of the newest row
        extra: dict[Request, torch.Tensor] = {}  # states of guessed slots, for the next module
        while active := [r for r in one_by_one if drafting[r] >= depth]:
            module = min(depth, self._head.num_modules) - 1
            rows = [self._draft_rows(r, module, depth, last, extra) for r in active]
            normed, recycled, ends = self._run(module, rows)
            self._guess(active, normed[ends], module)
            for request, part, end in zip(active, rows, ends, strict=True):
                last[request] = recycled[end : end + 1]
                if self._feeds_next(module):
                    guessed = max(0, part.start + len(part.tokens) - len(request.tokens))
                    extra[request] = recycled[end + 1 - guessed : end + 1]
            depth += 1
        rest = [r for r in drafting if drafting[r] < self._head.num_modules]
        if rest:
            self.catch_up(rest, force=True)

    def _chain(self, drafting: dict[Request, int]) -> list[Request]:
        """Make those drafts that can be made at once; returns the requests that are left."""
        chain = self._runner.chain
        able = [r for r in drafting if chain is not None and drafting[r] and r.takes_most_likely]
        for vocab in dict.fromkeys(request.draft_vocab for request in able):
            own = [request for request in able if request.draft_vocab == vocab]
            own.sort(key=lambda request: -drafting[request])
            rows = [self._draft_rows(request, 0, 1, {}, {}) for request in own]
            assert chain is not None
            found = chain(rows, [drafting[request] for request in own], vocab)
            for request, part, drafts in zip(own, rows, found, strict=True):
                request.drafts = drafts
                request.head.advance(0, len(part.tokens))
        return [request for request in drafting if request not in able]

    def _draft_rows(
        self,
        request: Request,
        module: int,
        depth: int,
        last: dict[Request, torch.Tensor],
        extra: dict[Request, torch.Tensor],
    ) -> HeadRows:
        """All rows of `module` up to the slot that gives the guess of this depth."""
        newest = len(request.tokens) - 1
        slot = newest + depth - 1
        if depth > self._head.num_modules:  # the last module again, on its own output
            return HeadRows(request, slot, [request.drafts[-1]], last[request])
        track = request.head
        start = track.done[module]
        tokens = (request.tokens[start:] + request.drafts)[: slot + 1 - start]
        states = track.states[module]
        if module > 0 and not self._runner.is_parallel and request in extra:
            states = torch.cat([states, extra[request]])
        return HeadRows(request, start, tokens, states[: len(tokens)])

    def _final_rows(self, request: Request, module: int) -> HeadRows | None:
        track = request.head
        count = track.ready(module, len(request.tokens))
        if count == 0:
            return None
        start = track.done[module]
        tokens = request.tokens[start : start + count]
        return HeadRows(request, start, tokens, track.states[module][:count])

    def _run(
        self, module: int, rows: list[HeadRows]
    ) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """One pass; final rows move the track on, guessed rows do not."""
        normed, recycled, ends = self._runner.head_pass(module, rows)
        begin = 0
        for part in rows:
            request, track = part.request, part.request.head
            final = min(part.start + len(part.tokens), len(request.tokens)) - part.start
            if part.start == track.done[module] and final > 0:
                outputs = recycled[begin : begin + final]
                track.advance(module, final)
                if self._feeds_next(module):
                    track.feed(module + 1, outputs)
                    self._save_boundaries(request, module + 1, part.start, outputs)
            begin += len(part.tokens)
        return normed, recycled, ends

    def _feeds_next(self, module: int) -> bool:
        """Whether another module goes on with what this one says."""
        return not self._runner.is_parallel and module + 1 < self._head.num_modules

    def _guess(self, requests: list[Request], normed: torch.Tensor, module: int) -> None:
        for vocab in dict.fromkeys(request.draft_vocab for request in requests):
            at = [i for i, request in enumerate(requests) if request.draft_vocab == vocab]
            logits = self._runner.draft_logits(
                normed if len(at) == len(requests) else normed[at], vocab, module
            )
            ids = self._runner.draft_vocabs[vocab].ids if vocab else None
            rows = [_row(requests[i]) for i in at]
            self._keep_probs(requests, at, logits, rows, ids)
            for i, token in zip(at, choose_drafts(logits, rows, ids).tolist(), strict=True):
                requests[i].drafts.append(token)

    def _keep_probs(
        self,
        requests: list[Request],
        at: list[int],
        logits: torch.Tensor,
        rows: list[Row],
        ids: torch.Tensor | None,
    ) -> None:
        """The rejection rule needs the distribution that each guess was drawn from."""
        for place, i in enumerate(at):
            request = requests[i]
            if request.params.acceptance != "rejection":
                continue
            vocab = self._runner.trunk_model.config.vocab
            probs = draft_probs(logits[place : place + 1], rows[place : place + 1], ids, vocab)
            old = request.draft_probs if request.drafts else None
            request.draft_probs = probs if old is None else torch.cat([old, probs])

    def _save_boundaries(
        self, request: Request, module: int, first_slot: int, states: torch.Tensor
    ) -> None:
        """State r feeds the slot after first_slot + r."""
        size = self._runner.block_size
        first = -(first_slot + 1) % size  # the first row that is the last of a block
        block = (first_slot + first) // size
        rows = states[first::size][: max(0, len(request.blocks) - block)]
        if rows.shape[0]:
            blocks = request.blocks[block : block + rows.shape[0]]
            self._runner.save_boundaries(blocks, module, rows)

    def is_behind(self, requests: Iterable[Request], by: int) -> bool:
        """Whether a head has more rows to read before a draft than a round leaves behind."""
        return any(request.head.done and self._pending(request) > by for request in requests)

    def _pending(self, request: Request) -> int:
        return max(
            request.head.ready(module, len(request.tokens))
            for module in range(self._head.num_modules)
        )


def _row(request: Request) -> Row:
    """How a request's next guess is drawn: with the noise that the trunk's choice will have."""
    mask = None
    if request.grammar is not None:
        masks = request.grammar.masks(request.drafts)
        mask = masks[-1] if len(masks) > len(request.drafts) else None
    return Row(
        params=request.params,
        seed=request.seed,
        position=len(request.tokens) + len(request.drafts),
        prompt_ids=(),
        output_ids=(),
        num_output=request.num_output + len(request.drafts),
        end_ids=request.end_ids,
        mask=mask,
    )
