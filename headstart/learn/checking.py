"""Whether a head that has learned may serve: the simulator walks answers that it never saw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from headstart.learn.certainty import FEWEST, Gain, Walked, compare, first_rate
from headstart.learn.kinds import numbered
from headstart.learn.known import KnownWalks

if TYPE_CHECKING:
    from headstart.data.records import Record

# What walks records with the head at this share of the way to the learned one; 0: the serving one.
Walk = Callable[[Sequence["Record"], float], Mapping[str, Walked]]
WORST_ON_BASE = 0.01  # of the acceptance length, that what was known may lose
# Of the way from the serving head to the learned one. Half of it loses less than half of what was
# known and keeps more than half of what was gained.
SHARES = (1.0, 0.75, 0.5, 0.25)


@dataclass(frozen=True)
class Verdict:
    """The new head against the one that serves."""

    recent: Gain
    base: Gain
    by_kind: dict[str, tuple[float, float]]  # lengths of recent answers, old and new
    first_gain: float = 0.0  # of the rate of first drafts, recent: what can be seen live
    share: float = 1.0  # of the way from the serving head to the learned one
    learned_base: float = 0.0  # gain on what was known of the learned head itself, at a share of 1
    # New over old lengths of recent answers, of kinds with enough of these to go by.
    ratios: dict[str, float] = field(default_factory=dict)

    @property
    def is_accepted(self) -> bool:
        return self.recent.is_better and not self.base.is_worse_by(WORST_ON_BASE)

    @property
    def reason(self) -> str:
        """In words, for the log."""
        recent, base = self.recent, self.base
        part = "" if self.share == 1 else f"{self.share:.0%} of the way: "
        said = (
            f"{part}{recent.old:.3f} -> {recent.new:.3f} on {recent.answers} recent held-out "
            f"answers ({recent.value:+.1%}, 95 % certain of {recent.low:+.1%}), "
            f"{base.old:.3f} -> {base.new:.3f} on {base.answers} of the base ({base.value:+.1%}, "
            f"with 90 % certainty {base.low:+.1%} to {base.high:+.1%})"
        )
        if not recent.is_better:
            return f"not certainly better: {said}"
        if base.is_worse_by(WORST_ON_BASE):
            return f"worse on what was known: {said}"
        return f"better: {said}"

    def as_json(self, *, names_kinds: bool = True) -> dict[str, Any]:
        """names_kinds: whether kinds are called by their words, which nothing kept with a head may
        hold."""
        by_kind = self.by_kind if names_kinds else numbered(self.by_kind)
        return {
            "is_accepted": self.is_accepted, "reason": self.reason, "recent": asdict(self.recent),
            "base": asdict(self.base), "first_gain": self.first_gain,
            "share": self.share, "learned_base": self.learned_base,
            "by_kind": {k: list(v) for k, v in by_kind.items()},
        }  # fmt: skip


class Checker:
    """Remembers how the serving head walked each answer: only the new head walks all of them.

    On what was known, heads are compared with the first one that walked an answer.
    """

    def __init__(self, known: KnownWalks | None = None) -> None:
        self._serving: dict[str, Walked] = {}
        self.learned: dict[str, Walked] = {}  # by the head that was checked last
        self._known = known or KnownWalks()  # of the base
        self._first: dict[str, Walked] = {}  # of these, what the last check was held against

    def swapped(self, *, is_learned: bool) -> None:
        """Another head serves: the one that was checked last, or any other."""
        self._serving = self.learned if is_learned else {}

    def prepare(self, recent: Sequence[Record], base: Sequence[Record], walk: Walk) -> None:
        """Walk what the serving head has not walked yet: once for every answer and head."""
        records = {record.id: record for record in [*recent, *base]}
        known = {name: own for name, own in self._serving.items() if name in records}
        new = walk([r for n, r in records.items() if n not in known], 0.0)
        self._serving = {**known, **new}

    def check(self, recent: Sequence[Record], base: Sequence[Record], walk: Walk) -> Verdict:
        """Of the head nearest to the learned one that keeps what was known."""
        self.prepare(recent, base, walk)
        self._first = self._known.of(base, self._serving)
        losses: list[float] = []
        for share in SHARES:
            found = dict(walk(base, share))
            on_base = self.gain_on_known(base, found)
            losses.append(on_base.value)
            if not on_base.is_worse_by(WORST_ON_BASE):
                break
        found |= walk(recent, share)
        self.learned = found
        on_recent = _gain(recent, self._serving, found)
        kinds = sorted({record.category for record in recent})
        by_kind, ratios = {}, {}
        for kind in kinds:
            gain = _gain([r for r in recent if r.category == kind], self._serving, found)
            by_kind[kind] = (gain.old, gain.new)
            if gain.answers >= FEWEST:
                ratios[kind] = gain.new / gain.old
        names = [r.id for r in recent if r.id in found and r.id in self._serving]
        before = first_rate([self._serving[name] for name in names])
        after = first_rate([found[name] for name in names])
        first_gain = after / before - 1 if before else 0.0
        return Verdict(on_recent, on_base, by_kind, first_gain, share, losses[0], ratios)

    def gain_on_known(self, base: Sequence[Record], walks: Mapping[str, Walked]) -> Gain:
        """Of these walks over those of the first head, as the last check compared."""
        return _gain(base, self._first, walks)


def _gain(
    records: Sequence[Record], before: Mapping[str, Walked], after: Mapping[str, Walked]
) -> Gain:
    names = [r.id for r in records if r.id in before and r.id in after]
    return compare([before[n] for n in names], [after[n] for n in names])
