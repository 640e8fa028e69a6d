"""Drafts with llama.cpp's own library, through ctypes: no program of it has to be built.

    python llama_cpp_library.py LIBS TARGET.gguf DRAFT.gguf NUM_TOKENS TOKEN ...

LIBS is a folder with libllama*.so and its companions, version 0.5.0 (the npm package
@node-llama-cpp/linux-x64 3.22.1 has one). The target goes on from the tokens, greedily; beside it
the head guesses the token after the next at every step. DRAFT may be TARGET itself. Prints one JSON
document: the tokens, how many guesses were right, and digests of all logits.
"""

from __future__ import annotations

import ctypes as c
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

_MTP = 1  # of llama_context_type
_F32 = 0  # of ggml_type


class ModelParams(c.Structure):
    _fields_ = [
        ("devices", c.c_void_p), ("overrides", c.c_void_p), ("n_gpu_layers", c.c_int32),
        ("split_mode", c.c_int), ("load_mode", c.c_int), ("lazy_mode", c.c_int),
        ("main_gpu", c.c_int32), ("tensor_split", c.c_void_p), ("progress", c.c_void_p),
        ("progress_data", c.c_void_p), ("kv_overrides", c.c_void_p), ("vocab_only", c.c_bool),
        ("check_tensors", c.c_bool), ("use_extra_bufts", c.c_bool), ("no_host", c.c_bool),
        ("no_alloc", c.c_bool), ("load_mtp", c.c_bool),
    ]  # fmt: skip


class ContextParams(c.Structure):
    _fields_ = [
        *((name, c.c_uint32) for name in (
            "n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq", "n_outputs_max",
            "n_outputs_max_per_seq",
        )),
        ("n_threads", c.c_int32), ("n_threads_batch", c.c_int32),
        *((name, c.c_int) for name in ("ctx_type", "rope", "pooling", "attention", "flash")),
        *((name, c.c_float) for name in ("base", "scale", "ext", "attn", "fast", "slow")),
        ("yarn_orig_ctx", c.c_uint32), ("defrag", c.c_float), ("cb_eval", c.c_void_p),
        ("cb_data", c.c_void_p), ("type_k", c.c_int), ("type_v", c.c_int), ("abort", c.c_void_p),
        ("abort_data", c.c_void_p),
        *((name, c.c_bool) for name in (
            "embeddings", "offload_kqv", "no_perf", "op_offload", "swa_full", "kv_unified",
        )),
        ("samplers", c.c_void_p), ("n_samplers", c.c_size_t), ("ctx_other", c.c_void_p),
    ]  # fmt: skip


class Batch(c.Structure):
    _fields_ = [
        ("n_tokens", c.c_int32), ("token", c.POINTER(c.c_int32)), ("embd", c.POINTER(c.c_float)),
        ("pos", c.POINTER(c.c_int32)), ("n_seq_id", c.POINTER(c.c_int32)),
        ("seq_id", c.POINTER(c.POINTER(c.c_int32))), ("logits", c.POINTER(c.c_int8)),
    ]  # fmt: skip


