"""Stage `final`: the best row, trained for as long as there is time.

With the whole vocabulary, because other engines draft from all tokens.
"""

from __future__ import annotations

from dataclasses import replace

from scores import lengths
from settings import Settings
from study import Row, best_of_rows, read
from training import base_options, trained

from headstart.errors import some

_VALIDATIONS = 10
_SPREAD = 0.01  # of acceptance lengths


def train_final(settings: Settings) -> None:
    winner = best_row(settings)
    print(f"final: {winner['name']} {winner['options']}", flush=True)
    size = settings.final_size
    larger = replace(
        settings, batch_sequences=settings.batch_sequences * size,
        pack_tokens=settings.pack_tokens * size,
    )  # fmt: skip
    options = base_options(larger, **winner["options"], draft_vocab=None)
    trained(
        larger, settings.work / "final", {"": options}, seconds=settings.seconds["final"],
        head=settings.stock, validations=_VALIDATIONS,
    )  # fmt: skip


def best_row(settings: Settings) -> Row:
    """By what `score` found: trainings for different K are validated with different K.

    More depths cost time, so another K than the study's has to be better by more than seeds differ.
    """
    found = lengths(settings)
    rows = [row for row in (*best_of_rows(settings), *read(settings, "closer")) if not row["seed"]]
    unscored = [row["name"] for row in rows if row["name"] not in found]
    if unscored:
        raise SystemExit(f"{some(unscored)} have no score yet: run the stage `score` first.")
    usual = {row["name"] for row in best_of_rows(settings)}

    def worth(row: Row) -> float:
        return found[row["name"]] - (0 if row["name"] in usual else _SPREAD)

    return max(rows, key=worth)
