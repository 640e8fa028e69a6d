"""Stage `publish`: the head in bf16, its draft vocabulary and its card, as a folder to ship."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from scores import current, digests_of, table
from settings import Settings

from headstart.checkpoint.provenance import PROVENANCE_NAME
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.values import as_bytes, load
from headstart.heads.export import plan_export
from headstart.heads.formats import open_head

CARD = Path(__file__).parent / "card.md"


def publish(settings: Settings, out: Path) -> None:
    """Write `out`, a folder to ship."""
    program = "recipes/demo_head/recipe.py publish"
    write_folder(settings.final, settings.vocab, card(settings), out, program)


def write_folder(folder: Path, vocab: Path, text: str, out: Path, program: str) -> None:
    """A head in our format, its vocabulary and card; without tokenizer files, which the model has.

    `program` is what provenance names.
    """
    import torch

    head = open_head(folder)

    def pieces(source: TensorSource) -> Iterator[memoryview]:
        yield as_bytes(load(source).to(torch.bfloat16))

    tensors = {
        name: TensorSource("BF16", source.shape, partial(pieces, source), is_copy=False)
        for name, source in head.tensors.items()
    }
    operation = plan_export(head.changed(tensors, "stored in bf16"), "headstart", name="publish")
    plan = replace(operation.plan, copies={})
    document = {**plan.documents, "README.md": text, "draft_vocab.json": vocab.read_text()}
    replace(operation, plan=replace(plan, documents=document)).write(out, overwrite=True)
    _without_paths(out / PROVENANCE_NAME, program, f"{folder.parent.name}/{folder.name}")
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"publish: {out}, {size / 1e6:.1f} MB", flush=True)


def _without_paths(path: Path, program: str, source_path: str) -> None:
    """Folders of the machine that made it say nothing to whoever gets the head."""
    document = json.loads(path.read_text())
    document["command"] = program
    for source in document["sources"]:
        source["path"] = source_path
    path.write_text(json.dumps(document, indent=2) + "\n")


def card(settings: Settings) -> str:
    """The model card: what is in card.md, and what was measured."""
    header = json.loads((settings.answers / "dataset.json").read_text())
    counts = header["counts"]["train"]
    digests = digests_of({"final": (settings.final, settings.vocab)})
    scored = current(settings.work / "scores.jsonl", digests)
    found = [line for line in scored if line["head"] == "final"]
    return CARD.read_text().format(
        prompts=_sources(settings.prompts),
        records=counts["records"],
        tokens=counts["answer_tokens"],
        temperature=header["sampling"]["temperature"],
        options=json.dumps(_options(settings)),
        scores=table(found) if found else "not scored yet\n",
        vocab=settings.vocab_size,
    )


def _options(settings: Settings) -> dict[str, object]:
    run = json.loads((settings.final.parent / "options.json").read_text())
    own = run.get("options", run)
    names = (
        "context", "loss", "num_depths", "optimizer", "learning_rate", "max_steps",
        "batch_sequences",
    )  # fmt: skip
    return {name: own.get(name) for name in names}


def _sources(path: Path) -> str:
    """Where the prompts came from and under which licence, counted."""
    found: Counter[tuple[str, str]] = Counter()
    for line in path.read_text().strip().split("\n"):  # a prompt may hold other line ends
        entry = json.loads(line)
        found[str(entry.get("source", "unnamed")), str(entry.get("licence", "not stated"))] += 1
    rows = [f"| {source} | {licence} | {n} |" for (source, licence), n in found.most_common()]
    return "\n".join(["| prompts from | licence | number |", "|---|---|---|", *rows])


def pack_results(settings: Settings, out: Path, package: Path) -> None:
    """Few and small files for the way home: the head, the tables, the answers scored on."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.make_archive(str(out / "head"), "gztar", package)
    small = settings.work / "small"
    shutil.rmtree(small, ignore_errors=True)
    small.mkdir()
    for path in settings.work.glob("*.json*"):
        shutil.copy(path, small)
    for path in settings.work.glob("*.md"):
        shutil.copy(path, small)
    shutil.copytree(settings.work / "evaluation", small / "evaluation")
    for run in settings.work.glob("*/metrics.jsonl"):
        shutil.copy(run, small / f"{run.parent.name}-metrics.jsonl")
    shutil.make_archive(str(out / "results"), "gztar", small)
