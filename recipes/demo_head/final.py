"""Stage `final`: the best row, trained for as long as there is time.

First with the draft vocabulary, which makes steps cheap, then with the whole one, because other
engines draft from all tokens.
"""

from __future__ import annotations

from scores import lengths
from settings import Settings
from study import Row, best_of_rows, read
from training import base_options, trained

from headstart.errors import some


def train_final(settings: Settings) -> None:
    winner = best_row(settings)
    print(f"final: {winner['name']} {winner['options']}", flush=True)
    own = winner["options"]
    seconds = settings.seconds["final"]
    cheap = base_options(settings, **own)
    trained(
        settings, settings.work / "final-1", {"": cheap},
        seconds=seconds * (1 - settings.whole_share), head=settings.stock,
    )  # fmt: skip
    rate = own["learning_rate"] / 2
    whole = base_options(settings, **{**own, "learning_rate": rate, "draft_vocab": None})
    trained(
        settings, settings.work / "final-2", {"": whole}, seconds=seconds * settings.whole_share,
        head=settings.work / "final-1" / "head",
    )  # fmt: skip


def best_row(settings: Settings) -> Row:
    """By what `score` found: trainings for different K are validated with different K."""
    found = lengths(settings)
    rows = [row for row in (*best_of_rows(settings), *read(settings, "closer")) if not row["seed"]]
    unscored = [row["name"] for row in rows if row["name"] not in found]
    if unscored:
        raise SystemExit(f"{some(unscored)} have no score yet: run the stage `score` first.")
    return max(rows, key=lambda row: found[row["name"]])
