"""Keeps the head's memory in step with the trunk's, and proposes draft tokens.

After a step every accepted token has a trunk state. The head consumes (state, next token) pairs,
which rewrites whatever it had guessed before; the row of the newest token is its first guess.
Further depths use the next module, or the last one again on its own output; what those rows
write is temporary and comes after `HeadProgress.done`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from headstart.backends.base import Backend, HeadOutput, HeadRows, HeadStates
from headstart.engine.head_progress import HeadProgress
from headstart.engine.request import Request
from headstart.sampling.params import Row

# Rows that wait this long are run even if no request drafts: one pass over many rows costs little.
_LAZY_ROWS = 64


class Drafter:
    """The head's side of every running request."""

    def __init__(self, backend: Backend):
        assert backend.head is not None
        self._backend, self._num_modules = backend, backend.num_modules
        self._progress: dict[str, HeadProgress] = {}  # by request
        self._probs: dict[str, torch.Tensor] = {}  # [K, V] of drafts, for the rejection rule only

    def feed(self, request: Request, first_slot: int, states: torch.Tensor) -> None:
        """Hand over trunk states of accepted slots [first_slot, first_slot + n)."""
        progress = self._progress.get(request.id)
        if progress is None:
            progress = self._progress[request.id] = HeadProgress.start(self._num_modules, states)
        if not self._backend.is_parallel:
            progress.feed(0, states)
            self._save_boundaries(request, 0, first_slot, states)
            return
        # A boundary of module j is the state j slots further back, which the last module still has.
        known = torch.cat([progress.states[-1], states])
        before = known.shape[0] - states.shape[0]
        for module in range(self._num_modules):
            progress.feed(module, states)
            skipped = max(0, module - before)  # at the start of a text there is none so far back
            own = known[before + skipped - module : max(0, known.shape[0] - module)]
            self._save_boundaries(request, module, first_slot + skipped, own)

    def resume(self, request: Request, at: int) -> None:
        """Start after slots [0, at), from the state that is kept at the end of their last block."""
        last = request.blocks[max(0, at // self._backend.sizes.block_size - 1)]
        self._progress[request.id] = HeadProgress.resume(
            at, self._backend.boundary(last), parallel=self._backend.is_parallel
        )

    def restore(self, request: Request, states: HeadStates) -> None:
        """Take up a request whose last tokens, with these states, wait for every module."""
        done = len(request.tokens) - len(states.pending)
        progress = HeadProgress.start(self._num_modules, states.pending)
        progress.states[0] = states.pending
        for module in range(self._num_modules):
            if self._backend.is_parallel:  # trunk states before the pending ones, oldest first
                before = states.carried[: min(module, done - 1)].flip(0)
                progress.states[module] = torch.cat([before, states.pending])
            elif module and done > module:  # a text that has reached the module's first slot
                progress.states[module] = states.carried[module - 1 : module].clone()
            progress.done[module] = max(done, module + 1)
        self._progress[request.id] = progress

    def newest_states(self, request: Request) -> torch.Tensor:
        """[modules, hidden] what the newest token will be fused with, when all is caught up.

        Of a parallel head the trunk's last states, the newest first. Zeros for modules whose first
        slot is not reached.
        """
        states = self._progress[request.id].states
        blank = states[0].new_zeros(states[0].shape[-1])
        if self._backend.is_parallel:
            known = [*states[-1].flip(0), *[blank] * self._num_modules]
            return torch.stack(known[: self._num_modules])
        return torch.stack([own[-1] if len(own) else blank for own in states])

    def forget(self, request: Request) -> None:
        """The request has ended, starts again, or goes on elsewhere."""
        self._progress.pop(request.id, None)
        self._probs.pop(request.id, None)

    def num_final(self, request: Request) -> int:
        """Slots whose head entries are final."""
        progress = self._progress.get(request.id)
        return 0 if progress is None else min(progress.done)

    def probs(self, request: Request) -> torch.Tensor:
        """[K, V] the distributions that the request's drafts were drawn from."""
        return self._probs[request.id]

    def catch_up(self, requests: Sequence[Request], *, force: bool = False) -> None:
        """Fill head slots of requests that do not draft now, when enough of them wait."""
        limit = 1 if force else _LAZY_ROWS
        waiting = [r for r in requests if self._pending(r) >= limit]
        for module in range(self._num_modules):
            rows = {r: rows for r in waiting if (rows := self._final_rows(r, module)) is not None}
            if rows and self._feeds_next(module):
                self._run(module, rows)
            elif rows:
                self._backend.fill_head(module, list(rows.values()))
                for request, part in rows.items():
                    self._progress[request.id].advance(module, len(part.tokens))

    def propose(self, drafting: dict[Request, int]) -> None:
        """Set `drafts` of each request to as many guesses as its number says."""
        for request in drafting:
            request.drafts = []
            self._probs.pop(request.id, None)
        if self._backend.drafts_chains:
            self._chain(drafting)
        else:
            self._draft_by_depth(drafting)
        self.catch_up([r for r in drafting if drafting[r] < self._num_modules], force=True)

    def _draft_by_depth(self, drafting: dict[Request, int]) -> None:
        depth = 1
        last: dict[Request, torch.Tensor] = {}  # recycled state of the newest row
        extra: dict[Request, torch.Tensor] = {}  # states of guessed slots, for the next module
        while active := [r for r in drafting if drafting[r] >= depth]:
            module = min(depth, self._num_modules) - 1
            rows = {r: self._draft_rows(r, module, depth, last, extra) for r in active}
            output = self._run(module, rows)
            self._guess(active, output.normed[output.last], module)
            for (request, part), end in zip(rows.items(), output.last, strict=True):
                last[request] = output.recycled[end : end + 1]
                if self._feeds_next(module):
                    guessed = max(0, part.start + len(part.tokens) - len(request.tokens))
                    extra[request] = output.recycled[end + 1 - guessed : end + 1]
            depth += 1

    def _chain(self, drafting: dict[Request, int]) -> None:
        """Drafts of all depths at once.

        A grammar's mask has to follow each draft. Guesses mostly fit without one, and what fits is
        what a mask would have left; from the first that does not, drafting goes on with its mask.
        The rejection rule has to know the masked distribution, so each draft has its own call.
        """
        last: dict[Request, torch.Tensor] = {}
        while active := [r for r in drafting if len(r.drafts) < drafting[r]]:
            counts = {r: 1 if _needs_masks(r) else drafting[r] - len(r.drafts) for r in active}
            for vocab in dict.fromkeys(request.draft_vocab for request in active):
                own = [request for request in active if request.draft_vocab == vocab]
                own.sort(key=lambda request: -counts[request])
                rows = [self._draft_rows(r, 0, len(r.drafts) + 1, last, {}) for r in own]
                extra = [request.own_tokens for request in own] if vocab is not None else []
                found = self._backend.draft_chain(
                    rows, [counts[request] for request in own], [_row(r) for r in own], vocab, extra
                )
                for request, part, chain in zip(own, rows, found, strict=True):
                    if not request.drafts:  # further rows are temporary
                        self._progress[request.id].advance(0, len(part.tokens))
                    count = _num_kept(request, chain.tokens)
                    request.drafts = request.drafts + chain.tokens[:count]
                    if len(request.drafts) < drafting[request]:
                        last[request] = chain.states[count - 1 : count]
                    self._add_probs(request, chain.probs)

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
        if depth > self._num_modules:  # the last module again, on its own output
            return HeadRows([request.drafts[-1]], slot, request.blocks, last[request])
        progress = self._progress[request.id]
        start = progress.done[module]
        tokens = (request.tokens[start:] + request.drafts)[: slot + 1 - start]
        if module > 0 and not self._backend.is_parallel and request in extra:
            states = torch.cat([progress.states[module], extra[request]])[: len(tokens)]
        else:
            states = progress.first(module, len(tokens))
        return HeadRows(tokens, start, request.blocks, states)

    def _final_rows(self, request: Request, module: int) -> HeadRows | None:
        progress = self._progress[request.id]
        count = progress.ready(module, len(request.tokens))
        if count == 0:
            return None
        start = progress.done[module]
        tokens = request.tokens[start : start + count]
        return HeadRows(tokens, start, request.blocks, progress.first(module, count))

    def _run(self, module: int, rows: dict[Request, HeadRows]) -> HeadOutput:
        """One pass; final rows move the progress on, guessed rows do not."""
        output = self._backend.head_pass(module, list(rows.values()))
        begin = 0
        for request, part in rows.items():
            progress = self._progress[request.id]
            final = min(part.start + len(part.tokens), len(request.tokens)) - part.start
            if part.start == progress.done[module] and final > 0:
                outputs = output.recycled[begin : begin + final]
                progress.advance(module, final)
                if self._feeds_next(module):
                    progress.feed(module + 1, outputs)
                    self._save_boundaries(request, module + 1, part.start, outputs)
            begin += len(part.tokens)
        return output

    def _feeds_next(self, module: int) -> bool:
        """Whether another module goes on with the output of this one."""
        return not self._backend.is_parallel and module + 1 < self._num_modules

    def _guess(self, requests: list[Request], normed: torch.Tensor, module: int) -> None:
        for vocab in dict.fromkeys(request.draft_vocab for request in requests):
            at = [i for i, request in enumerate(requests) if request.draft_vocab == vocab]
            logits = self._backend.draft_logits(
                normed if len(at) == len(requests) else normed[at], vocab, module
            )
            ids = self._backend.draft_vocabs[vocab].ids if vocab else None
            shared: list[int] = []  # of `at`, those that draft from the same tokens
            for place, i in enumerate(at):
                own = requests[i].own_tokens
                if vocab is None or own is None:
                    shared.append(place)
                    continue
                one = logits[place : place + 1], vocab, normed[i : i + 1], own, module
                self._choose([requests[i]], *self._backend.with_own(*one))
            if shared:
                common = logits if len(shared) == len(at) else logits[shared]
                self._choose([requests[at[place]] for place in shared], common, ids)

    def _choose(
        self, requests: list[Request], logits: torch.Tensor, ids: torch.Tensor | None
    ) -> None:
        """The next draft of each request, from its row of logits, whose columns are `ids`."""
        rows = [_row(request) for request in requests]
        chosen = self._backend.choose_drafts(logits, rows, ids)
        for request, one, row, token in zip(requests, logits, rows, chosen, strict=True):
            if row.params.acceptance == "rejection":
                given = (one[None], [row], ids, self._backend.config.vocab)
                self._add_probs(request, self._backend.draft_probs(*given))
            request.drafts.append(token)

    def _add_probs(self, request: Request, probs: torch.Tensor | None) -> None:
        """The rejection rule needs the distribution that each guess was drawn from."""
        if probs is not None:
            old = self._probs.get(request.id)
            self._probs[request.id] = probs if old is None else torch.cat([old, probs])

    def _save_boundaries(
        self, request: Request, module: int, first_slot: int, states: torch.Tensor
    ) -> None:
        """State r feeds the slot after first_slot + r."""
        size = self._backend.sizes.block_size
        first = -(first_slot + 1) % size  # the first row that is the last of a block
        if first >= len(states):
            return
        block = (first_slot + first) // size
        rows = states[first::size][: max(0, len(request.blocks) - block)]
        if rows.shape[0]:
            blocks = request.blocks[block : block + rows.shape[0]]
            self._backend.save_boundaries(blocks, module, rows)

    def is_behind(self, requests: Iterable[Request], by: int) -> bool:
        """Whether a head has more rows to read before a draft than a round leaves behind."""
        return any(self._pending(request) > by for request in requests)

    def _pending(self, request: Request) -> int:
        """Rows that the head could read now, in the module that has most of them."""
        progress = self._progress.get(request.id)
        if progress is None:
            return 0
        count = len(request.tokens)
        return max(progress.ready(module, count) for module in range(self._num_modules))


def _needs_masks(request: Request) -> bool:
    """Whether each of its drafts has to be chosen under a mask."""
    return request.grammar is not None and request.params.acceptance == "rejection"


def _num_kept(request: Request, tokens: list[int]) -> int:
    """How many further drafts fit the request's grammar; the first was chosen under its mask."""
    if request.grammar is None or len(tokens) == 1:
        return len(tokens)
    fitting = request.grammar.num_fitting(request.drafts + tokens) - len(request.drafts)
    return max(1, fitting)


def _row(request: Request) -> Row:
    """How a request's next guess is drawn: with the noise that the trunk's choice will have."""
    masks = request.grammar.masks(request.drafts) if request.grammar is not None else []
    mask = masks[-1] if len(masks) > len(request.drafts) else None
    return request.row(request.drafts, mask, penalties=False)
