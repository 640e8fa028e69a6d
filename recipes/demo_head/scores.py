"""Stage `score`: every row's best head on held-out prompts and on MT-Bench, loops apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

from parallel import Recipe, side_by_side
from settings import Settings
from study import best_of_rows, read

from headstart.checkpoint.hub import local_folder
from headstart.checkpoint.reader import Checkpoint
from headstart.data.dataset import Dataset
from headstart.data.prompt_reader import PromptReader
from headstart.data.records import Record
from headstart.distill.filters import is_looping
from headstart.heads.formats import open_head
from headstart.models.build import LoadedModel, build
from headstart.models.loading import load_head
from headstart.simulate.plan import make_plan
from headstart.simulate.scoring import WHOLE, VocabOf, score
from headstart.vocab.files import read as read_vocabs

MAX_DRAFTS, SHOWN_DRAFTS = 5, 3
SMALL = "draft vocabulary"
CHOSEN_ON = "held-out, T=0.6"
_MAX_REPETITION = 0.5  # as `headstart distill` drops answers


class Scored(Recipe, Protocol):
    """What scoring needs of the settings of a recipe."""

    @property
    def stock(self) -> Path: ...  # any head of the model's
    @property
    def evaluation(self) -> dict[str, Path]: ...


def score_heads(settings: Settings) -> None:
    """Every head of the study; leaves scores.jsonl and scores.md."""
    folders = {"stock": settings.stock, **_rows(settings), "final": settings.final}
    ordered = score_all(settings, {name: (path, settings.vocab) for name, path in folders.items()})
    (settings.work / "scores.md").write_text(f"{table(ordered)}\n{category_table(ordered)}")


Heads = Mapping[str, tuple[Path, Path]]  # name -> folder, draft vocabulary


def score_all(settings: Scored, heads: Heads) -> list[dict[str, Any]]:
    """Lines of scores.jsonl, one for each head and set, written when a head is done with all sets.

    What is there is not scored again, unless the head of that name is another one by now.
    """
    out = settings.work / "scores.jsonl"
    digests = digests_of(heads)
    _write(out, current(out, digests))
    done = {(line["head"], line["set"]) for line in lines(out)}
    missing = [
        (name, heads[name], sets)
        for name in digests
        if (sets := [s for s in settings.evaluation if (name, s) not in done])
    ]
    score_one = partial(_score_head, settings)
    for found in side_by_side(score_one, missing, settings.processes):
        _write(out, [*lines(out), *({**line, "digest": digests[line["head"]]} for line in found)])
        for line in found:
            length, whole = (length_of(line, way) for way in (SMALL, WHOLE))
            print(
                f"score: {line['head']}, {line['set']}: {length:.3f} at K = 3, {whole:.3f} with "
                "all tokens", flush=True,
            )  # fmt: skip
    return _ordered(lines(out), heads)


def digests_of(heads: Heads) -> dict[str, str]:
    """Of the heads that are there: their weights and the tokens that they draft from."""
    return {name: _digest(*own) for name, own in heads.items() if own[0].is_dir()}


def _digest(head: Path, vocab: Path) -> str:
    state = hashlib.sha256()
    for path in (*sorted(head.glob("*.safetensors")), vocab):
        state.update(path.read_bytes())
    return state.hexdigest()


def current(path: Path, digests: Mapping[str, str]) -> list[dict[str, Any]]:
    """Lines of scores.jsonl without those of an earlier head under the name of one of these.

    A training that its deadline stopped and one that went on to its end leave the same name.
    """
    return [
        line
        for line in lines(path)
        if line["head"] not in digests or line.get("digest") == digests[line["head"]]
    ]


def _score_head(
    settings: Scored, wanted: tuple[str, tuple[Path, Path], list[str]]
) -> list[dict[str, Any]]:
    name, (folder, vocab), sets = wanted
    checkpoint, built = _opened(settings.model, settings.device, settings.stock)
    _use(built, folder)
    result = []
    for set_name in sets:
        records = Dataset.open(settings.evaluation[set_name]).records("heldout")
        found = _scored(vocab, built, checkpoint, records)
        result.append({"head": name, "set": set_name, **found})
    return result


@lru_cache(1)
def _opened(model: str, device: str, head: Path) -> tuple[Checkpoint, LoadedModel]:
    """Once in a process: loading the trunk takes longer than scoring."""
    checkpoint = Checkpoint.open(local_folder(model))
    return checkpoint, build(checkpoint, head, device=device)


def _write(path: Path, found: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in found))


def _ordered(found: list[dict[str, Any]], heads: Iterable[str]) -> list[dict[str, Any]]:
    places = {name: place for place, name in enumerate(heads)}
    return sorted(found, key=lambda line: places.get(line["head"], len(places)))


def _rows(settings: Settings) -> dict[str, Path]:
    rows = {row["name"]: row["head"] for row in best_of_rows(settings)}
    for row in read(settings, "closer"):
        rows[f"{row['name']}, seed {row['seed']}" if row["seed"] else row["name"]] = row["head"]
    return {name: settings.work / folder for name, folder in rows.items()}


def _use(built: LoadedModel, folder: Path) -> None:
    """Other weights in the same modules."""
    assert built.head is not None
    load_head(built.head, open_head(folder).tensors, built.head.config)


def _scored(
    vocab_file: Path, built: LoadedModel, checkpoint: Checkpoint, records: Sequence[Record]
) -> dict[str, Any]:
    (vocab,) = read_vocabs(vocab_file)
    loops = {r.id for r in records if is_looping(r.ids[r.mask].astype("int64"), _MAX_REPETITION)}
    ways: dict[str, VocabOf] = {SMALL: lambda record: vocab}
    parts = {"all": list(records)}
    if loops:
        parts["not looping"] = [r for r in records if r.id not in loops]
        parts["looping"] = [r for r in records if r.id in loops]
    result: dict[str, Any] = {}
    for part, chosen in parts.items():
        if not any(r.mask.sum() > 1 for r in chosen):
            continue
        both = {**ways, WHOLE: lambda record: None} if part == "all" else ways
        scores = score(
            built, chosen, make_plan(chosen, None, "match"), max_drafts=MAX_DRAFTS, vocabs=both,
            end_ids=PromptReader(checkpoint).end_ids,
        )  # fmt: skip
        result[part] = {way: found.as_json() for way, found in scores.items()}
    return result


def lines(path: Path) -> list[dict[str, Any]]:
    """What is there; a last line that was cut off does not count."""
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def lengths(settings: Settings) -> dict[str, float]:
    """Head -> walked acceptance length at K = 3 on the set that heads are chosen on."""
    found = [line for line in lines(settings.work / "scores.jsonl") if line["set"] == CHOSEN_ON]
    return {line["head"]: _length(line["all"], SMALL) for line in found}


def length_of(line: Mapping[str, Any], way: str) -> float:
    """Walked acceptance length of all answers at K = 3, of a line of scores.jsonl."""
    return _length(line["all"], way)


def _length(part: Mapping[str, Any], way: str) -> float:
    return float(part[way]["overall"]["walked"]["acceptance_length"][SHOWN_DRAFTS])


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Walked acceptance length at K = 3: the study trains and drafts with the draft vocabulary."""
    columns = (
        "head", "answers", "length", "95 %", "not looping", "looping", "cumulative by depth",
        "whole vocabulary",
    )  # fmt: skip
    text = [_line(columns), _line(["---"] * len(columns))]
    for line in found:
        walked = line["all"][SMALL]["overall"]["walked"]
        low, high = (walked["acceptance_length_interval"] or [(0, 0)] * 9)[SHOWN_DRAFTS]
        depths = walked["cumulative_acceptance"][:SHOWN_DRAFTS]
        parts = [f"{_length(line[p], SMALL):.3f}" if p in line else "" for p in _PARTS]
        cells = [line["head"], line["set"], parts[0], f"{low:.2f} to {high:.2f}", *parts[1:]]
        cells += [" / ".join(f"{rate:.2f}" for rate in depths)]
        text.append(_line([*cells, f"{_length(line['all'], WHOLE):.3f}"]))
    return "\n".join(text) + "\n"


def category_table(found: Sequence[Mapping[str, Any]]) -> str:
    """Length at K = 3 and cumulative acceptance by depth, with the draft vocabulary."""
    names = list(dict.fromkeys(name for line in found for name in _categories(line)))
    text = [_line(["head", "answers", *names]), _line(["---"] * (len(names) + 2))]
    for line in found:
        cells = [_cell(_categories(line).get(name)) for name in names]
        text.append(_line([line["head"], line["set"], *cells]))
    return "\n".join(text) + "\n"


def _categories(line: Mapping[str, Any]) -> Mapping[str, Any]:
    return dict(line["all"][SMALL]["by_category"])


def _cell(part: Mapping[str, Any] | None) -> str:
    if part is None:
        return ""
    walked = part["walked"]
    rates = "/".join(f"{rate:.2f}" for rate in walked["cumulative_acceptance"][:SHOWN_DRAFTS])
    return f"{walked['acceptance_length'][SHOWN_DRAFTS]:.2f} ({rates})"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


_PARTS = ("all", "not looping", "looping")
