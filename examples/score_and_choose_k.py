"""Which K is fastest for a head? Predicted on held-out answers, without serving anything.

python examples/score_and_choose_k.py MODEL DATA [HEAD]
"""

import json
import subprocess
import sys

if len(sys.argv) not in (3, 4):
    sys.exit("usage: python examples/score_and_choose_k.py MODEL DATA [HEAD]")
model, data, *head = sys.argv[1:]
command = [sys.executable, "-m", "headstart", "score", model, "--data", data, "--max-drafts", "4"]
command += ["--head", head[0]] if head else []
result = subprocess.run([*command, "--json"], stdout=subprocess.PIPE)
if result.returncode:
    sys.exit(result.returncode)  # it has said why
(scored,) = json.loads(result.stdout)["results"]

print("K  tokens per pass  predicted speed-up")
lengths = scored["overall"]["walked"]["acceptance_length"]
for speed in scored["speed"]:
    print(f"{speed['drafts']}  {lengths[speed['drafts']]:<15.2f}  {speed['speed_up']:.2f}x")
print(f"use --speculate {scored['best_drafts']}")
for category, part in scored["by_category"].items():
    print(f"  {category}: {part['walked']['acceptance_length'][-1]:.2f} tokens per pass at K = 4")
