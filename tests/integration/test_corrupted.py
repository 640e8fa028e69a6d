"""Whatever is wrong with the files: success, or one line and nothing written. Never a traceback."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.long_runs import IS_LONG, unless_long

from headstart.checkpoint.header import read_header
from headstart.cli.main import main
from headstart.heads.formats import FORMATS

INDEX = "model.safetensors.index.json"
VARIANTS = ("deepseek_v3", "mimo", "qwen3_next")
common = settings(
    deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
few = settings(common, max_examples=unless_long(5, 25))
many = settings(common, max_examples=unless_long(9, 60))


@pytest.fixture(scope="module")
def models(tiny: Callable[..., Path]) -> dict[str, Path]:
    return {variant: tiny(variant, shard_bytes=600_000) for variant in VARIANTS}


@pytest.fixture(scope="module")
def heads(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    for variant, model in models.items():
        code, said = run("export", str(model), "--out", str(folder / variant))
        assert code == 0, said
    return {variant: folder / variant for variant in models}


@pytest.fixture(scope="module")
def formats(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Path]:
    """The head of a dense and of a MoE model in every format."""
    folder = tmp_path_factory.mktemp("formats")
    made = {(v, form): folder / f"{v}-{form}" for v in ("deepseek_v3", "mimo") for form in FORMATS}
    for (variant, form), out in made.items():
        code, said = run("export", str(models[variant]), "--format", form, "--out", str(out))
        assert code == 0, said
    return made


@contextlib.contextmanager
def with_files(model: Path, **changed: bytes) -> Iterator[Path]:
    """The model with some files replaced, in a folder that holds nothing else."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "model"
        copy.mkdir()
        for path in model.iterdir():
            if path.name in changed:
                (copy / path.name).write_bytes(changed[path.name])
            else:
                os.link(path, copy / path.name)
        yield copy


