"""Keys, web pages of other origins, and names that lead here without being ours."""

from __future__ import annotations

import pytest

from headstart.server.access import Keys, check_host, check_site, key_in, salt_of_key
from headstart.server.refusals import Refusal


@pytest.mark.parametrize(
    ("headers", "allowed", "may"),
    [
        ({"host": "localhost:8000"}, [], True),
        ({"host": "localhost:8000", "origin": "http://localhost:8000"}, [], True),
        ({"host": "localhost:8000", "origin": "http://localhost:9000"}, [], False),
        ({"host": "localhost:8000", "origin": "http://else.where"}, [], False),
        ({"host": "localhost:8000", "origin": "http://else.where"}, ["http://else.where"], True),
        ({"host": "localhost:8000", "origin": "http://else.where"}, ["*"], True),
        ({"host": "localhost:8000", "origin": "null"}, [], False),
        ({"host": "x", "sec-fetch-site": "cross-site"}, [], False),
    ],
)
def test_a_page_of_another_origin_is_known_by_its_origin(
    headers: dict[str, str], allowed: list[str], may: bool
) -> None:
    if may:
        check_site(headers, allowed)
        return
    with pytest.raises(Refusal, match="may not ask this server") as refused:
        check_site(headers, allowed)
    assert refused.value.status == 403


def test_a_server_for_this_machine_goes_by_names_of_this_machine() -> None:
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1:8000", "127.1.2.3", "[::1]:8000", "[::1]"):
        check_host(host, "127.0.0.1")
    check_host("box:8000", "box")
    for host in ("else.where:8000", "127.0.0.1.else.where", "[fe80::1]:80", "localhost.else.where"):
        with pytest.raises(Refusal, match="this server is for this machine") as refused:
            check_host(host, "127.0.0.1")
        assert refused.value.status == 403


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic one", "Bearer on", "Bearer one two"]
)
def test_only_a_whole_key_opens(header: str | None) -> None:
    keys = Keys(["one", "zw\u00f6lf"])
    with pytest.raises(Refusal) as refused:
        keys.check(key_in({"authorization": header} if header is not None else {}))
    assert refused.value.status == 401
    keys.check(key_in({"authorization": "bearer one"}))
    keys.check(key_in({"authorization": "Bearer zw\u00f6lf"}))
    keys.check(key_in({"x-api-key": "one"}))  # as Anthropic's clients send it
    Keys([]).check(header)


def test_keys_have_salts_that_no_field_of_a_request_can_reach() -> None:
    one, two = (salt_of_key(key, None) for key in ("one", "two"))
    assert one != two and "one" not in one
    assert salt_of_key(key_in({"authorization": "bearer  one "}), None) == one
    assert salt_of_key("two", one) not in (one, two)
    assert salt_of_key("one", "a") == one + "a"
