"""Put the pages together for the site: all markdown of the repository, and every file it links to.

    python scripts/docs_site.py            fill build/docs/source; `make docs` runs mkdocs on it

The pages keep their places, so that links in them lead to the same files as in the repository. A
link to a folder leads to its README.md, or to a list of its pages that is made here. A link that
leads nowhere stays as it is, and mkdocs --strict fails on it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "build/docs/source"
LINK = re.compile(r"(\]\(|(?:src|srcset)=\")([^)#:\"\s]+)")
FENCED = re.compile(r"(?ms)^```.*?^```$")


def pages() -> list[Path]:
    """Markdown that git knows, or would; relative to the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(line) for line in found.stdout.splitlines() if (ROOT / line).exists()]


def put_together(source: Path = SOURCE) -> None:
    shutil.rmtree(source, ignore_errors=True)
    for page in pages():
        place = source / page
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(_linked(page, source))


def _linked(page: Path, source: Path) -> str:
    """The page's text with folders replaced by pages; what it links to is copied."""
    text = (ROOT / page).read_text()

    def led(found: re.Match[str]) -> str:
        target = (ROOT / page).parent / found[2]
        if target.is_dir():
            return f"{found[1]}{found[2].rstrip('/')}/{_page_of(target, source)}"
        if target.is_file() and target.suffix != ".md":
            place = source / target.resolve().relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(target, place)
        return found[0]

    return LINK.sub(led, text)


def _page_of(folder: Path, source: Path) -> str:
    """The page that stands for a folder: its own, or a list of what is in it."""
    if (folder / "README.md").exists():
        return "README.md"
    place = source / folder.resolve().relative_to(ROOT) / "index.md"
    place.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"- [{_title(page)}]({page.name})" for page in sorted(folder.glob("*.md"))]
    place.write_text(f"# {folder.resolve().name.capitalize()}\n\n" + "\n".join(lines) + "\n")
    return "index.md"


def _title(page: Path) -> str:
    found = re.search(r"^# (.+)$", page.read_text(), re.MULTILINE)
    return found[1] if found else page.stem


if __name__ == "__main__":
    put_together()
