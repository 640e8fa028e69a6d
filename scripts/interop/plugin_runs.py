"""What the checks of our plugin inside vLLM share: rows of counters, our engine's side, and lists.

A check gets a name, the Python that has vLLM, a folder for PYTHONPATH that holds the plugin, a
folder to work in, and a dict that it fills with vLLM's versions.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import own_engine
from checking import check_all
from checkpoints import CommandFailed
from engine_check import APART, apart
from environments import python_of
from plugin_site import plugin_site
from simulated import simulated
from vllm_engine import EngineFailed, Served

from headstart.checkpoint.reader import Checkpoint
from headstart.engine.engine import Engine
from headstart.errors import HeadstartError
from headstart.vocab.draft_vocab import DraftVocab

Layout = Literal["own", "vllm"]
WITHOUT = {"VLLM_PLUGINS": "none"}  # an allow-list that names nothing installed
CHOOSING: Mapping[str, Any] = {"use_local_argmax_reduction": True}


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
    """Of one family or trunk."""

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

    def expect_lively(self, own: Served) -> None:
        """Counters that could not tell a wrong head from a right one show nothing."""
        rate = own.accepted[0] / own.drafts
        self.expect(0.1 <= rate <= 0.9, f"acceptance {rate:.2f} at depth 1")
        self.expect(0 < own.accepted[-1] < own.drafts, "no bonus or no recovery")


def ours(
    model: Path,
    depth: int,
    *,
    vocab: DraftVocab | None = None,
    head: Path | None = None,
    layout: Layout = "vllm",
) -> Served:
    """Our engine, counted as vLLM counts; with a vocabulary it is held against our simulator."""
    engine = Engine(
        model, head=head, device="cpu", dtype="float32", speculate=depth, layout=layout,
        draft_vocab=None if vocab is None else [vocab], kernels="off",
    )  # fmt: skip
    results = own_engine.generate(engine, depth)
    if vocab is not None:
        params = own_engine.params(depth)
        counted, predicted = simulated(engine, results, params, depth, vocab)
        if counted != predicted:
            raise EngineFailed(f"our engine counts {counted}, our simulator {predicted}")
    return own_engine.served(results, depth)


def vocab_size(model: Path) -> int:
    return int(Checkpoint.open(model).config.fields["vocab_size"])


def halves(plain: list[list[int]], size: int) -> tuple[DraftVocab, DraftVocab]:
    """Every second token by how often it is written, and the others: both lose drafts."""
    seen = Counter(token for tokens in plain for token in tokens)
    ranked = sorted(range(size), key=lambda token: (-seen[token], token))
    often = {token for at, token in enumerate(ranked) if at % 4}  # three of four of the frequent
    half = sorted(often, key=lambda token: (-seen[token], token))[: size // 2]
    rest = set(range(size)) - set(half)
    facts = {"vocab_size": size}
    return DraftVocab.of(half, name="half", **facts), DraftVocab.of(rest, name="rest", **facts)


def asking(**settings: Path) -> dict[str, Any]:
    """The argument of vLLM's that asks our plugin for something, as `headstart launch` does."""
    return {"additional_config": {"headstart": {name: str(p) for name, p in settings.items()}}}


def with_plugin(site: Path) -> dict[str, str]:
    """Variables of a vLLM that finds our plugin, and says so in its log."""
    return {"PYTHONPATH": str(site), "VLLM_LOGGING_LEVEL": "INFO"}


def check_each(
    parser: ArgumentParser,
    names: Iterable[str],
    check: Callable[[str, Path, Path, Path, dict[str, str], Namespace], Result],
    *,
    folder: str,
) -> int:
    """Exit code of a check of `names`, or of those that --only names; works in FOLDER-NAME."""
    options = parser.parse_args()
    python = python_of(options.envs, options.env)
    site = plugin_site(python, options.work / folder)
    return check_all(
        options.only or names,
        lambda name, work, versions: check(name, python, site, work, versions, options),
        lambda name, error: Result(name, "F32", failures=[error]),
        errors=(CommandFailed, EngineFailed, HeadstartError),
        folder=lambda name: options.work / f"{folder}-{name.replace(' ', '-')}",
        out=options.json,
    )
