"""From the journal to a dataset: judge the answers, split them by prompt, write the files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headstart.data.dataset import Header, write_dataset
from headstart.data.journal import JOURNAL_NAME, Answer, read_journal
from headstart.data.records import Record
from headstart.distill.filters import Verdict, judge
from headstart.distill.options import DistillOptions
from headstart.errors import DataError

_EXAMPLES = 5


def finish(folder: Path, options: DistillOptions, refused: Mapping[str, str]) -> Header:
    """Write train, heldout and dataset.json from the journal; DataError if nothing is left."""
    asked, answers = read_journal(folder / JOURNAL_NAME)
    verdicts = judge(answers, options)
    report = make_report(verdicts, refused)
    kept = [verdict for verdict in verdicts if verdict.reason is None]
    if not kept:
        why = ", ".join(f"{d['count']} {r}" for r, d in report["dropped"].items()) or "none came"
        raise DataError(
            f"{folder} has no answer to keep ({why}); expected at least one. Look at "
            f"{JOURNAL_NAME}; raise --max-tokens or add --keep-truncated if answers were cut off."
        )
    sampling = asked.sampling
    header = Header(**asdict(asked), counts={}, report=report)
    return write_dataset(
        folder,
        header,
        {
            "train": [_record(v.answer, sampling) for v in kept if not v.is_heldout],
            "heldout": [_record(v.answer, sampling) for v in kept if v.is_heldout],
        },
    )


def make_report(verdicts: Sequence[Verdict], refused: Mapping[str, str]) -> dict[str, Any]:
    """Counts by reason and by category, with the ids of some examples."""
    dropped: dict[str, dict[str, Any]] = {}
    for reason, _ in Counter(v.reason for v in verdicts if v.reason).most_common():
        those = [v.answer for v in verdicts if v.reason == reason]
        dropped[str(reason)] = {
            "count": len(those),
            "by_category": dict(Counter(answer.category for answer in those).most_common()),
            "examples": [answer.id for answer in those[:_EXAMPLES]],
        }
    answers = Counter(v.answer.category for v in verdicts)
    kept = Counter(v.answer.category for v in verdicts if v.reason is None)
    return {
        "answers": len(verdicts),
        "kept": kept.total(),
        "not_exact": sum(not v.answer.exact_ids for v in verdicts if v.reason is None),
        "by_category": {
            name: {"answers": count, "kept": kept[name]} for name, count in answers.most_common()
        },
        "dropped": dropped,
        "refused": {"count": len(refused), "examples": dict(list(refused.items())[:_EXAMPLES])},
    }


def _record(answer: Answer, sampling: dict[str, Any]) -> Record:
    import numpy as np

    num_prompt = len(answer.prompt_ids)
    ids = np.array([*answer.prompt_ids, *answer.answer_ids], np.int32)
    return Record(
        id=answer.id, prompt_id=answer.prompt_id, category=answer.category, turn=answer.turn,
        sample=answer.sample, ids=ids, mask=np.arange(len(ids)) >= num_prompt, seed=answer.seed,
        sampling=sampling, finish_reason=answer.finish_reason, exact_ids=answer.exact_ids,
        num_prompt=num_prompt, max_tokens=answer.max_tokens,
    )  # fmt: skip
