"""Another head into a running vLLM: `--worker-extension-cls headstart.vllm_plugin.swap.HeadSwap`.

vLLM mixes the class into its workers, and `collective_rpc` reaches its method between two steps, so
no answer is interrupted. The head comes from a folder that every worker can read, under the names
that the running draft was loaded from, and goes into the tensors that are there (vLLM's layerwise
reload): captured graphs stay valid. Embedding and LM head stay the target's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headstart.errors import CheckpointError, ConfigError

METHOD = "headstart_swap"


class HeadSwap:
    """What is added to a worker."""

    vllm_config: Any
    model_runner: Any

    def headstart_swap(self, folder: str) -> int:
        """Take the head in `folder`; how many tensors were loaded."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        draft = draft_of(self.model_runner)
        config = self.vllm_config.speculative_config.draft_model_config
        names = list(tensor_names(Path(folder)))
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(draft)
            try:
                draft.load_weights(stored_tensors(Path(folder)))
            finally:
                finalize_layerwise_reload(draft, config)
        return len(names)


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


def tensor_names(folder: Path) -> Iterator[str]:
    from safetensors import safe_open

    for file in _files(folder):
        with safe_open(file, framework="pt") as opened:
            yield from opened.keys()


def stored_tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Every tensor of a folder, one after the other."""
    from safetensors import safe_open

    for file in _files(folder):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)


def _files(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise CheckpointError(
            f"{folder} holds no .safetensors file on this machine; give a head's folder that every "
            "worker of vLLM's can read."
        )
    return found
