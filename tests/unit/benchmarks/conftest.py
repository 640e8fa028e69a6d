"""Programs of `benchmarks` import each other as scripts do: from the folder they lie in."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