def run(*arguments: str) -> tuple[int, str]:
    """Exit code and stderr of a command, in this process."""
    before = signal.getsignal(signal.SIGTERM)
    out, err = io.StringIO(), io.StringIO()
    argv, sys.argv = sys.argv, ["headstart", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as exit_:
        return int(exit_.code or 0), err.getvalue()
    finally:
        sys.argv = argv
        signal.signal(signal.SIGTERM, before)
    return 0, err.getvalue()


def check(model: Path, head: Path) -> list[int]:
    """Run everything that reads a checkpoint; returns the exit codes."""
    parent = model.parent
    return run_all(parent, {
        "inspect": ["inspect", str(model), "--json"],
        "export": ["export", str(model), "--out", str(parent / "export")],
        "export_xllm": ["export", str(model), "--format", "xllm", "--out", str(parent / "xllm")],
        "stitch": ["stitch", str(head), str(model), "--out", str(parent / "stitch")],
        "from": ["stitch", str(model), str(model), "--out", str(parent / "from")],
    })  # fmt: skip


def check_lost(model: Path, head: Path) -> None:
    """Run what mends a model; on a whole one it is refused, which `check` cannot expect."""
    parent = model.parent
    run_all(parent, {
        "restore": ["restore", str(model), "--from", str(head), "--out", str(parent / "restore")],
        "graft": ["graft", str(model), "--out", str(parent / "graft")],
    })  # fmt: skip


def check_head(head: Path, model: Path, bare: Path) -> list[int]:
    """Run everything that reads a standalone head; returns the exit codes."""
    parent = head.parent
    results = {
        "inspect": ["inspect", str(head), "--json"],
        "stitch": ["stitch", str(head), str(model), "--out", str(parent / "stitch")],
        "restore": ["restore", str(bare), "--from", str(head), "--out", str(parent / "restore")],
    }
    for form in FORMATS:
        results[form] = ["convert", str(head), "--to", form, "--out", str(parent / form)]
    return run_all(parent, results)


def run_all(parent: Path, commands: dict[str, list[str]]) -> list[int]:
    """Each command succeeds and writes, or says one line and writes nothing."""
    codes = []
    for name, arguments in commands.items():
        target = Path(arguments[-1])
        code, said = run(*arguments)
        assert code in (0, 1), (name, code, said)
        if code == 1:
            assert said.startswith("error: "), (name, said)
            assert said.count("\n") == 1, (name, said)
            assert len(said) < 2000, (name, said)
        if name != "inspect":
            assert target.is_dir() == (code == 0), (name, said)
        codes.append(code)
    assert not [path for path in parent.iterdir() if ".partial-" in path.name]
    return codes


def damage(data: bytes, where: float, kind: str, new: bytes) -> bytes:
    """`data` with bytes flipped, inserted or cut at a fraction of its length."""
    at = int(where * len(data))
    if kind == "cut":
        return data[:at]
    if kind == "insert":
        return data[:at] + new + data[at:]
    return data[:at] + new + data[at + len(new) :]


damages = st.tuples(
    st.floats(0, 1, exclude_max=True),
    st.sampled_from(["cut", "insert", "flip"]),
    st.one_of(
        st.binary(min_size=1, max_size=4),
        st.sampled_from([b"9", b"-", b"0" * 30, b'"', b",", b"}", b"null", b"\n", b"\\ud800"]),
    ),
)
variants = st.sampled_from(VARIANTS)


@many
@given(variant=variants, how=damages, number=st.integers(0, 100))
def test_a_damaged_header_is_refused_or_harmless(
    models: dict[str, Path], heads: dict[str, Path], variant: str, how: Any, number: int
) -> None:
    shards = sorted(models[variant].glob("*.safetensors"))
    shard = shards[number % len(shards)]
    data = shard.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    with with_files(models[variant], **{shard.name: damage(data[:end], *how) + data[end:]}) as copy:
        check(copy, heads[variant])


@few
@given(variant=variants, where=st.floats(0, 1, exclude_max=True), number=st.integers(0, 100))
def test_a_truncated_shard_is_refused_by_every_command(
    models: dict[str, Path], heads: dict[str, Path], variant: str, where: float, number: int
) -> None:
    shards = sorted(models[variant].glob("*.safetensors"))
    shard = shards[number % len(shards)]
    data = shard.read_bytes()
    with with_files(models[variant], **{shard.name: data[: int(where * len(data))]}) as copy:
        assert set(check(copy, heads[variant])) == {1}


@few
@given(variant=variants, how=damages)
def test_a_damaged_index_is_refused_or_harmless(
    models: dict[str, Path], heads: dict[str, Path], variant: str, how: Any
) -> None:
    data = (models[variant] / INDEX).read_bytes()
    with with_files(models[variant], **{INDEX: damage(data, *how)}) as copy:
        check(copy, heads[variant])


@many
@given(variant=variants, how=damages)
def test_a_damaged_config_is_refused_or_harmless(
    models: dict[str, Path], heads: dict[str, Path], variant: str, how: Any
) -> None:
    data = (models[variant] / "config.json").read_bytes()
    with with_files(models[variant], **{"config.json": damage(data, *how)}) as copy:
        check(copy, heads[variant])


odd_values = st.one_of(
    st.sampled_from([
        None, True, False, -1, 0, 1, 2**31, 10**25, 0.5, float("nan"), float("inf"), "", "x",
        "\ud800", "a\nb", [], [1], ["x"], [None], {}, {"a": 1}, [[]], {"": {}},
    ]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=5,
    ),
)  # fmt: skip


@many
@given(variant=variants, value=odd_values, data=st.data())
def test_an_odd_value_in_any_config_field_is_refused_or_harmless(
    models: dict[str, Path], heads: dict[str, Path], variant: str, value: Any, data: Any
) -> None:
    config = json.loads((models[variant] / "config.json").read_text())
    extra = ["quantization_config", "text_config", "mtp_config", "rope_scaling", "auto_map"]
    field = data.draw(st.sampled_from([*config, *extra]))
    config[field] = value
    with with_files(models[variant], **{"config.json": json.dumps(config).encode()}) as copy:
        check(copy, heads[variant])


ODD_JSON = [
    b"", b"\0", b"null", b"[]", b'"x"', b"1", b"{", b"{}", b'{"a": NaN}',
    b'{"a": 1e999, "b": -1e999}', b'{"a": 1' + b"0" * 5000 + b"}", b"[" * 100_000,
    b'{"a":' * 500 + b"1" + b"}" * 500, b"\xff\xfe", b"\xef\xbb\xbf{}",
    b'{"\\ud800": "\\udfff"}',
    b'{"weight_map": {"x": "/etc/passwd"}}', b'{"weight_map": {"a\\nb": "c\\nd"}}',
    b'{"model_type": "mimo", "model_type": 3}',
]  # fmt: skip
# Each in two of the files, in long runs in every one.
ODD_FILES = [
    pytest.param(name, content, id=f"{content[:24]!r}-{name}")
    for number, content in enumerate(ODD_JSON)
    for turn, name in enumerate(("config.json", INDEX, "generation_config.json"))
    if IS_LONG or (number + turn) % 3 != 1
]


@pytest.mark.parametrize(("name", "content"), ODD_FILES)
def test_odd_json_is_refused_or_harmless(
    models: dict[str, Path], heads: dict[str, Path], name: str, content: bytes
) -> None:
    with with_files(models["mimo"], **{name: content}) as copy:
        check(copy, heads["mimo"])


@pytest.fixture(scope="module")
def bare(tiny: Callable[..., Path]) -> dict[str, Path]:
    """Models that lost their head."""
    return {variant: tiny(variant, with_head=False) for variant in ("deepseek_v3", "mimo")}


Formats = dict[tuple[str, str], Path]
kinds = st.tuples(st.sampled_from(["deepseek_v3", "mimo"]), st.sampled_from(FORMATS))


@few
@given(kind=kinds, how=damages, number=st.integers(0, 2))
def test_a_damaged_head_is_refused_or_harmless(
    models: dict[str, Path], bare: dict[str, Path], formats: Formats, kind: Any, how: Any,
    number: int,
) -> None:  # fmt: skip
    weights = next(formats[kind].glob("*.safetensors")).name
    name = ("config.json", "headstart.json", weights)[number]
    data = (formats[kind] / name).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little") if name == weights else len(data)
    with with_files(formats[kind], **{name: damage(data[:end], *how) + data[end:]}) as copy:
        check_head(copy, models[kind[0]], bare[kind[0]])


def objects(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The object and every object in it."""
    inner = [value for value in document.values() if isinstance(value, dict)]
    return [document, *(found for value in inner for found in objects(value))]


@many
@given(kind=kinds, value=odd_values, data=st.data())
@pytest.mark.parametrize("name", ["config.json", "headstart.json"])
def test_an_odd_value_anywhere_in_a_head_is_refused_or_harmless(
    models: dict[str, Path], bare: dict[str, Path], formats: Formats, kind: Any, name: str,
    value: Any, data: Any,
) -> None:  # fmt: skip
    document = json.loads((formats[kind] / name).read_text())
    part = data.draw(st.sampled_from([o for o in objects(document) if o]))
    part[data.draw(st.sampled_from([*part]))] = value
    with with_files(formats[kind], **{name: json.dumps(document).encode()}) as copy:
        check_head(copy, models[kind[0]], bare[kind[0]])


@few
@given(variant=st.sampled_from(["deepseek_v3", "mimo"]), value=odd_values, data=st.data())
def test_an_odd_value_in_a_model_without_head_is_refused_or_harmless(
    bare: dict[str, Path], heads: dict[str, Path], variant: str, value: Any, data: Any
) -> None:
    config = json.loads((bare[variant] / "config.json").read_text())
    config[data.draw(st.sampled_from([*config]))] = value
    with with_files(bare[variant], **{"config.json": json.dumps(config).encode()}) as copy:
        check_lost(copy, heads[variant])


@pytest.mark.parametrize("form", FORMATS)
def test_an_undamaged_head_passes_all_of_this(
    models: dict[str, Path], bare: dict[str, Path], formats: Formats, form: str
) -> None:
    with with_files(formats["mimo", form]) as copy:
        assert set(check_head(copy, models["mimo"], bare["mimo"])) == {0}


def test_an_undamaged_model_passes_all_of_this(
    models: dict[str, Path], heads: dict[str, Path]
) -> None:
    """The control: without it, the tests above would also pass if everything were refused."""
    for variant in ("deepseek_v3", "mimo"):
        with with_files(models[variant]) as copy:
            assert set(check(copy, heads[variant])) == {0}
            assert read_header(next((copy.parent / "export").glob("*.safetensors"))).tensors
