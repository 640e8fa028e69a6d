"""The demo's model in 4 bits on a CPU, without and with drafts, beside int8 and llama.cpp's Q4_0.

    python benchmarks/cpu_int4.py mt_bench.jsonl [--llama-libs LIBS] [--limit 8] [--tokens 160]
        [--stored awq gptq fp8-row fp8-block] [--exact awq fp8-block plain] [--threads 2]
        [--gguf FILE] [--out result.json]

LIBS: a folder with llama.cpp's libraries, version 0.5.0 (the npm package @node-llama-cpp/linux-x64
3.22.1 has one; they choose the processor's own build by themselves). The demo's GGUF file is
rewritten with its layers in Q4_0; the embedding, which is the LM head as well, stays in Q8_0, as
llama.cpp's own tool leaves it for this width. `--stored`: copies of the model in these formats
(`formats_quality.py`), which run as they are stored; `--exact`: the same with `exact`, which
dequantises them, and `plain` for the demo's model. Contenders answer each question in turns,
greedily; what counts is the time from the first token on. Speeds are medians over questions, ratios
medians of the questions' ratios. The last line is JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from formats_quality import WRITTEN, stored
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

from headstart.backends.options import Weights
from headstart.checkpoint.reader import Checkpoint
from headstart.data.conversations import read_conversations
from headstart.demo.package import gguf_path
from headstart.demo.shipped import shipped_vocab
from headstart.demo.unpacked import ready
from headstart.engine.engine import Engine
from headstart.engine.options import Speculate
from headstart.sampling.params import SamplingParams

LIBRARY = Path(__file__).parents[1] / "scripts" / "interop" / "llama_cpp_library.py"
KINDS: dict[str, Weights] = {"fp32": "as-dtype", "int8": "int8", "int4": "int4"}
MAX_LEN = 1024
Contender = Callable[[Sequence[int], int], tuple[int, float]]  # tokens and seconds after the first


def ours(
    folder: Path, weights: Weights, threads: int, speculate: Speculate, lengths: list[float],
    exact: bool = False,
) -> Contender:  # fmt: skip
    """One engine; `lengths` gets the acceptance length of each answer."""
    engine = Engine(
        folder, speculate=speculate, weights=weights, threads=threads, max_model_len=MAX_LEN,
        max_running_requests=1, prefix_caching=False, exact=exact, dtype="float32",
        draft_vocab=shipped_vocab() if speculate else None,
    )  # fmt: skip
    print(*(note for note in engine.notes if "weights" in note), sep="\n", flush=True)

    def run(prompt: Sequence[int], tokens: int) -> tuple[int, float]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        name = engine.add(list(prompt), params)
        first, count = 0.0, 0
        is_finished = False
        while not is_finished:
            updates = engine.step()
            if updates and not count:
                first, count = time.perf_counter(), len(updates[0].token_ids)
            is_finished = any(update.finish_reason for update in updates)
        seconds = time.perf_counter() - first
        output = engine.collect(name).outputs[0]
        lengths.append(output.stats.acceptance.length)
        return len(output.token_ids) - count, seconds

    return run


def llama_cpp(libs: Path, model: Path, threads: int) -> Contender:
    spec = importlib.util.spec_from_file_location("llama_cpp_library", LIBRARY)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    library = module.Library(libs)
    loaded = library.model(str(model), False)
    params = library.lib.llama_context_default_params()
    params.n_ctx = params.n_batch = MAX_LEN
    params.n_threads = params.n_threads_batch = threads
    vocab = library.lib.llama_vocab_n_tokens(library.lib.llama_model_get_vocab(loaded))
    context = library.lib.llama_init_from_model(loaded, params)
    forget = library.lib.llama_memory_clear
    forget.argtypes = [ctypes.c_void_p, ctypes.c_bool]
    memory = library.lib.llama_get_memory
    memory.restype, memory.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

    def run(prompt: Sequence[int], tokens: int) -> tuple[int, float]:
        forget(memory(context), True)
        for position, token in enumerate(prompt):
            library.decode(context, token, position)
        started = time.perf_counter()
        for position in range(len(prompt), len(prompt) + tokens - 1):
            logits = library.lib.llama_get_logits_ith(context, 0)
            token = int(np.ctypeslib.as_array(logits, (vocab,)).argmax())
            library.decode(context, token, position)
        return tokens - 1, time.perf_counter() - started

    return run


def write_q4_0(source: Path, target: Path) -> None:
    """The same file with 4-bit matrices in Q4_0."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kinds = field.types
            writer.add_key_value(
                name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None
            )
    for tensor in reader.tensors:
        data, kind = tensor.data, tensor.tensor_type
        if kind == Kind.Q4_1:
            data, kind = quantize(dequantize(data, kind), Kind.Q4_0), Kind.Q4_0
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("questions", type=Path, help="MT-Bench's question file (JSONL)")
    parser.add_argument("--llama-libs", type=Path)
    parser.add_argument(
        "--gguf", type=Path, help="the demo's file, if its package is not installed"
    )
    parser.add_argument("--weights", nargs="*", choices=list(KINDS), default=["int8", "int4"])
    parser.add_argument("--stored", nargs="*", choices=list(WRITTEN), default=[])
    parser.add_argument("--exact", nargs="*", choices=["plain", *WRITTEN], default=[])
    parser.add_argument("--speculate", nargs="*", default=["0", "auto"])
    parser.add_argument("--limit", type=int, default=8, help="so many questions, evenly spread")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    source = arguments.gguf or gguf_path()
    folder, threads = ready(source), arguments.threads
    lengths: dict[str, list[float]] = {}
    contenders: dict[str, Contender] = {}
    with tempfile.TemporaryDirectory() as made:
        folders = {"plain": folder}
        for form in dict.fromkeys([*arguments.stored, *arguments.exact]):
            if form not in folders:
                folders[form] = Path(made) / form
                stored(Checkpoint.open(folder), form, folders[form])
        kinds: list[tuple[str, Path, Weights, bool]] = [
            *((kind, folder, KINDS[kind], False) for kind in arguments.weights),
            *((form, folders[form], "as-dtype", False) for form in arguments.stored),
            *((f"{form} exact", folders[form], "as-dtype", True) for form in arguments.exact),
        ]
        for kind, own, weights, exact in kinds:
            for speculate in arguments.speculate:
                name = f"{kind} K={speculate}"
                number: Speculate = "auto" if speculate == "auto" else int(speculate)
                lengths[name] = []
                contenders[name] = ours(own, weights, threads, number, lengths[name], exact)
        if arguments.llama_libs:
            model = Path(made) / "q4_0.gguf"
            write_q4_0(source, model)
            contenders["llama.cpp Q4_0"] = llama_cpp(arguments.llama_libs, model, threads)
        rows = measure(contenders, prompts(folder, arguments), arguments.tokens)
    result = {
        "tokens_per_second": {
            name: round(statistics.median(row[name] for row in rows), 1) for name in contenders
        },
        "over": {
            f"{name} over {base}": round(statistics.median(r[name] / r[base] for r in rows), 3)
            for base in ("fp32 K=0", "int8 K=0", "llama.cpp Q4_0") if base in contenders
            for name in contenders if name != base
        },
        "acceptance_length": {
            name: round(statistics.mean(values), 3) for name, values in lengths.items()
        },
        "questions": len(rows), "tokens": arguments.tokens, "threads": threads, "rows": rows,
        "torch": torch.__version__, "python": platform.python_version(),
        "load_average": os.getloadavg(),
    }  # fmt: skip
    for name in ("tokens_per_second", "over", "acceptance_length"):
        print(*(f"{key:40} {value}" for key, value in result[name].items()), sep="\n")
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "rows"}))


def prompts(folder: Path, arguments: argparse.Namespace) -> list[list[int]]:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    questions = read_conversations(arguments.questions)
    chosen = questions[:: max(1, len(questions) // arguments.limit)][: arguments.limit]
    found = []
    for question in chosen:
        message = [{"role": "user", "content": question.messages[0]["content"]}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        found.append(tokenizer.encode(text, add_special_tokens=False))
    return [ids for ids in found if len(ids) + arguments.tokens < MAX_LEN]


def measure(
    contenders: dict[str, Contender], prompts: Sequence[Sequence[int]], tokens: int
) -> list[dict[str, float]]:
    for run in contenders.values():
        run(prompts[0], 24)
    rows = []
    for prompt in prompts:
        found = {name: run(prompt, tokens) for name, run in contenders.items()}
        rows.append({name: count / seconds for name, (count, seconds) in found.items()})
        print({name: round(speed, 1) for name, speed in rows[-1].items()}, flush=True)
    return rows


if __name__ == "__main__":
    main()
