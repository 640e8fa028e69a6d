"""lm-eval's real package against our server: its log-probabilities are transformers' own.

    .venv/bin/python scripts/clients/lm_eval_check.py MODEL --work DIR

MODEL is a folder that transformers can read, or one of ours whose trunk is a Qwen2's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import torch
from run import HERE, environment, server


def scored_by_transformers(model: Any, tokenizer: Any, row: dict[str, Any]) -> float:
    """The sum over the choice's tokens, as lm-eval counts them: those behind the context's."""
    whole = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
    context = row["prompt"].removesuffix(row["choice"])
    begin = len(tokenizer(context, add_special_tokens=False)["input_ids"])
    with torch.inference_mode():
        logprobs = model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
    return sum(float(logprobs[at - 1, whole[at]]) for at in range(begin, len(whole)))


def read_model(folder: Path) -> tuple[Any, Any]:
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    fields = json.loads((folder / "config.json").read_text())
    kind = {"mimo": "qwen2"}.get(fields["model_type"], fields["model_type"])
    dropped = ("model_type", "auto_map", "architectures", "torch_dtype")
    config = AutoConfig.for_model(kind, **{n: v for n, v in fields.items() if n not in dropped})
    model = AutoModelForCausalLM.from_config(config).float().eval()
    state = {
        n: v.float() for file in folder.glob("*.safetensors") for n, v in load_file(file).items()
    }
    model.load_state_dict({n: v for n, v in state.items() if "mtp" not in n}, strict=False)
    return model, PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--work", type=Path, required=True, help="folder for environments")
    asked = parser.parse_args()
    result = asked.work / "lm_eval.json"
    with server(asked.model) as url:
        program = [
            environment("lm_eval", asked.work),
            HERE / "programs" / "try_lm_eval.py",
            url,
            result,
        ]
        subprocess.run([str(word) for word in program], check=True)
    model, tokenizer = read_model(Path(asked.model))
    worst = 0.0
    for row in json.loads(result.read_text()):
        wanted = scored_by_transformers(model, tokenizer, row)
        worst = max(worst, abs(row["logprob"] - wanted))
        print(f"{row['prompt']!r}: lm-eval {row['logprob']:.5f}, transformers {wanted:.5f}")
    print(f"largest difference: {worst:.2e}")
    if worst > 1e-3:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
