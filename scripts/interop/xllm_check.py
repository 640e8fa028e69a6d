"""Compares `headstart export --format xllm` with what xLLM's own export script writes.

    python scripts/interop/xllm_check.py --script XLLM/tools/export_mtp.py [--report FILE.md]

Both export the same tiny checkpoints. File names, tensor names, dtypes, shapes, bytes, the index
and config.json are held against each other; the exit status is 1 if a difference is found that is
not in `DOCUMENTED`. The script reads configs through transformers where that knows the model type,
which adds default fields and renames others; it is therefore run twice: as it is (the fields it
sets and those it kept must be equal), and on its own fall-back to the raw config (then all fields
must be).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from headstart.calibrate.tiny import write_tiny

FILE = "mtp_layer_parameters.safetensors"
PROVENANCE = "headstart.json"
# case -> (variant, options, block FP8)
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "deepseek_v3": ("deepseek_v3", {}, False),
    "deepseek_v3, FP8": ("deepseek_v3", {}, True),
    "deepseek_v3, sharded": ("deepseek_v3", {"shard_bytes": 400_000}, False),
    "deepseek_v32": ("deepseek_v32", {}, False),
    "deepseek_v32, FP8": ("deepseek_v32", {}, True),
    "deepseek_v4": ("deepseek_v4", {}, False),
    "glm4_moe": ("glm4_moe", {}, False),
    "glm_moe_dsa": ("glm_moe_dsa", {}, False),
    "mimo": ("mimo", {}, False),
    "qwen3_5, nested": ("qwen3_5", {}, False),
    "qwen3_5, text": ("qwen3_5_text", {}, False),
    "qwen3_5, model.mtp.": ("qwen3_5_text", {"root": "model."}, False),
    "qwen3_5_moe, per expert": ("qwen3_5_moe", {}, False),
    "qwen3_5_moe, fused": ("qwen3_5_moe", {"fused_experts": True}, False),
    "qwen3_5_moe, text": ("qwen3_5_moe_text", {}, False),
}
# what may differ, and why: "file X", "config X" or "tensor X" as the comparison names them
DOCUMENTED = {
    f"file {PROVENANCE}": "only ours: the provenance, which makes the export invertible",
    **{
        f"config {name}": "ours and later versions of the script rewrite it for shared indices"
        for name in (
            "index_topk_freq",
            "index_skip_topk_offset",
            "index_topk_pattern",
            "indexer_types",
        )
    },
}
# Runs the script for each job on stdin in one process; `raw` makes it fall back to config.json.
_DRIVER = """
import json, runpy, sys
import transformers
auto = transformers.AutoConfig.from_pretrained
def refuse(*args, **options):
    raise OSError("headstart: the raw config, please")
for line in sys.stdin:
    job = json.loads(line)
    transformers.AutoConfig.from_pretrained = refuse if job["raw"] else auto
    sys.argv = ["export_mtp.py", "--input-dir", job["model"], "--output-dir", job["out"]]
    runpy.run_path(job["script"], run_name="__main__")
