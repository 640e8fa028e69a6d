"""Every backend is held to the reference, plain PyTorch: logits, head, drafts and choices of the
same requests, for every family that it claims to run. Kernels of GPUs are interpreted here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from support.head_edits import graft
from support.kernel_sizes import LATENT, SPARSE, WINDOWS
from support.long_runs import IS_LONG
from support.quantized_models import quantized_model
from support.tiny_fixture import Tiny
from torch import Tensor

from headstart.backends.base import Backend, CacheSizes, RoundSizes, StateRows, TrunkRows
from headstart.backends.options import BackendOptions
from headstart.backends.select import TABLE, create_backend
from headstart.backends.torch import backend as torch_backend
from headstart.backends.torch.backend import TorchBackend
from headstart.calibrate.tiny_configs import TINY_CONFIGS
from headstart.checkpoint.reader import Checkpoint
from headstart.engine.drafter import Drafter
from headstart.engine.request import Request
from headstart.errors import UnsupportedFamily
from headstart.families.registry import GRAFTED_AS
from headstart.models.build import LoadedModel, build
from headstart.sampling.params import Row, SamplingParams

pytestmark = pytest.mark.usefixtures("quick_kernels")

# What each backend runs today: it may learn more, and must not forget any.
CLAIMS = {
    "cuda": {
        "bailing_moe_v2", "deepseek_v3", "deepseek_v32", "ernie4_5_moe", "exaone_moe", "glm4_moe",
        "glm4_moe_lite",
        "glm_moe_dsa", "llama", "mellum", "mimo", "mimo_v2", "qwen2", "qwen3", "qwen3_5",
        "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "step3p5",
    },
    "numba": {
        "bailing_moe_v2", "deepseek_v3", "ernie4_5_moe", "exaone_moe", "glm4_moe", "glm4_moe_lite",
        "llama", "mellum",
        "mimo", "mimo_v2", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text",
        "qwen3_5_text", "qwen3_moe", "qwen3_next", "step3p5",
    },
    "torch": {
        "bailing_moe_v2", "bailing_moe_v3", "deepseek_v3", "deepseek_v32", "deepseek_v4",
        "ernie4_5_moe", "exaone4_5",
        "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm5_next", "glm_moe_dsa", "hy_v4", "llama",
        "mellum", "mimo", "mimo_v2", "nemotron_h", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe",
        "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen4_exp", "step3p5",
    },
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A backend with the options that choose it, and how near it is to the reference."""

    name: str
    options: BackendOptions
    reference: BackendOptions
    tolerance: float  # of numbers, as a share of the largest


_PLAIN = BackendOptions(kernels="off", threads=1)
_PLAIN_INT8 = BackendOptions(kernels="off", threads=1, weights="int8")
_PLAIN_INT4 = BackendOptions(kernels="off", threads=1, weights="int4")
CASES = {
    "cuda": Case("cuda", BackendOptions(kernels="on"), _PLAIN, 1e-5),
    "numba": Case("numba", BackendOptions(threads=1), _PLAIN, 1e-5),
    # The same rounded weights; but inputs are bf16 there, and 8 bits with a scale per row here.
    "numba int8": Case("numba", BackendOptions(threads=1, weights="int8"), _PLAIN_INT8, 0.03),
    # The same rounded weights; inputs are 8 bits with a scale per group here.
    "numba int4": Case("numba", BackendOptions(threads=1, weights="int4"), _PLAIN_INT4, 0.03),
}
# One family for each kind of layer; `numba` itself has all of them.
ROUNDED = {
    "numba int8": ("deepseek_v3", "glm4_moe", "mimo", "qwen3_5_moe", "step3p5"),
    "numba int4": ("ernie4_5_moe", "llama", "qwen3_next"),
}
# Families whose layers others have as well: interpreted kernels run them in long runs only.
_ALIKE = {
    "glm4_moe_lite", "glm_moe_dsa", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_moe", "qwen3_next",
}  # fmt: skip
PAIRS = [
    (case, family)
    for case in CASES
    for family in ROUNDED.get(case) or sorted(CLAIMS[CASES[case].name])
    if IS_LONG or case != "cuda" or family not in _ALIKE
]

