"""What tests share: models, engines and servers to try things on, references to compare with.

`pythonpath` in pyproject.toml makes it importable; programs that tests start are in `scripts`.
"""

from __future__ import annotations

from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
