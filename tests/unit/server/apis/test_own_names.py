"""What is wrong with a body is told with the names that the body has."""

from __future__ import annotations

from typing import Any

import pytest

from headstart.errors import RequestError
from headstart.server.apis.prepare import as_chat, named_by
from headstart.server.apis.responses_request import ResponsesRequest
from headstart.server.refusals import Refusal


@pytest.mark.parametrize("given", [[], [{"role": "nobody", "content": "a"}]])
def test_a_response_is_refused_in_its_own_words(given: list[dict[str, Any]]) -> None:
    with pytest.raises(Refusal) as caught:
        as_chat(ResponsesRequest.model_validate({"input": given}))
    assert caught.value.param == "input"
    assert "input" in caught.value.message and "messages" not in caught.value.message


def test_limits_are_told_in_its_own_words_too() -> None:
    asked = ResponsesRequest.model_validate({"input": "a"})
    with pytest.raises(RequestError) as caught, named_by(asked):
        raise RequestError("max_tokens is 5; messages[0].content is long.", field="max_tokens")
    assert caught.value.field == "max_output_tokens"
    assert str(caught.value) == "max_output_tokens is 5; messages[0].content is long."
