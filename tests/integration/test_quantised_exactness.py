"""Texts of quantised checkpoints are exact: `exact` takes every format, and nothing that runs
beside a request, in pieces or again changes its text."""

from __future__ import annotations

import re
from math import prod

import pytest
from support.engine_runs import (
    assert_head_is_alive,
    greedy,
    ids_of,
    make_prompts,
    run,
    seeded,
    start,
)
from support.long_runs import unless_long
from support.quantized_models import ALL, VALUES, plain_model, quantized_model
from support.tiny_fixture import Tiny

from headstart.checkpoint.reader import Checkpoint

COST = re.compile(
    r"14 weights are dequantised to float32 at load, (.*) in place of (.*) \(.*\): (.*)"
)


@pytest.mark.parametrize("form", ALL)
def test_exact_takes_every_format_and_says_what_it_costs(form: str, tiny: Tiny) -> None:
    folder, prompts = quantized_model(tiny, form), make_prompts(4)
    plain = Checkpoint.open(plain_model(tiny)).tensors
    values = sum(prod(i.shape) for n, i in plain.items() if "model.layers." in n and "_proj.w" in n)
    stored = sum(
        info.end - info.start for name, info in Checkpoint.open(folder).tensors.items()
        if "model.layers." in name and "_proj." in name
        and not name.endswith(("bias", "input_scale"))
    )  # fmt: skip
    why = "exact computes with weights in the model's own type"
    if form in VALUES:
        why = "no backend computes with this format"
    found = []
    for drafts in (0, 3):
        engine = start(folder, dtype="float32", exact=True, speculate=drafts)
        costs = [cost for note in engine.notes if (cost := COST.fullmatch(note)) is not None]
        assert [cost.groups() for cost in costs] == [
            (f"{4 * values / 1e6:.2f} MB", f"{stored / 1e6:.2f} MB", why)
        ]
        assert not any("stay as stored" in note for note in engine.notes)
        results = run(engine, prompts, greedy(16, logprobs=1))
        found.append([(o.token_ids, o.logprobs) for result in results for o in result.outputs])
    assert_head_is_alive(results)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("form", "kernels"),
    unless_long([("awq", "auto"), ("fp8-block", "off")],
                [(form, kernels) for form in ALL for kernels in ("auto", "off")]),
)  # fmt: skip
def test_company_pieces_preemption_and_prefix_hits_change_no_text(
    form: str, kernels: str, tiny: Tiny
) -> None:
    """Beside others, in prompts cut into pieces, preempted and from cached prefixes."""
    folder, prompts = quantized_model(tiny, form), make_prompts()
    params = [greedy(16), seeded(temperature=0.8, max_tokens=16)] * (len(prompts) // 2)
    options = {"dtype": "float32", "kernels": kernels}
    alone = start(folder, speculate=0, prefix_caching=False, **options)
    texts = [
        ids
        for prompt, own in zip(prompts, params, strict=True)
        for ids in ids_of(run(alone, [prompt], own))
    ]
    assert len({tuple(ids) for ids in texts}) > len(texts) / 2
    together = run(start(folder, speculate=3, **options), prompts, params)
    assert_head_is_alive(together)
    assert ids_of(together) == texts
    tight = {"slots": 60, "max_batched_tokens": 20, "prefix_caching": False}
    small = start(folder, speculate=3, **tight, **options)
    assert max(map(len, prompts)) > 20
    assert ids_of(run(small, prompts, params)) == texts
    assert small.stats.preemptions > 0
    cached = start(folder, speculate=2, max_running_requests=2, block_size=1, **options)
    assert ids_of(run(cached, prompts, params)) == texts
    assert cached.stats.cached_tokens > 0
