"""`headstart generate` and `headstart calibrate` from the command line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.commands import headstart
from typer.testing import CliRunner

from headstart.calibrate.agreement import walk
from headstart.calibrate.calibrated import agreement_of
from headstart.checkpoint.hub import named_models
from headstart.checkpoint.reader import Checkpoint
from headstart.cli.main import app, main
from headstart.engine.engine import Engine
from headstart.errors import ConfigError
from headstart.sampling.params import SamplingParams

SHAPE = "layers=2,hidden=128,intermediate=128,heads=4,kv_heads=2,vocab=64"


def generated(*arguments: str, **options: str) -> Any:
    """`headstart generate` in this process: starting another takes longer than the answer."""
    result = CliRunner().invoke(app, ["generate", *arguments], **options)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "model"
    result = headstart(
        "calibrate", "--shape", SHAPE, "--acceptance", "0.7", "--dtype", "F32", "--out", str(out)
    )
    assert result.returncode == 0, result.stderr
    return out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--top-p", "2"], "error: --top-p is 2.0; give a number above 0, up to 1.\n"),
        (["--memory-fraction=2"], "error: --memory-fraction is 2.0; give a number above 0, up "),
        (["--kv-bytes", "0"], "error: --kv-bytes is 0; give a whole number of at least 1.\n"),
        (["--speculate", "many"], "error: --speculate is 'many'; give auto, context or a number"),
    ],
)
def test_a_bad_value_is_called_by_the_flag_that_was_typed(words: list[str], said: str) -> None:
    result = headstart("generate", "nowhere", "t3", *words)
    assert result.returncode == 2 and result.stderr.startswith(said)


def test_a_head_may_be_given_by_a_name_of_ours(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: `demo` was the name of a model, and no name of a head."""
    monkeypatch.setitem(named_models, "ours", lambda: made)
    asked = ("t3", "--head", "ours", "--max-tokens", "3", "--temperature", "0")
    result = headstart("generate", str(made), *asked, cwd=tmp_path)
    assert result.returncode == 0 and "3 tokens in" in result.stderr


def test_a_head_alone_is_no_model(made: Path, tmp_path: Path) -> None:
    exported = headstart("export", str(made), "--out", str(tmp_path / "head"))
    assert exported.returncode == 0, exported.stderr
    result = headstart("generate", str(tmp_path / "head"), "t3")
    assert "Give its model, and this folder with --head." in result.stderr


def test_comparing_reports_both_speeds_and_identical_texts(made: Path) -> None:
    result = headstart(
        "generate", str(made), "t3 t4 t5", "--compare", "--temperature", "0", "--max-tokens", "40",
        "--ignore-eos", "--json",
    )  # fmt: skip
    report = json.loads(result.stdout)
    assert report["equal"] is True
    assert report["num_tokens"] == 40
    assert report["plain_tokens_per_second"] > 0
    assert 1 < report["acceptance_length"] < 4
    assert "K/V blocks" in result.stderr


def test_a_prompt_may_come_from_stdin(made: Path) -> None:
    options = ("--json", "--temperature", "0", "--max-tokens", "4", "--ignore-eos")
    given = json.loads(generated(str(made), "t3 t4\nt5", *options).stdout)
    piped = json.loads(generated(str(made), "-", *options, input="t3 t4\nt5\n").stdout)
    assert piped["token_ids"] == given["token_ids"]
    with pytest.raises(ConfigError, match="stdin is empty; pipe a text"):
        CliRunner().invoke(app, ["generate", str(made), "-"], input="\n", catch_exceptions=False)


def test_the_same_seed_gives_the_same_text_whatever_is_drafted(made: Path) -> None:
    options = ("--seed", "5", "--max-tokens", "24", "--ignore-eos", "--temperature", "0.9")
    texts = []
    for drafts in ("0", "auto"):
        result = generated(str(made), "t9", "--json", "--speculate", drafts, *options)
        texts.append(json.loads(result.stdout)["token_ids"])
    assert texts[0] == texts[1] and len(texts[0]) == 24


def test_what_was_copied_from_the_context_is_said(made: Path) -> None:
    """The model writes a cycle of tokens: what came before comes again."""
    options = ("--temperature", "0", "--max-tokens", "40", "--ignore-eos")
    before = json.loads(generated(str(made), "t3 t4 t5", "--json", *options).stdout)["text"]
    prompt = f"t3 t4 t5 {before} t3 t4 t5"
    plain = json.loads(generated(str(made), prompt, "--json", "--speculate", "0", *options).stdout)
    copying = (str(made), prompt, "--speculate", "context", *options)
    found = json.loads(generated(*copying, "--json").stdout)
    assert found["token_ids"] == plain["token_ids"]
    assert found["copied_tokens"] == found["origins"].count("copied") > 0
    assert plain["copied_tokens"] == 0
    said = generated(*copying).stderr
    assert re.search(r"acceptance length \d+\.\d+, \d+ of them copied from the context", said)
    assert "copied" not in generated(str(made), prompt, "--speculate", "0", *options).stderr
    compared = generated(*copying, "--compare").stdout
    assert re.search(r"^copied +\d+ tokens, from the context$", compared, re.MULTILINE)
    assert "identical (40 tokens)" in compared


