"""Ask a model from Python, with and without drafts: the same text, fewer passes of the model.

python examples/generate.py [MODEL] [QUESTION]
"""

import sys

from headstart import Engine, HeadstartError, SamplingParams

if len(sys.argv) > 3:
    sys.exit("usage: python examples/generate.py [MODEL] [QUESTION]")
model = sys.argv[1] if len(sys.argv) > 1 else "demo"
question = sys.argv[2] if len(sys.argv) > 2 else "Name three rivers in Europe."
params = SamplingParams(temperature=0, max_tokens=64)

try:
    engine = Engine(model, speculate=3)
    is_chat = bool(getattr(engine.prompts.tokenizer, "chat_template", None))
    # A model without a chat template continues the text.
    prompt = [{"role": "user", "content": question}] if is_chat else question
    for update in engine.stream(prompt, params):
        print(update.text, end="", flush=True)
    print()
    drafted, plain = engine.generate(
        [prompt, prompt], [params, SamplingParams(temperature=0, max_tokens=64, speculate=0)]
    )
except HeadstartError as error:
    sys.exit(f"error: {error}")
answer = drafted.outputs[0]
print(f"{len(answer.token_ids)} tokens in {answer.stats.acceptance.rounds} rounds with drafts,")
print(f"{plain.outputs[0].stats.acceptance.rounds} without; ", end="")
print(f"same text: {answer.text == plain.outputs[0].text}")
