"""What ends an answer, and what min_tokens holds back."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
from support.engine_runs import checkpoint, ids_of, run, start
from support.tiny_fixture import Tiny

from headstart.engine.engine import Engine
from headstart.engine.output import Completion
from headstart.errors import ConfigError, RequestError
from headstart.sampling.params import SamplingParams

PROMPT = [5, 6, 7]


def say(engine: Engine, **fields: Any) -> Completion:
    settings = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, **fields}
    (result,) = run(engine, [PROMPT], SamplingParams(**settings))
    return result.outputs[0]


@pytest.mark.parametrize("drafts", [0, 3])
def test_min_tokens_holds_stop_strings_back(drafts: int, tiny: Tiny) -> None:
    """Regression: it held back end tokens only."""
    engine = start(checkpoint(tiny), speculate=drafts)
    words = say(engine).text.split()
    assert len(say(engine, stop=words[1]).token_ids) == 2
    held = say(engine, stop=(words[1], words[9]), min_tokens=8)
    assert (held.stop_reason, len(held.token_ids)) == (words[9], 10)
    assert held.text.split() == words[:9]


def test_a_stop_token_is_kept_in_the_text_on_request(tiny: Tiny) -> None:
    engine = start(checkpoint(tiny))
    whole = say(engine)
    stop = {"stop_token_ids": (whole.token_ids[3],)}
    cut, kept = say(engine, **stop), say(engine, **stop, include_stop_str_in_output=True)
    assert cut.token_ids == kept.token_ids == whole.token_ids[:4]
    assert (cut.text.split(), kept.text.split()) == (whole.text.split()[:3], whole.text.split()[:4])
    assert cut.stop_reason == kept.stop_reason == whole.token_ids[3]


def test_min_tokens_with_nothing_but_end_tokens_allowed_is_refused(tiny: Tiny) -> None:
    """Regression: such an answer was empty and said to be complete."""
    engine = start(checkpoint(tiny))
    (end,) = engine.prompts.end_ids
    only = {"allowed_token_ids": (end, 9), "banned_token_ids": (9,), "ignore_eos": False}
    with pytest.raises(RequestError, match=r"only end tokens are allowed.*min_tokens"):
        say(engine, min_tokens=3, **only)
    assert say(engine, **only).token_ids == [end]
    assert not engine.has_work


@pytest.mark.parametrize("settings", [{}, {"dtype": "float32"}], ids=["torch", "numba"])
def test_an_end_id_beyond_the_vocabulary_is_no_token(settings: Any, tiny: Tiny) -> None:
    """Regression: with min_tokens the step of all requests failed."""
    folder = checkpoint(tiny)
    out = folder.parent / f"{folder.name}-far-end"
    if not out.exists():
        shutil.copytree(folder, out)
        (out / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 500]}))
    engine = start(out, **settings)
    assert len(say(engine, min_tokens=3, ignore_eos=False).token_ids) > 3
    assert engine.admission.ends(SamplingParams()) == {1}


def test_more_drafts_than_an_engine_makes_are_refused(tiny: Tiny) -> None:
    engine = start(checkpoint(tiny), speculate=2)
    with pytest.raises(RequestError, match="speculate is 1000000; this engine drafts up to 16"):
        engine.add(PROMPT, SamplingParams(speculate=10**6))
    with pytest.raises(RequestError, match="params is a dict; give SamplingParams"):
        engine.add(PROMPT, {"temperature": 0})
    assert ids_of([engine.generate([PROMPT], SamplingParams(temperature=0, speculate=16))[0]])


def test_settings_that_need_a_head_are_refused_without_one(tiny: Tiny) -> None:
    folder = checkpoint(tiny)
    with pytest.raises(ConfigError, match="a head was given with speculate 0"):
        start(folder, head=folder, speculate=0)
    with pytest.raises(ConfigError, match="draft vocabulary was given and the engine runs without"):
        start(folder, speculate=0, draft_vocab=[3, 4])
    with pytest.raises(ConfigError, match="options and block_size were both given"):
        Engine(folder, options=start(folder).options, block_size=-5)