# As small as can be: interpreted programs take milliseconds each.
SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64,
}  # fmt: skip
_LATENT = {**LATENT, "first_k_dense_replace": 0}
_HYBRID = {
    **SIZES, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 16, "linear_value_head_dim": 12, "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
_EXPERTS = {**SIZES, "moe_intermediate_size": 32}
OWN_SIZES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "mimo", "qwen2", "qwen3"), SIZES),
    **WINDOWS,
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": _LATENT,
    **SPARSE,
    "qwen3_moe": {**_EXPERTS, "mlp_only_layers": []},
    "bailing_moe_v2": {**_EXPERTS, "first_k_dense_replace": 0},
    "glm4_moe": {**_EXPERTS, "first_k_dense_replace": 0},
    "ernie4_5_moe": {**_EXPERTS, "moe_layer_start_index": 0, "moe_layer_end_index": 0},
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _HYBRID
    ),
}

# Two requests: one is read in two chunks; the other decodes with drafts beside the second chunk.
TEXTS = [[3, 14, 15, 9, 26], [31, 41, 5]]
CUT, DRAFTS = 3, (7, 11, 40)
ACCEPTED = 2  # of the drafts, which then belong to the text
NEWEST = [20, 22]
NUM_DRAFTS = 3
BLOCKS = [[5, 1, 3, 9, 10], [2, 6, 0, 8, 7]]  # of two tokens, in no order
CACHE = CacheSizes(num_blocks=11, block_size=2, num_states=6)
GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.8, top_k=5)


@dataclass
class Found:
    """What a backend says of the two requests."""

    tensors: list[Tensor] = field(default_factory=list)  # logits and states, logits of the head
    drafts: list[list[int]] = field(default_factory=list)
    chained: list[list[int]] | None = None  # the same by `draft_chain`
    choices: list[int] = field(default_factory=list)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from support.kernel_runs import few_programs

    few_programs(monkeypatch)
    # It measures which of two ways to compute a product is the faster one.
    monkeypatch.setattr(torch_backend, "tune", lambda *modules: None)


def loaded(tiny: Tiny, family: str, **sizes: Any) -> LoadedModel:
    """A model of its own: a backend may change the format of weights."""
    folder = tiny(family, rate=0.9, dtype="F32", with_head=family not in GRAFTED_AS, **sizes)
    return build(Checkpoint.open(with_some_head(folder, family)), device="cpu", dtype="float32")


def with_some_head(folder: Path, family: str) -> Path:
    if family not in GRAFTED_AS:
        return folder
    out = folder.parent / f"{folder.name}-grafted"
    return out if out.exists() else graft(folder, out)


def test_no_backend_claims_less_than_it_did(tiny: Tiny) -> None:
    claimed: dict[str, set[str]] = {name: set() for name in CLAIMS}
    for family in TINY_CONFIGS:
        try:
            model = loaded(tiny, family, **OWN_SIZES.get(family, {}))
        except UnsupportedFamily:
            continue
        claimed["torch"].add(family)
        for case in CASES.values():
            if TABLE[case.name](model, case.options) is None:
                claimed[case.name].add(family)
    for name, families in CLAIMS.items():
        assert claimed[name] == families, f"{name}: {claimed[name] ^ families} are new or missing"


@pytest.mark.parametrize(("case", "family"), PAIRS)
def test_a_backend_gives_what_the_reference_does(case: str, family: str, tiny: Tiny) -> None:
    own, sizes = CASES[case], OWN_SIZES[family]
    reference = TorchBackend(loaded(tiny, family, **sizes), own.reference)
    backend = create_backend(loaded(tiny, family, **sizes), own.options)
    assert backend.name == own.name
    wanted, found = (run(each) for each in (reference, backend))
    for numbers, reference_numbers in zip(found.tensors, wanted.tensors, strict=True):
        within = own.tolerance * float(reference_numbers.abs().max())
        torch.testing.assert_close(numbers, reference_numbers, rtol=0, atol=within)
    last = wanted.tensors[-1]  # of the head: [requests, tokens]
    for drafts, reference_drafts, logits in zip(found.drafts, wanted.drafts, last, strict=True):
        assert drafts[:-1] == reference_drafts[:-1]
        behind = float(logits[reference_drafts[-1]] - logits[drafts[-1]])
        assert behind <= 2 * own.tolerance * float(last.abs().max()), "no near tie"
    assert found.chained in (None, found.drafts), "at once as one by one"
    assert found.choices == wanted.choices


# How near numbers are to plain products with the same weights: rows are rounded to 8-bit floats, or
# to pairs of integers, which together are finer than bf16.
QUANTIZED = {"fp8-row": 0.09, "fp8-block": 0.09, "awq": 1e-3}
# Parts of merged matrices end with blocks of 128.
_BLOCKS = {**SIZES, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 128}


