"""Stock vLLM and vLLM with our plugin on one GPU, in turns, in one run.

PYTHONPATH=. python3 benchmarks/gpu_vllm_plugin.py --models FOLDER --out results.json
    [--cases vocab,graft] [--repeats 3] [--time-limit 570]

`vocab`: MiMo-7B's sizes, 151,680 tokens, K = 3. vLLM as it is, with a draft vocabulary of 32,000
tokens by the plugin, and with its rows in int8; 1, 16 and 80 requests. `graft`: Qwen3-8B's sizes
with a head in a folder of its own, run by vLLM's class for MiMo-7B and by the plugin's own class.

Calibrated checkpoints that are not in FOLDER are written first (16 GB each). The plugin is this
checkout, in a folder that only those processes see. Every answer is checked
against the cycle that the trunk walks. vLLM's defaults hold: its newer model runner, full graphs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import tempfile
import time
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from versus.measure import Sizes, Turns, speeds
from versus.process import Failed, Worker, settings_of
from versus.quick_checkpoints import write_quickly
from versus.report import write_json

from headstart import __version__
from headstart.calibrate.calibrated import agreement_of
from headstart.calibrate.shape_config import shape_config
from headstart.heads.export import plan_export
from headstart.heads.formats import head_in, open_model
from headstart.heads.formats.vllm import COUNT, KEY, PLUGIN, PLUGIN_TYPE, overrides
from headstart.vocab.draft_vocab import DraftVocab
from headstart.vocab.files import write

DRAFTS, RATE, ACTIVE = 3, 0.8, 32000
PROMPT, ANSWER = 1000, 500
REQUESTS = (1, 16, 80)
SHAPES = {"vocab": "mimo-7b", "graft": "qwen3-8b"}
_ROOT = Path(__file__).parents[1]
_SPEC: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": DRAFTS}


def main() -> int:
    given = options()
    work = Path(tempfile.mkdtemp(prefix="vllm-plugin-"))
    print(f"logs of the engines: {work}", flush=True)
    site = install(work)
    document: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python3", *sys.argv]), "k": DRAFTS, "rate": RATE, "active": ACTIVE,
        "prompt": PROMPT, "answer": ANSWER, "repeats": given.repeats, "cases": {}, "failures": [],
    }  # fmt: skip
    began = time.perf_counter()
    for name in given.cases:
        if time.perf_counter() - began > given.time_limit:
            document["failures"].append(f"{name}: not measured, time was over")
            continue
        variants = {"vocab": vocab_variants, "graft": graft_variants}[name](given.models, work)
        document["cases"][name] = measure(given, work, site, variants, document)
        if given.out:
            write_json(document, given.out)
    print(json.dumps(document["failures"]))
    return 1 if document["failures"] else 0


Variant = tuple[Path, dict[str, Any]]  # model, and what vLLM is told


def vocab_variants(models: Path, work: Path) -> dict[str, Variant]:
    model = made(models, "mimo-7b")
    size = shape_config("mimo-7b")["vocab_size"]
    # The tokens in use begin with 2.
    file = work / "vocab.json"
    write([DraftVocab.of(range(2, ACTIVE + 2), vocab_size=size)], file)
    asked = {"draft_vocab": str(file)}
    choosing = {**_SPEC, "use_local_argmax_reduction": True}
    return {
        "stock": (model, {"speculative_config": _SPEC}),
        "vocab": (model, {"speculative_config": choosing,
                          "additional_config": {"headstart": asked}}),
        "int8": (model, {"speculative_config": choosing,
                         "additional_config": {"headstart": {**asked, "draft_rows": "int8"}}}),
    }  # fmt: skip


def graft_variants(models: Path, work: Path) -> dict[str, Variant]:
    model = made(models, "qwen3-8b")
    trunk = models / "qwen3-8b-trunk"
    if not trunk.exists():
        write_quickly("qwen3-8b", None, trunk, rate=RATE, active=ACTIVE, without="mtp.")
    head, own = work / "head", work / "own"
    found = head_in(open_model(model))
    plan_export(found, "vllm").write(head)
    # The same tensors under our names, for our class.
    plan_export(found, "headstart").write(own)
    config = {**found.config, "architectures": [PLUGIN], "model_type": PLUGIN_TYPE, COUNT: 1,
              KEY: {"family": found.family.name}}  # fmt: skip
    (own / "config.json").write_text(json.dumps(config))
    added = overrides(found.family, "MiMoForCausalLM")
    return {
        "stock class": (trunk, {"speculative_config": {**_SPEC, "model": str(head)},
                                "hf_overrides": added}),
        "plugin's class": (trunk, {"speculative_config": {**_SPEC, "model": str(own)}}),
    }  # fmt: skip


def made(models: Path, shape: str) -> Path:
    folder = models / shape
    if not cycle_of(folder).exists():
        write_quickly(shape, None, folder, rate=RATE, active=ACTIVE)
        cycle_of(folder).write_text(json.dumps(agreement_of(folder).following.tolist()))
        print(f"wrote {folder}", flush=True)
    return folder


def cycle_of(folder: Path) -> Path:
    return folder.parent / f"{folder.name}-cycle.json"


def install(work: Path) -> Path:
    """This checkout with its entry point, as an installer leaves it, in a folder of its own."""
    site = work / "site"
    shutil.copytree(_ROOT / "headstart", site / "headstart")
    facts = site / f"headstart-{__version__}.dist-info"
    facts.mkdir()
    named = f"Metadata-Version: 2.1\nName: headstart\nVersion: {__version__}\n"
    (facts / "METADATA").write_text(named)
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    group = "vllm.general_plugins"
    lines = [f"{name} = {place}" for name, place in project["entry-points"][group].items()]
    (facts / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    return site


def measure(
    given: argparse.Namespace,
    work: Path,
    site: Path,
    variants: dict[str, Variant],
    document: dict[str, Any],
) -> dict[str, Any]:
    workers = {
        name: Worker(name.replace(" ", "-").replace("'", ""), settings(given, site, name, *variant),
                     work)
        for name, variant in variants.items()
    }  # fmt: skip
    result: dict[str, Any] = {"engines": {}, "rows": []}
    try:
        for name, worker in list(workers.items()):
            try:
                result["engines"][name] = worker.started()
                said = [line[-160:] for line in worker.log.splitlines() if "headstart:" in line]
                result["engines"][name]["plugin"] = said
                print(f"{name} is up: {said[:1]}", flush=True)
            except Failed as failure:
                document["failures"].append(f"{name}: {failure}")
                del workers[name]
        for requests in REQUESTS:
            turns = Turns(list(workers.values()), document["failures"])
            row = speeds(turns, Sizes(PROMPT, ANSWER, given.repeats, 0, ()), requests)
            result["rows"].append({"requests": requests, **row})
            print(json.dumps(result["rows"][-1]), flush=True)
    finally:
        for worker in workers.values():
            worker.stop()
    return result


def settings(
    given: argparse.Namespace, site: Path, name: str, model: Path, told: dict[str, Any]
) -> dict[str, Any]:
    is_ours = not name.startswith("stock")
    variables = {"PYTHONPATH": str(site)} if is_ours else {"VLLM_PLUGINS": "none"}
    cycle = cycle_of(model.with_name(model.name.removesuffix("-trunk")))
    return {
        **settings_of("vllm", None, {"VLLM_LOGGING_LEVEL": "INFO", **variables}),
        "model": str(model.resolve()), "drafts": DRAFTS, "max_requests": max(REQUESTS),
        "max_model_len": PROMPT + ANSWER + 64, "draft_vocab": 0, "kv_gib": 0,
        "memory": given.memory, "patience": given.patience, "active": ACTIVE,
        "cycle": str(cycle.resolve()), "options": told,
    }  # fmt: skip


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", type=float, default=0.3, help="of the GPU, for each engine")
    parser.add_argument("--patience", type=float, default=400)
    parser.add_argument("--time-limit", type=float, default=400, help="no case is begun after it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
