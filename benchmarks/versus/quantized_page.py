"""What a run of quantised checkpoints beside vLLM says: its page, and what of logs is kept."""

from __future__ import annotations

import re
from typing import Any

_TOLD = re.compile(
    r"(Using|Selected) \S+ (for|attention backend)|\S+ MoE backend|MLA prefill backend|"
    r"[Uu]sing .*(backend|kernel|GEMM|Attention|MoE|FLA|GDN)|DeepGEMM|Model loading took|"
    r"KV cache size|Maximum concurrency"
)


def told(log: str) -> list[str]:
    """What vLLM's log says about kernels, backends and memory, each once."""
    lines = [line.rpartition("] ")[2].strip() for line in log.splitlines() if _TOLD.search(line)]
    return [line[:200] for line in dict.fromkeys(lines)][:24]


def figures(found: dict[str, Any]) -> str:
    parts = [f"{name} {own['value']:.0f} tokens/s" for name, own in found.items()]
    if len(found) == 2:
        parts.append(f"{found['headstart']['value'] / found['vllm']['value']:.2f}x vLLM")
    return ", ".join(parts) or "nothing measured"


def why(failure: str) -> str:
    """The last line that names an error, else the last line."""
    lines = [line.strip() for line in failure.strip().splitlines() if line.strip()] or [""]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines)[-1][-400:]


def last_line(log: str) -> str:
    return next((line.strip()[-200:] for line in log.splitlines()[::-1] if line.strip()), "nothing")


def page(document: dict[str, Any]) -> str:
    lines = [
        f"{document['device']}, {document['date']}: tokens/s, K = {document['k']}, prompts of "
        f"{document['prompt']}, answers of {document['answer']}, medians of {document['repeats']}",
        "", "| checkpoint | requests | ours | vLLM | ratio | tokens per step, ours / vLLM |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, case in document["cases"].items():
        steps = [case["engines"].get(e, {}).get("tokens_per_step") for e in ("headstart", "vllm")]
        said = " / ".join("-" if step is None else f"{step:.2f}" for step in steps)
        for row in case["rows"]:
            pair = [row["engines"].get(engine, {}).get("value") for engine in ("headstart", "vllm")]
            cells = ["-" if value is None else f"{value:.0f}" for value in pair]
            ratio = f"{pair[0] / pair[1]:.2f}" if all(pair) else "-"
            lines.append(f"| {name} | {row['requests']} | {' | '.join(cells)} | {ratio} | {said} |")
    lines += [
        "", "| checkpoint | files, GB | ours holds | to the files | vLLM's log |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    for name, case in document["cases"].items():
        files = case["file_bytes"]
        own = case["engines"].get("headstart", {}).get("weight_bytes")
        held = ["-", "-"] if own is None else [f"{own / 1e9:.2f}", f"{own / files:.3f}"]
        log = "; ".join(case["engines"].get("vllm", {}).get("log", []))
        lines.append(f"| {name} | {files / 1e9:.2f} | {' | '.join(held)} | {log} |")
    lines += [f"- failed: {failure}" for failure in document["failures"]]
    return "\n".join(lines)
