"""Drop-in for xLLM's tools/export_mtp.py: the same options, the same result.

    python tools/export_mtp.py --input-dir MODEL --output-dir DIR [--model-type TYPE]

It is `headstart export --format xllm` with xLLM's spelling; see `headstart export --help`.
"""

import sys

from headstart.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["export", "--format", "xllm"]
    main()
