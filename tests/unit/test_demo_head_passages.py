"""What the demo's recipe collects from packages, and that held-out passages stay held out."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest
from support.demo_recipe import RECIPE, recipe_modules

PROSE = (
    "The harbour of the town was built in the last century, and it is still used by boats that "
    "carry salt and timber to the islands. Visitors like to walk along the wall in the evening."
)
FRENCH = (
    "Le port de la ville est utilisé par les bateaux qui transportent le sel et le bois vers les "
    "îles, et les visiteurs se promènent sur le quai dans la soirée avec leurs enfants. "
)


@pytest.fixture(scope="module")
def recipe() -> Iterator[SimpleNamespace]:
    with recipe_modules("passages", "kinds", "leaks", "collect") as modules:
        yield modules


def words(start: int, count: int) -> str:
    return " ".join(f"w{i}" for i in range(start, start + count))


def passage(recipe: SimpleNamespace, text: str, package: str = "a", document: str = "") -> Any:
    return recipe.passages.Passage(text, "en", False, package, document)


def of_split(recipe: SimpleNamespace, text: str, split: str) -> Any:
    """A passage of this text that belongs there; a last word decides it."""
    found = (passage(recipe, f"{text} z{i}") for i in range(1000))
    return next(p for p in found if recipe.kinds.split_of(p.split_key) == split)


def test_a_function_within_a_function_is_no_passage_of_its_own(recipe: SimpleNamespace) -> None:
    """Regression: both were passages, and could fall on either side of the split."""
    inner = "\n".join(f"            total += values[{i}] * weights[{i}]" for i in range(8))
    source = (
        "class A:\n    def outer(self):\n        def inner(values, weights, total):\n"
        f"{inner}\n            return total\n        return inner\n"
    )
    (found,) = recipe.passages.passages_of("a.py", source, "pkg")
    assert found.text.startswith("def outer(self)") and "    def inner(" in found.text


PACKAGES = ("faq", "faq-fr", "guide-en", "guide-pt-br", "pages", "policy", "alone-en")


@pytest.mark.parametrize(
    ("paths", "package", "document"),
    [
        ("doc/faq/a.en.html doc/faq/b.txt", "faq", "faq"),
        ("doc/faq/fr/a.fr.html", "faq-fr", "faq"),
        ("g/html/x.html", "guide-en", "guide"),
        ("g/html/x.html", "guide-pt-br", "guide"),
        ("help/C/top/a.page help/fr/top/a.page help/pt_BR/top/a.page help/ca@valencia/top/a.page",
         "pages", "pages/help/top/a.page"),
        ("doc/ch1.en.html doc/ch1.de.html", "alone-en", "alone/doc/ch1.html"),
        ("doc/policy/ch-scope.html doc/policy/README", "policy", ""),
    ],
)  # fmt: skip
def test_a_text_and_its_translations_have_one_name(
    recipe: SimpleNamespace, paths: str, package: str, document: str
) -> None:
    for path in paths.split():
        found = recipe.passages.document_of(PurePosixPath(path), package, PACKAGES)
        assert found == document, path


def test_translations_are_on_one_side(recipe: SimpleNamespace) -> None:
    splits = set()
    for i in range(200):
        english = recipe.passages.Passage(f"{PROSE} {i}", "en", False, "faq", f"faq-{i}")
        french = recipe.passages.Passage(f"{FRENCH} {i}", "fr", False, "faq-fr", f"faq-{i}")
        both = {task.split for task in recipe.kinds.tasks([english, french])}
        assert len(both) == 1
        splits |= both
    assert splits == {"test", "validation", "train"}


def test_training_passages_that_share_text_with_held_out_ones_are_dropped(
    recipe: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    test = of_split(recipe, words(0, 100), "test")
    validation = of_split(recipe, words(1000, 100), "validation")
    leaks = [
        of_split(recipe, f"{words(60, 40)} {words(5000, 50)}", "train"),  # 33 of its 84 runs
        of_split(recipe, f"{words(1000, 100)} {words(6000, 900)}", "train"),  # holds one
        of_split(recipe, words(30, 20), "train"),  # is held by one
    ]
    others = [
        of_split(recipe, f"{words(78, 22)} {words(7000, 78)}", "train"),  # 15 of 94 runs
        of_split(recipe, words(9000, 100), "train"),
        of_split(recipe, f"{words(0, 7)} {words(8000, 20)} {words(0, 7)}", "train"),  # no whole run
    ]
    found = recipe.leaks.without_leaks(
        [leaks[0], test, others[0], *leaks[1:], validation, *others[1:]]
    )
    assert found == [test, others[0], validation, *others[1:]]
    said = capsys.readouterr().out
    assert "2 held out; 3 of 6 others shared more than 20% of their runs of 8 words" in said


def test_licences_are_read_as_packages_state_them(recipe: SimpleNamespace, tmp_path: Path) -> None:
    stated = tmp_path / "usr/share/doc/one/copyright"
    stated.parent.mkdir(parents=True)
    names = ["GPL-2+", "GFDL-1.3", "MIT", "Expat", "Zlib", "ISC"]
    stated.write_text("\n".join(f"Files: {i}\nLicense: {own}\n" for i, own in enumerate(names)))
    assert recipe.collect.licence_of("one", tmp_path) == ", ".join(names), "all of them"
    stated.write_text("You may copy it under the GNU General Public License.\n")
    assert recipe.collect.licence_of("one", tmp_path) == "GPL"
    stated.write_text("It has completions for zsh. Do with it what you like.\n")
    assert recipe.collect.licence_of("one", tmp_path) == "see its copyright file"
    assert recipe.collect.licence_of("zsh-doc", tmp_path, "Zsh") == "Zsh", "it is in zsh-common"
    (tmp_path / "two-1.dist-info").mkdir()
    stated.unlink()
    (tmp_path / "two-1.dist-info/METADATA").write_text("Name: two\nLicense-Expression: MIT\n")
    assert recipe.collect.licence_of("two", tmp_path) == "MIT"


def test_every_package_names_version_licence_and_digest() -> None:
    entries = json.loads((RECIPE / "packages.json").read_text())
    assert len({(e["from"], e["name"]) for e in entries}) == len(entries) > 80
    for entry in entries:
        assert set(entry) == {"from", "name", "version", "sha256", "licence", "passages"}
        assert entry["from"] in ("debian", "pypi") and len(entry["sha256"]) == 64
        assert entry["version"] and entry["licence"] not in ("", "see its copyright file")


def test_files_that_are_no_use_are_left_out(recipe: SimpleNamespace, tmp_path: Path) -> None:
    packed = gzip.compress(f"{PROSE} Packed.".encode())
    files = {
        "doc/good.txt": f"{PROSE} Good.".encode(), "doc/good2.txt.gz": packed,
        "doc/cut.txt.gz": packed[: len(packed) // 2],  # EOFError
        "doc/bent.txt.gz": packed[:20] + bytes(40) + packed[60:],  # zlib.error
        "doc/named.txt.gz": b"no gzip at all",  # OSError
        "tests/data.txt": f"{PROSE} Test.".encode(),
        "pkg/tests/more.txt": f"{PROSE} More.".encode(),
        "manual/fr/page.html": f"<p>{FRENCH}{FRENCH}</p>".encode(),
        "manual/fr/manual.fr.txt": f"{FRENCH}{FRENCH}".encode(),  # all pages once more
    }  # fmt: skip
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    found = list(recipe.collect._read(tmp_path, "pkg", ["pkg"]))
    assert [p.text.split()[-1] for p in found] == ["Good.", "Packed.", "enfants."]
    assert [p.document for p in found] == ["", "", "pkg/manual/page.html"]


def test_passages_that_are_alike_are_kept_once(recipe: SimpleNamespace, tmp_path: Path) -> None:
    make = recipe.passages.Passage
    found = [
        make(PROSE, "en", False, "a"), make(PROSE.replace("salt", "coal"), "en", False, "b"),
        make(FRENCH, "fr", False, "a", "a/page"), make(PROSE, "en", False, "c"),
    ]  # fmt: skip
    kept = recipe.collect.without_twins(found)
    assert [p.language for p in kept] == ["en", "fr"]
    recipe.collect.write_passages(tmp_path / "p.jsonl.xz", kept)
    assert recipe.collect.read_passages(tmp_path / "p.jsonl.xz") == kept


def test_passages_of_an_older_collection_are_refused(
    recipe: SimpleNamespace, tmp_path: Path
) -> None:
    line = {"text": PROSE, "language": "en", "is_code": False, "package": "a"}
    with lzma.open(tmp_path / "old.jsonl.xz", "wt") as file:
        file.write(json.dumps(line) + "\n")
    with pytest.raises(SystemExit, match=r"older collect\.py.* collect the passages again"):
        recipe.collect.read_passages(tmp_path / "old.jsonl.xz")
