"""Stage `questions`: the model writes user turns. And the file of all prompts that are asked."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Container
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from answers import heldout_prompts
from collect import read_passages
from engines import Turn, open_engine, turn_ids, write_turns
from kinds import TEST, TRAIN, VALIDATION, split_of, tasks
from leaks import without_leaks
from overlap import Questions
from own_questions import kept_of, openings
from parallel import side_by_side
from wide_settings import OPENINGS, Wide

from headstart.data.conversations import read_conversations
from headstart.data.fingerprints import is_heldout, prompt_sha

Entry = dict[str, Any]
PEOPLE, MODEL, PACKAGES = "people", "model", "packages"
_OWN = "own-"
_TASK_ID = re.compile(r"[0-9a-f]{16}-\d+")


def write_questions(settings: Wide) -> None:
    """Leaves questions.jsonl: what the model asked, without what is no use."""
    if settings.written.is_file():
        print(f"questions: {settings.written} is there")
        return
    parts = range(settings.processes)
    tried: list[tuple[str, bool]] = []
    for found in side_by_side(partial(_tried, settings), parts, settings.processes):
        tried += found
    started = time.monotonic()
    kept = kept_of(sorted(tried), avoided(settings))
    write_lines(settings.written, [{"text": text} for text in kept.questions])
    spent = time.monotonic() - started
    print(f"questions: {len(tried)} tried, {kept.describe()} ({spent:.0f} s)", flush=True)


def _tried(settings: Wide, part: int) -> list[tuple[str, bool]]:
    """Texts of one process, and whether each ended by itself."""
    started = time.monotonic()
    engine = open_engine(settings)
    begun = time.monotonic()
    found: list[tuple[str, bool]] = []
    temperatures = settings.question_temperatures
    given = enumerate(openings(OPENINGS, settings.num_questions))
    ids_of = cache(partial(turn_ids, engine.prompts, ()))  # by opening, of which there are few
    turns = (  # of this process: what others write is not rendered here
        Turn(ids_of(opening), opening, temperatures[i % len(temperatures)], i)
        for i, opening in islice(given, part, None, settings.processes)
    )
    write_turns(
        engine, turns, settings.question_tokens,
        lambda turn, text, is_whole: found.append((text, is_whole)),
        deadline=started + settings.seconds["questions"],
    )  # fmt: skip
    spent = time.monotonic() - begun
    print(f"questions: part {part}: {len(found)} in {spent:.0f} s, engine ready after "
          f"{begun - started:.0f} s", flush=True)  # fmt: skip
    return found


def avoided(settings: Wide) -> Questions:
    """All turns of the benchmarks' questions."""
    return Questions(
        message["content"]
        for path in settings.benchmarks
        for conversation in read_conversations(path)
        for message in conversation.messages
    )


def write_prompts(settings: Wide) -> None:
    """Leaves prompts.jsonl: prompts of people, tasks of passages and the model's own questions.

    In an order of their hashes, validation first: whenever the time is up, it is a fair sample.
    """
    if settings.asked.is_file():
        return
    found = [*_of_people(settings), *_of_passages(settings), *_of_the_model(settings)]
    benchmarks = avoided(settings)
    near = [e for e in found if any(benchmarks.is_near(turn) for turn in e["turns"])]
    names = {entry["id"] for entry in near}
    kept = [e for e in found if e["id"] not in names and e["split"] != TEST]
    kept.sort(key=lambda e: (e["split"] != VALIDATION, _draw(e["id"])))
    limited = _limited(kept, settings.eval_limit)
    write_lines(settings.asked, limited)
    by_category = Counter(entry["category"] for entry in limited)
    counts = Counter(source_of(entry) for entry in limited)
    removed = Counter(source_of(entry) for entry in near)
    document = {
        "prompts": dict(counts), "near a benchmark": dict(removed),
        "benchmarks": [path.name for path in settings.benchmarks],
    }  # fmt: skip
    settings.sources.write_text(json.dumps(document) + "\n")
    print(f"prompts: {len(limited)}: {dict(by_category.most_common())}", flush=True)
    print(f"prompts: {len(near)} near a benchmark's question removed: {dict(removed)}", flush=True)


