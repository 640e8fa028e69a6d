"""Commands that run a model take GGUF files: from answers to scores, with a head beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import tiny_gguf
from support.commands import headstart
from support.gguf_models import random_bits, write_head
from support.gguf_models import write_trunk as write_bare_trunk
from support.gguf_trunks import write_trunk
from support.head_edits import graft
from support.tiny_fixture import Tiny

from headstart.bench.facts import facts_of_folder
from headstart.checkpoint.writer import write_folder
from headstart.demo.llama import plan_llama
from headstart.heads.export import plan_export
from headstart.heads.formats import open_head, open_target
from headstart.heads.formats.gguf.archs import arch_named
from headstart.heads.stitch import plan_stitch


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Llama with a tokenizer, and a head for it in a folder of its own."""
    folder = tmp_path_factory.mktemp("gguf")
    file = folder / "tiny.gguf"
    tiny_gguf.write_gguf(file)
    write_folder(plan_llama(file), folder / "llama", provenance={})
    grafted = graft(folder / "llama", folder / "grafted")
    plan_export(open_head(grafted), "headstart").write(folder / "head")
    return file, folder / "head"


def test_a_file_answers_is_distilled_and_scored(made: tuple[Path, Path], tmp_path: Path) -> None:
    file, head = map(str, made)
    common = ("--device", "cpu", "--dtype", "float32")
    said = headstart("generate", file, "the", "--head", head, "--max-tokens", "6", "--temperature",
                     "0", "--ignore-eos", "--kernels", "off", *common)  # fmt: skip
    assert said.returncode == 0, said.stderr
    assert "(GGUF Q4_1): no backend computes with this format" in said.stderr
    assert "tokens in" in said.stderr
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "ab"}\n{"prompt": "the 12"}\n')
    data = str(tmp_path / "data")
    run = headstart("distill", file, "--prompts", str(tmp_path / "prompts.jsonl"), "--out", data,
                    "--max-tokens", "8", "--heldout", "1", "--speculate", "0", *common)  # fmt: skip
    assert run.returncode == 0, run.stderr
    scored = headstart("score", file, "--data", data, "--head", head, "--bandwidth", "10",
                       "--max-drafts", "2", "--json", *common)  # fmt: skip
    assert scored.returncode == 0, scored.stderr
    assert json.loads(scored.stdout)["model"] == file
    other = headstart("score", str(Path(file).parent / "llama"), "--data", data, "--head", head)
    assert other.returncode == 1 and "was written by the trunk" in other.stderr


def test_lengths_and_chats_of_a_benchmark_are_those_of_the_file(made: tuple[Path, Path]) -> None:
    facts = facts_of_folder(made[0], None)
    assert facts.api == "chat" and facts.count_answers is not None
    assert facts.count_answers("the the") == 2 and facts.vocabulary.size == tiny_gguf.VOCAB


def test_the_contract_of_a_head_is_probed_in_a_file(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("glm4_moe")
    trunk = write_trunk(model, "glm4_moe", tmp_path / "trunk")
    plan_stitch(open_head(model), open_target(trunk)).write(tmp_path / "whole")
    [file] = (tmp_path / "whole").glob("*.gguf")
    found = headstart("inspect", str(file), "--probe", "--json", "--device", "cpu")
    assert found.returncode == 0, found.stderr
    expected = headstart("inspect", str(model), "--probe", "--json", "--device", "cpu")
    reports = [json.loads(each.stdout)["probe"] for each in (found, expected)]
    assert reports[0] == reports[1]


def test_the_demos_file_is_not_told_to_be_a_head_of_llama_cpp(made: tuple[Path, Path]) -> None:
    refused = headstart("export", str(made[0].parent / "grafted"), "--format", "gguf", "--out",
                        str(made[0].parent / "x"))  # fmt: skip
    assert refused.returncode == 1 and "llama.cpp does not know MiMo-7B's head" in refused.stderr


def test_torch_is_not_imported_to_put_a_head_into_a_file(tmp_path: Path) -> None:
    """It takes longer than copying a gigabyte, and four times the memory of all the rest."""
    arch = arch_named("qwen35")
    assert arch is not None
    head = write_head(arch, tmp_path / "hf", random_bits())
    trunk = write_bare_trunk(arch, tmp_path / "trunk")
    script = (
        "import sys; from headstart.heads.formats import open_head, open_target\n"
        "from headstart.heads.stitch import plan_stitch; from pathlib import Path\n"
        "plan_stitch(open_head(sys.argv[1]), open_target(sys.argv[2])).write(Path(sys.argv[3]))\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    words = [sys.executable, "-c", script, str(head), str(trunk), str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr
