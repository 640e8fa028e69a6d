"""Names go from published to ours and back without loss, in every family of the registry."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.errors import ConfigError
from headstart.families.base import Family
from headstart.families.names import KeyMap, Naming
from headstart.families.registry import families

NUM_LAYERS = 61
FIELDS: dict[str, Any] = {
    "num_hidden_layers": NUM_LAYERS,
    "hidden_size": 8,
    "vocab_size": 11,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 12,
    "n_routed_experts": 3,
    "num_experts": 3,
    "num_shared_experts": 1,
    "moe_intermediate_size": 6,
    "q_lora_rank": 4,
    "kv_lora_rank": 4,
    "attention_bias": True,
    "use_qk_norm": True,
    "sandwich_norm": True,
    "use_ordered_embeddings": True,
    "mtp_config": {"chain_hidden_post_norm": True},
}
TRUNK_NAMES = (
    f"model.layers.{NUM_LAYERS - 1}.mlp.gate_proj.weight",
    "model.layers.6.x",
    "model.layers.6.eh_proj.weight",
    "model.layers.0.input_layernorm.weight",
    "model.embed_tokens.weight",
    "model.norm.weight",
    "lm_head.weight",
)
FAMILIES = families()
CASES = [
    pytest.param(family, root, id=f"{family.name}-{root or 'no_root'}")
    for family in FAMILIES
    for root in family.keys.roots
]

segments = st.text(alphabet="abcxyz_0123456789", min_size=1, max_size=8)
rests = st.lists(segments, min_size=1, max_size=4).map(".".join)
any_family = st.sampled_from(FAMILIES)


def names_of(family: Family) -> list[str]:
    return list(family.expected(FIELDS, family.default_modules))


def fill(family: Family, pattern: str, module: int, rest: str, naming: Naming) -> str:
    """A published name made from one of the family's patterns."""
    last = family.num_sub_layers(FIELDS) - 1
    return naming.root + pattern.format(
        module=module, layer=NUM_LAYERS + module, last=last, rest=rest
    )


@pytest.mark.parametrize(("family", "root"), CASES)
def test_expected_names_survive_the_way_out_and_back(family: Family, root: str) -> None:
    naming = family.naming(FIELDS, root)
    for name in names_of(family):
        assert family.keys.to_ours(family.keys.to_published(name, naming), naming) == name


@pytest.mark.parametrize(("family", "root"), CASES)
def test_no_two_expected_names_are_published_as_one(family: Family, root: str) -> None:
    naming = family.naming(FIELDS, root)
    published = [family.keys.to_published(name, naming) for name in names_of(family)]
    assert len(set(published)) == len(published)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_expects_a_fusion_tensor(family: Family) -> None:
    assert any(".fuse" in name for name in names_of(family))


@pytest.mark.parametrize("name", TRUNK_NAMES)
@pytest.mark.parametrize(("family", "root"), CASES)
def test_trunk_tensors_are_not_part_of_a_head(family: Family, root: str, name: str) -> None:
    assert family.keys.to_ours(name, family.naming(FIELDS, root)) is None


@pytest.mark.parametrize("name", TRUNK_NAMES)
@pytest.mark.parametrize(("family", "root"), CASES)
def test_trunk_tensors_below_the_root_are_not_part_of_a_head(
    family: Family, root: str, name: str
) -> None:
    nested = root + name.removeprefix("model.")
    assert family.keys.to_ours(nested, family.naming(FIELDS, root)) is None


@given(family=any_family, name=st.text())
def test_any_text_is_a_head_tensor_or_none(family: Family, name: str) -> None:
    ours = family.keys.to_ours(name, family.naming(FIELDS))
    assert ours is None or ours.startswith(("modules.", "shared."))


@given(family=any_family, tail=st.text())
def test_any_text_below_a_root_is_a_head_tensor_or_none(family: Family, tail: str) -> None:
    for root in family.keys.roots:
        ours = family.keys.to_ours(root + tail, family.naming(FIELDS, root))
        assert ours is None or ours.startswith(("modules.", "shared."))


@given(data=st.data(), family=any_family, module=st.integers(0, 12), rest=rests)
def test_published_names_survive_the_way_in_and_back(
    data: st.DataObject, family: Family, module: int, rest: str
) -> None:
    pattern = data.draw(st.sampled_from(list(family.keys.pairs)))
    naming = family.naming(FIELDS, data.draw(st.sampled_from(family.keys.roots)))
    name = fill(family, pattern, module, rest, naming)
    ours = family.keys.to_ours(name, naming)
    assert ours is not None
    assert family.keys.to_published(ours, naming) == name


@given(layer=st.integers(0, NUM_LAYERS - 1), rest=rests)
def test_layers_of_the_trunk_are_never_taken_for_a_head(layer: int, rest: str) -> None:
    for family in FAMILIES:
        name = f"{family.keys.roots[0]}layers.{layer}.{rest}"
        assert family.keys.to_ours(name, family.naming(FIELDS)) is None


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_root_that_fits_the_names_is_found(family: Family) -> None:
    for root in family.keys.roots:
        naming = family.naming(FIELDS, root)
        published = [family.keys.to_published(name, naming) for name in names_of(family)]
        assert family.keys.find_root(published, family.naming(FIELDS)).root == root


def test_a_pair_that_loses_a_part_is_refused() -> None:
    with pytest.raises(ConfigError, match="the two sides name different parts"):
        KeyMap({"mtp.layers.{module}.{rest}": "modules.0.block.{rest}"})


def test_a_pair_that_invents_a_part_is_refused() -> None:
    with pytest.raises(ConfigError, match="the two sides name different parts"):
        KeyMap({"mtp.norm.weight": "modules.{module}.out_norm.weight"})


def test_two_patterns_with_one_name_on_our_side_are_refused() -> None:
    with pytest.raises(ConfigError, match="same name on our side"):
        KeyMap({"mtp.a.{rest}": "modules.0.fuse.{rest}", "mtp.b.{rest}": "modules.0.fuse.{rest}"})


def test_a_name_without_a_place_in_the_family_is_refused() -> None:
    keys = KeyMap({"mtp.fc.{rest}": "modules.0.fuse.{rest}"})
    with pytest.raises(ConfigError, match=r"modules\.0\.out_norm\.weight has no published name"):
        keys.to_published("modules.0.out_norm.weight", Naming())


def test_a_name_that_another_pattern_would_claim_is_refused() -> None:
    keys = KeyMap(
        {"mtp.fc.{rest}": "modules.0.fuse.{rest}", "mtp.{rest}": "modules.0.block.{rest}"}
    )
    with pytest.raises(ConfigError, match="has no published name"):
        keys.to_published("modules.0.block.fc.weight", Naming())
