"""Logits of every dense family through the GPU's kernels, against transformers' implementation.

PYTHONPATH=. python3 benchmarks/gpu_logits.py [--families llama,mimo] [--dtypes float32] [--out F]

Weights are random, attention is sharp. Three checks per family and number format:
- logits: log-probabilities of all tokens, of the row that ends a prompt (prompts of several
  lengths, read in chunks) and of decoded rows;
- rounds: tokens that captured rounds chose without drafts, by how far transformers' logit of each
  lies below its best one; rounds write no logits, so only what changes a choice is noticed;
- drafts: the same with K = 3, for families that publish a head. The vocabulary is so small that a
  random head is right now and then, so rows behind an accepted draft are checked as well.

In fp32 the tolerance is absolute. In bf16 an engine may be a little further from transformers in
fp32 than transformers in bf16 is. A control drops all but the last token of every prompt and must
be refused: it shows that far context counts. Exits 1 on a failure. Without a GPU kernels run in
Triton's interpreter, on smaller models and in fp32 only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # chosen before triton is imported

from safetensors.torch import load_file, save_file

from headstart.calibrate.tiny import write_tiny
from headstart.engine.engine import Engine
from headstart.engine.output import Result
from headstart.sampling.params import SamplingParams

WITH_HEAD = ("qwen3", "mimo")
DTYPES = ("float32", "bfloat16")
FP32_TOLERANCE = 2e-3
# bf16: how much further from fp32 than transformers' own bf16, in all rows and in the worst one
BF16_RMS, BF16_MAX, BF16_SPARE = 1.5, 2.0, 0.05
_SHARP = 3.0  # scale of queries: few tokens get most of the weight


@dataclass(frozen=True)
class Scale:
    """Sizes of models and texts: as large as the device can check in seconds."""

    model: dict[str, int]
    vocab: int  # of families without a head
    prompts: tuple[int, ...]
    chunk: int
    answer: int


GPU = Scale(
    {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
     "intermediate_size": 768, "num_hidden_layers": 3},
    vocab=1000, prompts=(1, 17, 64, 300), chunk=128, answer=48,
)  # fmt: skip
INTERPRETED = Scale(
    {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
     "intermediate_size": 64, "num_hidden_layers": 1},
    vocab=40, prompts=(1, 11, 7), chunk=8, answer=8,
)  # fmt: skip
_DRAFTING_VOCAB = 12


def random_checkpoint(family: str, scale: Scale, dtype: str, folder: Path) -> Path:
    """A checkpoint of one family with every parameter random, its head's too."""
    vocab = _DRAFTING_VOCAB if family in WITH_HEAD else scale.vocab
    sizes: dict[str, Any] = {**scale.model, "vocab_size": vocab}
    write_tiny(family, folder, dtype="F32", **sizes)
    draw = torch.Generator().manual_seed(7)
    (file,) = folder.glob("*.safetensors")
    tensors = {}
    for name, old in load_file(file).items():
        noise = torch.randn(old.shape, generator=draw)
        if "norm" in name:
            value = 1 + 0.2 * noise
        elif name.endswith(".bias"):
            value = 0.3 * noise
        else:
            value = noise * (1.0 if "embed" in name else old.shape[1] ** -0.5)
        # Qwen3 normalises queries, so their size is the norm's.
        sharp = ("q_norm.weight",) if family == "qwen3" else ("q_proj.weight",)
        tensors[name] = (value * (_SHARP if name.endswith(sharp) else 1)).to(getattr(torch, dtype))
    tensors["lm_head.weight"] *= 2
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


class Reference:
    """transformers' implementation with the checkpoint's weights; mimo runs as the Qwen2 it is."""

    def __init__(self, folder: Path, dtype: str, device: torch.device):
        from transformers import AutoConfig, AutoModelForCausalLM

        fields = json.loads((folder / "config.json").read_text())
        kind = {"mimo": "qwen2"}.get(fields["model_type"], fields["model_type"])
        dropped = ("model_type", "auto_map", "architectures", "torch_dtype")
        config = AutoConfig.for_model(kind, **{n: v for n, v in fields.items() if n not in dropped})
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        (file,) = folder.glob("*.safetensors")
        model.load_state_dict({n: v for n, v in load_file(file).items() if "mtp" not in n})
        self._model = model.to(device=device, dtype=getattr(torch, dtype)).eval()
        self._device = device

    @torch.inference_mode()
    def logprobs(self, prompt: list[int], answer: list[int], *, skip: int = 0) -> torch.Tensor:
        """[answer, vocab] of the rows that chose `answer`, without the first `skip` tokens."""
        ids = torch.tensor([(prompt + answer)[skip:]], device=self._device)
        logits = self._model(ids).logits[0, len(prompt) - skip - 1 : -1]
        result: torch.Tensor = logits.float().log_softmax(-1).cpu()
        return result


@dataclass
class Check:
    """One comparison: errors against fp32, the tolerance, and what the control gave."""

    name: str
    error: float
    tolerance: float
    control: float
    note: str = ""
    problem: str = ""  # what else is wrong

    @property
    def is_right(self) -> bool:
        return self.error <= self.tolerance < self.control and not self.problem

    def __str__(self) -> str:
        verdict = "ok" if self.is_right else "WRONG"
        return (f"{self.name:28} {verdict:5} error {self.error:.2e} of {self.tolerance:.2e}, "
                f"control {self.control:.2e} {self.note}{self.problem}")  # fmt: skip


