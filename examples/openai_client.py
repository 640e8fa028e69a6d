"""Talk to `headstart serve` with OpenAI's own client.

headstart serve demo --weights int8 --speculate auto &
python examples/openai_client.py [URL] [QUESTION]
"""

import os
import sys

try:
    from openai import APIConnectionError, OpenAI
except ModuleNotFoundError:
    sys.exit("openai is not installed; type: pip install openai")

if len(sys.argv) > 3:
    sys.exit("usage: python examples/openai_client.py [URL] [QUESTION]")
url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
question = sys.argv[2] if len(sys.argv) > 2 else "Name three rivers in Europe."
client = OpenAI(base_url=url, api_key=os.environ.get("HEADSTART_API_KEY") or "none")
try:
    model = client.models.list().data[0].id
except APIConnectionError:
    sys.exit(f"no server answers at {url}; start one: headstart serve demo")
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": question}],
    max_tokens=64,
    temperature=0,
    stream=True,
)
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        print(chunk.choices[0].delta.content, end="", flush=True)
print()
