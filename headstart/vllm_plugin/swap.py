"""Another head into a running vLLM: `--worker-extension-cls headstart.vllm_plugin.swap.HeadSwap`.

vLLM mixes the class into its workers, and `collective_rpc` reaches its methods between two steps,
so no answer is interrupted. The head comes from a folder that every worker can read, under the
names that the running draft was loaded from, and goes into the tensors that are there (vLLM's
layerwise reload): captured graphs stay valid. Embedding and LM head stay the target's. A head that
is read beforehand (`headstart_prepare`) holds answers up for the copy alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headstart.errors import CheckpointError, ConfigError, HeadstartError
from headstart.heads.formats.vllm import KEY

log = logging.getLogger("vllm.headstart")
EXTENSION = "headstart.vllm_plugin.swap.HeadSwap"
DESCRIBE, PREPARE, SWAP = "headstart_describe", "headstart_prepare", "headstart_swap"
IS_PREPARED = "headstart_is_prepared"
Reply = dict[str, Any]  # what goes through vLLM's server as it is
_TARGETS = ("lm_head", "embed_tokens", "shared_head.head")  # parts of a draft that are the target's
_PARTS = "The draft may hold parts of both heads: push a head of its model, or restart vLLM."


class HeadSwap:
    """What is added to a worker."""

    vllm_config: Any
    model_runner: Any

    def headstart_describe(self) -> Reply:
        """Which class drafts, how its weights are stored, and whose head a folder of ours is."""
        try:
            draft = draft_of(self.model_runner)
        except HeadstartError as error:
            return {"error": str(error)}
        config = self.vllm_config.speculative_config.draft_model_config
        return {
            "architecture": str((config.hf_config.architectures or [""])[0]),
            "own": getattr(config.hf_config, KEY, None),
            "quantization": quantization_of(draft, config.quantization),
            "head_version": getattr(self, "_headstart_version", 0),
        }

    def headstart_prepare(self, folder: str) -> Reply:
        """Begin to read a head in a thread, for `headstart_swap` of the same folder."""
        self._headstart_head: Prepared | None = Prepared(folder)
        return {}

    def headstart_is_prepared(self, folder: str) -> Reply:
        found = getattr(self, "_headstart_head", None)
        return {"is": found is not None and found.folder == folder and found.is_done}

    def headstart_swap(self, folder: str) -> Reply:
        """Take the head in `folder`; what was loaded, or why it was not."""
        try:
            draft, tensors = draft_of(self.model_runner), self._headstart_read(folder)
        except HeadstartError as error:
            return {"error": str(error)}
        try:
            self._headstart_load(draft, tensors)
        except Exception as error:
            log.exception("headstart: the head of %s was not taken", folder)
            return {"error": f"{first_line(error)} {_PARTS}"}
        self._headstart_version: int = getattr(self, "_headstart_version", 0) + 1
        log.info("headstart: another head drafts from now on, of %s", folder)
        return {"tensors": len(tensors), "head_version": self._headstart_version}

    def _headstart_read(self, folder: str) -> dict[str, Any]:
        prepared = getattr(self, "_headstart_head", None)
        self._headstart_head = None
        if prepared is None or prepared.folder != folder:
            prepared = Prepared(folder)
        found: dict[str, Any] = prepared.tensors()
        return found

    def _headstart_load(self, draft: Any, tensors: dict[str, Any]) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        config = self.vllm_config.speculative_config.draft_model_config
        with set_current_vllm_config(self.vllm_config), _experts_anew(draft):
            initialize_layerwise_reload(draft)
            try:
                draft.load_weights(iter(tensors.items()))
            finally:
                finalize_layerwise_reload(draft, config)
        if hasattr(draft, "headstart_refill"):
            draft.headstart_refill()  # a head may have an LM head of its own


class Prepared:
    """A folder's tensors, read in a thread of their own."""

    def __init__(self, folder: str):
        self.folder = folder
        self._found: dict[str, Any] = {}
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._read, name="headstart-swap", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def tensors(self) -> dict[str, Any]:
        """All of them, waited for; a HeadstartError where they could not be read."""
        self._thread.join()
        if isinstance(self._error, HeadstartError):
            raise self._error
        if self._error is not None:
            raise CheckpointError(
                f"{first_line(self._error)} The running head stays; give a head's folder that "
                "every worker of vLLM's can read."
            ) from self._error
        return self._found

    def _read(self) -> None:
        try:
            self._found = {name: _checked(name, v) for name, v in stored_tensors(Path(self.folder))}
        except Exception as error:
            self._error = error


def _checked(name: str, value: Any) -> Any:
    """In memory that a GPU copies from by itself, where there is one."""
    import torch

    if value.is_floating_point() and not bool(torch.isfinite(value.float()).all()):
        raise ConfigError(
            f"the head's {name} has values that are not finite; the running head stays. Export the "
            "head again."
        )
    return value.pin_memory() if torch.cuda.is_available() else value.clone()


@contextmanager
def _experts_anew(draft: Any) -> Iterator[None]:
    """Within, experts on a CPU are loaded as if for the first time.

    vLLM 0.32 packs them for its CPU kernels only then, and would take new ones for packed.
    """
    methods = [
        module.quant_method
        for module in draft.modules()
        if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None
        and all(value.device.type == "cpu" for value in module.parameters())
    ]
    kernels = [method.moe_kernel for method in methods]
    for method in methods:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in zip(methods, kernels, strict=True):
            if method.moe_kernel is None:  # the head had no experts for it
                method.moe_kernel = kernel


def first_line(error: Exception) -> str:
    """An error in one line that ends as a sentence; those of other libraries with their type."""
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, HeadstartError):
        return lines[0]
    return f"{type(error).__name__}: {lines[0]}".rstrip(" .:") + "."


def quantization_of(draft: Any, method: Any) -> str | None:
    """How the head's own weights are stored; None: plain, as many are beside a quantised trunk."""
    import torch

    plain = (torch.float32, torch.bfloat16, torch.float16)
    own = (
        value
        for name, value in draft.named_parameters()
        if not any(part in name for part in _TARGETS)
    )
    return str(method) if method and any(value.dtype not in plain for value in own) else None


def draft_of(runner: Any) -> Any:
    """The draft's module; ConfigError where this vLLM drafts without one."""
    find = getattr(runner, "get_draft_model", None)
    draft = find() if callable(find) else None
    if draft is None:
        raise ConfigError(
            "this vLLM has no draft that could take another head; start it with an MTP head "
            "(--speculative-config) and without pipeline parallelism."
        )
    return draft


def stored_tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """The head's tensors under their stored names, one after the other."""
    from safetensors import safe_open

    kept = _names(folder)
    for file in _files(folder):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                if kept is None or name in kept:
                    yield name, opened.get_tensor(name)


def _names(folder: Path) -> frozenset[str] | None:
    """Of the head in a folder that holds a whole model; None: a folder has nothing else."""
    from headstart.checkpoint.reader import Checkpoint
    from headstart.heads.detection import find_head
    from headstart.heads.formats.vllm import recognises

    if not (folder / "config.json").exists():
        return None
    checkpoint = Checkpoint.open(folder)
    return None if recognises(checkpoint) else frozenset(find_head(checkpoint).tensors.values())


def _files(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise CheckpointError(
            f"{folder} holds no .safetensors file on this machine; give a head's folder that every "
            "worker of vLLM's can read."
        )
    return found
