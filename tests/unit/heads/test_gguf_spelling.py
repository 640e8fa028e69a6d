"""Heads in GGUF: the names and types of llama.cpp's converter, and the way back to the bytes."""

from __future__ import annotations

from ast import literal_eval
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gguf_models import random_bits, write_head, write_trunk
from support.tiny_fixture import Tiny

from headstart.calibrate.tiny_configs import TINY_CONFIGS
from headstart.checkpoint.gguf.values import byte_blocks
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.values import load
from headstart.errors import ConfigError, ShapeMismatch, UnsupportedFamily
from headstart.families.registry import family
from headstart.heads.export import plan_export
from headstart.heads.formats import open_head
from headstart.heads.formats.gguf import open_gguf
from headstart.heads.formats.gguf.arch import Arch
from headstart.heads.formats.gguf.archs import ARCHS, REFUSED
from headstart.heads.formats.gguf.plans import plan_gguf_stitch
from headstart.heads.formats.gguf.spelling import spell
from headstart.heads.formats.gguf.unspelling import unspelled
from headstart.heads.head import Head
from headstart.heads.latent import joined_kv_b

FIXTURES = Path(__file__).parents[2] / "fixtures" / "gguf"
CHANGES = {"mimo_v2": {"swa_head_dim": 64}}  # llama.cpp wants heads of one width
# llama.cpp's converter misses that it is a router; its loader takes either type.
OTHER_TYPE = {("nemotron_h", "blk.4.ffn_gate_inp.weight")}

COUNTED = [
    (arch, max(count, family(arch.family).default_modules))
    for arch in ARCHS
    for count in range(1, (arch.max_modules or 2) + 1)
]


def raw(source: TensorSource) -> bytes:
    return b"".join(byte_blocks(source, 1 << 24))


def contents(head: Head) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (s.dtype, s.shape, raw(s)) for name, s in head.tensors.items()}


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.txt")), ids=lambda p: p.stem)
def test_names_types_and_shapes_are_those_of_llama_cpps_converter(path: Path, tiny: Tiny) -> None:
    head = open_head(tiny(path.stem, **CHANGES.get(path.stem, {})))
    spelled = spell(head)
    first = head.naming().num_layers
    ours = {
        f"blk.{first + module}.{name}": f"{s.dtype} {'x'.join(map(str, s.shape))}"
        for (module, name), s in spelled.tensors.items()
    }
    lines = [line for line in path.read_text().splitlines() if line.startswith("blk.")]
    theirs = dict(line.split(" ", 1) for line in lines)
    assert ours.keys() == theirs.keys()
    differ = {(path.stem, name) for name in ours if ours[name] != theirs[name]}
    assert differ <= OTHER_TYPE


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.txt")), ids=lambda p: p.stem)
def test_values_per_layer_are_those_of_llama_cpps_converter(path: Path, tiny: Tiny) -> None:
    spelled = spell(open_head(tiny(path.stem, **CHANGES.get(path.stem, {}))))
    for line in path.read_text().splitlines():
        key, _, values = line.partition(" ")
        if line[0] not in "#b" or key.startswith("bailing"):
            own = spelled.layer_values[key.split(".", 1)[1]]
            expected = literal_eval(values)[-spelled.num_modules :]
            assert [int(v) for v in own] == [int(v) for v in expected], key


@pytest.mark.parametrize(
    ("arch", "modules"), COUNTED, ids=[f"{arch.family}-{count}" for arch, count in COUNTED]
)
def test_a_head_comes_back_from_gguf_with_every_bit(
    arch: Arch, modules: int, tmp_path: Path
) -> None:
    folder = write_head(arch, tmp_path / "hf", random_bits(modules), num_modules=modules)
    head = open_head(folder)
    trunk = open_gguf(write_trunk(arch, tmp_path / "trunk"))
    plan_gguf_stitch(head, trunk).write(tmp_path / "stitched")
    back = open_head(tmp_path / "stitched" / "trunk.gguf")
    assert back.family is head.family
    assert (back.num_modules, back.root) == (head.num_modules, head.root)
    assert contents(back) == contents(head)
    assert back.changes == ()


def test_fused_experts_come_back_fused(tiny: Tiny, tmp_path: Path) -> None:
    head = open_head(tiny("qwen3_5_moe", fused_experts=True))
    back, said = unspelled(spell(head))
    assert any(name.endswith("experts.gate_up_proj") for name in back)
    assert {n: raw(s) for n, s in back.items()} == {n: raw(s) for n, s in head.tensors.items()}
    assert said == ()


