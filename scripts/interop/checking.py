"""What the checks beside other engines share: one after another, a failure ends only its own."""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

Check = Callable[[str, Path, dict[str, str]], Any]  # name, folder to work in, versions to fill


def check_all(
    names: Iterable[str],
    check: Check,
    failed: Callable[[str, str], Any],
    *,
    errors: tuple[type[Exception], ...],
    folder: Callable[[str], Path],
    out: Path | None,
) -> int:
    """Exit code; a result has `failures` and `seconds`. `failed` makes one of a name and an error;
    `out` gets all of them as JSON."""
    results, versions = [], dict[str, str]()
    for name in names:
        work = folder(name).resolve()
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        started = time.monotonic()
        try:
            result = check(name, work, versions)
        except errors as error:
            result = failed(name, str(error))
            print(f"FAILED {name}: {error}", flush=True)
        result.seconds = round(time.monotonic() - started)
        results.append(result)
    if out:
        document = {"versions": versions, "results": [asdict(result) for result in results]}
        out.write_text(json.dumps(document, indent=1) + "\n")
    failures = sum(len(result.failures) for result in results)
    print(f"{len(results)} checked, {failures} failures")
    return 1 if failures else 0


def interop_parser(doc: str | None, choices: Collection[str]) -> argparse.ArgumentParser:
    """Where environments and models lie, where the result goes, and what is checked."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    parser.add_argument("--envs", type=Path, default=Path(".interop"))
    parser.add_argument("--env", default="vllm", help="which environment below --envs")
    parser.add_argument("--work", type=Path, default=Path(".interop/work"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", choices=choices, default=[])
    return parser