def test_a_calibrated_checkpoint_accepts_exactly_what_its_cycle_predicts(made: Path) -> None:
    engine = Engine(made, speculate=3, kv_bytes=1 << 22, dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    (result,) = engine.generate([[7, 8, 9]], params)
    drafted, accepted = walk(agreement_of(made), 9, 90, 3)
    counted = result.stats.acceptance
    assert (counted.drafted, counted.accepted) == (drafted, accepted)
    assert 0 < accepted[2] < accepted[0] < drafted[0]


def test_a_shape_by_numbers_has_those_numbers(made: Path) -> None:
    fields = Checkpoint.open(made).config.fields
    assert (fields["num_hidden_layers"], fields["hidden_size"], fields["vocab_size"]) == (
        2,
        128,
        64,
    )


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("--shape", "nonsense", "--acceptance", "0.5"), "no shape is called 'nonsense'"),
        (("--shape", "qwen3-8", "--acceptance", "0.5"), "(did you mean qwen3-8b?)"),
        (("--shape", "layers=2", "--acceptance", "0.5"), "--shape lacks"),
        (("--shape", SHAPE, "--acceptance", "2"), "--acceptance is 2"),
        (("--shape", SHAPE, "--acceptance", "0.5", "--active", "99"), "--active is 99"),
    ],
    ids=["unknown name", "near name", "missing numbers", "rate above one", "too many tokens"],
)
def test_a_bad_calibration_is_refused_in_one_line(
    arguments: tuple[str, ...], found: str, tmp_path: Path
) -> None:
    result = headstart("calibrate", *arguments, "--out", str(tmp_path / "x"))
    assert result.returncode != 0
    assert found in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("--compare",), "--compare was given without a prompt"),
        (("--json",), "--json was given without a prompt"),
        (("t3", "--compare", "--speculate", "0"), "--compare with --speculate 0 has nothing"),
        (("t3", "--head", "/nope", "--speculate", "0"), "a head was given with speculate 0"),
        (("t3", "--device", "foo"), "device is 'foo'; give auto, cpu or cuda"),
        (("t3", "--threads", "0"), "threads is 0; give"),
        (("t3", "--weights", "int8", "--exact"), "exact and weights int8 were both given"),
        (("t3", "--kv-bytes", "0"), "--kv-bytes is 0; give"),
        (("t3", "--max-model-len", "99999999"), "--max-model-len is 99999999; the model was made"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_misuse_is_one_line_and_exit_code_two(
    made: Path,
    arguments: tuple[str, ...],
    found: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("signal.signal", lambda *handler: None)
    monkeypatch.setattr("sys.argv", ["headstart", "generate", str(made), *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert (ended.value.code, len(said.splitlines())) == (2, 1), said
    assert found in said


def test_a_chat_on_a_model_without_template_says_so_and_goes_on(made: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(made, bare, ignore=shutil.ignore_patterns("chat_template.jinja"))
    result = generated(str(bare), "--no-prefix-caching", input="t3 t4\nt5\n")
    assert result.stderr.count("has no chat template; give text or token ids") == 2


def test_an_answer_that_finds_no_more_memory_says_so(made: Path) -> None:
    """A server would refuse to promise it; here it goes as far as it can."""
    options = ("--speculate", "0", "--ignore-eos", "--block-size", "4", "--kv-bytes", "20000")
    result = generated(str(made), "t9", "--json", "--max-tokens", "400", *options)
    found = len(json.loads(result.stdout)["token_ids"])
    assert f"note: ended after {found} of 400 tokens" in result.stderr and found < 400
    assert "ended after" not in generated(str(made), "t9", "--max-tokens", "4", *options).stderr


def test_exact_is_a_flag(made: Path) -> None:
    options = ("--seed", "5", "--max-tokens", "24", "--ignore-eos", "--temperature", "0.9")
    result = generated(str(made), "t9", "--json", "--exact", *options)
    engine = Engine(made, speculate=0, kv_bytes=1 << 22, exact=True)
    params = engine.prompts.default_params(seed=5, max_tokens=24, ignore_eos=True, temperature=0.9)
    (expected,) = engine.generate(["t9"], params)
    assert json.loads(result.stdout)["token_ids"] == expected.outputs[0].token_ids
