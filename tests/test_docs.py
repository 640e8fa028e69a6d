"""The docs are true: README commands run, generated pages are current, links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_lines import lines_of, parse, spans_of, unknown_words
from support.commands import headstart

from headstart.calibrate.tiny import write_tiny
from headstart.cli.commands import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
FOLDERS = ("docs", "deploy", "examples", "recipes", "scripts", "headstart")
FOUND = [*ROOT.glob("*.md"), *(path for name in FOLDERS for path in ROOT.glob(f"{name}/**/*.md"))]
PAGES = sorted(path for path in FOUND if path.name != "card.md")  # a template of a page
HISTORY = ("CHANGELOG.md", "lab-log.md")  # they may name what is gone
MAX_LINE = 120
RUN_ELSEWHERE = ("serve", "bench")  # one does not end, the other takes long: their own tests do


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints that the README's examples name, small ones."""
    folder = tmp_path_factory.mktemp("readme")
    write_tiny("glm4_moe", folder / "GLM-4.5-Air")
    write_tiny("glm4_moe", folder / "air-tuned", with_head=False, seed=1)
    write_tiny("llama", folder / "Llama-3.2-1B")
    return folder


def test_the_readme_has_at_most_200_lines() -> None:
    assert len(README.splitlines()) <= 200


def test_every_command_in_the_readme_runs(workplace: Path) -> None:
    commands = lines_of(README)
    assert len(commands) >= 9
    for command in commands:
        _, *words = shlex.split(command, comments=True)
        if words[0] in RUN_ELSEWHERE or "demo" in words:
            parse(command)
            continue
        result = headstart(*words, cwd=workplace)
        assert result.returncode == 0, f"{command}\n{result.stderr}"


def test_the_python_in_the_readme_runs_after_the_commands(workplace: Path) -> None:
    (code,) = blocks("python")
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=workplace, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "complete" in result.stdout
    assert (workplace / "air-again" / "config.json").is_file()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_in_the_docs_can_be_parsed(page: Path) -> None:
    if page.name not in HISTORY:
        for line in lines_of(page.read_text()):
            assert parse(line) in line


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_within_sentences_have_options_that_exist(page: Path) -> None:
    if page.name not in HISTORY:
        for span in spans_of(page.read_text()):
            assert unknown_words(span) == [], span


def test_a_wrong_option_within_a_sentence_would_be_found() -> None:
    page = "Say `headstart export\n  m --gone x`, `headstart bench run --url U` or `headstart no`."
    gone, fine, no = spans_of(page)
    assert unknown_words(gone) == ["--gone"]
    assert unknown_words(fine) == [] and unknown_words(no) == ["no"]


def test_a_command_with_an_option_that_is_gone_would_be_found() -> None:
    page = "```bash\nheadstart export m --out o   # fine\nheadstart export m \\\n  --gone\n```"
    fine, wrong = lines_of(page)
    parse(fine)
    with pytest.raises(Exception, match="--gone"):
        parse(wrong)


def test_generated_pages_are_current() -> None:
    script = ROOT / "scripts" / "generate_docs.py"
    result = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    named = re.findall(r"(?m)^\[[^\]]+\]: ([^#:\s]+)$", text)
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text) + named:
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_that_the_docs_name_exist(page: Path) -> None:
    named = re.findall(
        r"`((?:headstart|scripts|tools|tests|benchmarks)/[\w/.-]+\.\w+)`", page.read_text()
    )
    for name in named:
        assert (ROOT / name).exists(), f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_that_the_docs_name_exist(page: Path) -> None:
    """Those that are named from `headstart/`, or from one of its packages on."""
    packages = {path.name for path in (ROOT / "headstart").iterdir() if path.is_dir()}
    for name in re.findall(r"`(\w+(?:/\w+)+\.py)`", page.read_text()):
        if name.split("/")[0] in packages and page.name not in HISTORY:
            places = [ROOT / "headstart" / name, ROOT / "headstart/server" / name]
            assert any(place.exists() for place in places), f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_lines_are_not_too_long(page: Path) -> None:
    assert long_lines(page.read_text()) == []


def long_lines(text: str) -> list[str]:
    """Lines that are too long: of text, tables and code; a single long word cannot be broken."""
    long = [line for line in text.splitlines() if len(line) > MAX_LINE]
    words = [re.sub(r"^\s*(?:[-*]|\d+\.)\s", "", line).split() for line in long]
    return [line for line, own in zip(long, words, strict=True) if len(own) > 1]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_headings_stand_between_empty_lines(page: Path) -> None:
    assert crowded_headings(page.read_text()) == []


def crowded_headings(text: str) -> list[str]:
    """Headings with text right above or below; marks of generated parts are no text."""
    text = re.sub(r"(?ms)^```.*?^```$", "", text)
    return re.findall(r"(?m)(?<=\S\n)(?<!-->\n)#+ .*|^#+ .*(?=\n[^\n])", text)


def test_a_heading_below_a_line_of_text_would_be_found() -> None:
    text = "# a\n\ntext\n## b\n\ntext\n```\n# no heading\n```\n\n<!-- made -->\n## c\n\n## d\ntext"
    assert crowded_headings(text) == ["## b", "## d"]


def test_a_long_line_would_be_found() -> None:
    words, word = "word " * 30, "w" * 130
    wrong = [f"| {words}|", f"- {words}", words]
    assert long_lines("\n".join(["short", f"- {word}", "```", *wrong, "```"])) == wrong


def test_the_python_of_the_engine_page_runs(workplace: Path, quick_python: str) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/engine.md").read_text(), re.DOTALL)
    write_tiny("mimo", workplace / "model", dtype="F32")
    (workplace / "page.py").write_text(code)
    result = subprocess.run(
        [quick_python, "page.py"], cwd=workplace, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_only_commands_that_exist_are_named_to_users() -> None:
    named = r"headstart[ \n]+(\w+)(?=[ `\n])"
    verbs = {"train", "serve", "bench", "score", "vocab", "distill", "demo"} - set(COMMANDS)
    sources = [*PAGES, *(ROOT / "headstart").rglob("*.py")]
    for path in sources:
        wrong = verbs & set(re.findall(named, path.read_text().replace('"\n', "")))
        assert not wrong, f"{path.name} sends users to {wrong}"
