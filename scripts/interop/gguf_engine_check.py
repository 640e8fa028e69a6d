"""GGUF files of llama.cpp's converter in our engine, beside the checkpoints and beside llama.cpp.

    python scripts/interop/gguf_engine_check.py --tree DIR --libs DIR [--fixtures DIR]

DIR of --tree is llama.cpp's source tree, DIR of --libs its libraries (`llama_cpp_library.py` says
which). Tiny checkpoints of every family that both run are converted whole. Every tensor that the
engine sees must have the value of the checkpoint (norms that are stored as 1 + w: as far as FP32
keeps them), its config must mean the same, texts must be those of the checkpoint with 0 to 3
drafts, and llama.cpp's own tokens must be the same. --fixtures writes what the converter made, for
tests: keys, and a checksum of every tensor of the trunk.

Prints a table, exits 1 on any failure.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from gguf_check import _SLIDING, convert, drafted, give_tokenizer

from headstart.calibrate.tiny import write_tiny
from headstart.checkpoint.gguf.fields import KIND_NAMES
from headstart.checkpoint.gguf.values import byte_blocks
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.source import stored
from headstart.checkpoint.values import load
from headstart.engine.engine import Engine
from headstart.heads.experts import split_experts
from headstart.heads.formats import open_runnable
from headstart.heads.formats.gguf import GgufModel, open_gguf
from headstart.heads.formats.gguf.found import find_gguf_head
from headstart.models.config_reader import model_config
from headstart.sampling.params import SamplingParams

# variant -> changes of its tiny config
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "qwen3": {}, "qwen3_5_text": {}, "qwen3_5_moe_text": {},
    "qwen3_next": {}, "glm4_moe": {}, "glm4_moe_lite": {}, "deepseek_v3": {}, "deepseek_v32": {},
    "glm_moe_dsa": {}, "ernie4_5_moe": {}, "step3p5": _SLIDING,
    "mimo_v2": {"swa_head_dim": 64, "sliding_window": 128},
}  # fmt: skip
_WITHOUT_HEAD = ("llama", "qwen2", "qwen3")
_TOKENS = [3, 17, 42, 99, 5, 8, 61]
_PREFIXES = ("model.language_model.", "language_model.model.")
# Rows that the view leaves in another tensor than the checkpoint has them in.
_APART = ("linear_attn.in_proj_",)


def _values(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    sources = {n: checkpoint.source(n) for n in checkpoint.tensors}
    found = {}
    for name, source in split_experts(sources).items():
        prefix = next((each for each in _PREFIXES if name.startswith(each)), None)
        found["model." + name.removeprefix(prefix) if prefix else name] = load(source).float()
    return found


def _differing(model: Path, file: Path) -> list[str]:
    ours, theirs = _values(open_runnable(file)), _values(Checkpoint.open(model))
    wrong = [f"only in the file: {n}" for n in ours.keys() - theirs.keys()]
    wrong += [f"{n} differs" for n in ours.keys() & theirs.keys() if not _same(n, ours, theirs)]
    return [each for each in wrong if not any(apart in each for apart in _APART)]


def _same(name: str, ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    if name.endswith("norm.weight"):
        return torch.equal(ours[name] + 1, theirs[name] + 1)
    return torch.equal(ours[name], theirs[name])


def _text(path: Path, num_drafts: int) -> list[int]:
    engine = Engine(path, device="cpu", dtype="float32", speculate=num_drafts, max_model_len=256)
    params = SamplingParams(temperature=0, detokenize=False, max_tokens=40, ignore_eos=True)
    return list(engine.generate([_TOKENS], params)[0].outputs[0].token_ids)


def check(variant: str, options: argparse.Namespace, work: Path) -> list[str]:
    has_head = variant not in _WITHOUT_HEAD
    model = write_tiny(variant, work / "model", with_head=has_head, **FAMILIES[variant])
    give_tokenizer(model)
    convert(options.tree, model, work, {"whole": []})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    file = work / "whole.gguf"
    failures = [f"{variant}: {each}" for each in _differing(model, file)]
    configs = [model_config(open_runnable(path).config.fields) for path in (model, file)]
    if configs[0] != configs[1]:
        failures.append(f"{variant}: the config means something else")
    drafts = range(4) if find_gguf_head(open_gguf(file)).blocks else range(1)
    texts = {k: _text(file, k) for k in drafts}
    if any(text != _text(model, 0) for text in texts.values()):
        failures.append(f"{variant}: other texts")
    said = drafted(options.libs, file, file) if len(texts) > 1 else {}
    if "tokens" in said and said["tokens"][: len(texts[0])] != texts[0]:
        failures.append(f"{variant}: llama.cpp says {said['tokens'][:8]}, we {texts[0][:8]}")
    beside = "same tokens as llama.cpp" if "tokens" in said else "not run in llama.cpp"
    print(f"{variant:18} {'equal' if not failures else 'DIFFER'}, {beside}", flush=True)
    if options.fixtures:
        _write_fixture(options.fixtures / f"{variant}.json", open_gguf(file))
    return failures


def _write_fixture(path: Path, model: GgufModel) -> None:
    beyond = set(find_gguf_head(model).names)
    keys = {
        name: [KIND_NAMES[f.kind if f.item_kind is None else f.item_kind], f.value]
        for name, f in model.fields.items()
        if name.startswith(f"{model.arch_name}.")
    }
    tensors = {}
    for name, info in model.tensors.items():
        if name not in beyond:
            sum_ = 0
            for block in byte_blocks(stored(info), 1 << 20):
                sum_ = zlib.crc32(block, sum_)
            shape = "x".join(map(str, info.shape))
            tensors[name] = f"{info.dtype} {shape} {sum_:08x}"
    lines = [
        f"{json.dumps({'arch': model.arch_name})[:-1]},",
        f' "keys": {json.dumps(keys)},',
        f' "tensors": {json.dumps(tensors, indent=2)}}}',
    ]
    path.write_text("\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tree", type=lambda text: Path(text).resolve(), required=True)
    parser.add_argument("--libs", type=lambda text: Path(text).resolve(), required=True)
    parser.add_argument("--fixtures", type=Path)
    parser.add_argument("--work", type=Path, default=Path(".interop/work"))
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    options = parser.parse_args()
    failures = []
    for variant in options.families:
        work = (options.work / f"gguf-engine-{variant}").resolve()
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        try:
            failures += check(variant, options, work)
        except RuntimeError as error:
            failures.append(f"{variant}: {error}")
    print("\n".join([*failures, f"{len(options.families)} checked, {len(failures)} failures"]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
