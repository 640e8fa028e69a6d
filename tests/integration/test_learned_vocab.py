"""A draft vocabulary that misses what is served: counted anew beside a real head that learns."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.learning_runs import GREEDY, collect, learnable_heads, prompt_of
from support.swapped_heads import acceptance

from headstart.engine.engine import Engine
from headstart.learn.assembly import make_loop
from headstart.learn.folder import Folder
from headstart.learn.options import LearnOptions
from headstart.learn.starting import open_folder
from headstart.learn.vocabs import vocab_beside, write_vocab
from headstart.vocab.draft_vocab import DraftVocab
from headstart.vocab.files import write

UNSEEN = [prompt_of(number) for number in range(5000, 5008)]


def test_a_list_counted_anew_comes_with_its_head_and_is_walked_from_then_on(tmp_path: Path) -> None:
    """The trunk writes tokens 2 to 17; the list has half of them."""
    heads, folder = learnable_heads(tmp_path), Folder(tmp_path / "learned")
    given = DraftVocab.of([*range(2, 10), *range(30, 46)], vocab_size=64)
    write([given], tmp_path / "list.json")
    engine = Engine(
        heads.model, heads.weak, speculate=3, threads=1, kernels="off", draft_vocab=[given]
    )
    collect(engine, folder)
    options = LearnOptions(learn=folder.path)
    task = open_folder(options, str(heads.model), heads.weak, device="cpu", dtype="float32")
    task = replace(
        task, head=str(folder.heads / "start"), vocab=str(tmp_path / "list.json"), warm_up=1,
        overrides={"learning_rate": 3e-3, "batch_tokens": 256}, least_seconds=20,
    )  # fmt: skip
    write_vocab(given, folder.heads / "start")  # as a server's start does
    told: dict[str, dict[str, Any]] = {}
    loop = make_loop(task, lambda name, facts: told.update({name: facts}), waits=False)
    loop._clock = map(float, itertools.count()).__next__  # a step takes a second: twenty of them
    while "offer" not in told:
        assert loop.turn()
    head = folder.heads / told["offer"]["name"]
    found = vocab_beside(head)
    recent, _ = loop._compared()
    known = loop._checker._known.of(recent, loop._checker._serving)
    again = make_loop(replace(task, head=str(head)), lambda name, facts: None, waits=False)
    assert again._vocab == found, "a learner that is started again, with the list of the start"
    assert again._checker._known.of(recent, {}) == known != {}
    assert found is not None and len(found.ids) == 24 and set(range(2, 18)) <= set(found.ids)
    assert head.name in told["vocab"]["reason"]
    asked = [GREEDY] * len(UNSEEN)
    wanted = [result.outputs[0].token_ids for result in engine.generate(UNSEEN, asked)]
    accepted = []
    for own, vocab in ((head, found), (heads.good, given), (heads.good, found)):
        engine.swap_head(engine.prepare_head(own, vocab))
        accepted.append(sum(sum(each.accepted) for each in acceptance(engine, UNSEEN, asked)))
        texts = [result.outputs[0].token_ids for result in engine.generate(UNSEEN, asked)]
        assert texts == wanted
    assert accepted[2] > 1.3 * accepted[1], "a head that knows all tokens drafts them"
    # What was walked with the new list is what the serving head does from now on.
    loop.served(head)
    training = loop._training
    serving = {name: loop._checker._serving[name] for name in (r.id for r in recent)}
    assert training.walk(recent, 0.0) == serving == training.walk_with(recent, found.ids, 0.0)
    assert again._training.walk(recent, 0.0) == serving
    assert training.walk_with(recent, given.ids, 0.0) != serving
