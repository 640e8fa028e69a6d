"""A result's folder: bench.json, report.html, and where they came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headstart.bench.document import PAGE_NAME, RESULT_NAME
from headstart.bench.page import make_page
from headstart.checkpoint.atomic import building, check_target, write_failed
from headstart.checkpoint.provenance import PROVENANCE_NAME, provenance


def check_out(out: Path | None, *, overwrite: bool) -> None:
    """Refuse at once what could not be written to, not after an hour of measuring."""
    if out is not None:
        check_target(out, overwrite=overwrite)


def write_folder(document: dict[str, Any], out: Path, *, overwrite: bool) -> None:
    """All of it or nothing."""
    check_target(out, overwrite=overwrite)
    with building(out, overwrite=overwrite) as folder:
        try:
            text = json.dumps(document, indent=1, allow_nan=False)
            (folder / RESULT_NAME).write_text(text + "\n")
            origin = provenance("bench", (), model=document["model"])
            (folder / PROVENANCE_NAME).write_text(json.dumps(origin, indent=2) + "\n")
        except OSError as error:
            raise write_failed(out, error) from error
        make_page(document).write(folder / PAGE_NAME)
