"""Now and then a round does what was not chosen: otherwise its worth would never be known.

Requests that do not draft try one draft, requests that do draft none, or one more. Old rates and
old corrections of costs fade on such occasions, so that no choice stays for ever.
"""

from __future__ import annotations

from collections.abc import Mapping

from headstart.engine.auto.live_costs import LiveCosts
from headstart.engine.auto.rates import AcceptanceRates
from headstart.engine.request import Request

_PROBE_EVERY = 64  # rounds in which a request does not draft, until one draft is tried
_PROBE_SOON = 8  # the same after a try that paid,
_QUICK_PROBES = 8  # this often in a row: more would not be news
_PLAIN_EVERY = 256  # rounds with drafts until one without is timed
_DEEPER_EVERY = 16  # rounds until one draft more is tried, where it promises half of its cost,
_HOPELESS_EVERY = 256  # and until it is tried whatever it promises

Drafts = dict[Request, int]


class Exploration:
    """Counts rounds since the last try of each sort, for all requests together."""

    def __init__(self, rates: AcceptanceRates, max_drafts: int):
        self._rates, self._max_drafts = rates, max_drafts
        self._rounds_idle = 0  # rounds in which a request did not draft, since the last try
        self._rounds_drafting = 0  # rounds with drafts, since the last without
        self._rounds_shallow = 0  # rounds in which a request could draft more, since a try
        self._rounds_hopeless = 0  # and since a try of all requests
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
            or self._one_more(chosen, rooms, costs)
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
            return None
        self._rounds_idle += 1
        if self._rounds_idle < (_PROBE_SOON if self._probes_soon else _PROBE_EVERY):
            return None
        if not self._probes_soon:
            costs.fade()
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

    def _one_more(
        self, chosen: Drafts, rooms: Mapping[Request, int], costs: LiveCosts
    ) -> Drafts | None:
        """One draft more: how often the draft after the last one is right is only known by it.

        Only where each request has its own K.
        """
        most = self._max_drafts
        able = {r: k + 1 for r, k in chosen.items() if 0 < k < min(rooms[r], most)}
        if costs.uniform or not able:
            return None
        self._rounds_shallow += 1
        self._rounds_hopeless += 1
        if self._rounds_shallow < _DEEPER_EVERY:
            return None
        self._rounds_shallow = 0
        if self._rounds_hopeless >= _HOPELESS_EVERY:
            self._rounds_hopeless = 0
            return {**chosen, **able}
        priors, batch = self._rates.overall.priors(most), len(chosen)
        seconds = [costs.seconds(batch, drafts) for drafts in range(max(able.values()) + 1)]
        worthwhile = {
            request: drafts
            for request, drafts in able.items()
            if self._rates.gains(request.id, priors[:drafts])[-1]
            > (seconds[drafts] - seconds[drafts - 1]) / seconds[0] / 2
        }
        return {**chosen, **worthwhile}