class Library:
    def __init__(self, folder: Path) -> None:
        for stem in ("libggml-base", "libggml.v", "libllama.v"):
            [path] = sorted(folder.glob(f"{stem}*.so"))
            handle = c.CDLL(str(path), mode=c.RTLD_GLOBAL)
            if stem == "libggml.v":
                ggml = handle
        ggml.ggml_backend_load_all_from_path(str(folder).encode())
        self.lib: Any = handle
        for name, result, words in (
            ("llama_model_default_params", ModelParams, []),
            ("llama_context_default_params", ContextParams, []),
            ("llama_model_load_from_file", c.c_void_p, [c.c_char_p, ModelParams]),
            ("llama_init_from_model", c.c_void_p, [c.c_void_p, ContextParams]),
            ("llama_decode", c.c_int32, [c.c_void_p, Batch]),
            ("llama_get_logits_ith", c.POINTER(c.c_float), [c.c_void_p, c.c_int32]),
            ("llama_model_get_vocab", c.c_void_p, [c.c_void_p]),
            ("llama_vocab_n_tokens", c.c_int32, [c.c_void_p]),
            ("llama_model_n_embd_out", c.c_int32, [c.c_void_p]),
        ):
            function = getattr(handle, name)
            function.restype, function.argtypes = result, words
        self.ask_states = handle["_Z26llama_set_embeddings_nextnP13llama_contextbb"]
        self.ask_states.argtypes = [c.c_void_p, c.c_bool, c.c_bool]
        self.state = handle["_Z30llama_get_embeddings_nextn_ithP13llama_contexti"]
        self.state.restype, self.state.argtypes = c.POINTER(c.c_float), [c.c_void_p, c.c_int32]

    def model(self, path: str, with_head: bool) -> int:
        params = self.lib.llama_model_default_params()
        params.load_mtp, params.n_gpu_layers = with_head, 0
        found = self.lib.llama_model_load_from_file(path.encode(), params)
        if not found:
            sys.exit(f"llama.cpp does not load {path}")
        return int(found)

    def context(self, model: int, other: int | None = None) -> int:
        params = self.lib.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = 256
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = _F32
        if other is not None:
            params.ctx_type, params.ctx_other = _MTP, other
        found = self.lib.llama_init_from_model(model, params)
        if not found:
            sys.exit("llama.cpp makes no context")
        self.ask_states(found, True, other is not None)
        return int(found)

    def decode(self, context: int, token: int, position: int, state: Any = None) -> None:
        one = (c.c_int32 * 1)(0)
        batch = Batch(
            1, (c.c_int32 * 1)(token), state, (c.c_int32 * 1)(position), (c.c_int32 * 1)(1),
            (c.POINTER(c.c_int32) * 1)(c.cast(one, c.POINTER(c.c_int32))), (c.c_int8 * 1)(1),
        )  # fmt: skip
        code = self.lib.llama_decode(context, batch)
        if code:
            sys.exit(f"llama_decode gave {code}")


def main() -> int:
    folder, target, draft, count, *prompt = sys.argv[1:]
    library = Library(Path(folder))
    is_same = target == draft
    trunk = library.model(target, is_same)
    head = trunk if is_same else library.model(draft, True)
    context = library.context(trunk)
    drafting = library.context(head, context)
    vocab = library.lib.llama_vocab_n_tokens(library.lib.llama_model_get_vocab(trunk))
    width = library.lib.llama_model_n_embd_out(trunk)
    tokens = [int(token) for token in prompt]
    said: list[int] = []
    guesses: list[int] = []
    digests = {"trunk": hashlib.sha256(), "head": hashlib.sha256()}
    before = (c.c_float * width)()  # the state in front of the first token: none
    for position in range(len(tokens) + int(count)):
        token = tokens[position] if position < len(tokens) else said[position - len(tokens)]
        library.decode(context, token, position)
        logits = library.lib.llama_get_logits_ith(context, 0)[:vocab]
        digests["trunk"].update(repr(logits).encode())
        best = max(range(vocab), key=logits.__getitem__)
        library.decode(drafting, token, position, before)
        found = library.lib.llama_get_logits_ith(drafting, 0)[:vocab]
        digests["head"].update(repr(found).encode())
        guesses.append(max(range(vocab), key=found.__getitem__))
        before = (c.c_float * width)(*library.state(context, 0)[:width])
        if position >= len(tokens) - 1:
            said.append(best)
    # A row of the head at position p has read the token there: it guesses the one after.
    right = sum(g == t for g, t in zip(guesses[len(tokens) - 1 :], said, strict=False))
    document = {"tokens": said, "right": right, "of": len(said)}
    print(json.dumps(document | {name: d.hexdigest()[:16] for name, d in digests.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
