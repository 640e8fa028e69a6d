"""Requests on the device: who sits where, rounds that are under way, and what they gave.

A round is launched without knowing what the one before gave: the device carries every seated
request on by itself. Its tokens are read one round later, while the next one runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from headstart.backends.cuda.graphs import Graphs
from headstart.backends.cuda.rounds import Kind
from headstart.backends.cuda.seats import Seat, Seats
from headstart.engine.device_runner import DeviceRunner
from headstart.engine.kinds import Kinds
from headstart.engine.request import Request
from headstart.engine.scheduler import Scheduler
from headstart.engine.seatable import needs_truncation

WINDOW = 16  # tokens that the head may be behind while nobody drafts
_FEW = 4  # of so many seats one has a head, or less: a round that reads for all costs too much


@dataclass(frozen=True)
class Outcome:
    """What one round gave one request."""

    request: Request
    tokens: list[int]
    num_drafts: int
    num_unread: int = 0  # tokens from before the round that the head has not read yet, at most


@dataclass(frozen=True)
class Timed:
    """A round whose time says what such rounds cost."""

    kind: Kind
    context: int  # tokens of all seats together
    began: torch.cuda.Event


@dataclass
class Flight:
    """What is under way: who takes part, how many drafts each, where the result will be."""

    seats: dict[int, Request]
    drafts: dict[int, int]
    emitted: torch.Tensor
    is_done: torch.cuda.Event | None
    timed: Timed | None = None
    num_unread: int = 0

    def rows(self) -> list[Any]:
        """The result, waiting for it."""
        if self.is_done is not None:
            self.is_done.synchronize()
        return self.emitted.tolist()

    def seconds(self) -> float:
        """How long the device took for a timed round whose result has been read."""
        assert self.timed is not None and self.is_done is not None
        return float(self.timed.began.elapsed_time(self.is_done)) / 1e3


@dataclass
class Seating:
    """All seats of one engine, packed at the front."""

    runner: DeviceRunner
    scheduler: Scheduler
    seats: Seats
    graphs: Graphs
    kinds: Kinds
    max_tokens: int  # of a request: the model's length
    taken: dict[int, Request] = field(default_factory=dict)
    _limits: list[int] = field(default_factory=list)  # drafts per seat, as the device knows them
    _flight: Flight | None = None
    _last_drafts: int = 0  # the most of anybody in the last round
    _pending: int = 0  # the most tokens that any seat's head may be behind

    @classmethod
    def create(
        cls, runner: DeviceRunner, scheduler: Scheduler, *, count: int, max_drafts: int,
        max_len: int, draft_vocab: str | None, menu: Sequence[int] = (),
    ) -> Seating:  # fmt: skip
        size = runner.block_size
        max_blocks = -(-(max_len + 2 * max_drafts + 2) // size)
        seats = Seats(
            count, max_drafts=max_drafts, window=max(WINDOW, max_drafts + 1),
            max_blocks=max_blocks, hidden=runner.trunk_model.config.hidden, dtype=runner.dtype,
            device=runner.device, recurrent=runner.recurrent_seats(count, max_drafts),
        )  # fmt: skip
        model = runner.round_model(max_blocks * size, draft_vocab)
        graphs = Graphs(model, seats)
        menu = [drafts for drafts in menu if drafts <= max_drafts]
        kinds = Kinds(graphs, WINDOW, menu, widest=seats.window)
        return cls(runner, scheduler, seats, graphs, kinds, max_len)

    def kinds_of(self, drafts: int) -> list[Kind]:
        """Rounds of every size."""
        return [Kind.usual(count, drafts) for count in self.graphs.sizes()]

    def warm_up(self, kinds: Sequence[Kind]) -> None:
        """Capture rounds, while all seats are empty."""
        for kind in kinds:
            for _ in range(2):  # as it is; then captured
                self.kinds.run(kind)

    def room(self) -> int:
        """How many more may sit: a seat each, and two blocks for the rounds ahead of everybody."""
        most = min(self.seats.count, self.scheduler.pool.num_available // 2)
        return max(0, most - len(self.taken))

    def sit(self, request: Request, state: torch.Tensor | None, newest: torch.Tensor) -> None:
        """A request that has been read to its end; `newest` is the token after that.

        The head has read everything before it, or nothing and `state` is None. How much it
        drafts is said with every round.
        """
        at = len(self.taken)
        self.taken[at] = request
        request.seat = at
        seat = Seat(
            len(request.tokens) + 1, request.room - 1, 0, newest, state, request.seed,
            request.params.temperature, request.blocks, max(0, request.params.top_k),
            request.params.top_p, request.params.min_p,
            -1 if request.states.slot is None else request.states.slot,
        )  # fmt: skip
        self.seats.sit(at, seat, self.runner.layer_states)
        self._limits = []
        request.num_tabled = len(request.blocks)
        if state is not None:
            self._pending = max(self._pending, 1)

    def give_up(self, request: Request) -> None:
        """Free the seat of a request that starts again: what is under way for it is not taken."""
        if self._flight is not None:
            going = self._flight.seats.items()
            self._flight.seats = {at: other for at, other in going if other is not request}
        self.leave(request)

    def leave(self, request: Request) -> None:
        """Free a seat; the last one moves into it."""
        at, last = request.seat, len(self.taken) - 1
        assert at is not None
        request.seat = None
        self._limits = []
        if at == last:
            self.seats.leave(at)
        else:
            self.seats.move(last, at)
            self.taken[at] = self.taken[last]
            self.taken[at].seat = at
        del self.taken[last]

    def launch(self, chosen: dict[Request, int]) -> bool:
        """Start a round of everybody seated; False if there is no memory for it."""
        if not self.taken:
            self._pending = 0
            return True
        wanted = {at: chosen.get(request, 0) for at, request in self.taken.items()}
        is_truncated = any(needs_truncation(r.params) for r in self.taken.values())
        self._read_late(max(wanted.values()))
        kind = self.kinds.pick(
            len(self.taken), max(wanted.values()), self._pending, is_truncated=is_truncated
        )
        drafts = {at: min(number, kind.num_drafts) for at, number in wanted.items()}
        most = max(drafts.values())
        if not self._extend(self._last_drafts, most):
            return False
        self._last_drafts = most
        self._limit(drafts)
        began = self._mark()
        is_replay = self.kinds.run(kind)
        num_unread = 0 if kind.head_rows or not self.graphs.has_head else self._pending
        self._pending = most + 1 if kind.head_rows else self._pending + 1
        count = self.graphs.bucket(len(self.taken))
        emitted, is_done = self._copy_out(self.seats.emitted[:count])
        timed = None
        # A larger round than was wanted may take less than one in which all rows are there.
        is_usual = kind.head_rows < self.kinds.window and not self.kinds.is_fall(kind, most)
        if began is not None and is_replay and is_usual:
            timed = Timed(kind, sum(len(r.tokens) for r in self.taken.values()), began)
        self._flight = Flight(dict(self.taken), drafts, emitted, is_done, timed, num_unread)
        return True

    def results(self, flight: Flight | None) -> list[Outcome]:
        """Wait for a round and read what it gave."""
        if flight is None:
            return []
        rows = flight.rows()
        return [
            Outcome(
                request, rows[at][1 : 1 + rows[at][0]],
                max(0, min(flight.drafts[at], request.room - 1)),
                0 if request.is_headless else flight.num_unread,
            )
            for at, request in flight.seats.items()
            if rows[at][0]
        ]  # fmt: skip

    def send(self, firsts: torch.Tensor, requests: list[Request]) -> Flight:
        """First tokens on their way to the host."""
        return Flight(dict(enumerate(requests)), {}, *self._copy_out(firsts))

    def take_flight(self) -> Flight | None:
        """The round under way, which is the caller's to read from now on."""
        flight, self._flight = self._flight, None
        return flight

    def stand_up(self) -> None:
        """Everybody leaves, when no round is under way: the host goes on as if it had done all."""
        if self.seats.recurrent is not None and self.taken:
            lengths = [len(self.taken[at].tokens) for at in range(len(self.taken))]
            self.runner.settle_states(self.seats.recurrent, lengths)
        for request in list(self.taken.values()):
            at = request.seat
            assert at is not None
            if self.graphs.has_head and not request.is_headless:
                pending = int(self.seats.pending[at])
                request.head.done = [len(request.tokens) - pending]
                request.head.states = [self.seats.states[at, :pending].clone()]
            request.seat = None
            self.seats.leave(at)
        self.taken.clear()
        self._limits = []

    def _read_late(self, most: int) -> None:
        """Where few seats have a head, it reads what is pending for them alone."""
        if not self.graphs.has_head:
            return
        heads = [at for at, request in self.taken.items() if not request.is_headless]
        if not heads:
            self._pending = 0
        elif _FEW * len(heads) <= len(self.taken) and self.kinds.is_late(most, self._pending):
            self.graphs.catch_up(heads, self.kinds.late_rows(self._pending))
            self._pending = 1

    def _extend(self, under_way: int, drafts: int) -> bool:
        """Blocks for a round and the one under way, whose outcome is not known; drafts of both."""
        size, pool = self.scheduler.pool.block_size, self.scheduler.pool
        for at, request in self.taken.items():
            # A first token, too, may not have arrived here yet.
            ahead = min((under_way + 1) + (drafts + 1) + 1, request.room)
            slots = len(request.tokens) + ahead
            missing = -(-(slots + 1) // size) - len(request.blocks)
            if missing > 0:
                got = pool.allocate(missing)
                if got is None:
                    return False
                request.blocks += got
            if request.num_tabled < len(request.blocks):
                self.seats.extend(at, request.num_tabled, request.blocks[request.num_tabled :])
                request.num_tabled = len(request.blocks)
        return True

    def _limit(self, drafts: dict[int, int]) -> None:
        wanted = [drafts[at] for at in range(len(drafts))]
        if wanted != self._limits:
            self._limits = wanted
            self.seats.limit(wanted)

    def _copy_out(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """A copy for the host, and the event after which it is whole."""
        if not values.is_cuda:
            return values.clone(), None
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        return host, self._mark()

    def _mark(self) -> torch.cuda.Event | None:
        """A point in what the device has been given to do, with a time that it will know."""
        if not self.seats.lengths.is_cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
