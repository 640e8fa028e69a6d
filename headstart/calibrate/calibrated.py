"""Checkpoints of any size with a known acceptance, to measure engines without anyone's weights.

Speed depends on sizes and on acceptance, not on what the text says. Output projections are zero, so
every layer is an identity that still costs its full compute, and acceptance is exactly what walking
the cycle of tokens gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.calibrate.agreement import Agreement, make_agreement
from headstart.calibrate.copy_prompts import FILE_NAME, CopyPlan, prompt_lines
from headstart.calibrate.folder import write_made
from headstart.calibrate.given_tokenizer import GivenTokenizer, ordinary_ids
from headstart.calibrate.shape_config import released, shape_config
from headstart.calibrate.tensors import EXACT, calibrated_tensors
from headstart.calibrate.tokenizer import CHAT_TEMPLATE, tokenizer_documents
from headstart.checkpoint.config import read_json_object, text_part
from headstart.checkpoint.provenance import PROVENANCE_NAME
from headstart.checkpoint.source import TensorSource
from headstart.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch

# (config, tensors) -> the same checkpoint in another format
StoredAs = Callable[
    [dict[str, Any], Mapping[str, TensorSource]], tuple[dict[str, Any], dict[str, TensorSource]]
]
MARGIN_TOKENS = 512  # whose decisions are looked at: all would be vocabulary squared times hidden
_ROWS = 2048
_LEAST_MARGIN = 0.05
_LEAST_TOKENS = 8  # on the cycle


def write_calibrated(
    shape: str,
    rate: float,
    out: Path | None,
    *,
    active: int | None = None,
    tokenizer: GivenTokenizer | None = None,
    seed: int = 0,
    dtype: str = "BF16",
    overwrite: bool = False,
    stored_as: StoredAs | None = None,
    copies: CopyPlan | None = None,
    margin_tokens: int = MARGIN_TOKENS,
    report: Callable[[int], None] = lambda num_bytes: None,
) -> dict[str, Any]:
    """Write the checkpoint, or only check and measure it (`out` None); returns what it is.

    `stored_as` may lay the tensors down in a quantised format. What decides, embedding, fusion and
    LM head, stays plain in all of them, and the output of a layer is a zero in every format: so
    acceptance does not depend on it. `copies` adds a file of prompts that the trunk repeats spans
    of. `margin_tokens`: how many tokens' decisions are looked at; with 0 nothing says that they are
    far enough apart.
    """
    if not 0 <= rate <= 1:
        raise ConfigError(f"--acceptance is {rate}; give a rate from 0 to 1.")
    config = shape_config(shape)
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    tokens = _tokens_in_use(vocab, active, tokenizer)
    if tokenizer is not None:
        config = tokenizer.config_with_ids(config)
    config["torch_dtype"] = {"BF16": "bfloat16", "F32": "float32", "F16": "float16"}[dtype]
    agreement = make_agreement(vocab, hidden, rate=rate, seed=seed, active=tokens)
    margin = smallest_margin(agreement, margin_tokens) if margin_tokens else None
    if margin is not None and margin < _LEAST_MARGIN:
        enough = None if tokenizer is not None else _enough(config, len(tokens), rate, seed)
        raise ConfigError(
            f"with hidden {hidden} and {len(tokens)} tokens the decisions are only {margin:.3f} "
            "apart, too close for low precision. Use a larger hidden size"
            + ("." if enough is None else f", or --active {enough}, which would do.")
        )
    tensors = calibrated_tensors(
        config, rate=rate, seed=seed, dtype=dtype, disturbance=EXACT, agreement=agreement
    )
    parameters = sum(prod(source.shape) for source in tensors.values())
    max_len, config = config["max_position_embeddings"], released(config)
    if stored_as is not None:
        config, tensors = stored_as(config, tensors)
    facts: dict[str, Any] = {
        "shape": shape, "rate": rate, "seed": seed, "active": len(tokens), "margin": margin,
        "margin_tokens": min(margin_tokens, vocab - 2),
    }  # fmt: skip
    if tokenizer is None:
        documents = {**tokenizer_documents(config), "chat_template.jinja": CHAT_TEMPLATE}
    else:
        if copies is not None:
            raise ConfigError(
                "--copy-length and --tokenizer were both given; prompts to copy from are made of "
                "the words of a calibrated checkpoint's own tokenizer. Drop one."
            )
        facts["tokenizer"] = {"ids": tokenizer.num_ids, "left_out": tokenizer.left_out}
        documents = tokenizer.documents(max_len)
    if copies is not None:
        facts["copies"] = vars(copies)
        documents[FILE_NAME] = prompt_lines(agreement, copies, seed=seed)
    if out is not None:
        write_made(
            config, tensors, out, facts=facts, tokenizer=documents, overwrite=overwrite,
            end_ids=None if tokenizer is None else tokenizer.end_ids, report=report,
        )  # fmt: skip
    sizes = {
        "vocab": vocab,
        "tensors": len(tensors),
        "parameters": parameters,
        "bytes": sum(source.num_bytes for source in tensors.values()),
    }
    return {**facts, **sizes}


def _enough(config: Mapping[str, Any], count: int, rate: float, seed: int) -> int | None:
    """Fewer tokens whose decisions are far enough apart: half as many until they are."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    while (count := count // 2) >= _LEAST_TOKENS:
        tried = make_agreement(vocab, hidden, rate=rate, seed=seed, active=count)
        if smallest_margin(tried) >= _LEAST_MARGIN:
            return count
    return None


