"""Errors become refusals with a status, a field and no secrets."""

from __future__ import annotations

from headstart.errors import ConfigError, MissingExtra, PromptTooLong
from headstart.server.refusals import refusal_of


def test_what_happened_inside_is_not_told_to_clients() -> None:
    inside = refusal_of(RuntimeError("/etc/passwd"))
    assert inside.status == 500 and "passwd" not in inside.message
    assert refusal_of(ConfigError("top_p is 3; give less", field="top_p")).param == "top_p"
    assert refusal_of(ConfigError("it cannot be; give less")).param is None
    assert refusal_of(PromptTooLong("shorten it")).code == "context_length_exceeded"
    assert refusal_of(MissingExtra("xgrammar is not installed")).status == 501
