"""The page is one document that needs nothing from anywhere, and its policy allows just that."""

from __future__ import annotations

import base64
import hashlib
import re

from headstart.server.page import document, headers, page_response


def test_the_page_names_no_other_place() -> None:
    places = set(re.findall(r"https?://[\w./]+", document()))
    assert places == {"http://www.w3.org/2000/svg"}, "only the name of SVG itself"
    assert re.findall(r"(?:src|href)=\"([^\"]*)\"", document()) == ["data:,"]


def test_nothing_is_left_of_the_parts() -> None:
    assert "/*style*/" not in document() and "/*script*/" not in document()
    assert not re.search(r"^(export|import) ", document(), re.MULTILINE)
    assert not re.search(r" (on\w+|style)=", document()), "the policy would ignore them"


def test_the_policy_lets_only_this_script_and_this_style_run() -> None:
    policy = headers()["Content-Security-Policy"]
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", document(), re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy


def test_the_response_is_html_with_these_headers() -> None:
    response = page_response()
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["content-security-policy"] == headers()["Content-Security-Policy"]
    assert bytes(response.body).decode() == document()