def source_of(entry: Entry) -> str:
    """Whose words a prompt has: people's, the model's, or a package's."""
    source = str(entry["source"])
    return source if source in (PEOPLE, MODEL) else PACKAGES


def origin_of(prompt_id: str, people: Container[str]) -> str:
    """The same by the id alone, which is all that records of answers keep."""
    first = first_prompt(prompt_id)
    if first in people:
        return PEOPLE
    if first.startswith(_OWN):
        return MODEL
    return PACKAGES if _TASK_ID.fullmatch(first) else PEOPLE


def first_prompt(prompt_id: str) -> str:
    """The prompt that a dialogue began with, where the model wrote the second turn."""
    return prompt_id.partition("-then-")[0]


def benchmarks_of(settings: Wide) -> list[str] | None:
    """Files of questions that the prompts were kept away from; None where that is not noted."""
    given = json.loads(settings.sources.read_text()) if settings.sources.is_file() else {}
    found: list[str] | None = given.get("benchmarks")
    return found


def check_benchmarks(settings: Wide) -> None:
    """Second turns must be kept away from the same questions as the prompts were."""
    noted, now = benchmarks_of(settings), [path.name for path in settings.benchmarks]
    if noted is not None and set(noted) != set(now):
        raise SystemExit(
            f"{settings.asked} was kept away from {', '.join(noted) or 'no questions'}, and "
            f"--questions and --avoid name {', '.join(now) or 'none'}. Give the same files."
        )


def _limited(entries: list[Entry], most: int) -> list[Entry]:
    """No more validation prompts than are validated on, of all categories alike."""
    names = {e["category"] for e in entries if e["split"] == VALIDATION}
    each, counts, kept = -(-most // max(1, len(names))), Counter[str](), []
    for entry in entries:
        if entry["split"] == VALIDATION:
            counts[entry["category"]] += 1
            if counts[entry["category"]] > each:
                continue
        kept.append(entry)
    return kept


def _of_people(settings: Wide) -> list[Entry]:
    """As the study had them: the same are held out, and of these the same are scored."""
    if settings.prompts is None:
        return []
    scored = {conversation.id for conversation in heldout_prompts(settings)}
    result = []
    for conversation in read_conversations(settings.prompts):
        is_out = is_heldout(prompt_sha(conversation.messages), settings.heldout)
        split = TEST if conversation.id in scored else VALIDATION if is_out else TRAIN
        turns = [m["content"] for m in conversation.messages if m["role"] == "user"]
        result.append({
            "id": conversation.id, "category": conversation.category, "turns": turns,
            "split": split, "source": PEOPLE,
        })  # fmt: skip
    return result


def _of_passages(settings: Wide) -> list[Entry]:
    if settings.passages is None:
        return []
    kept = without_leaks(read_passages(settings.passages))
    return [dict(task.as_json()) for task in tasks(kept)]


def _of_the_model(settings: Wide) -> list[Entry]:
    """What would be a test is validated on: no scored set is made of them."""
    result = []
    for line in read_lines(settings.written):
        sha = hashlib.sha256(line["text"].encode()).hexdigest()
        split = TRAIN if split_of(sha) == TRAIN else VALIDATION
        result.append({
            "id": f"{_OWN}{sha[:16]}", "category": "own", "turns": [line["text"]], "split": split,
            "source": MODEL,
        })  # fmt: skip
    return result


def _draw(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def read_lines(path: Path) -> list[Entry]:
    """Lines of JSON; none where there is no file."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def write_lines(path: Path, entries: list[Entry]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_path = path.with_name(f"{path.name}.partial")
    lines = (json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
    partial_path.write_text("".join(lines), encoding="utf-8")
    partial_path.rename(path)