def _tokens_in_use(
    vocab: int, active: int | None, tokenizer: GivenTokenizer | None
) -> Sequence[int]:
    """Tokens on the cycle; ConfigError where tokenizer, shape and --active do not go together."""
    if tokenizer is None:
        count = active if active is not None else vocab - 2
        if not _LEAST_TOKENS <= count <= vocab - 2:
            raise ConfigError(
                f"--active is {count}; give {_LEAST_TOKENS} to {vocab - 2} (two tokens end a text)."
            )
        return range(2, count + 2)
    if tokenizer.num_ids > vocab:
        raise ConfigError(
            f"--tokenizer: {tokenizer.name} has {tokenizer.num_ids} ids and the shape a vocabulary "
            f"of {vocab}. Give a smaller tokenizer, or a --shape with a larger vocab."
        )
    tokens = tokenizer.ordinary
    if len(tokens) < _LEAST_TOKENS:
        raise ConfigError(
            f"--tokenizer: {tokenizer.name} has {len(tokens)} ordinary tokens that are whole "
            f"characters; expected {_LEAST_TOKENS} or more. Give another one."
        )
    if active not in (None, len(tokens)):
        raise ConfigError(
            f"--active is {active} and --tokenizer has {len(tokens)} ordinary tokens, all of "
            "which are in use. Leave --active out."
        )
    return tokens


def agreement_of(folder: Path) -> Agreement:
    """The construction behind a calibrated checkpoint, made again from what is written in it."""
    facts = read_json_object(folder / PROVENANCE_NAME)
    if "active" not in facts:
        raise CheckpointError(f"{folder} was not written by `headstart calibrate`.")
    config = text_part(read_json_object(folder / "config.json"))
    return make_agreement(
        config["vocab_size"], config["hidden_size"],
        rate=facts["rate"], seed=facts["seed"], active=active_ids(facts),
    )  # fmt: skip


def active_ids(facts: Mapping[str, Any]) -> Sequence[int]:
    """Tokens that the trunk of a calibrated checkpoint writes, from its provenance."""
    if "tokenizer" in facts:
        return ordinary_ids(facts["tokenizer"]["ids"], facts["tokenizer"]["left_out"])
    return range(2, facts["active"] + 2)


def smallest_margin(agreement: Agreement, tokens: int = MARGIN_TOKENS) -> float:
    """How far the winning logit is ahead, for trunk and head: the least over some `tokens`."""
    import torch

    vocab = agreement.vocab
    picked = torch.linspace(2, vocab - 1, min(tokens, vocab - 2)).long()
    embedding = agreement.embeddings(picked)
    drafted = embedding @ agreement.pass_embedding()
    said = torch.where(agreement.in_s, agreement.mistaken, agreement.following)[picked]
    states = torch.cat([embedding, drafted])
    return _margin(agreement, states, torch.cat([agreement.following[picked], said]))


def _margin(agreement: Agreement, states: torch.Tensor, winners: torch.Tensor) -> float:
    """The LM head a few rows at a time: as a whole it may be gigabytes."""
    import torch

    won = torch.full((len(states),), float("-inf"))
    others = won.clone()
    for start in range(0, agreement.vocab, _ROWS):
        stop = min(start + _ROWS, agreement.vocab)
        logits = states @ agreement.lm_head_rows(start, stop).T
        here = ((winners >= start) & (winners < stop)).nonzero().squeeze(1)
        won[here] = logits[here, winners[here] - start]
        logits[here, winners[here] - start] = float("-inf")
        others = torch.maximum(others, logits.amax(1))
    return float((won - others).min())
