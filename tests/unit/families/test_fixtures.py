"""Real layouts: every name of a published head maps both ways, and the head is found complete.

A fixture is `fixtures/keys/<name>.txt` (names with braces, trunk and head apart) and `<name>.json`
(the config values that matter, the number of head tensors). No weights are needed: detection
works on names and dtypes.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest

from headstart.checkpoint.config import Config
from headstart.checkpoint.header import TensorInfo
from headstart.checkpoint.index import Index
from headstart.checkpoint.reader import Checkpoint
from headstart.heads.detection import FoundHead, find_head, require_family

FOLDER = Path(__file__).parents[2] / "fixtures" / "keys"
NAMES = sorted(path.stem for path in FOLDER.glob("*.txt"))
_SCALES = ("weight_scale_inv", "scale")


@dataclass(frozen=True)
class Fixture:
    config: dict[str, Any]
    facts: dict[str, Any]
    head: list[str]
    trunk: list[str]


def expand(pattern: str) -> list[str]:
    """`a.{0..2}.{b,c}` -> a.0.b, a.0.c, a.1.b, ..."""
    found = re.search(r"\{([^{}]*)\}", pattern)
    if found is None:
        return [pattern]
    span = re.fullmatch(r"(\d+)\.\.(\d+)", found[1])
    options = (
        [str(i) for i in range(int(span[1]), int(span[2]) + 1)] if span else found[1].split(",")
    )
    before, after = pattern[: found.start()], pattern[found.end() :]
    return [name for option in options for name in expand(before + option + after)]


@cache
def fixture(name: str) -> Fixture:
    sections: dict[str, list[str]] = {}
    current = ""
    for line in (FOLDER / f"{name}.txt").read_text().splitlines():
        if line.startswith("["):
            current = line.strip("[]")
        elif line and not line.startswith("#"):
            sections.setdefault(current, []).extend(expand(line))
    facts = json.loads((FOLDER / f"{name}.json").read_text())
    return Fixture(facts["config"], facts, sections["head"], sections["trunk"])


def checkpoint(data: Fixture, names: list[str]) -> Checkpoint:
    """A checkpoint that exists as a table of names and dtypes only."""
    known = {*data.head, *data.trunk}  # a weight stays FP8 when its scale is lost
    tensors = {}
    for name in names:
        module = name.rpartition(".")[0]
        is_quantized = any(f"{module}.{scale}" in known for scale in _SCALES)
        dtype = "F8_E4M3" if is_quantized and name.endswith(".weight") else "BF16"
        tensors[name] = TensorInfo(name, dtype, (), Path("nowhere"), 0, 0)
    return Checkpoint(Path("nowhere"), Config(data.config), Index(tensors, {}, False, (), {}, {}))


@cache
def found_head(name: str) -> FoundHead:
    data = fixture(name)
    return find_head(checkpoint(data, data.trunk + data.head))


def expected_shapes(name: str) -> dict[str, tuple[int, ...]]:
    found, data = found_head(name), fixture(name)
    shapes = found.family.expected(Config(data.config).fields, found.num_modules)
    assert all(shapes.values()), "the config of the fixture leaves sizes open"
    return {ours: shape for ours, shape in shapes.items() if shape is not None}


def num_parameters(name: str) -> int:
    return sum(prod(shape) for shape in expected_shapes(name).values())


@pytest.mark.parametrize("name", NAMES)
def test_every_head_name_survives_the_way_in_and_back(name: str) -> None:
    found, data = found_head(name), fixture(name)
    keys, naming = found.family.keys, found.naming
    for published in data.head:
        ours = keys.to_ours(published, naming)
        assert ours is not None, f"{published} is not taken for a head tensor"
        assert keys.to_published(ours, naming) == published


@pytest.mark.parametrize("name", NAMES)
def test_no_trunk_name_is_taken_for_the_head(name: str) -> None:
    found, data = found_head(name), fixture(name)
    taken = [n for n in data.trunk if found.family.keys.to_ours(n, found.naming) is not None]
    assert taken == []


@pytest.mark.parametrize("name", NAMES)
def test_the_list_has_as_many_head_tensors_as_the_release(name: str) -> None:
    data = fixture(name)
    assert len(set(data.head)) == len(data.head) == data.facts["head_tensors"]
    assert len(found_head(name).tensors) == data.facts["head_tensors"]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_missing_from_the_published_head(name: str) -> None:
    found = found_head(name)
    assert found.missing == ()
    assert found.state == fixture(name).facts.get("state", "complete")


@pytest.mark.parametrize("name", NAMES)
def test_the_published_head_holds_nothing_unknown(name: str) -> None:
    assert found_head(name).unexpected == ()


@pytest.mark.parametrize("name", NAMES)
def test_a_head_without_its_fusion_is_not_complete(name: str) -> None:
    data, found = fixture(name), found_head(name)
    fusion = {p for ours, p in found.tensors.items() if ".fuse" in ours}
    kept = [n for n in data.head if n not in fusion]
    assert find_head(checkpoint(data, data.trunk + kept)).state == "partial"


@pytest.mark.parametrize("name", NAMES)
def test_each_lost_tensor_is_named(name: str) -> None:
    data, found = fixture(name), found_head(name)
    copies = tuple(f".{role}." for role in found.family.copies)
    required = [p for ours, p in found.tensors.items() if not any(c in ours for c in copies)]
    for lost in (required[0], required[len(required) // 2], required[-1]):
        kept = [n for n in data.head if n != lost]
        result = find_head(checkpoint(data, data.trunk + kept))
        assert result.state == "partial"
        assert lost in result.missing


@pytest.mark.parametrize("name", NAMES)
def test_a_trunk_alone_has_lost_its_head(name: str) -> None:
    data = fixture(name)
    state = find_head(checkpoint(data, data.trunk)).state
    is_declared = data.facts.get("state", "complete") == "complete"
    assert state == ("declared-but-missing" if is_declared else "absent")


@pytest.mark.parametrize("name", NAMES)
def test_the_family_is_fully_supported(name: str) -> None:
    assert require_family(checkpoint(fixture(name), [])).is_complete


def test_every_published_and_fully_supported_family_has_a_fixture() -> None:
    from headstart.families.registry import families

    covered = {found_head(name).family.name for name in NAMES}
    assert covered == {f.name for f in families() if f.is_complete and f.is_published}


def test_the_dense_qwen_head_has_the_published_shapes() -> None:
    shapes = expected_shapes("qwen3_5_27b")
    assert shapes["modules.0.fuse.weight"] == (5120, 10240)
    assert shapes["modules.0.block.self_attn.q_proj.weight"] == (12288, 5120)
    assert shapes["modules.0.block.self_attn.o_proj.weight"] == (5120, 6144)
    assert num_parameters("qwen3_5_27b") == 424_699_392


def test_hunyuan_4_has_the_published_ten_billions_to_the_last_one() -> None:
    assert num_parameters("hy4_preview") == 10_053_583_936


def test_the_head_of_qwen4_exp_has_the_published_shapes() -> None:
    shapes = expected_shapes("qwen3_8_flash_next")
    at = "modules.0."
    assert shapes[f"{at}hidden_norm.weight"] == (10240,)
    assert shapes[f"{at}fuse_hidden.weight"] == shapes[f"{at}fuse_embed.weight"] == (2560, 2560)
    assert shapes[f"{at}hc_head.input_mix_weight_down.weight"] == (320, 10240)
    assert shapes[f"{at}block.mlp_hyper_connection.block_inject_weight.weight"] == (4, 10240)
    assert shapes[f"{at}block.self_attn.q_proj.weight"] == (12288, 2560)
    assert shapes[f"{at}block.self_attn.o_proj.weight"] == (2560, 6144)
    assert shapes[f"{at}block.self_attn.indexer.index_qk_proj.weight"] == (640, 2560)


def test_the_head_of_motif_has_the_published_shapes() -> None:
    shapes = expected_shapes("motif3")
    assert "modules.0.hidden_norm.weight" not in shapes
    assert shapes["modules.0.fuse.weight"] == (4096, 8192)
    assert shapes["modules.0.block.self_attn.wkv_a.weight"] == (576, 4096)
    assert shapes["modules.0.block.self_attn.wq_b.weight"] == (80 * 192, 1024)
    assert shapes["modules.0.block.self_attn.wo.weight"] == (4096, 64 * 128)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("deepseek_v3_fp8", 11.5), ("glm5_2", 9.95), ("qwen3_8_flash_next", 2.6)],
    ids=lambda value: str(value),
)
def test_the_head_has_the_published_number_of_parameters(name: str, billions: float) -> None:
    assert num_parameters(name) / 1e9 == pytest.approx(billions, rel=0.01)
