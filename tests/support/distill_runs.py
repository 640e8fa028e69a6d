"""What the tests of distilling share: a model that can chat, prompts, and short ways to run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from headstart.data.dataset import Dataset, Split
from headstart.data.records import Record
from headstart.distill.options import DistillOptions
from headstart.distill.run import Outcome, distill, plan
from headstart.engine.options import EngineOptions
from support.engine_runs import soft
from support.tiny_fixture import Tiny

TEMPLATE = (
    "{% for m in messages %}{{ 't2' if m['role'] == 'user' else 't3' }} {{ m['content'] }} "
    "{% if m['role'] == 'assistant' %}</s> t5 {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}t3{% endif %}"
)
ENGINE: dict[str, Any] = {"dtype": "float64", "device": "cpu", "kv_bytes": 1 << 23}
OPTIONS: dict[str, Any] = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_tokens": 40, "heldout": 0.3, "seed": 3,
    "max_repetition": 1.0,
}  # fmt: skip


def chat_model(tiny: Tiny, out: Path) -> Path:
    """A tiny model with a template, whose answers end after a dozen tokens or so."""
    shutil.copytree(soft(tiny), out)
    (out / "chat_template.jinja").write_text(TEMPLATE)
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 10, 20, 30, 40]}))
    return out


def write_prompts(path: Path, count: int = 12) -> Path:
    """Single questions, and every third a conversation of two turns."""
    lines: list[dict[str, Any]] = []
    for i in range(count):
        turns = [f"t{11 + i} t{50 - i}", f"t{12 + i}"][: 1 + (i % 3 == 0)]
        lines.append(
            {"question_id": f"q{i}", "category": "math" if i % 2 else "code", "turns": turns}
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(model: Path, prompts: Path, out: Path, **changes: Any) -> Outcome:
    """Plan and distill; `as_given`, `engine`, `head` and `warn` are not DistillOptions."""
    as_given = changes.pop("as_given", False)
    head = changes.pop("head", None)
    warn = changes.pop("warn", lambda text: None)
    engine = EngineOptions(**{**ENGINE, **changes.pop("engine", {})})
    options = DistillOptions(**{**OPTIONS, **changes})
    planned = plan(str(model), prompts, out, options, as_given=as_given)
    return distill(planned, options, engine, head=head, warn=warn)


def contents(out: Path) -> dict[Split, list[tuple[Any, ...]]]:
    """Everything in a dataset but its stamp, comparable."""
    dataset = Dataset.open(out)
    return {split: [_facts(r) for r in dataset.records(split)] for split in ("train", "heldout")}


def _facts(record: Record) -> tuple[Any, ...]:
    return (
        record.id, record.category, record.seed, record.finish_reason, record.exact_ids,
        record.num_prompt, record.ids.tolist(), record.mask.tolist(),
    )  # fmt: skip
