"""A GGUF file becomes the checkpoint that it was made from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import load_file
from support import tiny_gguf

from headstart.checkpoint.gguf.header import read_gguf_header
from headstart.checkpoint.gguf.values import floats_of, regrouped
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.source import TensorSource, stored
from headstart.checkpoint.writer import write_folder
from headstart.demo.llama import plan_llama
from headstart.errors import BrokenFile, UnsupportedFamily


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, tiny_gguf.Array], Path]:
    """The file, the values that its checkpoint must hold, and the checkpoint."""
    folder = tmp_path_factory.mktemp("gguf")
    expected = tiny_gguf.write_gguf(folder / "tiny.gguf")
    write_folder(plan_llama(folder / "tiny.gguf"), folder / "llama", provenance={})
    return folder / "tiny.gguf", expected, folder / "llama"


def test_values_and_metadata_are_those_that_the_gguf_library_reads(
    made: tuple[Path, dict[str, tiny_gguf.Array], Path],
) -> None:
    ours, theirs = read_gguf_header(made[0]), GGUFReader(made[0])
    kinds = {info.dtype for info in ours.tensors.values()}
    assert kinds == {"F32", "Q8_0", "Q4_1"}
    assert set(ours.tensors) == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        expected = dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(floats_of(stored(ours.tensors[tensor.name])), expected), tensor.name
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            assert ours.fields[name].value == field.contents(), name


def test_the_checkpoint_holds_what_was_quantised_in_the_order_of_hugging_face(
    made: tuple[Path, dict[str, tiny_gguf.Array], Path],
) -> None:
    _, expected, folder = made
    found = load_file(folder / "model.safetensors")
    assert set(found) == set(expected)
    for name, values in expected.items():
        assert np.array_equal(found[name], values), name


def test_undoing_the_rotary_order_is_needed() -> None:
    rows = np.arange(16.0, dtype=np.float32).reshape(16, 1)
    paired = tiny_gguf.permuted(rows, 2)
    source = TensorSource("F32", (16, 1), lambda: (paired.tobytes(),), is_copy=False)
    assert not np.array_equal(paired, rows)
    assert np.array_equal(floats_of(regrouped(source, 4, 2)), rows)
    assert not np.array_equal(floats_of(regrouped(source, 2, 2)), rows)


def test_logits_are_those_of_transformers_llama(
    made: tuple[Path, dict[str, tiny_gguf.Array], Path],
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from headstart.models.build import build
    from headstart.models.documents import Documents
    from headstart.models.unroll import trunk_states

    _, expected, folder = made
    fields = json.loads((folder / "config.json").read_text())
    model = LlamaForCausalLM(LlamaConfig(**fields)).double().eval()
    state = {name: torch.from_numpy(values).double() for name, values in expected.items()}
    model.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]})
    ids = torch.tensor([5, 9, 200, 31, 7, 120, 64])
    built = build(Checkpoint.open(folder), device="cpu", dtype="float64", with_head=False)
    with torch.no_grad():
        theirs = model(ids[None]).logits[0]
        states = trunk_states(built.trunk, ids, Documents((len(ids),)), "after_final_norm")
        ours = built.trunk.logits(states)
    assert theirs.std() > 0.1  # not all alike, so that agreement says something
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_the_tokenizer_splits_digits_keeps_specials_and_knows_the_template(
    made: tuple[Path, dict[str, tiny_gguf.Array], Path],
) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(made[2]))
    names = tokenizer.convert_ids_to_tokens
    # There are merges for 12 and 123: only the split before them keeps digits apart.
    assert names(tokenizer.encode("ab123")) == ["ab", "1", "2", "3"]
    assert names(tokenizer.encode("the the")) == ["the", "\u0120the"]
    assert tokenizer.encode("<|im_start|>a<|im_end|>")[::2] == [1, 2]
    for text in (" 12 caf\u00e9\n\t\u4f60\u597d \U0001f389", "def f(x):\n    return x ** 2\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    said = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert said == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (2, 2, 0)


@pytest.mark.parametrize("keep", [3, 20, 300, 30_000])
def test_a_file_cut_short_is_refused_in_one_line(
    made: tuple[Path, dict[str, tiny_gguf.Array], Path], tmp_path: Path, keep: int
) -> None:
    (tmp_path / "cut.gguf").write_bytes(made[0].read_bytes()[:keep])
    with pytest.raises(
        BrokenFile, match=r"cut.gguf (has 3 bytes|has 20 bytes|ends|is truncated|claims).* again"
    ):
        plan_llama(tmp_path / "cut.gguf")


def test_another_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    tiny_gguf.write_gguf(tmp_path / "x.gguf", pre="odd-bpe")
    with pytest.raises(UnsupportedFamily, match="'odd-bpe'; 'gpt2' with one of gpt-2, smollm"):
        plan_llama(tmp_path / "x.gguf")
