"""The page at `/`: markup, style and scripts of the folder beside this file, put into one document.

Nothing is loaded from anywhere else, and the policy that is sent along forbids it: scripts and
styles run only if they are the ones below (by their hashes), and only this server may be asked.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.responses import Response

_FOLDER = Path(__file__).parent / "page"
# In this order; `export` is for reading only.
_SCRIPTS = (
    "stream.js", "charts.js", "markdown.js", "answer.js", "measures.js", "learning.js", "main.js",
)  # fmt: skip


@cache
def document() -> str:
    """The whole page."""
    page = _read("index.html")
    script = "\n".join(
        re.sub(r"^export ", "", _read(name), flags=re.MULTILINE) for name in _SCRIPTS
    )
    return page.replace("/*style*/", _read("style.css")).replace("/*script*/", script)


@cache
def headers() -> dict[str, str]:
    """What goes with the page; the first forbids everything that the page does not need."""
    policy = {
        "default-src": "'none'",
        "script-src": _hash_of("script"),
        "style-src": _hash_of("style"),
        "connect-src": "'self'",
        "img-src": "data:",  # an empty icon, so that browsers do not ask for one
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def page_response() -> Response:
    return Response(document(), headers=headers(), media_type="text/html")


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _hash_of(tag: str) -> str:
    """The hash of what stands inside the page's only tag of this name, as a policy writes it."""
    (content,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", document(), re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
