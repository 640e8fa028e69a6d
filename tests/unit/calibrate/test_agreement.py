"""Large tensors are made in parts, and the parts are the whole."""

from __future__ import annotations

import pytest
import torch

from headstart.calibrate import agreement as construction
from headstart.calibrate import tensors as making
from headstart.calibrate.agreement import make_agreement, walk
from headstart.calibrate.calibrated import smallest_margin, write_calibrated
from headstart.checkpoint.values import load

VOCAB, HIDDEN = 96, 256


@pytest.mark.parametrize("active", [None, 20], ids=["all tokens", "some tokens"])
def test_trunk_and_head_say_what_the_construction_promises(active: int | None) -> None:
    own = make_agreement(VOCAB, HIDDEN, rate=0.7, seed=3, active=active)
    embedding, lm_head = own.embedding_rows(0, VOCAB), own.lm_head_rows(0, VOCAB)
    assert torch.equal((embedding @ lm_head.T).argmax(1), own.following)
    drafted = (embedding @ own.pass_embedding() @ lm_head.T).argmax(1)
    assert torch.equal(drafted, torch.where(own.in_s, own.mistaken, own.following))
    assert torch.equal(drafted == own.following, ~own.in_s)
    assert own.following.unique().numel() == (active or VOCAB)
    parts = [own.lm_head_rows(start, min(start + 7, VOCAB)) for start in range(0, VOCAB, 7)]
    assert torch.equal(torch.cat(parts), lm_head)


def test_the_margin_is_the_least_lead_of_a_winner(monkeypatch: pytest.MonkeyPatch) -> None:
    from headstart.calibrate import calibrated

    # more tokens than half the hidden size: keys are random and every lead is another
    own = make_agreement(VOCAB, HIDDEN // 2, rate=0.7, seed=3, active=VOCAB - 2)
    embedding, lm_head = own.embedding_rows(0, VOCAB)[2:], own.lm_head_rows(0, VOCAB)
    leads = []
    for states in (embedding, embedding @ own.pass_embedding()):
        best = (states @ lm_head.T).topk(2, dim=1).values
        leads.append(float((best[:, 0] - best[:, 1]).min()))
    monkeypatch.setattr(calibrated, "_ROWS", 11)
    assert smallest_margin(own) == pytest.approx(min(leads), abs=1e-6)


def test_tensors_written_in_parts_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        "model_type": "mimo", "architectures": ["MiMoForCausalLM"], "hidden_size": HIDDEN,
        "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCAB, "num_nextn_predict_layers": 1,
    }  # fmt: skip

    def made() -> dict[str, torch.Tensor]:
        sources = making.calibrated_tensors(config, rate=0.7, seed=3, dtype="F32")
        return {name: load(source) for name, source in sources.items()}

    whole = made()
    monkeypatch.setattr(making, "_ROWS", 5)
    monkeypatch.setattr(construction, "_ROWS", 5)
    parts = made()
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())


def test_the_construction_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it was made twice and held twice, gigabytes for a large vocabulary."""
    calls = []
    from headstart.calibrate import calibrated

    def counted(*sizes: int, **options: object) -> construction.Agreement:
        calls.append(sizes)
        return make_agreement(*sizes, **options)

    for module in (calibrated, making):
        monkeypatch.setattr(module, "make_agreement", counted)
    shape = "layers=1,hidden=64,intermediate=96,heads=4,kv_heads=2,vocab=30"
    made = write_calibrated(shape, 0.5, None)
    assert calls == [(30, 64)]
    assert made["margin_tokens"] == 28


def test_walking_counts_drafted_and_accepted_by_depth() -> None:
    own = make_agreement(VOCAB, HIDDEN, rate=0.7, seed=3)
    drafted, accepted = walk(own, 5, 40, 3)
    assert len(drafted) == len(accepted) == 3
    assert drafted[0] >= accepted[0] >= accepted[1] >= accepted[2] > 0