@pytest.mark.parametrize("form", QUANTIZED)
def test_quantised_weights_run_as_stored(
    form: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support.interpreted_bf16 import repair_fp8

    repair_fp8(monkeypatch)
    folder = quantized_model(tiny, form, **_BLOCKS)

    def model() -> LoadedModel:
        return build(Checkpoint.open(folder), device="cpu", dtype="float32")

    reference = TorchBackend(model(), _PLAIN)
    backend = create_backend(model(), BackendOptions(kernels="on"))
    kinds = {type(own).__name__ for own in backend.trunk.layers.modules()} & _KERNELS
    assert backend.name == "cuda" and len(kinds) == 1
    wanted, found = (run(each) for each in (reference, backend))
    for numbers, reference_numbers in zip(found.tensors, wanted.tensors, strict=True):
        error = (numbers - reference_numbers).norm() / reference_numbers.norm()
        assert error < QUANTIZED[form]
    assert found.drafts == wanted.drafts and found.choices == wanted.choices


_KERNELS = {"KernelFp8", "KernelGroups"}


@torch.inference_mode()
def run(backend: Backend) -> Found:
    backend.allocate(CACHE)
    found = Found()
    first = backend.trunk_pass([trunk_rows(0, TEXTS[0][:CUT], 0, 0), trunk_rows(1, TEXTS[1], 0, 1)])
    drafts = [NEWEST[1], *DRAFTS]
    second = backend.trunk_pass(
        [trunk_rows(0, TEXTS[0][CUT:], CUT, 1), trunk_rows(1, drafts, len(TEXTS[1]), len(drafts))]
    )
    for states, logits in (first, second):
        found.tensors += [logits, *states]
    states = list(zip(first[0], second[0], strict=True))
    found.drafts, head_logits = propose(backend, states, chained=False)
    assert len(head_logits) == NUM_DRAFTS
    found.tensors += head_logits
    if backend.drafts_chains:
        found.chained, _ = propose(backend, states, chained=True)
    found.choices = choices(backend)
    return found


def trunk_rows(index: int, tokens: list[int], start: int, num_logits: int) -> TrunkRows:
    """Rows of a request; each draft leaves a recurrent state to go back to."""
    drafts = max(0, num_logits - 1)
    count = len(tokens)
    chain = [(count - drafts + i, 2 + i) for i in range(drafts)] + [(count, index)]
    states = StateRows(index if start else None, tuple(chain))
    return TrunkRows(tokens, start, BLOCKS[index], num_logits, True, states)


def propose(
    backend: Backend, states: list[tuple[Tensor, Tensor]], *, chained: bool
) -> tuple[list[list[int]], list[Tensor]]:
    """Drafts of both requests, and the head's logits by depth, unless chains are made at once."""
    texts = [[*TEXTS[0], NEWEST[0]], [*TEXTS[1], NEWEST[1], *DRAFTS[:ACCEPTED], 33]]
    drafter, requests = Drafter(backend), []
    for index, (text, (first, second)) in enumerate(zip(texts, states, strict=True)):
        request = Request(str(index), text, GREEDY, 0, 9, frozenset(), index)
        request.blocks = BLOCKS[index]
        drafter.feed(request, 0, first)
        drafter.feed(request, len(first), second[: len(text) - 1 - len(first)])
        requests.append(request)
    logits: list[Tensor] = []
    own = backend.draft_logits

    def watch(normed: Tensor, vocab: str | None, module: int = 0) -> Tensor:
        logits.append(own(normed, vocab, module))
        return logits[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "draft_logits", watch)
        patch.setattr(backend, "drafts_chains", chained)
        drafter.propose(dict.fromkeys(requests, NUM_DRAFTS))
    return [request.drafts for request in requests], logits


def choices(backend: Backend) -> list[int]:
    """Of the same logits, greedy and sampled; rounds choose the same, where there are any."""
    logits = torch.linspace(-3, 3, 64).roll(7).repeat(4, 1) * torch.tensor([[1], [-1], [0.5], [2]])
    rows = [Row(params, seed, 9) for params in (GREEDY, SAMPLED) for seed in (1, 2)]
    made = backend.choose(logits, rows)
    if backend.has_rounds:
        sizes = RoundSizes(max_requests=4, max_drafts=3, num_drafts=3, max_tokens=40)
        tokens, _ = backend.make_rounds(sizes).choose_first(logits, rows)
        assert [int(token) for token in tokens] == made
    return made
