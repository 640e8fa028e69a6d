"""Our plugin in vLLMs that it was not written for: the real one, which calls itself another.

A file that Python runs when it starts makes vLLM say that it is a newer or an older release, or a
fork with a version of its own; and a fork whose registry takes no classes. Each is asked for half
of the tokens: its log must say in one line why the plugin stays out, and text and counters must be
those of vLLM without plugins. Control: the same vLLM under its own name, whose counters must
differ.

Prints a table, writes JSON with --json, exits 1 on any failure.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path

from changed_vllm import changing
from checking import interop_parser
from engine_check import FAMILIES, make_model
from plugin_runs import WITHOUT, Result, asking, check_each, halves, vocab_size, with_plugin
from vllm_engine import Engine as Vllm

from headstart.vocab.files import write

DEPTH = 3
_VERSION, _REGISTRY = "vllm.version", "vllm.model_executor.models.registry"
# what it is -> the module that is changed, how, and words of the line in the log
OUTSIDE = {
    "too new": (_VERSION, "module.__version__ = '0.33.0'", "found vLLM 0.33.0, which is too new"),
    "too old": (_VERSION, "module.__version__ = '0.25.1'", "found vLLM 0.25.1, which is too old"),
    "a fork's version": (_VERSION, "module.__version__ = 'mine-7'", "'mine-7', which is no"),
    "a fork's registry": (
        _REGISTRY, "del module._ModelRegistry.register_model", "the plugin cannot be used here",
    ),
}  # fmt: skip


def variables_of(name: str, site: Path, work: Path) -> dict[str, str]:
    """Of a vLLM that is changed when it starts, and finds our plugin."""
    module, change, _ = OUTSIDE[name]
    folder = changing(module, change, work / name.replace(" ", "-").replace("'", ""))
    given = with_plugin(site)
    return {**given, "PYTHONPATH": os.pathsep.join([str(folder), given["PYTHONPATH"]])}


def check(
    family: str,
    python: Path,
    site: Path,
    work: Path,
    versions: dict[str, str],
    _: Namespace,
) -> Result:
    result = Result(family, FAMILIES[family]["dtype"])
    model = make_model(family, work / "model")
    with Vllm(python, work / "stock.log", work, WITHOUT) as vllm:
        versions.update(vllm.versions)
        stock = vllm.serve(model, DEPTH, result.dtype)
    half, _rest = halves(stock.tokens, vocab_size(model))
    write([half], work / "half.json")
    asked = asking(draft_vocab=work / "half.json")
    for name, (_module, _change, words) in OUTSIDE.items():
        log = work / f"{name.replace(' ', '-')}.log"
        with Vllm(python, log, work, variables_of(name, site, work)) as vllm:
            found = vllm.serve(model, DEPTH, result.dtype, **asked)
        result.add(name, DEPTH, found, stock.tokens, like=stock)
        lines = {line.partition("headstart: ")[2] for line in log.read_text().splitlines()} - {""}
        print(f"{family:17} {name}: {sorted(lines)}", flush=True)
        is_said = len(lines) == 1 and all(words in line for line in lines)
        result.expect(is_said and "vLLM runs as without it" in "".join(lines), f"it says {lines}")
    with Vllm(python, work / "plugin.log", work, with_plugin(site)) as vllm:
        found = vllm.serve(model, DEPTH, result.dtype, **asked)
    result.add("control: as it is", DEPTH, found, stock.tokens, like=stock, is_control=True)
    return result


def main() -> int:
    return check_each(interop_parser(__doc__, FAMILIES), ["mimo"], check, folder="outside")


if __name__ == "__main__":
    sys.exit(main())
