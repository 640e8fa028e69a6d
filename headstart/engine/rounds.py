"""Requests that decode in rounds on the device, one round ahead of the host.

A step launches a round for all of them, then reads what the round before gave, while the device
works: a request that has ended runs one round for nothing, and memory is taken for two rounds
ahead. Prompts are read by the loop as always; when one is done its first token is chosen on the
device, and the request enters the rounds without the host having seen that token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from headstart.backends.base import (
    DeviceRounds,
    GivenCopy,
    HeadStates,
    RoundRequest,
    TrunkOutput,
    TrunkRows,
)
from headstart.engine.flight import Flight, MeasuredRound, RoundOutcome
from headstart.engine.kv_cache import BlockPool
from headstart.engine.mask_batch import MaskRows
from headstart.engine.request import Request
from headstart.engine.round_grammars import RoundGrammars
from headstart.engine.scheduler import Work
from headstart.sampling.params import Row


@dataclass(frozen=True)
class GivenCopies:
    """What requests may copy in a round, how many tokens of it at most, and rows for all."""

    tokens: Mapping[Request, GivenCopy] = field(default_factory=dict)
    most: int = 0
    rows: int = 0


class Rounds:
    """The requests of one engine that are on the device, by index."""

    def __init__(self, device: DeviceRounds, pool: BlockPool):
        self._device, self._pool = device, pool
        self._requests: list[Request] = []
        self._index: dict[Request, int] = {}
        self._num_blocks: dict[Request, int] = {}  # that the device knows of
        self._flight: Flight | None = None
        self._firsts: Flight | None = None  # first tokens that the host has not seen
        self._entering: dict[Request, Tensor] = {}  # first tokens of this step, on the device
        self._grammars = RoundGrammars()
        self._rows: MaskRows | None = None  # masks of the round under way, as far as begun
        self.measured: MeasuredRound | None = None  # by the last `advance`
        self.joined: TrunkOutput | None = None  # of rows that joined the round it launched

    @property
    def requests(self) -> Mapping[Request, int]:
        """All that are in, with their index."""
        return self._index

    def takes(self, request: Request) -> bool:
        """Whether a request can decode here; otherwise the host decides each of its tokens."""
        return self.why_not(request) is None

    def why_not(self, request: Request) -> str | None:
        """What keeps a request out of rounds, or None."""
        return self._device.why_not(request.params)

    def fitting(self, works: Sequence[Work]) -> list[Work]:
        """The work that the next round takes best, where its rows join: the last may have fewer."""
        if not self._requests or any(work.states or work.request.is_decoding for work in works):
            return list(works)
        left = self._device.fitting_rows([work.count for work in works])
        found = []
        for work in works:
            if left > 0:
                found.append(replace(work, count=min(work.count, left)))
            left -= work.count
        return found

    def room(self) -> int:
        """How many more may enter: each needs two blocks for the rounds ahead."""
        most = min(self._device.sizes.max_requests, self._pool.num_available // 2)
        return max(0, most - len(self._requests))

    def advance(
        self, drafts: Mapping[Request, int], rows: Sequence[TrunkRows] = (),
        copies: GivenCopies | None = None, meanwhile: Callable[[], None] | None = None,
    ) -> tuple[list[RoundOutcome], bool]:  # fmt: skip
        """Launch the next round; what the last one gave, and whether there was memory.

        The device goes on at once; only then the host waits for the round before, after it has
        called `meanwhile`. `rows` of requests outside rounds join its trunk pass if they can: see
        `joined`. `copies` is what requests may copy from their context.
        """
        before, firsts = self._flight, self._firsts
        self._flight = self._firsts = self._rows = self.measured = self.joined = None
        self._entering = {}  # of a step that failed
        most = self._device.sizes.max_drafts
        wanted = [min(drafts.get(request, 0), most) for request in self._requests]
        if self._device.sizes.copied:
            given = copies or GivenCopies()
            indices = {i: given.tokens[r] for r, i in self._index.items() if r in given.tokens}
            self._device.give(indices, given.most, given.rows)
        is_launched = self._launch(wanted, rows)
        if meanwhile is not None:
            meanwhile()
        outcomes: list[RoundOutcome] = []
        if before is not None:
            outcomes = before.outcomes()
            self.measured = before.measured()
        if firsts is not None:  # tokens of prompts that were read after that round began
            for request, own in zip(firsts.requests, firsts.launched.collect(), strict=True):
                outcomes.append(RoundOutcome(request, own, 0))
        here = [outcome for outcome in outcomes if outcome.request in self._index]
        return here, is_launched

    def _launch(self, drafts: list[int], rows: Sequence[TrunkRows]) -> bool:
        if not self._requests:
            self.joined = self._device.read(rows) if rows and self._device.joins(rows) else None
            return True
        if not self._extend(self._device.max_ahead(drafts)):
            return False
        launched = self._device.launch(drafts, rows if self._device.joins(rows) else ())
        self.joined = launched.joined
        context = sum(len(request.tokens) for request in self._requests)
        self._flight = Flight(list(self._requests), launched, context)
        return True

    @property
    def is_under_way(self) -> bool:
        """Whether a round was launched that `advance` has not read."""
        return self._flight is not None

    @property
    def is_drafting(self) -> bool:
        """Whether `complete` would have to wait for drafts."""
        return self._flight is not None and self._device.is_drafting()

    @property
    def is_waiting(self) -> bool:
        """Whether a round that was launched has to be given masks."""
        return self._flight is not None and any(r.grammar is not None for r in self._requests)

    def accept(self, outcomes: Sequence[RoundOutcome]) -> list[int]:
        """Let grammars take what a round gave; of each outcome how many tokens one has taken."""
        return self._grammars.accept([(o.request.grammar, o.emitted.tokens) for o in outcomes])

    def begin_masks(self, stuck: Collection[Request]) -> None:
        """Begin with the masks of a round that waits, before it has drafts.

        Called when grammars have accepted what the round before gave; those of `stuck` requests,
        which were left without a token, are used elsewhere.
        """
        if self._flight is not None:
            held, requests = self._flight.grammars(), self._flight.requests
            if given := {i: held[i] for i in held if requests[i] not in stuck}:
                self._grammars.begin(given, self._mask_rows(self._flight))

    def complete(self) -> None:
        """Give a round that waits for them the masks of grammars.

        Called when grammars have accepted what the round before gave, while the trunk runs.
        """
        if self._flight is None or (drafted := self._device.drafted()) is None:
            self._grammars.finish()
            return
        asked = {i: (grammar, drafted[i]) for i, grammar in self._flight.grammars().items()}
        masks = self._grammars.masks(asked, self._mask_rows(self._flight))
        for index in asked:
            self._flight.fitting[index] = masks.num_fitting(index)
        self._device.choose(masks)

    def _mask_rows(self, flight: Flight) -> MaskRows:
        if self._rows is None:
            self._rows = MaskRows(self._device.mask_room(*flight.mask_size()))
        return self._rows

    def _extend(self, ahead: int) -> bool:
        """Blocks for a round and the one under way, whose outcome is not known."""
        size = self._pool.block_size
        for request in self._requests:
            slots = len(request.tokens) + min(ahead, request.room)
            missing = -(-(slots + 1) // size) - len(request.blocks)
            if missing > 0:
                got = self._pool.allocate(missing)
                if got is None:
                    return False
                request.blocks += got
        new: dict[int, tuple[int, list[int]]] = {}
        for index, request in enumerate(self._requests):
            known = self._num_blocks[request]
            if known < len(request.blocks):
                new[index] = (known, request.blocks[known:])
                self._num_blocks[request] = len(request.blocks)
        if new:
            self._device.extend(new)
        return True

    def enter(self, works: Sequence[Work], logits: Tensor) -> tuple[list[Work], Tensor]:
        """Choose first tokens of works that enter; the other works, and their rows of `logits`.

        As many enter as fit, the most important first: the others must not wait for room.
        """
        able = [w for w in works if not w.drafts and w.request.room > 0 and self.takes(w.request)]
        entering = able[: self.room()]
        if not entering:
            return list(works), logits
        own: list[int] = []
        kept: list[int] = []
        others: list[Work] = []
        row = 0
        for work in works:
            rows = range(row, row + work.num_logits)
            row = rows.stop
            if work in entering:
                own += rows
            else:
                kept += rows
                others.append(work)
        self._choose_first(entering, logits[own] if kept else logits)
        return others, logits[kept]

    def _choose_first(self, works: Sequence[Work], logits: Tensor) -> None:
        """The first token of each of these, all of which `takes`; logits [n, V].

        The host sees them with the outcomes of the next `advance`; until then the requests wait
        for `admit`.
        """
        requests = [work.request for work in works]
        rows = [_row(request, 0) for request in requests]
        tokens, launched = self._device.choose_first(logits, rows)
        self._entering = dict(zip(requests, tokens, strict=True))
        self._firsts = Flight(requests, launched, 0)

    @property
    def entering(self) -> list[Request]:
        """Requests whose first token was chosen in this step."""
        return list(self._entering)

    def admit(self, request: Request, states: Tensor | None) -> None:
        """Let a request in; the head has read everything before the newest token.

        states [modules, hidden]: what that token will be fused with, where there is a head.
        """
        slot = request.states.slot
        self._device.admit(
            RoundRequest(
                num_tokens=len(request.tokens) + 1, remaining=request.room - 1,
                newest=self._entering.pop(request), states=states, row=_row(request, 1),
                blocks=request.blocks, has_grammar=request.grammar is not None,
                draft_vocab=request.draft_vocab, own=request.own_tokens,
                state_slot=-1 if slot is None else slot,
            )
        )  # fmt: skip
        self._index[request] = len(self._requests)
        self._requests.append(request)
        self._num_blocks[request] = len(request.blocks)

    def remove(self, request: Request) -> None:
        """Let a request leave; the last one takes its index."""
        index = self._index.pop(request)
        del self._num_blocks[request]
        self._device.remove(index)
        last = self._requests.pop()
        if last is not request:
            self._requests[index] = last
            self._index[last] = index

    def drain(self) -> dict[Request, HeadStates | None]:
        """All leave, when no round is under way: the host goes on as if it had done everything.

        With each request what its head goes on with.
        """
        states = self._device.drain([len(request.tokens) for request in self._requests])
        drained = dict(zip(self._requests, states, strict=True))
        self._requests, self._index, self._num_blocks = [], {}, {}
        return drained


def _row(request: Request, ahead: int) -> Row:
    """What the choice of the token `ahead` tokens after those that the host has depends on."""
    has_history = request.params.has_penalties
    return Row(
        params=request.params, seed=request.seed, position=len(request.tokens) + ahead,
        prompt_ids=request.prompt_ids if has_history else (),
        output_ids=request.output_ids if has_history else (),
        num_output=request.num_output + ahead, end_ids=request.end_ids,
        mask=request.grammar.allowed() if request.grammar is not None and not ahead else None,
    )  # fmt: skip
