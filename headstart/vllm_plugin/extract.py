"""Runs inside vLLM's environment: the trunk's states of given texts, by `extract_hidden_states`.

python -m headstart.vllm_plugin.extract JOB.json

The job names model, folder to write to, arguments for vLLM's LLM, and records (name, ids, tokens of
the prompt). A file for each appears whole in the folder (collected.py), with the states before the
last norm. vLLM drafts nothing meanwhile, so the model needs no head.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headstart.documents import parse_json
from headstart.errors import DataError
from headstart.files import read_plain

_AT_ONCE = 256  # records that vLLM is given together
# vLLM writes states in the step behind a text, which an engine in this process does not make when
# it has nothing else to do: it would be waited for without end.
_OWN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
_WRITING_SECONDS = 600.0  # that one file may take


def settings(job: dict[str, Any], num_layers: int, folder: Path) -> dict[str, Any]:
    """Arguments of vLLM's LLM."""
    # What follows layer N is called N + 1 there; behind the last one comes the norm.
    layers = {"eagle_aux_hidden_state_layer_ids": [num_layers]}
    return {
        "model": job["model"], "skip_tokenizer_init": True,
        "enable_prefix_caching": False,  # of a prefix that is not computed there are no states
        "max_model_len": max(len(record["ids"]) for record in job["records"]) + 8,
        **job["arguments"],
        "speculative_config": {
            "method": "extract_hidden_states", "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": layers},
        },
        "kv_transfer_config": {
            "kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        },
    }  # fmt: skip


def num_layers_of(model: Path) -> int:
    config = parse_json(read_plain(model / "config.json"))
    found = config.get("text_config", config).get("num_hidden_layers")
    if not isinstance(found, int):
        raise DataError(f"{model}/config.json does not say num_hidden_layers; add it.")
    return found


def main() -> None:
    import tempfile

    import torch

    from headstart.vllm_plugin.collected import Collected, write

    os.environ.update(_OWN_PROCESS)
    job = parse_json(read_plain(Path(sys.argv[1]), 1 << 34))
    out = Path(job["folder"])
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".extracted-", dir=out) as place:
        given = settings(job, num_layers_of(Path(job["model"])), Path(place))
        for record, states in _extracted(given, job["records"]):
            ids = torch.tensor(record["ids"], dtype=torch.int32)
            found = Collected(ids, states, record["num_prompt"], "before_final_norm")
            write(out, record["name"], found)


def _extracted(given: dict[str, Any], records: list[Any]) -> Iterator[tuple[Any, Any]]:
    from vllm import LLM, SamplingParams

    llm = LLM(**given)
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    for start in range(0, len(records), _AT_ONCE):
        part = records[start : start + _AT_ONCE]
        prompts = [{"prompt_token_ids": record["ids"]} for record in part]
        for record, output in zip(part, llm.generate(prompts, params, use_tqdm=False), strict=True):
            path = Path((output.kv_transfer_params or {})["hidden_states_path"])
            tensors = _load(path)
            path.unlink(missing_ok=True)
            if tensors["token_ids"].tolist()[: len(record["ids"])] != record["ids"]:
                raise DataError(f"vLLM wrote states of another text than {record['name']}.")
            states = tensors["hidden_states"]
            yield record, states.reshape(len(states), -1)[: len(record["ids"])].contiguous()


def _load(path: Path) -> dict[str, Any]:
    """Some releases write in a thread, and have a function that waits for it."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as own

    wait = getattr(own, "load_hidden_states", None)
    if wait is not None:
        until_written(path)
        found: dict[str, Any] = wait(str(path))
        return found
    from safetensors.torch import load_file

    stored: dict[str, Any] = load_file(path)
    return stored


def until_written(path: Path) -> None:
    """While vLLM writes a file it locks another one beside it."""
    import fcntl

    lock, until = Path(f"{path}.lock"), time.monotonic() + _WRITING_SECONDS
    if not lock.exists():
        return
    with lock.open() as opened:
        while True:
            try:
                fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise DataError(
                        f"vLLM has not written {path.name} within {_WRITING_SECONDS:.0f} s; see "
                        "whether its disk is full, or leave --states-from out."
                    ) from None
                time.sleep(0.01)
            else:
                return


if __name__ == "__main__":
    main()
