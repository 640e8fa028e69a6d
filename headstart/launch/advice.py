"""What K means, which K to use, what it costs in memory, and where the output is not exact.

Where `headstart score` has predicted a head's best K here, that is the advice. Other numbers are
published ones and carry their source; one's own text may behave differently.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from headstart.checkpoint.provenance import read_provenance, training_of
from headstart.errors import LaunchError
from headstart.families.base import Family
from headstart.families.engines import ENGINE_TITLES
from headstart.families.registry import GRAFTED_AS
from headstart.families.versions import is_at_least
from headstart.heads.drafters import FoundDrafter
from headstart.heads.formats.headstart import MODEL_TYPE as HEAD_MODEL_TYPE
from headstart.heads.inspection import Report
from headstart.heads.predicted import Predicted, find_predicted
from headstart.launch.options import LaunchOptions

_LOGIT_BYTES = 4  # engines verify in fp32

# family -> K and where the advice comes from; families not listed: one per module
_ADVISED = {
    "deepseek_v3": (3, "TensorRT-LLM tech blog 2: best at 3 for DeepSeek-R1 at batch 1, 2.16x"),
    "deepseek_v32": (3, "as DeepSeek-V3"),
    "deepseek_v4": (3, "as DeepSeek-V3"),
    "glm4_moe": (1, "the GLM-4.5 recipe for vLLM; a second recursive token was almost never "
                    "accepted in vllm-project/vllm#25993"),
    "glm4_moe_lite": (1, "as GLM-4.5"),
    "qwen3_next": (3, "vllm-project/speculators#366: 0.87 / 0.78 / 0.68 accepted by position"),
    "qwen3_5": (3, "ggml-org/llama.cpp#22673: about 75 % accepted at 3, over 2x single stream"),
    "qwen3_5_moe": (3, "as Qwen3.5"),
    "qwen4_exp": (3, "the Qwen3.8-Flash-Next example of vLLM"),
    "glm5_next": (5, "the GLM-5.3-Flash recipe for vLLM"),
    "hy_v4": (3, "the Hy4-preview recipe for vLLM"),
    "mimo": (1, "the stock head: 70 / 11 / 2 % accepted by position (FastMTP paper)"),
    "mimo_v2": (3, "MiMo-V2-Flash report: acceptance length 2.8 to 3.6 with three heads"),
}  # fmt: skip


def advised_k(
    family: Family, report: Report, folder: Path, engine: str, modules: int
) -> tuple[int, str]:
    """K for the head in `folder` when the user names none, and one sentence that says why."""
    predicted = _predicted(report, folder)
    if predicted is None:
        return _usual_k(family, report, folder, engine, modules)
    # vLLM loads one of MiMo-V2's modules; the prediction is of all.
    is_first_alone = family.name == "mimo_v2" and engine == "vllm"
    most = predicted.drafts if family.layout.topology == "recursive" else modules
    if 0 < predicted.drafts <= most and not is_first_alone:
        return predicted.drafts, (
            f"K = {predicted.drafts}: predicted {predicted.describe()}; change it with --speculate"
        )
    k, why = _usual_k(family, report, folder, engine, modules)
    return k, f"{why}; predicted as best was {predicted.describe()}"


def _usual_k(
    family: Family, report: Report, folder: Path, engine: str, modules: int
) -> tuple[int, str]:
    """The same for a head of which nothing was predicted here."""
    if family.layout.topology == "recursive" and (depths := _trained_depths(folder)):
        return depths, (
            f"K = {depths}: Headstart trained this head to draft so many tokens (headstart.json); "
            "change it with --speculate"
        )
    per_module = f"K = {modules}: one draft token per module; change it with --speculate"
    made = read_provenance(folder)
    if made.get("fresh") is True and "training" not in made:
        return modules, (
            f"K = {modules}: the head is fresh (headstart graft); before it is trained (headstart "
            "distill, then train) its drafts bring nothing"
        )
    if made.get("operation") == "graft":  # a head of the user's own: nothing is published about it
        return modules, per_module
    if family.name == "glm_moe_dsa" and report.config.get("index_share_for_mtp_iteration"):
        return 5, "K = 5: the GLM-5.2 head was trained for up to 5 draft tokens (GLM-5.2 recipe)"
    if family.name == "mimo_v2" and engine == "vllm":
        return 1, "K = 1: vLLM loads only the first of MiMo-V2's modules"
    if family.name in _ADVISED:
        k, source = _ADVISED[family.name]
        if family.layout.topology != "recursive":
            k = min(k, modules)  # each module drafts one token
        return k, f"K = {k} ({source}); change it with --speculate"
    return modules, per_module


def _predicted(report: Report, folder: Path) -> Predicted | None:
    if report.format is not None:
        return None
    return find_predicted(report.path, None if folder == report.path else folder)


def _trained_depths(folder: Path) -> int | None:
    found = (training_of(folder) or {}).get("num_depths")
    return found if type(found) is int and found > 0 else None


def about_k(family: Family, modules: int, k: int) -> list[str]:
    notes = [
        f"K = {k}: the head drafts {k} token(s), one after the other, the model checks them in one "
        f"pass and adds one of its own, so a step gives 1 to {k + 1}"
    ]
    if k > modules and family.layout.topology == "recursive":
        notes.append(
            f"{k} drafts from {modules} module(s): the head is applied to its own output, which "
            "every engine allows and which lowers acceptance with depth; a head tuned for it "
            "(FastMTP: 81 / 56 / 36 % by position) pays up to 3"
        )
    notes.append(
        "the gain shrinks as more requests run and can turn into a loss: measure it with your "
        "own load, limit it with --speculate-off-above"
    )
    return notes


def caveats(engine: str, version: str) -> list[str]:
    """Where an engine with MTP does not give exactly what it gives without."""
    by_argmax = "CPU, NPU and XPU" if is_at_least(version, "0.5.23") else "ROCm, CPU, NPU and XPU"
    return {
        "vllm": ["requests with min_p or logit_bias are rejected while speculation is on"],
        "sglang": [
            f"exact sampling holds on CUDA; {by_argmax} verify by arg-max whatever the "
            "temperature (sgl-project/sglang#31214; ROCm samples from 0.5.23 on)",
            "min_p is ignored and penalties are approximate while speculation is on",
        ],
        "trtllm": [
            "requests with min_p or log-probabilities are rejected; penalties need "
            "speculative_config.enable_penalty"
        ],
        "llamacpp": [
            "prompts are read more slowly while drafting is on, and sampled output is checked "
            "against the most likely draft, so acceptance falls with the temperature"
        ],
        "mlx": [],
        "xllm": [
            "greedy output is exact; sampled output only approximates the model's distribution "
            "(xLLM keeps the probability of the chosen draft token alone)"
        ],
    }[engine]


def require_head(report: Report, engine: str) -> None:
    """LaunchError, with what to do, unless the checkpoint has a head an engine can load."""
    if report.drafter is not None:
        raise LaunchError(_about_drafter(report.drafter, engine))
    if report.is_head_alone:
        raise LaunchError(
            f"{report.path} holds a head without its model. Launch the model with it: `headstart "
            f"launch MODEL.gguf --engine llamacpp --head {shlex.quote(str(report.path))}`."
        )
    if report.family is not None and report.head.is_usable:
        return
    state, name = report.head.state, report.path
    found = f"{name} has no head to serve with: {report.model_type or 'unknown type'}, {state}"
    plain = "--speculate 0 launches without it."
    if report.head.missing:
        count = len(report.head.missing)
        found += f" ({count} tensors missing, first {report.head.missing[0]})"
    pasted = shlex.quote(str(name))
    if report.model_type == HEAD_MODEL_TYPE:
        raise LaunchError(
            f"{name} is a head without its model. Launch the model with it: `headstart launch "
            f"MODEL --head {pasted}`."
        )
    if state in ("partial", "declared-but-missing"):
        raise LaunchError(
            f"{found}. Fine-tuning or quantising lost it: `headstart restore {pasted} "
            f"--from ORIGINAL --out DIR` puts it back. {plain}"
        )
    if report.format == "gguf" and report.family is not None:
        raise LaunchError(
            f"{found}. Converting may have left it out: `headstart restore {pasted} "
            f"--from ORIGINAL --out DIR` puts it in. {plain}"
        )
    is_never_published = report.family is not None and not report.family.is_published
    if report.model_type in GRAFTED_AS or is_never_published:
        raise LaunchError(
            f"{found}. `headstart graft {pasted} --out DIR` adds one to train, or pass an "
            f"EAGLE-3 draft to the engine yourself. {plain}"
        )
    raise LaunchError(
        f"{found}. Check the published original with `headstart inspect`; if it never had one, an "
        f"EAGLE-3 draft for this model is the way, given to the engine directly. {plain}"
    )


def _about_drafter(found: FoundDrafter, engine: str) -> str:
    kind, title = found.kind.name, ENGINE_TITLES[engine]
    if engine not in found.flags:
        others = ", ".join(ENGINE_TITLES[name] for name in found.flags)
        return (
            f"{title} does not serve {kind} drafters, which are no MTP heads. These do: {others}."
        )
    since = found.kind.served[engine][0]
    return (
        f"the drafter is {kind} ({found.evidence}), no MTP head. {title} {since} or later serves "
        f"it with {found.flags[engine]}: start the engine directly."
    )


def memory(
    report: Report,
    options: LaunchOptions,
    k: int,
    *,
    running: int | None,
    head_bytes: int | None = None,
) -> list[str]:
    """What drafting adds in memory, over all devices together.

    `running` is the limit of running requests that the command sets, None where the engine has its
    own; `head_bytes` is the size of a separate head.
    """
    if k == 0:
        return []
    head, batch = report.head, running or 1
    lines = []
    if options.head_path is None:
        lines.append(f"head weights {_size(head.num_bytes)}")
    elif head_bytes is not None:
        lines.append(f"head weights {_size(head_bytes)} ({options.head_path})")
    else:
        lines.append(f"head weights: the size of {options.head_path}")
    if head.kv_bytes_per_token:
        length = options.max_model_len
        line = f"KV of the head {_size(head.kv_bytes_per_token)} per token"
        if length is not None:
            total = head.kv_bytes_per_token * length * batch
            line += f", {_size(total)} for {batch} x {length} tokens"
        lines.append(line)
    elif options.head_path is None:
        lines.append("no KV of its own: it attends to the model's")
    if report.trunk.vocab_size is not None:
        rows = k * options.draft_top_k + 1
        logits = batch * rows * report.trunk.vocab_size * _LOGIT_BYTES
        each = "per running request" if running is None else f"for {batch} running request(s)"
        lines.append(f"logits to verify {_size(logits)} {each}, fp32")
    return lines


def _size(num_bytes: int) -> str:
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
