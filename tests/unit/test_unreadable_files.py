"""A file that cannot be read is named once, with why in words and what to give instead."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from headstart.bench.document import read_document
from headstart.checkpoint.config import read_json_object
from headstart.data.api_keys import push_key
from headstart.data.dataset import _header
from headstart.doctor.verdict import promise_of
from headstart.errors import HeadstartError
from headstart.learn.starting import read_overrides
from headstart.predict.vocab_choice import _text
from headstart.server.options import read_template
from headstart.train.options import TrainOptions
from headstart.train.variants import read_variants

READERS: dict[str, Callable[[Path], object]] = {
    "config": read_json_object,
    "dataset": _header,
    "result": read_document,
    "score": promise_of,
    "learn-options": read_overrides,
    "variants": partial(read_variants, base=TrainOptions()),
    "text": _text,
    "template": lambda path: read_template(str(path)),
    "push key": lambda path: push_key(path, "--push-key-file"),
}
CONTENTS = {"missing": None, "binary": b"\xff\xfe\x00\x01"}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", READERS)
def test_it_is_named_once_with_a_reason_and_advice(tmp_path: Path, name: str, content: str) -> None:
    path, data = tmp_path / "given", CONTENTS[content]
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(HeadstartError) as refused:
        READERS[name](path)
    said = str(refused.value)
    assert "\n" not in said and "Errno" not in said and said.count(str(path)) == 1
    assert "No such file" in said or data is not None
    assert any(word in said.rpartition(")")[2] for word in (" Give ", " give ", " again", "Write"))
