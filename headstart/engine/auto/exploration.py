"""Now and then a round does what was not chosen: otherwise its worth would never be known.

Requests that do not draft try one draft, requests that do draft none, or one more or less. Tries
of one more or less have an allowance: a small share of all rounds, which a try spends by what it
is expected to lose. So what promises nearly as much is tried often, and what seems hopeless still
comes to its turn, and no wrong cost stays for ever.
"""

from __future__ import annotations

from collections.abc import Mapping

from headstart.engine.auto.live_costs import LiveCosts
from headstart.engine.auto.rates import AcceptanceRates
from headstart.engine.request import Request

_PROBE_EVERY = 64  # rounds in which a request does not draft, until one draft is tried
_PROBE_SOON = 8  # the same after a try that paid, or where requests have just stopped drafting,
_STEADY = 4  # rounds with drafts before; pauses between tries double from there on
_QUICK_PROBES = 8  # this often in a row: more would not be news
_PLAIN_EVERY = 256  # rounds with drafts until one without is timed
_ALLOWANCE = 0.002  # of every round, that tries of one draft more may lose, and of one less,
_MOST_SAVED = 0.5  # up to this share of a round;
_LEAST_LOSS = 0.02  # what a try is counted for at least,
_BETWEEN = 6  # and rounds between two tries

Drafts = dict[Request, int]


class Exploration:
    """Counts rounds since the last try of each sort, for all requests together."""

    def __init__(self, rates: AcceptanceRates, max_drafts: int):
        self._rates, self._max_drafts = rates, max_drafts
        self._rounds_idle = 0  # rounds in which a request did not draft, since the last try
        self._pause = _PROBE_SOON  # such rounds until the next try, where each has its own K
        self._rounds_steady = 0  # rounds in a row in which all requests drafted
        self._rounds_drafting = 0  # rounds with drafts, since the last without
        self._saved = {1: 0.0, -1: 0.0}  # of the allowances of one more and one less, in rounds
        self._rounds_kept = 0  # rounds since either was tried
        self._quick_probes = 0  # in a row
        self._probes_soon = False
        self._probing: set[str] = set()  # requests whose tried draft is not verified yet
        self._probed: list[bool] = []  # whether those that are verified were right
        self._break_even = 0.0  # how often a tried draft must be right to pay

    def vary(
        self, chosen: Drafts, rooms: Mapping[Request, int], costs: LiveCosts, *, break_even: float
    ) -> Drafts:
        """Drafts of the next round: mostly those that were chosen.

        `rooms` says how many drafts each request has room for, `break_even` how often one draft
        must be right to pay.
        """
        self._break_even = break_even
        return (
            self._one_draft(chosen, rooms, costs)
            or self._no_drafts(chosen, costs)
            or self._neighbour(chosen, rooms, costs)
            or chosen
        )

    def observe(self, request_id: str, *, is_right: bool) -> None:
        """Whether the first draft of a request was right; tries are judged when all are known."""
        if request_id not in self._probing:
            return
        self._probing.discard(request_id)
        self._probed.append(is_right)
        if self._probing:
            return
        if sum(self._probed) <= self._break_even * len(self._probed):
            self._quick_probes = 0
        elif self._quick_probes < _QUICK_PROBES:
            self._quick_probes += 1
            self._probes_soon = True

    def forget(self, request_id: str) -> None:
        self._probing.discard(request_id)

    def _one_draft(
        self, chosen: Drafts, rooms: Mapping[Request, int], costs: LiveCosts
    ) -> Drafts | None:
        """One draft for each request that has none."""
        idle = [request for request, drafts in chosen.items() if not drafts and rooms[request]]
        if not idle:
            self._rounds_steady += 1
            if self._rounds_steady >= _STEADY:
                self._pause = _PROBE_SOON  # a hard passage may be short
            return None
        self._rounds_steady = 0
        self._rounds_idle += 1
        pause = _PROBE_EVERY if costs.uniform else self._pause
        if self._rounds_idle < (_PROBE_SOON if self._probes_soon else pause):
            return None
        if not self._probes_soon:
            costs.fade()
            self._pause = min(2 * self._pause, _PROBE_EVERY)
        self._probing, self._probed = {request.id for request in idle}, []
        self._rates.fade(self._probing)
        self._rounds_idle, self._probes_soon = 0, False
        return {**chosen, **dict.fromkeys(idle, 1)}

    def _no_drafts(self, chosen: Drafts, costs: LiveCosts) -> Drafts | None:
        """No drafts for any request, to time a round without."""
        if not any(chosen.values()):
            return None
        self._rounds_drafting += 1
        if self._rounds_drafting < _PLAIN_EVERY:
            return None
        self._rounds_drafting = 0
        costs.fade()
        return dict.fromkeys(chosen, 0)

    def _neighbour(
        self, chosen: Drafts, rooms: Mapping[Request, int], costs: LiveCosts
    ) -> Drafts | None:
        """One draft more or less for all requests that draft, where the allowance covers it.

        How often the draft after the last one is right, and what a round with another K costs, is
        only known by it. Only where each request has its own K.
        """
        if costs.uniform or not any(chosen.values()):
            return None
        for way, saved in self._saved.items():
            self._saved[way] = min(_MOST_SAVED, saved + _ALLOWANCE)
        self._rounds_kept += 1
        if self._rounds_kept < _BETWEEN:
            return None
        for way in sorted(self._saved, key=lambda way: -self._saved[way]):
            tried = {r: self._moved(k, way, rooms[r]) for r, k in chosen.items()}
            if self._saved[way] < _LEAST_LOSS or tried == chosen:
                continue
            loss = max(_LEAST_LOSS, 1 - self._speed(tried, costs) / self._speed(chosen, costs))
            if loss <= self._saved[way]:
                self._saved[way] -= loss
                self._rounds_kept = 0
                return tried
        return None

    def _moved(self, drafts: int, way: int, room: int) -> int:
        """A number of drafts that is tried instead; none stay none."""
        return max(1, min(drafts + way, room, self._max_drafts)) if drafts else 0

    def _speed(self, drafts: Drafts, costs: LiveCosts) -> float:
        """Expected tokens per second."""
        priors = self._rates.overall.priors(max(drafts.values()))
        gained = sum(sum(self._rates.gains(r.id, priors[:k])) for r, k in drafts.items())
        return (len(drafts) + gained) / costs.seconds_of(list(drafts.values()))
