"""Our plugin inside the real vLLM on the CPU: draft vocabularies of every family that runs there.

For each family a tiny checkpoint is served by vLLM without plugins, then with ours installed:
nothing asked, a draft vocabulary of all tokens, one of half of them, and the half that is left.
Text never changes. Nothing asked and all tokens must give stock vLLM's counters, half of them those
of our engine and of our simulator with the same list; the other half is the control, whose counters
must differ. With `draft_sample_method: probabilistic` the logits of the whole width are used.
--short leaves out what does not change from family to family: nothing asked, and the whole width.

Prints a table, writes JSON with --json, exits 1 on any failure.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checking import interop_parser
from engine_check import FAMILIES, OPTIONS, make_model
from plugin_runs import (
    CHOOSING,
    WITHOUT,
    Result,
    asking,
    check_each,
    halves,
    ours,
    vocab_size,
    with_plugin,
)
from vllm_engine import Engine as Vllm
from vllm_engine import Served

from headstart.families.versions import is_at_least
from headstart.vocab.draft_vocab import DraftVocab
from headstart.vocab.files import write

CHECKED = [name for name in FAMILIES if name != "demo"]
# family -> the first release that runs its head as our engine does, what makes older ones do so:
# a head of K-EXAONE is rotated in all of them where it has a window.
SAME_SINCE: dict[str, tuple[str, dict[str, Any]]] = {
    "exaone_moe": (
        "0.32.0",
        {"mtp_layer_types": ["sliding_attention"], "mtp_sliding_windows": [128]},
    ),
}
SAMPLING: Mapping[str, Any] = {"draft_sample_method": "probabilistic"}


def changes(family: str, version: str) -> dict[str, Any]:
    """What the tiny checkpoint has besides its own, so that this release runs it as ours does."""
    since, made = SAME_SINCE.get(family, (version, {}))
    return {} if is_at_least(version, since) else made


def check(
    family: str,
    python: Path,
    site: Path,
    work: Path,
    versions: dict[str, str],
    given: Namespace,
) -> Result:
    result, depth = Result(family, FAMILIES[family]["dtype"]), given.depth
    options, variables = dict(OPTIONS.get(family, {})), dict[str, str]()
    if given.tensor_parallel > 1:
        options |= {"tensor_parallel_size": given.tensor_parallel}
        cores = "|".join(str(rank) for rank in range(given.tensor_parallel))
        variables["VLLM_CPU_OMP_THREADS_BIND"] = cores
    with Vllm(python, work / "stock.log", work, {**variables, **WITHOUT}) as vllm:
        versions.update(vllm.versions)
        model = make_model(family, work / "model", **changes(family, versions["vllm-cpu"]))
        if given.short:
            plain = ours(model, 0).tokens
        else:
            plain = vllm.serve(model, 0, result.dtype, **options).tokens
        stock = vllm.serve(model, depth, result.dtype, **options)
    size = vocab_size(model)
    half, rest = halves(plain, size)
    files = {}
    for vocab in (DraftVocab.of(range(size), name="all", vocab_size=size), half, rest):
        files[vocab.name] = work / f"{vocab.name}.json"
        write([vocab], files[vocab.name])
    own = ours(model, depth, vocab=half)
    log = work / "plugin.log"
    with Vllm(python, log, work, {**variables, **with_plugin(site)}) as vllm:

        def serve(vocab: str = "", keys: Mapping[str, Any] = CHOOSING) -> Served:
            asked = asking(draft_vocab=files[vocab]) if vocab else {}
            speculative = keys if vocab else {}
            return vllm.serve(
                model, depth, result.dtype, speculative=speculative, **options, **asked
            )

        result.expect(stock.tokens == plain, "stock vLLM's text differs")
        if not given.short:
            result.add("nothing asked", depth, serve(), plain, like=stock)
        result.add("all tokens", depth, serve("all"), plain, like=stock)
        result.add("half of them", depth, serve("half"), plain, like=own)
        result.expect(own.tokens == plain, "our engine's text differs")
        other = serve("rest")
        result.add("control: the other half", depth, other, plain, like=own, is_control=True)
        if not given.short:
            result.add("half, whole width", depth, serve("half", SAMPLING), plain, like=own)
    result.expect_lively(own)
    result.expect(own.counters != stock.counters, "half costs nothing")
    result.expect(
        f"of {size} tokens, plain rows" in log.read_text(), "vLLM's log does not name the plugin"
    )
    return result


def main() -> int:
    parser = interop_parser(__doc__, CHECKED)
    parser.add_argument("--depth", type=int, default=3, help="drafts of a round")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="processes of vLLM's")
    parser.add_argument(
        "--short", action="store_true", help="the listed tokens only; text is held against ours"
    )
    return check_each(parser, CHECKED, check, folder="plugin")


if __name__ == "__main__":
    sys.exit(main())
