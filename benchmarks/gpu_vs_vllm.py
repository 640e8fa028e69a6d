"""Our engine and vLLM side by side on one GPU: same calibrated checkpoint, same run, in turns.

PYTHONPATH=. python3 benchmarks/gpu_vs_vllm.py MODEL --out results.json

First the logits of every dense family are checked against transformers (gpu_logits.py). Then, for
each K of the plan, both engines are started, each in its own process and in its best
configuration, and answer the same prompts in alternation. --plan says what is measured, the most
important first: `K:` and then numbers of requests (output tokens per second, prefill included),
`offN` (the same, ours alone, drafting switched off per request), `first` or `firstN` (time to the
first token of a prompt, or of one of N tokens, at an idle engine), `long` (inter-token latency
while a long prompt is read), `vocab` (ours started again with --draft-vocab, one request). Results
are written after every row, so a run that is ended early loses nothing; versus/report.py makes one
page of several runs.

Every answer is checked against the cycle that the checkpoint's trunk walks. vLLM (0.26 for torch
2.11) lies in the same environment, or in the one of --vllm-python.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from page_cache import read_all
from versus.bench import Bench
from versus.plan import DEFAULT_PLAN, Group, Stage, parse_plan
from versus.report import page

ENGINES = ("headstart", "vllm")
_LOGITS = Path(__file__).with_name("gpu_logits.py")


def main() -> int:
    given = options()
    tell_vllm_texts_only(given)
    work = given.work or Path(tempfile.mkdtemp(prefix="versus-"))
    work.mkdir(parents=True, exist_ok=True)
    bench = Bench(given, checkpoint_facts(Path(given.model), work.resolve()), work.resolve())
    print(f"logs of the engines: {work}")
    if given.skip_logits:
        print("start-up figures assume that the checkpoint is in page cache: it was not read here")
    else:
        bench.document["logits"] = check_logits(Path(given.model), work)
        bench.document["page_cache"] = "read just before"
    bench.run(given.groups)
    bench.write()
    print("\n" + page([bench.document]))
    return 1 if bench.failures else 0


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--plan", default=DEFAULT_PLAN, help="default: %(default)s")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--prompt", type=int, default=2500)
    parser.add_argument("--answer", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--long", type=int, default=30000, help="tokens of the long prompt")
    parser.add_argument("--decoding", default="1,4", help="requests that decode beside it")
    parser.add_argument("--draft-vocab", type=int, default=0, help="tokens 2 to N + 1; adds vocab")
    parser.add_argument("--memory", type=float, default=0.49, help="of the GPU, for vLLM")
    parser.add_argument("--kv-gib", type=float, default=47, help="K/V memory of ours, at most")
    parser.add_argument("--overlap-start", action="store_true", help="start both at once")
    parser.add_argument("--start-all", action="store_true",
                        help="start both for every K at once; each needs memory")  # fmt: skip
    parser.add_argument("--patience", type=float, metavar="SECONDS",
                        help="end an engine that takes longer to start or to answer")  # fmt: skip
    parser.add_argument("--agree", type=float, metavar="SHARE",
                        help="repeat until two in a row differ by no more than this")  # fmt: skip
    parser.add_argument("--restart", action="store_true",
                        help="start an engine again that ended in a stage")  # fmt: skip
    parser.add_argument("--skip-logits", action="store_true")
    parser.add_argument("--time-limit", type=float, help="seconds after which no stage begins")
    parser.add_argument("--vllm-python", help="interpreter of vLLM's environment")
    for engine in ENGINES:
        parser.add_argument(
            f"--{engine}-options", type=json.loads, default={}, metavar="JSON",
            help=f"more arguments of {engine}'s constructor",
        )  # fmt: skip
    parser.add_argument("--vllm-env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--work", type=Path, help="folder for logs; default: a temporary one")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    try:
        given.groups = _with_vocab(parse_plan(given.plan), given.draft_vocab)
    except ValueError as error:
        parser.error(str(error))
    given.engines = given.engines.split(",")
    if unknown := set(given.engines) - set(ENGINES):
        parser.error(f"--engines: {', '.join(unknown)} is unknown; known are {', '.join(ENGINES)}")
    given.decoding = tuple(int(number) for number in given.decoding.split(","))
    given.vllm_env = dict(pair.split("=", 1) for pair in given.vllm_env)
    return given


def tell_vllm_texts_only(given: argparse.Namespace) -> None:
    """A calibrated model has no tensors of a vision part, whatever its config says."""
    if "vision_config" in json.loads((Path(given.model) / "config.json").read_text()):
        given.vllm_options = {"language_model_only": True, **given.vllm_options}


def _with_vocab(groups: list[Group], draft_vocab: int) -> list[Group]:
    """A draft vocabulary is tried last with the first K that drafts, as ours is started again."""
    asked = [any(stage.kind == "vocab" for stage in group.stages) for group in groups]
    if any(asked) and not draft_vocab:
        raise ValueError("--plan asks for vocab; give --draft-vocab as well")
    if any("vocab" in [stage.kind for stage in group.stages[:-1]] for group in groups):
        raise ValueError("--plan: vocab ends our engine; put it last in its group")
    if not draft_vocab or any(asked):
        return groups
    drafting = [number for number, group in enumerate(groups) if group.drafts]
    if not drafting:
        raise ValueError("--draft-vocab was given and no K in --plan drafts")
    first = groups[drafting[0]]
    groups[drafting[0]] = replace(first, stages=(*first.stages, Stage("vocab")))
    return groups


def checkpoint_facts(model: Path, work: Path) -> dict[str, Any]:
    """How the checkpoint was made, and a file with the cycle that its trunk walks."""
    from headstart.calibrate.calibrated import agreement_of
    from headstart.checkpoint.provenance import read_provenance

    cycle = work / "cycle.json"
    cycle.write_text(json.dumps(agreement_of(model).following.tolist()))
    facts = read_provenance(model)
    return {**{name: facts[name] for name in ("shape", "rate", "seed", "active")}, "cycle": cycle}


def check_logits(model: Path, work: Path) -> dict[str, Any]:
    """Nothing is timed with wrong logits. Meanwhile the checkpoint comes into page cache."""
    began, out = time.perf_counter(), work / "logits.json"
    reading = threading.Thread(target=read_all, args=(model,))
    reading.start()
    done = subprocess.run([sys.executable, str(_LOGITS), "--out", str(out.resolve())])
    if done.returncode != 0:
        raise SystemExit("logits differ from transformers': nothing is timed (see above)")
    seconds = time.perf_counter() - began
    reading.join()
    waited = time.perf_counter() - began
    print(f"logits took {seconds:.1f} s; the checkpoint was read and is assumed to be in page "
          f"cache after {waited:.1f} s")  # fmt: skip
    found: dict[str, Any] = json.loads(out.read_text())
    return found


if __name__ == "__main__":
    sys.exit(main())
