"""A head into a running vLLM, by our worker extension and the route that calls workers' methods.

vLLM has no route that takes a head's bytes: the head is written to a folder that its machine reads,
under the names that the running draft was loaded from, and the workers are told of it.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.writer import FolderPlan, split_shards, write_folder
from headstart.errors import ConfigError, ServerError
from headstart.families.registry import family
from headstart.heads.formats import format_named
from headstart.heads.formats.vllm import KEY, PLUGIN, STOCK, check_folder_name
from headstart.heads.head import Head, dequantize
from headstart.push.address import Address, Pushed, Report
from headstart.push.sent_head import SentHead
from headstart.vllm_plugin.architectures import DRAFT_CLASSES
from headstart.vllm_plugin.swap import DESCRIBE, EXTENSION, IS_PREPARED, PREPARE, SWAP
from headstart.vllm_plugin.versions import why_not

_ROUTE = "/collective_rpc"
_LOCAL = ("localhost", "127.0.0.1", "::1")
_PAUSE = 0.1  # seconds between two questions whether the head is read
_NEEDS = (
    f"Start it with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls {EXTENSION} (docs/vllm.md), "
    "or restart it with the head."
)


class VllmServer:
    """`vllm serve`."""

    name = "vllm"

    def recognises(self, server: Address) -> bool:
        return isinstance(server.ask("GET", "/version")[1].get("version"), str)

    def push(self, server: Address, head: Head, key: str | None, report: Report) -> Pushed:
        version = str(server.ask("GET", "/version")[1].get("version"))
        if reason := why_not(version):
            raise ServerError(
                f"{server.url} takes no head while it runs: {reason}. Restart it with the head."
            )
        asking = _Asking(server, version, key)
        [said, *_] = asking.call(DESCRIBE)
        if not isinstance(said, dict) or "architecture" not in said:
            raise ServerError(f"{server.url} has no draft that could take a head. {_NEEDS}")
        with _folder(server) as folder:
            tensors = named_as(head, said)
            write_folder(
                FolderPlan(split_shards(tensors)), folder,
                provenance={"operation": "push", "family": head.family.name}, overwrite=True,
                report=report,
            )  # fmt: skip
            asking.call(PREPARE, str(folder))
            ends = time.monotonic() + server.seconds
            while not all(one.get("is") for one in asking.call(IS_PREPARED, str(folder))):
                if time.monotonic() > ends:
                    raise ServerError(
                        f"{server.url} did not read the head within {server.seconds:g} s; it "
                        "drafts as before. Raise --timeout-seconds."
                    )
                time.sleep(_PAUSE)
            versions = [one["head_version"] for one in asking.call(SWAP, str(folder))]
        size = sum(source.num_bytes for source in tensors.values())
        return Pushed(self.name, max(versions), SentHead.of(head).digest, size)


class _Asking:
    """Calls of workers' methods; an answer from each worker."""

    def __init__(self, server: Address, version: str, key: str | None):
        self._server, self._version = server, version
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    def call(self, method: str, *args: str) -> list[dict[str, Any]]:
        body = json.dumps({"method": method, "args": list(args)}).encode()
        headers = {**self._headers, "Content-Length": str(len(body))}
        status, answer = self._server.ask("POST", _ROUTE, iter([body]), headers)
        if status == 401:
            raise ServerError(f"{self._server.url} wants its key; give it by --key-file.")
        found = answer.get("results")
        if status != 200 or not isinstance(found, list) or not found:
            raise ServerError(
                f"{self._server.url} (vLLM {self._version}) cannot be given a head: it answers "
                f"{method} with status {status}. {_NEEDS}"
            )
        errors = [one["error"] for one in found if isinstance(one, dict) and "error" in one]
        if errors:
            said = " ".join(str(errors[0]).split())[:400]
            raise ServerError(f"{self._server.url} does not take the head: {said}")
        return found


def named_as(head: Head, running: dict[str, Any]) -> dict[str, TensorSource]:
    """The head's tensors under the names that the running draft was loaded from."""
    if method := running.get("quantization"):
        raise ConfigError(
            f"vLLM runs its head quantised ({method}), and a head is pushed plain: its scales "
            "would have no values. Restart vLLM with the head in its model (headstart stitch)."
        )
    own = running.get("own")
    if own is not None:
        found = str(own.get("family") if isinstance(own, dict) else own)
        if found != head.family.name:
            raise ConfigError(
                f"the head is a {head.family.name} head, and vLLM drafts with a {found} head. Push "
                "a head that was made for its model."
            )
        plan = format_named("vllm").plan(head).plan
        [made] = plan.documents["config.json"]["architectures"]
        if made != (PLUGIN if running["architecture"] == PLUGIN else STOCK):
            raise ConfigError(
                f"vLLM drafts with {running['architecture']}, and this head is one for {made}. "
                f"Start vLLM with a folder of it ({KEY} in its config.json says for what it is)."
            )
        shards = plan.shards.values()
        return {name: source for shard in shards for name, source in shard.tensors.items()}
    _check_family(head, str(running["architecture"]))
    head = dequantize(head)
    naming = head.naming()
    return {head.family.keys.to_published(n, naming): source for n, source in head.tensors.items()}


def _check_family(head: Head, architecture: str) -> None:
    """ConfigError unless the class drafts with heads of this family, stored with their trunk."""
    names = DRAFT_CLASSES.get(architecture, ())
    inside = [name for name in names if "vllm" in family(name).served]
    if head.family.name not in inside:
        runs = f"for heads of {', '.join(inside)}" if inside else "which is not known here"
        raise ConfigError(
            f"the head is a {head.family.name} head, and vLLM drafts with {architecture}, {runs}. "
            "Push a head that was made for its model."
        )


@contextmanager
def _folder(server: Address) -> Iterator[Path]:
    """Where the head is written: on this machine for one that runs here, else where it was said."""
    host = urlsplit(server.url).hostname
    if server.folder is None and host not in _LOCAL:
        raise ConfigError(
            f"vLLM on {host} reads the head from a folder; give one by --folder that both machines "
            "have under the same name."
        )
    # Workers have another working directory, and may be another user's.
    place = None if server.folder is None else os.path.abspath(server.folder)
    with tempfile.TemporaryDirectory(prefix="headstart-push-", dir=place) as found:
        check_folder_name(found)
        os.chmod(found, 0o755)
        yield Path(found) / "head"
