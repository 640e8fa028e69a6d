"""Our plugin inside the real vLLM on the CPU: draft vocabularies of every family that runs there.

For each family a tiny checkpoint is served by vLLM without plugins, then with ours installed:
nothing asked, a draft vocabulary of all tokens, one of half of them, and the half that is left.
Text never changes. Nothing asked and all tokens must give stock vLLM's counters, half of them those
of our engine and of our simulator with the same list; the other half is the control, whose counters
must differ. With `draft_sample_method: probabilistic` the logits of the whole width are used.

Prints a table, writes JSON with --json, exits 1 on any failure.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import vllm_counters as workload
from checking import check_all, interop_parser
from engine_check import APART, FAMILIES, accepted_by_round, apart, make_model
from environments import python_of
from plugin_site import plugin_site
from simulated import simulated
from vllm_engine import Engine as Vllm
from vllm_engine import EngineFailed, Served

from headstart.engine.engine import Engine
from headstart.errors import HeadstartError
from headstart.sampling.params import SamplingParams
from headstart.vocab.draft_vocab import DraftVocab
from headstart.vocab.files import write

Layout = Literal["own", "vllm"]
DEPTHS = (3,)
CHECKED = [name for name in FAMILIES if name != "demo"]
WITHOUT = {"VLLM_PLUGINS": "none"}  # an allow-list that names nothing installed


@dataclass
class Row:
    """One way of drafting at one depth: rounds, and drafts accepted at depth 1, 2, ..."""

    way: str
    depth: int
    counters: tuple[int, ...]
    expected: tuple[int, ...]  # what they must be; of the control: must not be
    same_tokens: bool


@dataclass
class Result:
    family: str
    dtype: str
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    seconds: int = 0

    def add(self, way: str, depth: int, served: Served, plain: list[list[int]], *, like: Served,
            is_control: bool = False) -> None:  # fmt: skip
        same = served.tokens == plain
        self.rows.append(Row(way, depth, served.counters, like.counters, same))
        print(f"{self.family:17} K={depth} {way:26} {served.counters} {like.counters}", flush=True)
        self.expect(same, f"{way}, K={depth}: the text changed")
        distance = apart(served.counters, like.counters)
        if is_control:
            self.expect(distance > 10, f"{way}, K={depth}: counters as without")
        else:
            most = APART[self.dtype]
            self.expect(distance <= most, f"{way}, K={depth}: {served.counters} {like.counters}")

    def expect(self, is_true: bool, claim: str) -> None:
        if not is_true:
            self.failures.append(claim)
            print(f"FAILED {self.family}: {claim}", flush=True)


def ours(
    model: Path,
    depth: int,
    vocab: DraftVocab,
    *,
    head: Path | None = None,
    layout: Layout = "vllm",
) -> Served:
    """Our engine with that vocabulary, counted as vLLM counts, and held against the simulator."""
    engine = Engine(
        model, head=head, device="cpu", dtype="float32", speculate=depth, layout=layout,
        draft_vocab=[vocab], kernels="off",
    )  # fmt: skip
    length = workload.NUM_TOKENS + depth + 1
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    prompts = workload.prompts(engine.model.config.vocab)
    results = engine.generate(prompts, params)
    counted, predicted = simulated(engine, results, params, depth, vocab)
    if counted != predicted:
        raise EngineFailed(f"K={depth}: our engine counts {counted}, our simulator {predicted}")
    outputs = [result.outputs[0] for result in results]
    rounds = [found for output in outputs for found in accepted_by_round(output.origins)]
    accepted = tuple(sum(found > d for found in rounds) for d in range(depth))
    return Served([o.token_ids[: workload.NUM_TOKENS] for o in outputs], len(rounds), accepted)


def halves(plain: list[list[int]], vocab_size: int) -> tuple[DraftVocab, DraftVocab]:
    """Every second token by how often it is written, and the others: both lose drafts."""
    seen = Counter(token for tokens in plain for token in tokens)
    ranked = sorted(range(vocab_size), key=lambda token: (-seen[token], token))
    often = {token for at, token in enumerate(ranked) if at % 4}  # three of four of the frequent
    half = sorted(often, key=lambda token: (-seen[token], token))[: vocab_size // 2]
    rest = set(range(vocab_size)) - set(half)
    facts = {"vocab_size": vocab_size}
    return DraftVocab.of(half, name="half", **facts), DraftVocab.of(rest, name="rest", **facts)


def asking(path: Path) -> dict[str, Any]:
    """How a vocabulary is asked for, as `headstart launch` writes it."""
    return {"additional_config": {"headstart": {"draft_vocab": str(path)}}}


CHOOSING: Mapping[str, Any] = {"use_local_argmax_reduction": True}
SAMPLING: Mapping[str, Any] = {"draft_sample_method": "probabilistic"}


def check(family: str, python: Path, site: Path, work: Path, versions: dict[str, str]) -> Result:
    result = Result(family, FAMILIES[family]["dtype"])
    model = make_model(family, work / "model")
    with Vllm(python, work / "stock.log", work, WITHOUT) as vllm:
        versions.update(vllm.versions)
        plain = vllm.serve(model, 0, result.dtype).tokens
        stock = {depth: vllm.serve(model, depth, result.dtype) for depth in DEPTHS}
    size = Engine(model, device="cpu", speculate=0, kernels="off").model.config.vocab
    half, rest = halves(plain, size)
    files = {}
    for vocab in (DraftVocab.of(range(size), name="all", vocab_size=size), half, rest):
        files[vocab.name] = work / f"{vocab.name}.json"
        write([vocab], files[vocab.name])
    expected = {depth: ours(model, depth, half) for depth in DEPTHS}
    log = work / "plugin.log"
    variables = {"PYTHONPATH": str(site), "VLLM_LOGGING_LEVEL": "INFO"}
    with Vllm(python, log, work, variables) as vllm:

        def serve(depth: int, vocab: str = "", keys: Mapping[str, Any] = CHOOSING) -> Served:
            asked = asking(files[vocab]) if vocab else {}
            speculative = keys if vocab else {}
            return vllm.serve(model, depth, result.dtype, speculative=speculative, **asked)

        for depth in DEPTHS:
            result.add("nothing asked", depth, serve(depth), plain, like=stock[depth])
            result.add("all tokens", depth, serve(depth, "all"), plain, like=stock[depth])
            own = expected[depth]
            result.add("half of them", depth, serve(depth, "half"), plain, like=own)
            result.expect(own.tokens == plain, f"K={depth}: our engine's text differs")
            other = serve(depth, "rest")
            result.add("control: the other half", depth, other, plain, like=own, is_control=True)
        sampled = serve(DEPTHS[-1], "half", SAMPLING)
        result.add("half, whole width", DEPTHS[-1], sampled, plain, like=expected[DEPTHS[-1]])
    for depth, own in expected.items():
        rate = own.accepted[0] / own.drafts
        result.expect(0.1 <= rate <= 0.9, f"K={depth}: acceptance {rate:.2f} at depth 1")
        result.expect(0 < own.accepted[-1] < own.drafts, f"K={depth}: no bonus or no recovery")
        result.expect(own.counters != stock[depth].counters, f"K={depth}: half costs nothing")
    result.expect(
        f"of {size} tokens, plain rows" in log.read_text(), "vLLM's log does not name the plugin"
    )
    return result


def main() -> int:
    options = interop_parser(__doc__, CHECKED).parse_args()
    python = python_of(options.envs, options.env)
    site = plugin_site(python, options.work)
    return check_all(
        options.only or CHECKED,
        lambda family, work, versions: check(family, python, site, work, versions),
        lambda family, error: Result(family, "F32", failures=[error]),
        errors=(EngineFailed, HeadstartError),
        folder=lambda family: options.work / f"plugin-{family}",
        out=options.json,
    )


if __name__ == "__main__":
    sys.exit(main())
