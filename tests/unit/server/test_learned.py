"""What learning gives a server: a head, and the draft vocabulary that lies beside it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.engine_runs import start
from support.swapped_heads import two_heads
from support.tiny_fixture import Tiny

from headstart.engine.engine import Engine
from headstart.learn.vocabs import write_vocab
from headstart.server.learned import attach
from headstart.vocab.draft_vocab import DraftVocab

EVEN, ODD, FEW = (
    DraftVocab.of(ids, vocab_size=64) for ids in (range(0, 64, 2), range(1, 64, 2), range(8))
)


def swap_of(engine: Engine) -> Callable[[Path], None]:
    """How a server gives its engine another head, without its threads."""
    found: list[Callable[[Path], None]] = []

    def between_steps(work: Callable[[Engine], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(engine))
        return done

    learning: Any = SimpleNamespace(attach=lambda swap, is_busy: found.append(swap))
    worker: Any = SimpleNamespace(between_steps=between_steps, on_result=None)
    attach(learning, worker, engine)
    return found[0]


@pytest.mark.parametrize(
    ("running", "beside", "drafted"),
    [(EVEN, ODD, ODD), (EVEN, None, EVEN), (EVEN, FEW, EVEN), (None, ODD, None)],
    ids=["as many tokens", "none beside", "fewer tokens", "none runs"],
)
def test_the_list_beside_a_head_comes_with_it_where_it_fits(
    running: DraftVocab | None, beside: DraftVocab | None, drafted: DraftVocab | None, tiny: Tiny,
    tmp_path: Path,
) -> None:  # fmt: skip
    heads = two_heads(tiny)
    lists = None if running is None else [running]
    engine = start(heads.weak_model, speculate=3, draft_vocab=lists)
    head = heads.good if beside is None else copy(heads.good, tmp_path / "head", beside)
    swap_of(engine)(head)
    assert engine.head_version == 1
    found = [vocab.ids for vocab in engine.draft_vocabs.by_name.values()]
    assert found == ([] if drafted is None else [drafted.ids])


def copy(head: Path, out: Path, vocab: DraftVocab) -> Path:
    shutil.copytree(head, out)
    write_vocab(vocab, out)
    return out
