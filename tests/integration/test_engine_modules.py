"""Heads of several modules in rounds: the text and the drafts of the plain engine; interpreted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.engine_runs import ids_of
from support.long_runs import unless_long
from support.tiny_fixture import Tiny

pytest.importorskip("triton")

from support.kernel_runs import SIZES, few_programs
from support.kernel_sizes import WINDOWS

from headstart.backends.cuda import graphs
from headstart.backends.cuda.decode_batch import DecodeBatch
from headstart.backends.cuda.round_model import RoundModel
from headstart.backends.cuda.shapes import DraftShape
from headstart.engine.engine import Engine
from headstart.engine.request import Request
from headstart.sampling.params import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_kernels")
_few_programs = pytest.fixture(autouse=True)(few_programs)

# One is shorter than the head has modules; two begin alike, for more than a block.
PROMPTS = [[7], [3, 4, 5, 6, 7, 8, 9, 10, 11], [3, 4, 5, 6, 7, 8, 9, 10, 20, 21]]
EACH: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.6, "seed": 3},
    {"temperature": 0.9, "seed": 4, "top_p": 0.9, "acceptance": "rejection"},
]
SETTINGS = [SamplingParams(max_tokens=4, ignore_eos=True, **own) for own in EACH]


def model(tiny: Tiny, modules: int, family: str = "mimo") -> Path:
    """Of MiMo several chained modules; of others as many as their tiny configs have."""
    sizes = {**SIZES, "num_nextn_predict_layers": modules} if family == "mimo" else WINDOWS[family]
    return tiny(family, rate=0.9, seed=4, dtype="F32", **sizes)


def start(folder: Path, kernels: str, **settings: Any) -> Engine:
    settings = {"block_size": 4, "kv_bytes": 1 << 18, "max_running_requests": 3, **settings}
    return Engine(folder, dtype="float32", kernels=kernels, **settings)


Guesses = dict[tuple[tuple[int, ...], int], list[int]]  # by prompt and length of the text


def watch_plain(engine: Engine, patched: pytest.MonkeyPatch) -> Guesses:
    found, drafter = Guesses(), engine.loop.drafter
    assert drafter is not None
    propose = drafter.propose

    def watched(drafting: dict[Request, int]) -> None:
        propose(drafting)
        for request in drafting:
            found[tuple(request.prompt_ids), len(request.tokens)] = list(request.drafts)

    patched.setattr(drafter, "propose", watched)
    return found


def watch_rounds(engine: Engine, patched: pytest.MonkeyPatch) -> Guesses:
    found, draft = Guesses(), graphs.run_drafts
    assert engine.loop.rounds is not None
    requests = engine.loop.rounds.requests

    def watched(model: RoundModel, batch: DecodeBatch, shape: DraftShape) -> None:
        draft(model, batch, shape)
        for request, at in requests.items():
            most = min(int(batch.limits[at]), int(batch.left[at]) - 1)
            if most > 0:
                drafts = batch.ids[at, 1 : 1 + most].tolist()
                found[tuple(request.prompt_ids), int(batch.lengths[at])] = drafts

    patched.setattr(graphs, "run_drafts", watched)
    return found


# MiMo-V2's modules all read the trunk's states, Step-3.5's what the one before made.
LONG = [
    *(("mimo", *sizes) for sizes in [(2, 3), (3, 1), (3, 2), (3, 3), (2, 4), (3, 5)]),
    *((family, 3, drafts) for family in ("mimo_v2", "step3p5") for drafts in (1, 2, 3, 5)),
]


@pytest.mark.parametrize(("family", "modules", "drafts"), unless_long([("mimo", 2, 3)], LONG))
def test_drafts_are_those_of_the_plain_engine(
    family: str, modules: int, drafts: int, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model(tiny, modules, family)
    fused, plain = (start(folder, kernels, speculate=drafts) for kernels in ("on", "off"))
    assert fused.backend.name == "cuda" and fused.backend.num_modules == modules
    guesses, reference = watch_rounds(fused, monkeypatch), watch_plain(plain, monkeypatch)
    for _ in range(2):  # the second time prompts are found in the cache
        found, wanted = (engine.generate(PROMPTS, SETTINGS) for engine in (fused, plain))
        assert ids_of(found) == ids_of(wanted)
        assert [r.stats.acceptance for r in found] == [r.stats.acceptance for r in wanted]
        both = guesses.keys() & reference.keys()
        assert len(both) >= 5 and {key: guesses[key] for key in both} == {
            key: reference[key] for key in both
        }
        guesses.clear()
        reference.clear()
    assert found[2].num_cached_tokens > 0 and fused.stats.slow_rounds == {}


@pytest.mark.parametrize("family", unless_long(["mimo"], ["mimo", "mimo_v2"]))
def test_a_request_that_leaves_the_rounds_takes_all_modules_along(family: str, tiny: Tiny) -> None:
    """Memory is short, so that requests go on with the host, and are preempted."""
    folder = model(tiny, 3, family)
    plain = start(folder, "off", speculate=2)
    fused = start(folder, "on", speculate=2, kv_bytes=12 * plain.backend.block_bytes(4))
    asked = [*SETTINGS[:2], SETTINGS[0]]
    found, wanted = (engine.generate(PROMPTS, asked) for engine in (fused, plain))
    assert ids_of(found) == ids_of(wanted)
    assert fused.stats.slow_rounds["K/V memory is short"] > 0
    fused.scheduler.check()
