"""Put a tuned head into its model, and print the command with which vLLM serves both.

python examples/export_for_vllm.py MODEL HEAD OUT
"""

import sys
from pathlib import Path

from headstart import Checkpoint, HeadstartError, inspect, open_head, plan_stitch
from headstart.checkpoint.hub import local_folder
from headstart.launch import commands_for

if len(sys.argv) != 4:
    sys.exit("usage: python examples/export_for_vllm.py MODEL HEAD OUT")
model, (head, out) = sys.argv[1], (Path(word) for word in sys.argv[2:])
try:
    operation = plan_stitch(open_head(head), Checkpoint.open(local_folder(model)))
    print(operation.describe())
    operation.write(out)
except HeadstartError as error:
    sys.exit(f"error: {error}")

report = inspect(Checkpoint.open(out))
print(f"head: {report.head.state}")
command = commands_for(report)["vllm"]
print(command if isinstance(command, str) else command.shell())
