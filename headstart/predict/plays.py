"""All answers played by each source of drafts: the head, copies, and both as `auto` chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from headstart.engine.auto.served_costs import RoundTimes
from headstart.predict.auto_speed import Played, head_speed
from headstart.predict.captured_speed import captured_speed
from headstart.predict.host_speed import host_speed
from headstart.predict.options import PredictionOptions
from headstart.sampling.params import DraftFrom
from headstart.simulate.copies import ReplayedCopies
from headstart.simulate.cost import Costs
from headstart.simulate.matches import Matches


@dataclass(frozen=True)
class Plays:
    """What playing answers came to, by source where its costs are known, and copies alone by K."""

    by_source: Mapping[str, Played]
    copies: ReplayedCopies

    @classmethod
    def of(
        cls, matches: Sequence[Matches], texts: Mapping[str, list[int]], costs: Costs,
        options: PredictionOptions, max_drafts: int,
    ) -> Plays:  # fmt: skip
        requests, answers = options.requests, options.draft_from_answers
        copies = ReplayedCopies.of(matches, texts, max_drafts, answers)
        if isinstance(costs, RoundTimes) and costs.host is not None:
            return cls({
                source: host_speed(matches, texts, costs, max_drafts, source, answers)
                for source in get_args(DraftFrom)
            }, copies)  # fmt: skip
        played = {"head": head_speed(matches, costs, requests, max_drafts)}
        if isinstance(costs, RoundTimes) and costs.captured is not None:
            for name, with_head in (("auto", True), ("context", False)):
                played[name] = captured_speed(
                    matches, texts, costs.captured, requests, max_drafts, with_head=with_head,
                    from_answers=answers,
                )  # fmt: skip
        return cls(played, copies)

    def speeds(self, answers: Sequence[Matches]) -> dict[str, Any]:
        """Of these answers, for JSON."""
        found: dict[str, Any] = {"context_acceptance_length": self.copies.lengths(answers)}
        for name, played in self.by_source.items():
            speed = played.of(answers)
            found[f"{name}_speed_up"] = None if speed is None else speed.speed_up
            if name != "head" and speed is not None:
                found[f"{name}_copied_share"] = speed.copied_share
        return {"auto_speed_up": found["head_speed_up"], **found}
