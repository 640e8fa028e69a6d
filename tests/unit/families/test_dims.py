"""Sizes of a model, read from fields that were all checked before."""

from __future__ import annotations

from headstart.checkpoint.config_fields import KINDS
from headstart.families.dims import FIELDS, dims
from headstart.families.registry import families


def test_every_field_that_gives_a_size_is_checked_when_a_config_is_read() -> None:
    paths = [path for candidates in FIELDS.values() for path in candidates]
    paths += [path for family in families() for path in family.head_fields.values()]
    assert [path for path in paths if path.rpartition(".")[2] not in KINDS] == []


def test_parts_that_a_model_lacks_have_no_size() -> None:
    found = dims({"num_noise_heads": 0, "num_attention_heads": 4, "hidden_size": 64})
    assert found == {"heads": 4, "kv_heads": 4, "hidden": 64, "head_dim": 16, "v_dim": 16,
                     "signal_heads": 4}  # fmt: skip


def test_shared_experts_that_a_model_lacks_have_no_width() -> None:
    found = dims({"moe_intermediate_size": 32, "n_shared_experts": 0})
    assert found == {"moe_width": 32}
