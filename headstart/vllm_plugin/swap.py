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
from pathlib import Path
from typing import Any

from headstart.errors import CheckpointError, ConfigError, HeadstartError
from headstart.heads.formats.vllm import KEY

log = logging.getLogger("vllm.headstart")
EXTENSION = "headstart.vllm_plugin.swap.HeadSwap"
DESCRIBE, PREPARE, SWAP = "headstart_describe", "headstart_prepare", "headstart_swap"
IS_PREPARED = "headstart_is_prepared"
Reply = dict[str, Any]  # what goes through vLLM's server as it is


class HeadSwap:
    """What is added to a worker."""

    vllm_config: Any
    model_runner: Any

    def headstart_describe(self) -> Reply:
        """Which class drafts, and whose head it runs where it is in a folder of ours."""
        draft_of(self.model_runner)
        config = self.vllm_config.speculative_config.draft_model_config.hf_config
        return {
            "architecture": str((config.architectures or [""])[0]),
            "own": getattr(config, KEY, None),
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
            count = self._headstart_swap(folder)
        except HeadstartError as error:
            return {"error": str(error)}
        self._headstart_version: int = getattr(self, "_headstart_version", 0) + 1
        log.info("headstart: another head drafts from now on, of %s", folder)
        return {"tensors": count, "head_version": self._headstart_version}

    def _headstart_swap(self, folder: str) -> int:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        draft = draft_of(self.model_runner)
        config = self.vllm_config.speculative_config.draft_model_config
        prepared = getattr(self, "_headstart_head", None)
        self._headstart_head = None
        if prepared is None or prepared.folder != folder:
            prepared = Prepared(folder)
        tensors = prepared.tensors()
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(draft)
            try:
                draft.load_weights(iter(tensors.items()))
            finally:
                finalize_layerwise_reload(draft, config)
        if hasattr(draft, "headstart_refill"):
            draft.headstart_refill()  # a head may have an LM head of its own
        return len(tensors)


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
        """All of them, waited for; what reading them raised is raised here."""
        self._thread.join()
        if self._error is not None:
            raise self._error
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
