"""Drop-in for xLLM's older tools/export_deepseek_mtp.py: the same options, the same result.

    python tools/export_deepseek_mtp.py --input-dir MODEL --output-dir DIR

It is `headstart export --format xllm`, which finds out itself whether the model is V3, R1 or V3.2.
"""

import sys

from headstart.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["export", "--format", "xllm"]
    main()
