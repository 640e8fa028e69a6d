"""Small parts of the server: keys, options, tokens as bytes, channels, statistics, the listener."""

from __future__ import annotations

import asyncio
import socket

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headstart.engine.output import Completion, Result
from headstart.engine.request import RequestStats
from headstart.errors import ConfigError, EngineError, MissingExtra, PromptTooLong
from headstart.server.answers.writer import statistics_of
from headstart.server.app import Keys
from headstart.server.options import ServerOptions, listen
from headstart.server.pieces import Pieces
from headstart.server.refusals import Refusal, refusal_of
from headstart.server.worker import Channel
from headstart.simulate.acceptance import Acceptance


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic one", "Bearer on", "Bearer one two"]
)
def test_only_a_whole_key_opens(header: str | None) -> None:
    keys = Keys(["one", "zw\u00f6lf"])
    with pytest.raises(Refusal) as refused:
        keys.check(header)
    assert refused.value.status == 401
    keys.check("bearer one")
    keys.check("Bearer zw\u00f6lf")
    Keys([]).check(header)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"port": 70000}, "--port is 70000"),
        ({"max_n": 0}, "--max-n is 0"),
        ({"drain_seconds": -1.0}, "--drain-seconds is -1"),
        ({"max_queue": -1}, "--max-queue"),
        ({"log_format": "xml"}, "--log-format is 'xml'"),
        ({"served_model_name": ["a", " "]}, "--served-model-name is empty"),
        ({"api_key": [""]}, "--api-key is empty"),
        ({"api_key": ["one "]}, "--api-key begins or ends with a blank"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_cannot_work_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ServerOptions(**options)  # type: ignore[arg-type]


def test_a_server_is_for_this_machine_only_unless_told() -> None:
    assert not ServerOptions().is_public
    assert ServerOptions(host="0.0.0.0").is_public


def test_the_listener_is_one_that_asyncio_knows_as_tcp() -> None:
    # Without it every streamed event waited 40 ms for the client's acknowledgement.
    with listen(ServerOptions(port=0)) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_tokens_are_bytes_also_where_they_are_half_a_character() -> None:
    words = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    pieces = Pieces(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>"))
    ids = backend.encode(" \u20ac\x00").ids
    assert b"".join(pieces.bytes_of(token) for token in ids) == " \u20ac\x00".encode()
    assert pieces.text_of(ids[1]) == "\ufffd" and pieces.text_of(0) == "<end>"


def test_byte_pieces_and_blanks_of_sentencepiece_are_read() -> None:
    backend = Tokenizer(models.WordLevel({"<0xE2>": 0, "\u2581on": 1, "x": 2}, unk_token="x"))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    pieces = Pieces(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert [pieces.bytes_of(token) for token in (0, 1, 2)] == [b"\xe2", b" on", b"x"]


def test_a_channel_that_failed_gives_what_came_before_and_then_the_error() -> None:
    async def check() -> None:
        channel = Channel([])
        waiting = asyncio.create_task(channel.take())
        await asyncio.sleep(0)
        channel.fail(EngineError("gone"))
        channel.fail(EngineError("later"))
        with pytest.raises(EngineError, match="gone"):
            await waiting

    asyncio.run(check())


def test_statistics_add_up_over_samples_and_name_the_usual_k() -> None:
    outputs = []
    for index, rounds in enumerate([[(3, 2), (3, 0), (1, 1)], [(0, 0)]]):
        counted = Acceptance()
        for drafted, accepted in rounds:
            counted.observe(drafted, accepted)
        stats = RequestStats(counted, first_token_seconds=0.5, total_seconds=1.5, seed=7)
        outputs.append(Completion(index, [1, 2, 3], "", "stop", None, [], None, stats))
    found = statistics_of([Result("a", [1, 2], outputs)])
    assert (found["draft_tokens"], found["accepted_tokens"]) == (7, 3)
    assert found["accepted_per_depth"] == [2, 1, 0] and found["rounds"] == 4
    assert found["acceptance_length"] == 1.75 and found["chosen_k"] == 3
    assert found["tokens_per_second"] == 4 and found["time_to_first_token_seconds"] == 0.5


def test_what_happened_inside_is_not_told_to_clients() -> None:
    inside = refusal_of(RuntimeError("/etc/passwd"))
    assert inside.status == 500 and "passwd" not in inside.message
    assert refusal_of(ConfigError("top_p is 3; give less", field="top_p")).param == "top_p"
    assert refusal_of(ConfigError("it cannot be; give less")).param is None
    assert refusal_of(PromptTooLong("shorten it")).code == "context_length_exceeded"
    assert refusal_of(MissingExtra("xgrammar is not installed")).status == 501
