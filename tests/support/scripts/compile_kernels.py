"""Compile kernels for an H100 without one; run by test_compiling.py in a process of its own.

The interpreter accepts more than the compiler does, and it has room for everything. What the
compiler said is known: a kernel is compiled again when its source, sizes or Triton have changed.
With --long all are, in more sizes, and must say the same as before. --record compiles what is not
recorded, in all sizes, and writes down what the compiler said of each, for all machines
(tests/fixtures/kernels_sm_90.txt); with --long it compiles all of them again.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import sys
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headstart.backends.cuda.attending import LEAST_SHARING, cut_for
from headstart.backends.cuda.kernels import (
    adjusting,
    attention,
    attention_fp8,
    choice,
    copies,
    delta,
    delta_chunks,
    delta_exact,
    delta_prompts,
    eight_bits,
    fp8_products,
    gates,
    group_packing,
    groups,
    index_choice,
    index_rows,
    inputs,
    int8,
    int8_choice,
    latent,
    latent_heads,
    latent_prompts,
    latent_rows,
    linear,
    logprobs,
    losses,
    merging,
    moe,
    moe_fp8,
    moe_fp8_vector,
    moe_groups,
    moe_rows,
    moe_vector,
    moe_wide_groups,
    own_rows,
    pieces,
    prompts,
    rejection,
    routing,
    rows,
    sampling,
    shared_prefix,
    sorting,
    squeezed,
    streamed,
    wide_groups,
)
from headstart.backends.cuda.kernels.attention_cuts import fitted
from headstart.checkpoint.cache import cache_folder

IS_LONG, RECORDS = "--long" in sys.argv, "--record" in sys.argv
RECORD = Path(__file__).resolve().parents[2] / "fixtures" / "kernels_sm_90.txt"
MAX_SHARED_BYTES = 232448  # of one program, on an H100 and an H200
MAX_SPILLED_BYTES = 64  # of one thread: none by Triton 3.6, by which cuts were timed; 3.9 has 12,
# and about 200 in latent attention, which has all registers, 76 in 4-bit products of 64 rows, 112
# in chunks of delta nets, of which three run beside one another (48 by 3.6, faster than none).
MAX_SPILLED_BYTES_OF = {latent: 256, groups: 96, delta_chunks: 128}

ROUNDS = {"ROWS": 4, "HEADS": 32, "KV_HEADS": 8, "GROUP": 4, "DIM": 64, "BLOCK_D": 64, "TILE": 16}
LATENT = {"HEADS": 128, "RANK": 512, "ROPE": 64}  # DeepSeek-V3's
BY_HEAD = {
    "HEADS": 128,
    "RANK": 512,
    "NOPE": 128,
    "MATRIX": 256 * 512,
    "BLOCK_N": 64,
    "BLOCK_K": 128,
}
INDEX = {"key": "*fp32", "queries": "*fp32", "keys": "*bf16", "shares": "*fp32", "scores": "*fp32",
         "chosen": "*i32", "last": "*i32"}  # fmt: skip
UNFOLDED = {"ROPE": 64, "ENTRY": 576, "BLOCK_P": 64, "BLOCK_M": 64, "num_stages": 2}
OPTIONS = {"num_warps": 4, "num_stages": 3, "maxnreg": None}  # where a job has none of its own
WIDE = {"dim": 256, "group": 8}  # heads like Qwen3-Next's
CUT = {"LEAST": 128, "CUT": 0, "STEP": 32}
PLACES = {"starts": "*i32", "counts": "*i32", "usual": "*i32"}  # of rows in a packed pass
ALL_SEEN = {"WINDOW": 0, "sinks": None}
PLAIN_KV = {"k_sizes": None, "v_sizes": None}
FP8_KV = {"k_cache": "*i16", "v_cache": "*i16", "sizes": "*i32"}  # as they are read
KEPT_FP8 = {"k_cache": "*u8", "v_cache": "*u8", "k_sizes": "*i16", "v_sizes": "*i16"}
APART = {**dict.fromkeys(PLACES), "shared": None, "IS_PACKED": False}  # no such pass
PREFIX = {"shared": "*i32", "shared_partial": "*fp32", "shared_sums": "*fp32", "lengths": "*i32"}
NO_PREFIX = dict.fromkeys(("shared_partial", "shared_sums"))
TILE = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 64}
# 512 tokens beside a draft vocabulary.
OWN_SLOTS, OWN_TILE = {"LIMIT": 512}, {"SLOTS": 8, "BLOCK_K": 512}
OWN = dict.fromkeys(
    ("ids", "last", "counts", "pending", "lengths", "columns", "vocabs"), "*i32"
) | {"tokens": "*i64", "chosen": "*i64", "inputs": "i32 of 16"}
INTEGERS = {"whole": "*i8", "rest": "*i8", "weight": "*i8"}
# Two tiles of rows, as for 80 of them.
STREAMED = {"x": "tensordesc<bf16[64, 128]>", "x_rest": "tensordesc<bf16[16, 128]>",
            "weight": "tensordesc<bf16[64, 128]>"}  # fmt: skip
STREAMED_TILE = {"BLOCK_M": 64, "REST": 16, "BLOCK_N": 64, "BLOCK_K": 128}
STREAMED_INT8 = {"whole": "tensordesc<i8[64, 128]>", "whole_rest": "tensordesc<i8[16, 128]>",
                 "weight": "tensordesc<i8[64, 128]>"}  # fmt: skip
# Products of rounded rows: with blocks of weights, tiles of many rows, and 4 bits.
MULTIPLE = " of 16"  # an integer that is known to be a multiple, as the widths of matrices are
WIDTHS = dict.fromkeys(("inputs", "per_split"), "i32" + MULTIPLE)
FP8 = {**WIDTHS, "x": "*fp8e4nv", "weight": "*fp8e4nv", "values": "*fp8e4nv",
       "x_scales": "*fp32", "grown": "*fp32", "result": "*fp32"}  # fmt: skip
FP8_TILE = {"GROUP": 128, "IS_BLOCKED": True, "STREAMS": False, "BLOCK_M": 16, "BLOCK_N": 64,
            "BLOCK_K": 256, "DEEP": 128, "IS_EVEN": True, "num_stages": 4}  # fmt: skip
FP8_STREAMED = {
    **FP8,
    "x": "tensordesc<fp8e4nv[64, 128]>",
    "weight": "tensordesc<fp8e4nv[64, 128]>",
}
GROUPS = {**WIDTHS, "x": "*i8", "weight": "*i8", "zeros": "*i8", "values": "*i8",
          "scales": "*bf16", "x_scales": "*fp32", "x_sums": "*fp32", "result": "*fp32"}  # fmt: skip
GROUPS_TILE = {"GROUP": 128, "HALF": 128, "IS_PACKED": True, "IS_STACKED": True, "BLOCK_M": 16,
               "BLOCK_N": 64, "BLOCK_K": 256, "IS_EVEN": True, "num_stages": 4}  # fmt: skip
# A layer like Qwen3-Next's, in smaller tiles: 512 experts, 10 of them chosen, one shared.
EXPERTS = {**TILE, "CHOICES": 11, "IS_EVEN": True}
WIDE_PAIRS = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8}
SCAN = {"IS_SORTED": False, "BLOCK_R": 64, "MOST": 64, "BLOCK_C": 16}
LISTS = {name: "*i32" for name in ("chosen", "experts", "starts", "order")}
VECTOR = {"CHOICES": 11, "IS_EARLY": True}
# The same in 8-bit floats with scales of blocks, and in 4 bits.
SIZES = dict.fromkeys(("hidden", "width", "shared_width"), "i32" + MULTIPLE)
EXPERTS_FP8 = {**LISTS, **SIZES, **dict.fromkeys(("x", "weight", "shared", "values"), "*fp8e4nv"),
               **dict.fromkeys(("x_scales", "inner_scales", "shared_scales"), "*fp32")}  # fmt: skip
FP8_PAIRS = {"CHOICES": 9, "IS_BLOCKED": True, "BLOCK_M": 16, "BLOCK_N": 128, "BLOCK_K": 128,
             "IS_EVEN": True, "num_stages": 3}  # fmt: skip
FP8_ALONE = {"CHOICES": 9, "IS_BLOCKED": True, "IS_EARLY": True, "num_warps": 2}
EXPERTS_GROUPS = {**LISTS, **SIZES, **dict.fromkeys(("x", "weight", "zeros", "shared", "values",
                                                     "shared_zeros"), "*i8"),
                  **dict.fromkeys(("scales", "shared_scales"), "*bf16"),
                  **dict.fromkeys(("x_scales", "x_sums"), "*fp32")}  # fmt: skip
GROUP_PAIRS = {"CHOICES": 9, "GROUP": 128, "HALF": 128, "IS_PACKED": True, "BLOCK_M": 8,
               "BLOCK_N": 64, "BLOCK_K": 256, "IS_EVEN": True}  # fmt: skip
ROUTER = {"TOP_K": 8, "IS_SIGMOID": True, "RENORMALISE": True, "BLOCK_C": 16, "BLOCK_K": 512}
RINGS = {**{name: "*i32" for name in ("first", "buffers", "replays")}, "memory": "*fp32",
         "gates": "*fp32", "a_log": "*fp32", "dt_bias": "*fp32", "inputs": "*bf16",
         "mixed": "*bf16", "norm": "*bf16"}  # fmt: skip
EXACT = dict.fromkeys(("begins", "counts", "silents", "lines", "sources", "kept", "targets",
                       "positions"), "*i32")  # fmt: skip
CHUNKED = {"K_HEADS": 16, "K_DIM": 128, "V_DIM": 128}
WALKED = {"HEADS": 48, "TAPS": 4, "ROWS": 64, "IS_SILU": True, "BLOCK_C": 4, "BLOCK_K": 128}
PREPARED = {**dict.fromkeys(("projected", "known", "wanted", "scores", "conv"), "*bf16"),
            **dict.fromkeys(("chunks", "spans", "pieces", "keeps"), "*i32"), "faded": "*fp32",
            **dict.fromkeys(("width", "channels"), "i32" + MULTIPLE)}  # fmt: skip
LOSSES = {**dict.fromkeys(("logits_ptr", "target_ptr"), "*bf16"), "places_ptr": "*i64",
          "best_ptr": "*i64", **dict.fromkeys(
              ("norm_ptr", "numbers_ptr", "log_norm_ptr", "draft_ptr", "of_target_ptr",
               "below_ptr", "label_ptr"), "*fp32")}  # fmt: skip
CHOOSING = {**dict.fromkeys(("values", "peaks", "numbers", "bias", "raw", "raw_peaks", "adjusted",
                             "adjusted_peaks"), "*fp32"), "counts": "*i32", "history": "*i32",
            "drafts": "*i64", "masks": "*i32", "weights": "*i64", "chosen": "*i64",
            "tokens": "*i64", "emitted": "*i64"}  # fmt: skip
CUT_ROW = {"TILE": 1024, "TILES": 256}
SHARES = {**CHOOSING, **dict.fromkeys(("cuts", "d_values", "d_cuts", "shares"), "*fp32"),
          **dict.fromkeys(("last", "d_last", "limits", "of_head", "left", "lengths", "accepted"),
                          "*i32"),
          **dict.fromkeys(("d_weights", "columns_of", "choices"), "*i64")}  # fmt: skip
BATCH = {**dict.fromkeys(("copies", "tokens", "ids", "positions", "sources", "places", "drafted"),
                         "*i64"),
         **dict.fromkeys(("pending", "lengths", "left", "limits", "made", "tables", "kv_slots",
                          "seen", "starts", "counts"), "*i32")}  # fmt: skip
KINDS = {"tables": "*i32", "seen": "*i32", "context": "*i32", "row_edges": "*i32",
         "context_edges": "*i32", "slots": "*i32", "pending": "*i32", "where": "*i32",
         "positions": "*i64", "seeds": "*i64", "ids": "*i64", "partial": "*fp32", "sums": "*fp32",
         "inv_temps": "*fp32", "best": "*fp32", "scales": "*fp32", "weights": "*fp32",
         "terms": "*fp32", "correction": "*fp32", "least_sum": "fp32", "sizes": "*fp32",
         "scale": "fp32", "eps": "fp32", "v_scale": "fp32"}  # fmt: skip
TENSORS = ("q", "k_cache", "v_cache", "x", "weight", "stream", "normed", "embed", "states", "pair",
           "result", "shared", "inner", "gate", "cos", "sin", "bias", "q_norm", "k_norm",
           "embed_norm", "state_norm", "kv_norm", "lifted", "turned", "entries", "latent", "ups",
           "gathered", "unfolded", "sinks")  # fmt: skip


Job = tuple[Any, dict[str, Any], dict[str, str]]  # a kernel, its constants, kinds of the rest
Figures = tuple[int, int, int]  # registers, bytes that are spilled, bytes that are shared


class Described(NamedTuple):
    """A job as the compiler takes it; `digest` is the name of its figures in the record."""

    source: ASTSource
    options: dict[str, Any]
    digest: str


found_now: dict[str, Figures] = {}


def attend(
    requests: int, rows: int, *, dim: int, group: int, is_fitted: bool = True, is_fp8: bool = False
) -> Job:
    """Attention as it is launched for so many requests."""
    tile = max(16, triton.next_power_of_2(rows * group))
    cut = cut_for(requests, rows)
    if is_fitted:
        cut = fitted(cut, tile, dim, number_bytes=2, is_fp8=is_fp8)
    fixed = {"ROWS": rows, "HEADS": 2 * group, "KV_HEADS": 2, "GROUP": group, "DIM": dim,
             "BLOCK_D": dim, "TILE": tile, "PAGE": 16, "LEAST": cut.least, "CUT": cut.tokens,
             "STEP": cut.step, "IS_WHOLE": False, "IS_PACKED": True, "IS_OPEN": tile >= 64,
             "num_warps": cut.warps, "num_stages": cut.stages,
             "maxnreg": cut.registers}  # fmt: skip
    fixed |= {} if cut.levels else {"usual": None}
    if is_fp8:
        return attention_fp8.attend_fp8, fixed | {"BLOCK_D": dim // 2}, PLACES | FP8_KV
    fixed |= {} if requests >= LEAST_SHARING else {"shared": None}
    fixed |= {"VALUE": dim, "BLOCK_V": dim, **ALL_SEEN}
    return attention._attend, fixed, {**PLACES, **PREFIX}


def attend_window(requests: int, rows: int) -> Job:
    """Attention as it is launched in sliding layers of MiMo-V2."""
    kernel, fixed, kinds = attend(requests, rows, dim=256, group=8)
    fixed |= {"DIM": 192, "VALUE": 128, "BLOCK_V": 128, "WINDOW": 129, "IS_WHOLE": True,
              "LEAST": 256, "IS_OPEN": False, "shared": None}  # fmt: skip
    del fixed["sinks"]
    return kernel, fixed, kinds


def attend_latents(requests: int, rows: int, *, number_bytes: int = 2) -> Job:
    """Latent attention as it is launched for DeepSeek-V3."""
    lines = rows * LATENT["HEADS"]
    cut = latent.cut_for(requests, lines, number_bytes)
    fixed = {**LATENT, "ROWS": rows, "BLOCK_R": 512, "BLOCK_P": 64,
             "TILE": cut.lines, "PAGE": 16, "LEAST": cut.least,
             "CUT": cut.tokens, "STEP": cut.step, "IS_WHOLE": cut.pieces == 1,
             "num_warps": cut.warps, "num_stages": cut.stages}  # fmt: skip
    wide = dict.fromkeys(("lifted", "turned", "entries", "result"), "*fp32")
    return latent._attend, fixed, wide if number_bytes > 2 else {}


# Other sizes of kernels that JOBS compiles, too: seconds each, for long runs.
LONG_JOBS: list[Job] = [
    attend(4, 16, **WIDE),  # all the rows that one program has room for
    attend(8, 32, dim=128, group=4),  # a group of rows that join a round
    attend(80, 4, dim=128, group=4),
    attend(64, 9, dim=128, group=4),  # requests that copy beside others that do not
    attend(64, 17, dim=128, group=4),
    attend(16, 17, dim=128, group=4),
    attend(1, 4, **WIDE),
    attend(8, 32, dim=128, group=4, is_fp8=True),
    attend(1, 4, dim=128, group=4, is_fp8=True),
    attend(4, 16, **WIDE, is_fp8=True),
    (attention_fp8.prompt_fp8, {"HEADS": 32, "KV_HEADS": 8, "DIM": 128, "BLOCK_D": 64,
                                "BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 2},
     {"tiles": "*i32", **FP8_KV}),
    (rows._place_qkv, {"SPLITS": 2, "HEADS": 32, "KV_HEADS": 8, "EACH": 2, "DIM": 128, "HALF": 64,
                       "ROTATED": 128, "IS_INTERLEAVED": False, "IS_GATED": False, "BLOCK": 64,
                       "HAS_BIAS": False, "HAS_NORMS": False, "VALUE": 128, "IS_SCALED": False,
                       **PLAIN_KV}, {}),
    (pieces.combine, {**CUT, "ROWS": 4, "HEADS": 128, "KV_HEADS": 1, "GROUP": 128, "DIM": 512,
                          "BLOCK_D": 512, "TILE": 512, "LINES": 1, "BLOCK_C": 8, "LEFT_ALONE": -1,
                          "SHARED_STEP": 1, **APART, **NO_PREFIX, "WINDOW": 0}, {}),
    (linear._linear, {**TILE, "BLOCK_N": 16, "BLOCK_K": 64, "IS_EVEN": True},
     {"result": "*fp32", "weight": "*fp32"}),
    (int8_choice._best_of_tile, {**STREAMED_TILE, "HAS_IDS": False, "KEEPS_ALL": False,
                                 "num_stages": 4}, STREAMED_INT8),
    (fp8_products._linear, {**FP8_TILE, "BLOCK_K": 128, "STREAMS": True, "BLOCK_M": 64,
                            "num_stages": 6}, FP8_STREAMED),
    # Rows of prompts with blocks of weights, in the model's own type.
    (fp8_products._linear, {**FP8_TILE, "BLOCK_K": 128, "STREAMS": True, "BLOCK_M": 128,
                            "BLOCK_N": 128, "num_warps": 8, "num_stages": 4},
     {**FP8_STREAMED, "x": "tensordesc<fp8e4nv[128, 128]>",
      "weight": "tensordesc<fp8e4nv[128, 128]>", "result": "*bf16"}),
    # The most rows whose two sums fit, with scales of blocks and of rows.
    (fp8_products._gated, {**FP8_TILE, "BLOCK_K": 128, "STREAMS": True, "BLOCK_M": 64,
                           "num_stages": 4}, {**FP8_STREAMED, "result": "*bf16"}),
    (fp8_products._gated, {**FP8_TILE, "GROUP": 0, "IS_BLOCKED": False, "BLOCK_K": 128,
                           "STREAMS": True, "BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8},
     {**FP8_STREAMED, "x": "tensordesc<fp8e4nv[128, 128]>",
      "weight": "tensordesc<fp8e4nv[128, 128]>", "result": "*bf16"}),
    (eight_bits._silu_rows, {"sums": None, "SPLITS": 1, "GROUP": 16384, "BLOCK": 16384,
                             "num_warps": 16}, {**FP8, "product": "*bf16"}),
    (fp8_products._best_of_tile, {**FP8_TILE, "HAS_IDS": False}, FP8),
    (groups._best_of_tile, {**GROUPS_TILE, "BLOCK_K": 512, "num_stages": 3, "HAS_IDS": False},
     GROUPS),
    (group_packing._dequantize, {"GROUP": 128, "HALF": 128, "IS_PACKED": True, "BLOCK_N": 64},
     {**GROUPS, "result": "*bf16"}),
    (rows._add_norm, {"SPLITS": 4, "HAS_STREAM": True, "GROUP": 4096, "BLOCK": 4096,
                      "num_warps": 8}, {"normed": "*fp8e4nv"}),
    (eight_bits._fp8_rows, {"GROUP": 16384, "BLOCK": 16384, "num_warps": 8}, FP8),
    (groups._linear, {**GROUPS_TILE, "IS_STACKED": False, "BLOCK_M": 64, "num_stages": 3}, GROUPS),
    (moe._gate_up, {**EXPERTS, **SCAN, "IS_SORTED": True, "LIMIT": 0}, LISTS),
    # Sorted rows of a prompt.
    (moe._gate_up, {**EXPERTS, **SCAN, "IS_SORTED": True, "LIMIT": 0, **WIDE_PAIRS},
     {**LISTS, **SIZES}),
    (moe._down, {**EXPERTS, **WIDE_PAIRS, "BLOCK_N": 256}, {**LISTS, **SIZES, "terms": "*bf16"}),
    (moe_fp8._gate_up, {**FP8_PAIRS, "BLOCK_M": 64, "num_warps": 8},
     {**EXPERTS_FP8, "inner": "*fp8e4nv"}),
    (moe_fp8._down, {**FP8_PAIRS, "BLOCK_M": 64, "num_warps": 8, "num_stages": 4,
                     "IS_BY_EXPERT": False},
     {**EXPERTS_FP8, "inner": "*fp8e4nv", "terms": "*bf16"}),
    (moe_groups._product, {**GROUP_PAIRS, "BLOCK_M": 64, "num_warps": 8, "weights": None,
                           "IS_BY_EXPERT": False},
     EXPERTS_GROUPS),
    (routing._choose_experts, {**ROUTER, "SPLITS": 8, "GROUPS": 1, "EACH": 512, "BLOCK_G": 1,
                               "BLOCK_E": 512, "TOP_GROUPS": 1, "SHARED": 1}, LISTS),
    attend(4, 4, **WIDE),
    attend_latents(80, 4),
    attend_latents(80, 4, number_bytes=4),
    (latent_heads._lift, {**BY_HEAD, "BLOCK_M": 16, "SPLITS": 2, "ROPE": 64,
                          "IS_INTERLEAVED": True, "BLOCK_P": 32}, {}),
    (latent_prompts._prompt, {**UNFOLDED, "HEADS": 128, "SOME": 128, "NOPE": 128, "VALUE": 128,
                              "BLOCK_N": 128, "BLOCK_V": 128, "STEP": 64}, {"tiles": "*i32"}),
]  # fmt: skip
JOBS: list[Job] = [
    (attention._attend, {**ROUNDS, **CUT, **APART, **ALL_SEEN, "PAGE": 16, "IS_WHOLE": False,
                         "IS_OPEN": False, "VALUE": 64, "BLOCK_V": 64}, {}),
    attend_window(80, 4),
    attend(80, 4, dim=128, group=4, is_fp8=True),
    attend_latents(1, 1),
    (latent_rows._keep_latents, {"SPLITS": 2, "Q_RANK": 1536, "RANK": 512, "ROPE": 64,
                                 "IS_INTERLEAVED": True, "BLOCK_Q": 2048, "BLOCK_R": 512,
                                 "BLOCK_P": 32}, {}),
    # DeepSeek-V3.2's indexer.
    (index_rows._keep_index, {"SPLITS": 2, "DIM": 128, "ROPE": 64, "FIRST": 0, "BLOCK": 128,
                              "IS_INTERLEAVED": False, "TABLE_INTERLEAVED": True, "BLOCK_P": 32,
                              "num_warps": 1}, INDEX),
    (index_rows._index_queries, {"SPLITS": 2, "WEIGHT_SPLITS": 4, "HEADS": 64, "DIM": 128,
                                 "ROPE": 64, "FIRST": 0, "IS_INTERLEAVED": False, "EACH": 8,
                                 "TABLE_INTERLEAVED": True, "BLOCK": 128, "BLOCK_P": 32}, INDEX),
    (index_choice._scores, {"ROWS": 4, "HEADS": 64, "DIM": 128, "BLOCK_H": 64, "BLOCK_D": 128,
                            "PAGE": 16, "STEP": 64, "num_stages": 2}, INDEX),
    (index_choice._choose, {"ROWS": 4, "PAGE": 16, "TILE": 8192, "num_warps": 16}, INDEX),
    (latent_rows._turn_queries, {"SPLITS": 2, "HEADS": 128, "DIM": 192, "ROPE": 64, "EACH": 8,
                                 "BLOCK_N": 128, "BLOCK_P": 32, "IS_INTERLEAVED": True}, {}),
    (latent_heads._lift, {**BY_HEAD, "BLOCK_M": 64, "SPLITS": 2, "ROPE": 64,
                          "IS_INTERLEAVED": True, "BLOCK_P": 32}, {}),
    (latent_heads._lower, {**BY_HEAD, "BLOCK_M": 64, "VALUE": 128}, {}),
    (pieces.combine, {**ROUNDS, **CUT, "LINES": 16, "BLOCK_C": 1, "LEFT_ALONE": 1,
                         "SHARED_STEP": 64, "IS_PACKED": True, "WINDOW": 0}, {**PLACES, **PREFIX}),
    # Four requests of four rows, as they attend to what they share.
    (shared_prefix._attend_shared, {**ROUNDS, "DIM": 128, "BLOCK_D": 128, "NEIGHBOURS": 4,
                                    "PAGE": 16, "STEP": 64, "IS_OPEN": True}, PREFIX),
    (shared_prefix._attend_shared, {**ROUNDS, "HEADS": 16, "KV_HEADS": 2, "GROUP": 8, "DIM": 256,
                                    "BLOCK_D": 256, "TILE": 32, "NEIGHBOURS": 2, "PAGE": 16,
                                    "STEP": 64, "IS_OPEN": True, "num_warps": 8}, PREFIX),
    (prompts._prompt, {"HEADS": 32, "KV_HEADS": 8, "DIM": 64, "BLOCK_D": 64, "BLOCK_M": 64,
                       "BLOCK_N": 32, "VALUE": 64, "BLOCK_V": 64, **ALL_SEEN}, {"tiles": "*i32"}),
    # Sliding layers of MiMo-V2.
    (prompts._prompt, {"HEADS": 64, "KV_HEADS": 8, "DIM": 192, "BLOCK_D": 256, "BLOCK_M": 64,
                       "BLOCK_N": 64, "VALUE": 128, "BLOCK_V": 128, "WINDOW": 129,
                       "num_stages": 2}, {"tiles": "*i32"}),
    (gates._gate_heads, {"SPLITS": 2, "HEADS": 96, "DIM": 128, "BLOCK": 128, "num_warps": 1},
     {"rows": "*bf16"}),
    # Heads of GLM-4.7-Flash.
    (latent_prompts._prompt, {**UNFOLDED, "HEADS": 20, "SOME": 20, "NOPE": 192, "VALUE": 256,
                              "BLOCK_N": 256, "BLOCK_V": 256, "STEP": 32}, {"tiles": "*i32"}),
    (merging._merge, {"HEADS": 32, "DIM": 128, "BLOCK_D": 128, "BLOCK_M": 16},
     {"other": "*bf16", "other_sums": "*fp32"}),
    (linear._linear, {**TILE, "IS_EVEN": True}, {"result": "*fp32"}),
    (linear._gated, {**TILE, "IS_EVEN": True}, {}),
    (choice._best_of_tile, {**TILE, "IS_EVEN": True, "HAS_IDS": False}, {}),
    (adjusting._adjust, {"SPLITS": 2, "HAS_IDS": False, "HAS_MASKS": True,
                        "PENALISES": True, "PROCESSES": True, "STORES": True, "TILE": 1024},
     {**CHOOSING, "logits": "*fp32"}),
    (sampling._draw, {**CUT_ROW, "HAS_IDS": True}, CHOOSING),
    (sampling._finish, {**CUT_ROW, "HAS_IDS": True, "STEP": 4096, "num_warps": 8}, CHOOSING),
    (adjusting._remember, {"BLOCK": 8, "num_warps": 1}, CHOOSING),
    (logprobs._weigh, CUT_ROW, CHOOSING),
    (logprobs._rank, {**CUT_ROW, "STEP": 4096, "MOST": 20, "num_warps": 8},
     {**CHOOSING, "ids": "*i32"}),
    (rejection._shares, {**CUT_ROW, "STEP": 4096, "num_warps": 8}, SHARES),
    (rejection._share_of_drafts, {"num_warps": 1}, {**SHARES, "result": "*fp32"}),
    (rejection._accept_drafts, {"num_warps": 1}, {**SHARES, "columns_of": "*i64"}),
    (rejection._residual, {"HAS_IDS": True, "TILE": 1024}, {**SHARES, "columns_of": "*i32"}),
    (rejection._follow, {"BLOCK": 256, "ROWS": 4}, SHARES),
    (own_rows._add, OWN_SLOTS | {"BLOCK": 512}, OWN),
    (own_rows._best_of_own, OWN_SLOTS | OWN_TILE, OWN),
    (own_rows._logits_of_own, OWN_SLOTS | OWN_TILE, {**OWN, "result": "*fp32"}),
    (int8._linear, TILE, {**INTEGERS, "result": "*fp32"}),
    (int8._best_of_tile, {**TILE, "HAS_IDS": True}, INTEGERS),
    (streamed._linear, {**STREAMED_TILE, "num_stages": 5}, {**STREAMED, "result": "*fp32"}),
    (streamed._gated, {**STREAMED_TILE, "BLOCK_K": 64, "num_stages": 4},
     {name: kind.replace("128", "64") for name, kind in STREAMED.items()}),
    (int8_choice._best_of_tile, {**STREAMED_TILE, "HAS_IDS": False, "KEEPS_ALL": True,
                                 "num_stages": 4}, STREAMED_INT8),
    (int8._integers, {"BLOCK": 1024}, INTEGERS),
    (fp8_products._linear, FP8_TILE, FP8),
    (fp8_products._gated, {**FP8_TILE, "BLOCK_K": 128},
     {**FP8, "result": "*fp8e4nv"}),
    (groups._linear, GROUPS_TILE, GROUPS),
    (wide_groups._linear, {"GROUP": 128, "HALF": 128, "BLOCK_M": 64, "BLOCK_N": 128,
                           "num_warps": 8}, {**GROUPS, "x": "*bf16", "weight": "*i16"}),
    (moe_wide_groups._product, {"CHOICES": 9, "GROUP": 128, "HALF": 128, "BLOCK_M": 16,
                                "BLOCK_N": 64, "weights": None, "num_stages": 4},
     {**EXPERTS_GROUPS, "x": "*bf16", "weight": "*i16", "shared": "*i16"}),
    (moe_wide_groups._product, {"CHOICES": 9, "GROUP": 128, "HALF": 128, "BLOCK_M": 16,
                                "BLOCK_N": 64, "weights": None, "zeros": None,
                                "shared_zeros": None, "num_stages": 4},
     {**EXPERTS_GROUPS, "x": "*bf16", "weight": "*i16", "shared": "*i16"}),
    (wide_groups._part, {"SPLITS": 2, "HALF": 128, "IS_GATED": True, "BLOCK": 1024},
     {"source": "*fp32"}),
    (eight_bits._fp8_rows, {"GROUP": 128, "BLOCK": 1024}, FP8),
    (eight_bits._silu_rows, {"SPLITS": 1, "GROUP": 128, "BLOCK": 1024},
     {**GROUPS, "product": "*fp32", "scales": "*fp32"}),
    (rows._add_norm, {"SPLITS": 4, "HAS_STREAM": True, "GROUP": 0, "BLOCK": 1024, "scales": None},
     {}),
    (rows._place_qkv, {"SPLITS": 2, "HEADS": 32, "KV_HEADS": 8, "EACH": 2, "DIM": 128, "HALF": 64,
                       "ROTATED": 64, "IS_INTERLEAVED": False, "IS_GATED": True, "BLOCK": 64,
                       "HAS_BIAS": True, "HAS_NORMS": True, "VALUE": 128, "IS_SCALED": False},
     KEPT_FP8),
    (moe._gate_up, {**EXPERTS, **SCAN, "LIMIT": 7.0}, LISTS),
    (moe._down, EXPERTS, LISTS),
    (moe_vector._first, {**VECTOR, "BLOCK_N": 2, "BLOCK_K": 1024, "LIMIT": 0}, LISTS),
    (moe_vector._second, {**VECTOR, "BLOCK_N": 8, "BLOCK_K": 256}, LISTS),
    (moe_fp8._gate_up, FP8_PAIRS, {**EXPERTS_FP8, "inner": "*fp8e4nv"}),
    (moe_fp8._down, {**FP8_PAIRS, "num_stages": 4, "BLOCK_M": 32, "IS_BY_EXPERT": True},
     {**EXPERTS_FP8, "inner": "*fp8e4nv"}),
    (moe_fp8_vector._first, {**FP8_ALONE, "BLOCK_N": 2, "GROUPS": 8},
     {**EXPERTS_FP8, "inner": "*fp32"}),
    (moe_fp8_vector._second, {**FP8_ALONE, "BLOCK_N": 8, "GROUPS": 4},
     {**EXPERTS_FP8, "inner": "*fp32"}),
    (moe_groups._product, {**GROUP_PAIRS, "num_stages": 4, "IS_BY_EXPERT": True}, EXPERTS_GROUPS),
    (moe_groups._product, {**GROUP_PAIRS, "num_stages": 4, "IS_BY_EXPERT": True, "zeros": None,
                           "shared_zeros": None}, EXPERTS_GROUPS),
    (moe_rows._round_and_list, {"CHOICES": 9, "BLOCK_R": 64, "MOST": 64, "BLOCK_C": 16,
                                "GROUP": 128, "BLOCK": 1024, "sums": None, "IS_BY_EXPERT": True},
     {**EXPERTS_FP8, "x": "*bf16"}),
    (sorting._sort, {"TILE": 16, "BLOCK": 1024, "BLOCK_T": 32}, LISTS),
    (routing._choose_experts, {**ROUTER, "SPLITS": 1, "GROUPS": 8, "EACH": 32, "BLOCK_G": 8,
                               "BLOCK_E": 32, "TOP_GROUPS": 4, "SHARED": 0, "x": None,
                               "gate": None}, LISTS),
    # Qwen3-Next's memories, row after row.
    (delta_exact._delta, {"SPLITS": 2, "HEADS": 32, "GROUP": 2, "KEYS": 2048, "K_DIM": 128,
                          "V_DIM": 128, "IS_SILU": True, "BLOCK_K": 128, "BLOCK_V": 128,
                          "num_warps": 8},
     {**RINGS, **EXACT}),
    (delta_exact._mix, {"TAPS": 4, "BLOCK": 256, "num_warps": 2}, {**RINGS, **EXACT}),
    (delta_exact._inputs, {"SPLITS": 2, "BLOCK": 256, "BLOCK_H": 32, "num_warps": 2},
     {**RINGS, **EXACT}),
    (delta._convolve, {"SPLITS": 2, "ROWS": 4, "TAPS": 4, "PLACES": 34, "BLOCK": 256,
                       "BLOCK_H": 32}, RINGS),
    (delta._delta, {"SPLITS": 2, "ROWS": 4, "HEADS": 32, "GROUP": 2, "KEYS": 1024, "K_DIM": 64,
                    "V_DIM": 64, "PLACES": 34, "IS_SILU": True, "BLOCK_K": 64, "BLOCK_V": 64},
     RINGS),
    # Qwen3.5-27B's
    (delta_chunks._convolve, {**CHUNKED, "ROWS": 32, "PARTS": 2, "TAPS": 4, "BLOCK": 128},
     {**RINGS, **PREPARED}),
    (delta_chunks._prepare, {**CHUNKED, "ROWS": 64, "HEADS": 48, "LEVELS": 5, "BLOCK": 64,
                             "num_stages": 1, "maxnreg": 168}, {**RINGS, **PREPARED}),
    (delta_prompts._walk, {**CHUNKED, **WALKED, "TILES": 4, "BLOCK_V": 32}, {**RINGS, **PREPARED}),
    (delta_prompts._walk, {**CHUNKED, **WALKED, "TILES": 2, "BLOCK_V": 64}, {**RINGS, **PREPARED}),
    (delta_prompts._finish, {"HEADS": 48, "V_DIM": 128, "IS_SILU": True, "ROWS": 16,
                             "BLOCK_V": 128}, {**RINGS, **PREPARED}),
    (losses._row_sums, {"HAS_LABELS": True, "HAS_TARGET": True, "BLOCK": 4096, "num_warps": 8},
     LOSSES),
    (losses._mix, {"HAS_TARGET": True, "HAS_BELOW": True, "HAS_LABEL": True, "BLOCK": 4096,
                   "num_warps": 8}, LOSSES),
    (inputs._pair_rows, {"EMBED_AT": 0, "ZERO_FIRST": True, "BLOCK": 1024}, {}),
    (copies._follow, {"BLOCK": 32, "num_warps": 1}, BATCH),
    (squeezed._fit_drafts, {"MOST": 16, "REQUESTS": 64, "num_warps": 1}, BATCH),
    (squeezed._squeeze_rows, {"ROWS": 9, "BLOCK": 16, "REQUESTS": 64, "FILL": 128, "PAGE": 16,
                              "FEW": 4, "num_warps": 1}, BATCH),
]  # fmt: skip


def described(kernel: Any, fixed: dict[str, Any], own: dict[str, str]) -> Described:
    """What the compiler is given for a job, and a digest of it."""
    options = {name: fixed.get(name, usual) for name, usual in OPTIONS.items()}
    fixed = {name: value for name, value in fixed.items() if name not in OPTIONS}
    kinds = {**KINDS, **dict.fromkeys(TENSORS, "*bf16"), **own}
    # As a number of the run it would be compiled in another way than it is launched.
    left = [own.name for own in kernel.params if own.is_constexpr and own.name not in fixed]
    assert not left, f"{kernel.__name__} lacks {left}"
    words = {
        name: "constexpr" if name in fixed else kinds.get(name, "i32") for name in kernel.arg_names
    }
    signature = {name: word.removesuffix(MULTIPLE) for name, word in words.items()}
    constants = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, word in enumerate(words.values())
        if word.startswith("*") or word.endswith(MULTIPLE)
    }
    source = ASTSource(kernel, signature, constants, aligned)
    given = f"{triton.__version__} {source.hash()} {options}"
    return Described(source, options, hashlib.sha256(given.encode()).hexdigest()[:16])


def compile_kernel(kernel: Any, fixed: dict[str, Any], own: dict[str, str]) -> str:
    """Registers, and bytes that are spilled and shared; too many of them are an error."""
    registers, spilled, shared = known(described(kernel, fixed, own))
    found = f"{kernel.__module__} {kernel.__name__} {registers} {spilled} {shared}"
    most = MAX_SPILLED_BYTES_OF.get(sys.modules[kernel.__module__], MAX_SPILLED_BYTES)
    assert shared <= MAX_SHARED_BYTES and spilled <= most, f"{found} {fixed}"
    return found


@cache
def recorded() -> dict[str, Figures]:
    """What the compiler said of each kernel, by a digest of everything that it was given."""
    lines = [line.split() for line in RECORD.read_text().splitlines()] if RECORD.exists() else []
    return {name: (int(one), int(two), int(three)) for name, one, two, three in lines}


def known(job: Described) -> Figures:
    """The three figures, from the last time that the same was compiled, here or elsewhere."""
    name = job.digest
    path = cache_folder() / "kernels-sm-90" / name
    if RECORDS and not IS_LONG and name in recorded():
        figures = found_now[name] = recorded()[name]
        return figures
    if IS_LONG or RECORDS:
        figures = found_now[name] = compiled(job)
        before = recorded().get(name, figures)
        assert RECORDS or figures == before, f"{RECORD.name} has {before}, compiled: {figures}"
        return figures
    if name in recorded():
        return recorded()[name]
    if path.exists():
        registers, spilled, shared = map(int, path.read_text().split())
        return registers, spilled, shared
    figures = compiled(job)
    path.parent.mkdir(parents=True, exist_ok=True)
    own = path.with_name(f"{name}-{os.getpid()}")
    own.write_text(" ".join(map(str, figures)))
    own.replace(path)
    return figures


def compiled(job: Described) -> Figures:
    with redirect_stdout(io.StringIO()) as log:
        made = triton.compile(job.source, GPUTarget("cuda", 90, 32), job.options)
    registers = number_in(r"Used (\d+) registers", log.getvalue())
    spilled = number_in(r"(\d+) bytes spill stores", log.getvalue())
    return registers, spilled, made.metadata.shared


def number_in(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, f"the assembler did not say {pattern}: {text}"
    return int(found[1])


def main() -> None:
    triton.knobs.nvidia.dump_ptxas_log = True  # the assembler's words, on standard output
    for job in [*JOBS, *(LONG_JOBS if IS_LONG or RECORDS else ())]:
        print(compile_kernel(*job), flush=True)
    try:  # the control
        found = compile_kernel(*attend(1, 4, **WIDE, is_fitted=False))
    except AssertionError as error:
        print("too much:", error)
    else:
        raise SystemExit(f"the cut for heads of 128 was expected to spill with 256: {found}")
    if RECORDS:
        lines = (f"{name} {' '.join(map(str, found_now[name]))}\n" for name in sorted(found_now))
        RECORD.write_text("".join(lines))


if __name__ == "__main__":
    main()
