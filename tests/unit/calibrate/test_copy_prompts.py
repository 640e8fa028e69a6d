"""Prompts that a calibrated trunk repeats spans of, and what an engine then copies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.engine_runs import greedy, run, start

from headstart.calibrate.calibrated import agreement_of, write_calibrated
from headstart.calibrate.copy_prompts import FILE_NAME, CopyPlan, copy_prompts
from headstart.copying.index import MIN_MATCH
from headstart.errors import ConfigError

SHAPE = "layers=1,hidden=256,vocab=130,heads=2,kv_heads=2,intermediate=64"


@pytest.mark.parametrize(("share", "spans"), [(0.5, 2), (0.0, 0)])
def test_an_engine_copies_what_was_planned(tmp_path: Path, share: float, spans: int) -> None:
    plan = CopyPlan(length=16, share=share, prompts=2, answer_tokens=60)
    write_calibrated(SHAPE, 0.7, tmp_path / "made", dtype="F32", copies=plan)
    made = list(copy_prompts(agreement_of(tmp_path / "made"), plan, seed=0))
    lines = (tmp_path / "made" / FILE_NAME).read_text().splitlines()
    words = [[int(word[1:]) for word in json.loads(line)["prompt"].split()] for line in lines]
    assert words == [one.ids for one in made]
    engine = start(tmp_path / "made", speculate=3, dtype="float32", slots=2000)
    params = greedy(60, draft_from="context", speculate=16)
    for result, one in zip(run(engine, words, params), made, strict=True):
        assert result.outputs[0].token_ids == one.answer
        assert one.num_copied == spans * plan.length
        # All of a span but the tokens that show that it is one, and those that rounds end with.
        most = spans * (plan.length - MIN_MATCH)
        assert most - 2 * spans <= result.stats.copied_accepted <= most


def test_plans_that_cannot_work_are_refused(tmp_path: Path) -> None:
    for fields, words in (
        ({"length": 2, "share": 0.5}, "--copy-length is 2"),
        ({"length": 8, "share": 1.5}, "--copy-share is 1.5"),
        ({"length": 8, "share": 0.5, "prompts": 0}, "--copy-prompts is 0"),
    ):
        with pytest.raises(ConfigError, match=words):
            CopyPlan(**fields)
    plan = CopyPlan(length=8, share=0.5, answer_tokens=100)
    with pytest.raises(ConfigError, match="twice as many"):
        write_calibrated(SHAPE, 0.7, None, dtype="F32", copies=plan)
