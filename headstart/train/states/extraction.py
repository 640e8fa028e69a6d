"""Lets vLLM compute the states of a dataset's records, in a process and environment of its own.

HEADSTART_VLLM_PYTHON names the interpreter that has vLLM (else this one), and HEADSTART_VLLM_ARGS
further arguments of vLLM's LLM as JSON, such as {"tensor_parallel_size": 8}.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import headstart
from headstart.data.records import Record
from headstart.errors import ConfigError, DataError, some
from headstart.processes import python_command
from headstart.train.states.elsewhere import extracted_name, missing

PYTHON, ARGUMENTS = "HEADSTART_VLLM_PYTHON", "HEADSTART_VLLM_ARGS"
_PROGRAM = "headstart.vllm_plugin.extract"
_SAID = 600  # characters of its log that a failure shows
_CAUSE = re.compile(r"\b\w*(?:Error|Exception): .+")
_NO_CAUSE = ("EngineDeadError", "Engine core initialization failed")  # of the process that asked


def extract(
    model: Path, trunk: str, records: Sequence[Record], folder: Path, say: Callable[[str], None]
) -> None:
    """Fill `folder` with the states of records that it lacks; DataError says why it could not.

    `trunk` is the digest of the model's trunk.
    """
    left = missing(folder, records, trunk)
    if not left:
        return
    say(f"vLLM computes the states of {len(left)} records, into {folder}")
    job = {
        "model": str(model.resolve()), "folder": str(folder.resolve()), "arguments": _arguments(),
        "records": [
            {"name": extracted_name(r, trunk), "ids": r.ids.tolist(), "num_prompt": r.num_prompt}
            for r in left
        ],
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="headstart-extract-") as place:
        path = Path(place) / "job.json"
        path.write_text(json.dumps(job))
        python = os.environ.get(PYTHON)
        environment = {**os.environ, "PYTHONPATH": _path(python, Path(place))}
        try:
            done = subprocess.run(
                python_command(_PROGRAM, str(path), python=python), cwd=place,
                capture_output=True, text=True, env=environment,
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(
                f"{PYTHON} is {python}, which does not run ({error.strerror}). Name the Python of "
                "vLLM's environment."
            ) from error
    lacking = [record.id for record in missing(folder, records, trunk)]
    if done.returncode or lacking:
        said = _last_words(done.stderr)
        raise DataError(
            f"vLLM did not give the states of {some(lacking) if lacking else 'all records'} (exit "
            f"{done.returncode}: {said}). What it gave is kept in {folder}; run again, or leave "
            "--states-from out."
        )


def _last_words(log: str) -> str:
    """The last error that a log names; its end where it names none.

    vLLM's own processes fail first, and the one that asked them says only that they did.
    """
    causes = [
        found[0] for found in _CAUSE.finditer(log) if not any(one in found[0] for one in _NO_CAUSE)
    ]
    return causes[-1][:_SAID] if causes else " ".join(log.strip()[-_SAID:].split())


def _arguments() -> dict[str, object]:
    text = os.environ.get(ARGUMENTS, "{}")
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{ARGUMENTS} is {text[:80]!r}; expected a JSON object.")
    return found


def _path(python: str | None, place: Path) -> str:
    """Another environment need not have Headstart installed, and gets no other package of ours."""
    given = os.environ.get("PYTHONPATH", "")
    if python is None:
        return given
    own = place / "packages"
    own.mkdir()
    (own / headstart.__name__).symlink_to(Path(headstart.__file__).resolve().parent)
    return os.pathsep.join(filter(None, [str(own), given]))
