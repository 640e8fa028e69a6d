"""lm-eval: a multiple-choice task over local JSON, with the server's own tokenizer."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from client_report import report
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

URL = sys.argv[1]
TASK = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""


def choices() -> object:
    folder = Path(tempfile.mkdtemp())
    rows = [
        {"question": "The sky is", "choices": [" blue", " made of bricks"], "answer": 0},
        {"question": "Two and two is", "choices": [" nine", " four"], "answer": 1},
    ]
    (folder / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    (folder / "task.yaml").write_text(TASK.format(file=folder / "rows.json"))
    found = simple_evaluate(
        model="local-completions",
        model_args={
            "model": "default", "base_url": f"{URL}/v1/completions", "tokenizer_backend": "remote",
            "max_length": 200, "num_concurrent": 1,
        },
        tasks=["local_choice"], task_manager=TaskManager(include_path=str(folder)),
        log_samples=True,
    )  # fmt: skip
    scored = [
        {"prompt": argument["arg_0"] + argument["arg_1"], "choice": argument["arg_1"],
         "logprob": float(value[0][0])}
        for sample in found["samples"]["local_choice"]
        for argument, value in zip(
            sample["arguments"].values() if isinstance(sample["arguments"], dict) else [
                {"arg_0": one[0], "arg_1": one[1]} for one in sample["arguments"]
            ],
            sample["resps"], strict=True,
        )
    ]  # fmt: skip
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(json.dumps(scored))
    return scored


report({"log-probabilities": choices})
