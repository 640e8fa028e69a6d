"""Rounds of blank requests, timed before the first real one: what `auto` decides by.

Whole batches are timed: the same rows in one request would lack the spans, the sampling and the
Python that each request brings. Greedy requests are timed separately: to sample a token can take
longer than a row. How rounds are run is left to `blank_rounds.py`.
"""

from __future__ import annotations

import time

from headstart.engine.auto.blank_rounds import BlankPasses, BlankRounds
from headstart.engine.auto.costs import MENU, NEVER_PAYS, Curve, RoundCosts, level, level_surface
from headstart.sampling.params import SamplingParams

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
_QUICK_SECONDS = 0.05  # a round in which the choice of tokens counts
_BUDGET_SECONDS = 1.0  # larger batches than fit into this are extrapolated,
_LEAST_BATCH = 8  # but of quick rounds not from smaller ones: that batching pays must be seen
_SAMPLED, _GREEDY = SamplingParams(temperature=1), SamplingParams(temperature=0)
_SHORT, _LONG = 64, 1024  # tokens of context, of captured rounds


def profile_host_rounds(
    passes: BlankPasses, *, max_batch: int
) -> tuple[RoundCosts, RoundCosts | None]:
    """Costs of sampled and of greedy requests; of a slow model both are the same."""
    sampled = _profile_passes(passes, max_batch, _SAMPLED)
    is_quick = sampled is not NEVER_PAYS and sampled.round_seconds(1, 0) < _QUICK_SECONDS
    return sampled, _profile_passes(passes, max_batch, _GREEDY) if is_quick else None


def _profile_passes(passes: BlankPasses, max_batch: int, params: SamplingParams) -> RoundCosts:
    """Verification and drafting by batch size, as many as there is time for."""
    verification: list[tuple[int, Curve]] = []
    first: list[tuple[int, float]] = []  # seconds until one draft is made,
    step: list[tuple[int, float]] = []  # and for each one more
    spent = last = 0.0
    for batch in [size for size in _BATCHES if size == 1 or size <= max_batch]:
        drafts = [count for count in MENU if passes.has_room(batch, count)]
        if spent + 2 * last > _BUDGET_SECONDS:
            # A few numbers of drafts say enough of the one batch that is still timed.
            is_quick = verification[0][1][0][1] < _QUICK_SECONDS
            drafts = drafts[:3] if batch == _LEAST_BATCH and is_quick else []
            if batch < _LEAST_BATCH:
                continue
        if drafts in ([], [0]):
            break
        started = time.perf_counter()
        curve = [(count, passes.verify_seconds(batch, count, params)) for count in drafts]
        verification.append((batch, tuple(curve)))
        one, several = (passes.draft_seconds(batch, count, params) for count in (1, drafts[-1]))
        first.append((batch, one))
        more = max(0.0, several - one) / (drafts[-1] - 1) if drafts[-1] > 1 else one
        step.append((batch, more))
        last = time.perf_counter() - started
        spent += last
    if not verification:
        return NEVER_PAYS
    draft = level(step)
    start = [
        (batch, max(0.0, one - each))
        for (batch, one), (_, each) in zip(level(first), draft, strict=True)
    ]
    return RoundCosts(level_surface(verification), draft, tuple(start))


def profile_captured_rounds(blank: BlankRounds, max_drafts: int) -> RoundCosts:
    """Whole rounds with short and with long contexts, and what catching up adds to them."""
    menu = [drafts for drafts in MENU if drafts <= max_drafts]
    rounds: list[tuple[int, Curve]] = []
    context: list[tuple[int, Curve]] = []
    catch_up: list[tuple[int, float]] = []
    for size in blank.sizes():
        short, long = (blank.fitting(size, tokens) for tokens in (_SHORT, _LONG))
        if short < 1:
            break
        seconds = [blank.seconds(size, drafts, short) for drafts in menu]
        late = blank.seconds(size, 0, short, reads_window=True)
        catch_up.append((size, max(0.0, late - seconds[0])))
        blank.prepare_changes(size, short)
        slopes = [0.0] * len(menu)
        if long >= 2 * short:
            slopes = [
                (blank.seconds(size, drafts, long) - base) / (size * (long - short))
                for drafts, base in zip(menu, seconds, strict=True)
            ]
        context.append((size, tuple(zip(menu, slopes, strict=True))))
        bases = [base - slope * size * short for base, slope in zip(seconds, slopes, strict=True)]
        rounds.append((size, tuple(zip(menu, bases, strict=True))))
    blank.clear()
    if not rounds:
        return RoundCosts(((1, tuple((k, NEVER_PAYS.round_seconds(1, k)) for k in MENU)),))
    return RoundCosts(
        tuple(rounds), context=tuple(context), catch_up=tuple(catch_up), window=blank.window - 1
    )
