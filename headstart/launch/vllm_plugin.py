"""What our plugin adds to vLLM's command: draft vocabularies, collecting, heads beside a trunk."""

from __future__ import annotations

import json
from typing import Any

from headstart.checkpoint.reader import Checkpoint
from headstart.data.fingerprints import tokenizer_sha
from headstart.errors import ConfigError
from headstart.heads.formats.vllm import PLUGIN, SETTINGS, check_folder_name, overrides
from headstart.launch.plan import Plan
from headstart.vllm_plugin.architectures import DRAFT_CLASSES
from headstart.vllm_plugin.settings import WORKER
from headstart.vllm_plugin.versions import NEWEST_RUN, OLDEST, why_not
from headstart.vocab.files import read_one

_INSTALL = "pip install 'headstart[vllm]' in vLLM's environment"


def with_plugin(plan: Plan) -> dict[str, Any]:
    """Keys of the speculative config for what the plugin is asked; the rest goes to the plan."""
    asked: dict[str, str] = {}
    keys = _with_vocab(plan, asked)
    _with_collect(plan, asked)
    if asked:
        plan.add("--additional-config", json.dumps({SETTINGS: asked}))
        _about_images(plan)
    return keys


def _with_collect(plan: Plan, asked: dict[str, str]) -> None:
    folder = plan.options.collect
    if folder is None:
        return
    plan.require(OLDEST, "collect", "Upgrade, or let it answer prompts: headstart distill.")
    _require_release(plan, "collect")
    asked["collect"] = str(folder.absolute())
    plan.add("--worker-cls", WORKER)
    if plan.options.docker:
        given = folder.absolute()
        plan.warnings.append(f"--docker: the folder must be mounted, too: -v {given}:{given}")
    plan.notes.append(
        f"collect: by Headstart's plugin ({_INSTALL}). What is asked and answered is written to "
        f"{folder}, with states that take hidden_size x 2 bytes of GPU memory for each token of "
        "the KV cache; lower --memory-fraction where that is not free"
    )


def _with_vocab(plan: Plan, asked: dict[str, str]) -> dict[str, Any]:
    path = plan.options.vocab_path
    if path is None:
        return {}
    option = "draft_vocab" if plan.options.draft_vocab else "token_map"
    plan.require(OLDEST, option, "Upgrade, or draft from the whole vocabulary.")
    _require_release(plan, option)
    if not any(plan.family_name in families for families in DRAFT_CLASSES.values()):
        plan.refuse(
            option, f"drafts {plan.family_name} by a class that has no place for one", "Drop it."
        )
    if path.is_file():
        _check_vocab(plan, option)
    else:
        plan.warnings.append(f"draft vocabulary: there is no file {path} on this machine")
    asked["draft_vocab"] = str(path.absolute())
    plan.notes.append(
        f"draft vocabulary: by Headstart's plugin ({_INSTALL}; where VLLM_PLUGINS is set it must "
        "name headstart). It multiplies the listed rows of the LM head alone; vLLM's log says "
        "`headstart: ... drafts from N of M tokens`, else vLLM stops for lack of get_top_tokens"
    )
    # Without it vLLM makes logits of the whole width for every draft.
    return {"use_local_argmax_reduction": True}


def add_grafted(plan: Plan) -> None:
    """What a head in a folder of our `vllm` format needs beside its path."""
    path, head = plan.options.head_path, plan.head
    if path is not None:
        check_folder_name(path)
    if head is None or plan.family is None or not head.architecture:
        return
    plan.require(OLDEST, "head", "Upgrade, or run without it: --speculate 0.")
    if head.architecture == PLUGIN:
        _require_release(plan, "head")
        plan.notes.append(f"head: Headstart's plugin brings the class that runs it ({_INSTALL})")
        _about_images(plan)
    added = overrides(plan.family, head.architecture)
    if not added:
        return
    if any(word.startswith("--hf-overrides") for word in plan.options.extra_args):
        raise ConfigError(
            f"--extra holds --hf-overrides, and the head needs {json.dumps(added)} there, too. "
            "Start vLLM directly with both in one object."
        )
    plan.add("--hf-overrides", json.dumps(added))
    plan.notes.append("head: vLLM's class for MiMo-7B runs it; no plugin is needed for that")


def _require_release(plan: Plan, option: str) -> None:
    if reason := why_not(plan.version):
        plan.refuse(
            option, f"is no release that Headstart's plugin runs in: {reason}",
            f"Drop it, or run another vLLM and name it (--engine-version {NEWEST_RUN}).",
        )  # fmt: skip


def _about_images(plan: Plan) -> None:
    if plan.options.docker:
        plan.warnings.append(
            "--docker: vLLM's own image has no Headstart; make one from it with `RUN pip install "
            "headstart` and name that in the command"
        )


def _check_vocab(plan: Plan, option: str) -> None:
    path, report = plan.options.vocab_path, plan.report
    assert path is not None
    vocab = read_one(path)
    size = report.trunk.vocab_size
    if size is not None:
        sha = tokenizer_sha(Checkpoint.open(report.path)) if report.path.is_dir() else None
        vocab.check(vocab_size=size, tokenizer_sha=sha, where=f"--{option.replace('_', '-')}")