@settings(max_examples=25, deadline=None)
@given(bits=st.lists(st.integers(0, 0xFFFF), min_size=64, max_size=64))
def test_norms_of_any_value_survive_the_one_that_is_added(
    bits: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """1 + w in FP32 loses what is small; it is kept apart. Only what is no number may change."""
    finite = [b if (b >> 7) & 0xFF != 0xFF else b & 0x807F for b in bits]

    def fill(name: str, shape: tuple[int, ...]) -> np.ndarray[None, np.dtype[np.uint16]]:
        values = np.array(finite, dtype="<u2")
        return np.resize(values, shape)

    arch = next(arch for arch in ARCHS if arch.name == "qwen35")
    folder = write_head(arch, tmp_path_factory.mktemp("norms") / "hf", fill)
    head = open_head(folder)
    back, _ = unspelled(spell(head))
    for name, source in head.tensors.items():
        assert raw(back[name]) == raw(source), name


def test_without_a_record_dtypes_are_those_that_hold_the_values(tiny: Tiny, tmp_path: Path) -> None:
    head = open_head(tiny("glm4_moe"))
    back, said = unspelled(replace(spell(head), record={}))
    assert {n: (s.dtype, raw(s)) for n, s in back.items()} == {
        n: (s.dtype, raw(s)) for n, s in head.tensors.items()
    }
    assert said == (
        "the file does not say how the published tensors were stored: dtypes are chosen by what "
        "holds their values exactly",
    )


def test_a_quantised_head_says_what_is_lost(tiny: Tiny) -> None:
    head = open_head(tiny("qwen3_5"))
    spelled = spell(head, "Q8_0")
    assert spelled.changes == ("matrices are quantised to Q8_0, which cannot be undone",)
    kinds = {s.dtype for (_, n), s in spelled.tensors.items() if n.startswith(("ffn", "attn_q."))}
    assert kinds == {"Q8_0"}
    back, said = unspelled(spelled)
    assert {s.dtype for s in back.values()} == {"BF16"}
    assert "are Q8_0: dequantised to BF16, not the published values" in said[0]


def test_matrices_that_do_not_get_the_type_are_named(tiny: Tiny) -> None:
    spelled = spell(open_head(tiny("qwen3_5_moe")), "TQ2_0")  # blocks of 256 values
    assert spelled.tensors[0, "ffn_down_exps.weight"].dtype == "BF16"
    assert spelled.tensors[0, "ffn_up_exps.weight"].dtype == "TQ2_0"
    said = "ffn_down_exps.weight, ffn_down_shexp.weight: not TQ2_0, whose blocks of 256 values"
    assert spelled.changes[-1].startswith(said)
    assert len(spell(open_head(tiny("qwen3_5_moe")), "Q8_0").changes) == 1


def test_an_fp8_head_is_dequantised_and_said(tiny: Tiny) -> None:
    head = open_head(tiny("qwen3_5"))
    name = "modules.0.block.mlp.up_proj.weight"
    fp8 = TensorSource("F8_E4M3", (256, 256), lambda: (b"\x38" * 65536,), is_copy=False)  # 1.0
    scale = TensorSource("F32", (2, 2), lambda: (np.full(4, 0.5, "<f4").tobytes(),), is_copy=False)
    both = {name: fp8, f"{name}_scale_inv": scale}
    spelled = spell(replace(head, tensors={**head.tensors, **both}))
    assert spelled.changes == ("1 quantised weights were dequantised to BF16",)
    assert raw(spelled.tensors[0, "ffn_up.weight"]) == b"\x00\x3f" * 65536  # 0.5
    _, said = unspelled(spelled)
    assert said == ()


@pytest.mark.parametrize("name", sorted(REFUSED.keys() & TINY_CONFIGS.keys()))
def test_families_without_a_place_in_llama_cpp_are_refused_by_name(name: str, tiny: Tiny) -> None:
    with pytest.raises(UnsupportedFamily, match=rf"\({name}\) cannot be stored as GGUF: "):
        spell(open_head(tiny(name)))


def test_other_formats_have_no_head_type(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="--head-type belongs to --format gguf"):
        plan_export(open_head(tiny("qwen3_5")), "headstart", head_type="q8_0")


def test_more_modules_than_llama_cpp_runs_are_refused(tmp_path: Path) -> None:
    arch = next(arch for arch in ARCHS if arch.name == "qwen35")
    head = open_head(write_head(arch, tmp_path / "hf", random_bits()))
    with pytest.raises(UnsupportedFamily, match=r"runs 1 module of Qwen3.5"):
        spell(replace(head, num_modules=2))


@pytest.mark.parametrize(
    ("variant", "stem", "name", "factors"),
    [
        ("qwen3_5", "nextn.eh_proj", "modules.0.fuse.weight", [0.5]),
        ("qwen3_5_moe", "ffn_up_exps", "modules.0.block.mlp.experts.{}.up_proj.weight", [2, 4, 8]),
    ],
    ids=["matrix", "stack"],
)
def test_scales_beside_weights_are_multiplied_in(
    tiny: Tiny, variant: str, stem: str, name: str, factors: list[float]
) -> None:
    """As NVFP4 files have them; those of inputs change nothing."""
    head = open_head(tiny(variant))
    spelled = spell(head)
    count = len(spelled.tensors[0, f"{stem}.weight"].shape)
    number = spelled.tensors[0, f"{stem}.weight"].shape[0] if count == 3 else 1
    values = np.resize(np.array(factors, "<f4"), number)
    scale = TensorSource("F32", (number,), lambda: (values.tobytes(),), is_copy=False)
    both = {(0, f"{stem}.scale"): scale, (0, f"{stem}.input_scale"): scale}
    back, _ = unspelled(replace(spelled, tensors={**spelled.tensors, **both}))
    assert back.keys() == head.tensors.keys()
    for index, factor in enumerate(values):
        ours = name.format(index)
        expected = load(head.tensors[ours]).float() * float(factor)
        assert load(back[ours]).float().equal(expected)


def test_a_scale_of_another_size_is_refused(tiny: Tiny) -> None:
    spelled = spell(open_head(tiny("qwen3_5")))
    odd = {(0, "nextn.eh_proj.scale"): TensorSource("F32", (3,), lambda: (bytes(12),), False)}
    with pytest.raises(ShapeMismatch, match=r"a scale of shape \[3\] stands beside a weight"):
        unspelled(replace(spelled, tensors={**spelled.tensors, **odd}))


def shaped(head: Head, name: str, *shape: int) -> Head:
    """The head with a tensor of another shape."""
    odd = TensorSource("BF16", shape, lambda: (bytes(2 * int(np.prod(shape))),), is_copy=False)
    return replace(head, tensors={**head.tensors, name: odd})


@pytest.mark.parametrize(
    ("variant", "name", "shape", "said"),
    [
        ("glm4_moe_lite", "block.self_attn.kv_b_proj", (512, 4, 4), r"shape \[512, 4, 4\]"),
        ("glm4_moe_lite", "block.self_attn.kv_b_proj", (), r"shape \[\]; the config's"),
        ("glm4_moe_lite", "block.self_attn.kv_b_proj", (512, 0), r"shape \[512, 0\]"),
        ("qwen3_5", "hidden_norm", (2, 4), "expected one value per channel"),
    ],
)
def test_tensors_of_other_shapes_are_refused_before_they_are_rearranged(
    tiny: Tiny, variant: str, name: str, shape: tuple[int, ...], said: str
) -> None:
    head = shaped(open_head(tiny(variant)), f"modules.0.{name}.weight", *shape)
    with pytest.raises((ConfigError, ShapeMismatch), match=said):
        spell(head)


def test_parts_of_latent_attention_that_are_empty_are_refused() -> None:
    empty = TensorSource("BF16", (4, 8, 0), lambda: (b"",), is_copy=False)
    values = TensorSource("BF16", (4, 2, 8), lambda: (bytes(128),), is_copy=False)
    with pytest.raises(ShapeMismatch, match=r"\[4, 8, 0\] and \[4, 2, 8\]; expected"):
        joined_kv_b(empty, values)


def test_a_fusion_that_is_no_matrix_is_refused(tmp_path: Path) -> None:
    arch = next(arch for arch in ARCHS if arch.name == "qwen35")
    head = open_head(write_head(arch, tmp_path / "hf", random_bits()))
    trunk = open_gguf(write_trunk(arch, tmp_path / "trunk"))
    with pytest.raises(ShapeMismatch, match=r"the head's nextn\.eh_proj\.weight is \[\]"):
        plan_gguf_stitch(shaped(head, "modules.0.fuse.weight"), trunk)