"""


@dataclass
class Result:
    case: str
    num_tensors: int = 0
    documented: list[str] = field(default_factory=list)
    rewritten: list[str] = field(default_factory=list)  # by transformers, not by the script
    added: int = 0  # default fields that transformers added
    wrong: list[str] = field(default_factory=list)

    def note(self, what: str, detail: str = "") -> None:
        if what in DOCUMENTED:
            self.documented.append(what)
        else:
            self.wrong.append(f"{what}: {detail}" if detail else what)


def quantize_blocks(model: Path) -> None:
    """Turn attention projections and experts into 128x128 block FP8, as DeepSeek releases are."""
    file = model / "model.safetensors"
    tensors = load_file(file)
    for name in [n for n in tensors if n.endswith("_proj.weight") and "eh_proj" not in n]:
        weight = tensors[name].float()
        rows, columns = weight.shape
        scale = torch.zeros(-(-rows // 128), -(-columns // 128))
        stored = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                part = (slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128))
                scale[i, j] = weight[part].abs().max() / 448
                stored[part] = (weight[part] / scale[i, j]).to(torch.float8_e4m3fn)
        tensors[name] = stored
        tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (model / "config.json").write_text(json.dumps(config))


def compare(case: str, model: Path, ours: Path, auto: Path, raw: Path) -> Result:
    """Hold our folder against theirs."""
    result = Result(case)
    names = {p.name for p in ours.iterdir()}, {p.name for p in auto.iterdir()}
    for name in sorted(names[0] ^ names[1]):
        result.note(f"file {name}", "only ours" if name in names[0] else "only theirs")
    for name in sorted(names[0] & names[1] - {"config.json", FILE}):
        same = (ours / name).read_bytes() == (auto / name).read_bytes()
        if name.endswith(".json") and not same:  # the index lists names in the order of a listing
            same = _json(ours / name) == _json(auto / name)
        if not same:
            result.note(f"file {name}", "other content")
    result.num_tensors = _compare_tensors(result, ours / FILE, auto / FILE)
    mine, source = _json(ours / "config.json"), _json(model / "config.json")
    for path, left, right in _differences(mine, _json(raw / "config.json")):
        result.note(f"config {path}", f"ours {left!r}, theirs {right!r}")
    changed = {path for path, _, _ in _differences(source, mine)}
    for path, left, right in _differences(mine, _json(auto / "config.json")):
        if left is _ABSENT:
            result.added += 1
        elif path in changed:  # a field that the script sets
            if f"config {path}" not in DOCUMENTED:
                result.note(f"config {path}", f"ours {left!r}, theirs {right!r}")
        else:
            result.rewritten.append(path)
    return result


def _compare_tensors(result: Result, ours: Path, theirs: Path) -> int:
    with safe_open(ours, "pt") as left, safe_open(theirs, "pt") as right:
        names = set(left.keys()), set(right.keys())
        for name in sorted(names[0] ^ names[1]):
            result.note(f"tensor {name}", "only ours" if name in names[0] else "only theirs")
        for name in sorted(names[0] & names[1]):
            a, b = left.get_tensor(name), right.get_tensor(name)
            kinds = (a.dtype, tuple(a.shape)), (b.dtype, tuple(b.shape))
            if kinds[0] != kinds[1]:
                result.note(f"tensor {name}", f"ours {kinds[0]}, theirs {kinds[1]}")
            elif not torch.equal(_bytes(a), _bytes(b)):
                result.note(f"tensor {name}", "other bytes")
        if left.metadata() != right.metadata():
            result.note("file metadata", f"ours {left.metadata()}, theirs {right.metadata()}")
        return len(names[0])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).reshape(-1)


_ABSENT = object()


def _differences(left: Any, right: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted paths at which two JSON values differ."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in sorted({*left, *right}):
            below = f"{path}.{key}" if path else key
            yield from _differences(left.get(key, _ABSENT), right.get(key, _ABSENT), below)
    elif left is _ABSENT or right is _ABSENT or left != right:
        yield path, left, right


def _json(path: Path) -> Any:
    return json.loads(path.read_text())


def run_cases(script: Path, folder: Path) -> list[Result]:
    places: dict[str, tuple[Path, Path, Path, Path]] = {}
    jobs = []
    for number, (case, (variant, options, is_fp8)) in enumerate(CASES.items()):
        at = folder / str(number)
        model = write_tiny(variant, at / "model", **options)
        (model / PROVENANCE).unlink()  # a released checkpoint has none
        if is_fp8:
            quantize_blocks(model)
        ours, auto, raw = at / "ours", at / "auto", at / "raw"
        command = [sys.executable, "-m", "headstart", "export", "--format", "xllm"]
        command += ["--input-dir", str(model), "--output-dir", str(ours)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        for out, is_raw in ((auto, False), (raw, True)):
            jobs.append(
                {"script": str(script), "model": str(model), "out": str(out), "raw": is_raw}
            )
        places[case] = (model, ours, auto, raw)
    lines = "".join(json.dumps(job) + "\n" for job in jobs)
    driver = [sys.executable, "-c", _DRIVER]
    done = subprocess.run(driver, input=lines, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"xLLM's script failed:\n{done.stderr[-3000:]}")
    return [compare(case, *folders) for case, folders in places.items()]


def table(results: list[Result]) -> str:
    lines = [
        "| checkpoint | tensors | files, names, bytes | raw config | rewritten by transformers |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        wrong = [w for w in result.wrong if not w.startswith("config")]
        config = [w for w in result.wrong if w.startswith("config")]
        documented = [d for d in result.documented if d.startswith("config")]
        told = "equal" if not documented else f"equal but {len(documented)} documented"
        rewritten = ", ".join(sorted(set(result.rewritten))) or "none"
        lines.append(
            f"| {result.case} | {result.num_tensors} | {'; '.join(wrong) or 'equal'} | "
            f"{'; '.join(config) or told} | {rewritten}; {result.added} defaults added |"
        )
    used = sorted({what for result in results for what in result.documented})
    lines += ["", "Documented differences:", ""]
    return "\n".join(lines + [f"- {what}: {DOCUMENTED[what]}" for what in used])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--script", type=Path, required=True, help="xLLM's tools/export_mtp.py")
    parser.add_argument("--report", type=Path, help="write the table to this file, too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = run_cases(arguments.script.resolve(), Path(folder))
    text = table(results)
    print(text)
    if arguments.report:
        title = "# `headstart export --format xllm` against xLLM's own export script\n\n"
        about = (
            "Tiny checkpoints, exported by both; every tensor compared byte for byte. Made with\n"
            "`scripts/interop/xllm_check.py`. xLLM's script reads configs through transformers,\n"
            "which rewrites and adds fields (last column); ours stay as they are published.\n\n"
        )
        arguments.report.write_text(title + about + text + "\n")
    return 1 if any(result.wrong for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
