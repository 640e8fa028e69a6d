"""How answers can be scored: their noise replayed, or by formula; and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from headstart.errors import ConfigError, DataError
from headstart.sampling.params import AcceptanceRule, SamplingParams
from headstart.simulate.answers import params_of

if TYPE_CHECKING:
    from headstart.data.records import Record

Method = Literal["replay", "formula"]
RULES: tuple[AcceptanceRule, ...] = get_args(AcceptanceRule)


@dataclass(frozen=True)
class Plan:
    method: Method
    rule: AcceptanceRule
    params: SamplingParams
    is_own_text: bool  # whether the trunk sampled the text at these settings
    reason: str

    @property
    def formula(self) -> str:
        """Which of the formulas the rule means."""
        return "shared_noise" if self.rule == "match" else "rejection"


def make_plan(records: Sequence[Record], temperature: float | None, rule: str) -> Plan:
    """Replay where the text was sampled by our engine at the settings that are asked about."""
    if rule not in RULES:
        raise ConfigError(f"--rule is {rule!r}; expected {' or '.join(RULES)}.")
    if len({str(sorted(record.sampling.items())) for record in records}) > 1:
        raise DataError("the records were sampled in several ways; score each kind by itself.")
    sampling = records[0].sampling
    known = sampling.get("temperature")
    asked = known if temperature is None else temperature
    params = params_of(sampling, asked)
    is_own = known is not None and asked == known
    text = (
        f"sampled at temperature {known:g}" if known is not None else "not known to be the model's"
    )
    if rule == "rejection":
        reason = "by formula: the rejection rule draws noise of its own"
        return Plan("formula", rule, params, is_own, f"{reason}; the text was {text}")
    if temperature is not None and not is_own:
        reason = f"by formula at temperature {temperature:g}: the text was {text}"
        return Plan("formula", rule, params, False, f"{reason}, so its noise says nothing")
    if params.is_greedy:
        reason = "exact replay: arg-max drafts against the text"
        if known is None:
            reason = "arg-max drafts against the text, which is not known to be the model's own"
        elif not all(record.exact_ids for record in records):
            reason += ", as far as re-tokenised ids are the model's own"
        return Plan("replay", rule, params, is_own, reason)
    unknown = sum(not record.is_replayable for record in records)
    if unknown:
        reason = (
            f"by formula: {unknown} of {len(records)} answers have no seed or no exact ids (they "
            "do not come from the embedded engine), so their noise cannot be replayed"
        )
        return Plan("formula", rule, params, is_own, reason)
    reason = f"exact replay of the engine's noise at temperature {asked:g}"
    return Plan("replay", rule, params, True, reason)
