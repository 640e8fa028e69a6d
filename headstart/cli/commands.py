"""What commands there are, by task, and how each is used: shown by --help and in docs/cli.md."""

from __future__ import annotations

# task -> command -> what it does; its code is headstart/cli/<command>.py, function `run`
TASKS = {
    "See it": {
        "demo": "See a real small model answer without and with its head, on a CPU.",
    },
    "Find": {
        "inspect": "Say whether a checkpoint has a head, which, and how to serve with it.",
        "families": "List the supported families.",
    },
    "Move": {
        "export": "Take the head out as a standalone draft checkpoint.",
        "convert": "Turn a standalone head from one format into another.",
        "stitch": "Put a head into a checkpoint.",
        "restore": "Give a fine-tuned or quantised checkpoint back the head it lost.",
        "graft": "Add a fresh, trainable head to a checkpoint that has none.",
    },
    "Tune": {
        "distill": "Let the model answer prompts: the text that its head is tuned on.",
        "train": "Tune the head on what the model wrote; the same command goes on after a stop.",
        "vocab": "Choose the tokens that a head may propose, by language.",
        "quantize": "Make a head smaller, against what it drafts from, and say what that costs.",
    },
    "Predict": {
        "score": "Predict acceptance and speed on held-out answers, without serving anything.",
        "calibrate": "Make a checkpoint of any size with a known acceptance.",
    },
    "Serve": {
        "generate": "Answer a prompt or chat, with the embedded engine.",
        "serve": "Serve a model over HTTP, as OpenAI's API, with the embedded engine.",
        "learn": "Show, remove or use what a server with --learn collected.",
        "launch": "Print or run the command that serves a model with its head.",
        "push": "Swap another head into a running server; its requests go on.",
    },
    "Measure": {
        "bench": "Measure what MTP brings: any server or a MODEL, with and without it.",
        "doctor": "Say whether a server's head is alive, and why not; without URL: what is "
        "installed.",
    },
}
COMMANDS = {name: purpose for group in TASKS.values() for name, purpose in group.items()}
# Options that are the fields of these dataclasses stand together in a command's help.
OPTION_TITLES = {
    "DistillOptions": "Answers",
    "EngineOptions": "Engine",
    "LearnOptions": "Learning while serving",
    "LoadOptions": "Load",
    "ServerOptions": "Server",
    "TargetOptions": "What is measured",
    "TrainOptions": "Training",
    "WorkloadOptions": "Requests",
    "Writing": "Result",
}

# Lines that a shell takes, with what they do; a test parses each of them.
EXAMPLES = {
    "demo": {
        "headstart demo": "five questions, side by side, and report.html",
        "headstart demo --weights as-dtype": "the same in fp32",
    },
    "inspect": {
        "headstart inspect GLM-4.5-Air": "is there a head, is it whole, how to serve with it",
        "headstart inspect GLM-4.5-Air --probe": "and do its weights obey the family's contract",
    },
    "families": {
        "headstart families": "what is supported",
    },
    "export": {
        "headstart export GLM-4.5-Air --out air-head": "in our own format",
        "headstart export GLM-4.5-Air --format sglang --out air-sglang": "as SGLang's draft model",
    },
    "convert": {
        "headstart convert air-head --to xllm --out air-xllm": "for xLLM",
    },
    "stitch": {
        "headstart stitch run/head GLM-4.5-Air --out air-tuned": "a tuned head goes in",
        "headstart stitch run/head GLM-4.5-Air --out air-tuned --dry-run": "what would change",
    },
    "restore": {
        "headstart restore air-awq --from GLM-4.5-Air --out air-awq-mtp": "after quantising",
    },
    "graft": {
        "headstart graft Llama-3.2-1B --out llama-mtp": "then distill and train",
    },
    "distill": {
        "headstart distill MyModel --prompts prompts.jsonl --out data": "with the embedded engine",
        "headstart distill MyModel --prompts prompts.jsonl --out data "
        "--server http://127.0.0.1:8000": "by asking a server",
    },
    "train": {
        "headstart train MyModel --data data --out run": "the head is run/head in the end",
        "torchrun --nproc-per-node 8 -m headstart train MyModel --data data --out run": "8 GPUs",
    },
    "vocab": {
        "headstart vocab MyModel --data data --out maps.json": "a map per language, size chosen",
        "headstart vocab MyModel --data data --size 32000 --by none --out map.pt": "for SGLang",
    },
    "quantize": {
        "headstart quantize MyModel --data data --bits 4 --out small-head": "refused if it costs "
        "more than 3 % of the acceptance length",
    },
    "score": {
        "headstart score MyModel --data data": "the model's own head",
        "headstart score MyModel --data data --head run/head": "a tuned one",
    },
    "calibrate": {
        "headstart calibrate --shape mimo-7b --acceptance 0.8 --out m7": "to compare engines with",
    },
    "generate": {
        'headstart generate demo "What is a tide?" --chat': "one answer",
        "headstart generate demo": "a chat, until Ctrl-D",
        'headstart generate demo "What is a tide?" --chat --compare': "with and without drafts",
    },
    "serve": {
        "headstart serve demo --weights int8": "API at /v1, chat page at /, metrics at /metrics",
        "headstart serve GLM-4.5-Air --speculate auto --host 0.0.0.0 --api-key KEY": "for others",
        "headstart serve GLM-4.5-Air --learn learned": "keep requests, and tune the head on them",
    },
    "learn status": {
        "headstart learn status learned": "of a server that was started with --learn learned",
    },
    "learn forget": {
        "headstart learn forget learned": "what was collected; --heads: and what was learned",
    },
    "learn run": {
        "headstart learn run learned --model MyModel": "the head to stitch is in learned/heads",
        "headstart learn run new --model MyModel --requests in.jsonl --answers out.jsonl": "from "
        "logs of another server",
    },
    "launch": {
        "headstart launch GLM-4.5-Air --engine vllm": "print the command",
        "headstart launch GLM-4.5-Air --engine sglang --run": "run it, and watch its head",
    },
    "push": {
        "headstart push run/head --server http://127.0.0.1:8000 --key-file push.key": "a tuned "
        "head, to a server that was started with --allow-push",
    },
    "bench run": {
        "headstart bench run MyModel --sweep concurrency=1,4,16 k=0,1,3 --out result": "a server "
        "of our own, report.html in result",
        "headstart bench run --url plain=http://a:8000 --url mtp=http://b:8000": "two servers",
    },
    "bench tasks": {
        "headstart bench tasks MyModel --question-file mt_bench.jsonl": "with and without MTP",
    },
    "bench diff": {
        "headstart bench diff old/bench.json new/bench.json": "what changed, and is it noise",
    },
    "doctor": {
        "headstart doctor": "versions, devices, kernels, caches, what is missing",
        "headstart doctor http://127.0.0.1:8000 GLM-4.5-Air": "does this server's head work",
    },
}