class Case:
    """One family in one number format."""

    def __init__(self, family: str, dtype: str, scale: Scale, device: torch.device, work: Path):
        self.name, self._scale, self._is_low = f"{family} {dtype}", scale, dtype != "float32"
        folder = random_checkpoint(family, scale, dtype, work / f"{family}-{dtype}")
        self._exact = Reference(folder, "float32", device)
        self._low = Reference(folder, dtype, device) if self._is_low else None
        self._has_head = family in WITH_HEAD
        self._vocab = _DRAFTING_VOCAB if self._has_head else scale.vocab
        self._engine = Engine(
            folder, device=device.type, dtype=dtype, kernels="on", kv_bytes=1 << 26,
            speculate=3 if self._has_head else 0, max_running_requests=len(scale.prompts),
            max_batched_tokens=scale.chunk, max_model_len=max(scale.prompts) + scale.answer + 8,
        )  # fmt: skip
        draw = random.Random(3)
        self._prompts = [draw.choices(range(self._vocab), k=n) for n in scale.prompts]

    def checks(self) -> list[Check]:
        # Log-probabilities are the host's work, so these rows take the path of prompts.
        found = [self._compare_logits(self._answer(logprobs=self._vocab, speculate=0))]
        found.append(self._compare_choices("rounds", self._answer(speculate=0)))
        if self._has_head:
            results = self._answer(speculate=3)
            check = self._compare_choices("drafts", results)
            origins = [origin for r in results for origin in r.outputs[0].origins]
            check.note = f"{origins.count('accepted')} of {len(origins)} tokens were drafts"
            if "accepted" not in origins:
                check.problem = "; a head that is never right proves nothing"
            found.append(check)
        return found

    def _answer(self, **fields: Any) -> list[Result]:
        params = SamplingParams(
            temperature=0, max_tokens=self._scale.answer, ignore_eos=True, detokenize=False,
            **fields,
        )  # fmt: skip
        return self._engine.generate(self._prompts, params)

    def _compare_logits(self, results: Sequence[Result]) -> Check:
        ours = []
        for result in results:
            for row in result.outputs[0].logprobs or []:
                ours.append(torch.tensor([row.top[token] for token in range(self._vocab)]))
        exact, low, control = self._references(results)
        errors = torch.stack(ours) - exact
        wrong = (control - exact).abs().max().item()
        if low is None:
            return Check(f"{self.name} logits", errors.abs().max().item(), FP32_TOLERANCE, wrong)
        theirs = low - exact
        share = errors.square().mean().sqrt() / theirs.square().mean().sqrt()
        check = Check(
            f"{self.name} logits", errors.abs().max().item(), _bf16_tolerance(theirs), wrong,
            f"rms {share:.2f} of transformers'",
        )  # fmt: skip
        if share > BF16_RMS:
            check.problem = f"; at most {BF16_RMS} is expected"
        return check

    def _compare_choices(self, what: str, results: Sequence[Result]) -> Check:
        exact, low, control = self._references(results)
        chosen = torch.tensor([t for r in results for t in r.outputs[0].token_ids])[:, None]

        def worst(rows: torch.Tensor) -> float:
            return float((rows.amax(1) - rows.gather(1, chosen)[:, 0]).max())

        tolerance = FP32_TOLERANCE if low is None else _bf16_tolerance(low - exact)
        return Check(f"{self.name} {what}", worst(exact), tolerance, worst(control))

    def _references(
        self, results: Sequence[Result]
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """transformers in fp32, in the format of the case, and without the prompts' beginnings."""

        def rows(model: Reference, *, is_cut: bool = False) -> torch.Tensor:
            return torch.cat([
                model.logprobs(prompt, result.outputs[0].token_ids, skip=(len(prompt) - 1) * is_cut)
                for prompt, result in zip(self._prompts, results, strict=True)
            ])  # fmt: skip

        low = rows(self._low) if self._low is not None else None
        return rows(self._exact), low, rows(self._exact, is_cut=True)


def _bf16_tolerance(theirs: torch.Tensor) -> float:
    return BF16_MAX * float(theirs.abs().max()) + BF16_SPARE


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", default="llama,qwen2,qwen3,mimo")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    device, scale = torch.device("cuda" if has_gpu else "cpu"), GPU if has_gpu else INTERPRETED
    name = torch.cuda.get_device_name() if has_gpu else "CPU, interpreted kernels"
    began, checks = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as work:
        for dtype in given.dtypes.split(","):
            if dtype != "float32" and not has_gpu:
                print(f"{dtype}: not checked, attention over prompts needs a GPU for it")
                continue
            for family in given.families.split(","):
                for check in Case(family, dtype, scale, device, Path(work)).checks():
                    print(f"[{time.perf_counter() - began:5.1f} s] {check}", flush=True)
                    checks.append(check)
    wrong = [check.name for check in checks if not check.is_right]
    summary = (f"{len(checks)} comparisons of random-weight logits with transformers' on {name}: "
               f"{f'wrong are {wrong}' if wrong else 'all within tolerance'}")  # fmt: skip
    print(summary)
    if given.out:
        rows = [{**vars(check), "is_right": check.is_right} for check in checks]
        given.out.write_text(json.dumps({"summary": summary, "checks": rows}, indent=1) + "\n")
    return 1 if wrong or not checks else 0


if __name__ == "__main__":
    sys.exit(main())
