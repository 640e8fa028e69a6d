"""Every error Headstart raises on purpose.

    HeadstartError
      ConfigError             a bad option or combination of options
      UnsupportedFamily       model_type unknown, or known but lacking a feature
      MissingExtra            an optional dependency is not installed
      LaunchError             an external engine is absent, too old, or cannot do what was asked
      RequestError            a request that cannot be answered as asked (the client's fault)
        PromptTooLong         a prompt that leaves no room for an answer
      EngineError             the embedded engine failed (ours): no memory, device failure
      DataError               prompts, answers or cached states that cannot be used as they are
      TrainError              training cannot go on: a loss is not a number, a run is broken
      QuantizeError           a quantised head that loses more than is allowed
      ServerError             a server that was asked for answers failed, and retries did not help
      CheckpointError         the files of a checkpoint are not what they should be
        BadConfig             config.json absent, unreadable or with a field of the wrong type
        BrokenFile            a safetensors file that is truncated or malformed
        BrokenIndex           an index that does not agree with the files
        MissingTensor         a tensor that must be there is not
        UnexpectedTensor      a tensor that has no place
        ShapeMismatch         a tensor of another size than its place
        HeadNotFound          no head where one is needed
        WriteFailed           the result could not be written (disk full, permission, ...)

Messages have three parts: what was found (name and value), what was expected, what to do.
The command line prints them as one line; `--debug` adds the traceback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

_LONGEST = 200  # characters of one item in a list; names in files may be of any length


class HeadstartError(Exception):
    """Base of all errors that are meant for the user."""

    def __init__(self, message: str = "", *, field: str | None = None):
        """`field` is the option, or the field of a request, that is at fault, where one is."""
        super().__init__(message)
        self.field = field


class ConfigError(HeadstartError):
    """An option has a value, or two options a combination, that cannot work."""


class UnsupportedFamily(HeadstartError):
    """The model family is unknown, or known but without the feature asked for."""


class MissingExtra(HeadstartError):
    """An optional dependency is needed and not installed."""


class LaunchError(HeadstartError):
    """An external engine is absent, too old, or cannot do what was asked."""


class RequestError(HeadstartError):
    """A request asks for something that cannot be done: the client's fault."""


class PromptTooLong(RequestError):
    """A prompt has more tokens than the model's length or the K/V memory leave room for."""


class EngineError(HeadstartError):
    """The embedded engine failed: no memory for K/V, a broken invariant, a device failure."""


class DataError(HeadstartError):
    """Prompts, answers or cached states are not what the task needs."""


class TrainError(HeadstartError):
    """Training cannot go on: a loss that is not a number, a run folder that is not whole."""


class QuantizeError(HeadstartError):
    """A head that was quantised loses more acceptance than is allowed."""


class ServerError(HeadstartError):
    """A server that was asked for answers failed, and retries did not help."""


class CheckpointError(HeadstartError):
    """The files of a checkpoint are not what they should be."""


class BadConfig(CheckpointError):
    """config.json is absent, unreadable, or holds a field of the wrong type."""


class BrokenFile(CheckpointError):
    """A safetensors file is truncated or malformed."""


class BrokenIndex(CheckpointError):
    """The index and the files beside it do not agree."""


class MissingTensor(CheckpointError):
    """A tensor that must be there is not."""


class UnexpectedTensor(CheckpointError):
    """A tensor that has no place in the family or format."""


class ShapeMismatch(CheckpointError):
    """A tensor has another shape or dtype than the place it goes to."""


class HeadNotFound(CheckpointError):
    """There is no usable head where one is needed."""


class WriteFailed(CheckpointError):
    """The result could not be written."""


def first_line(error: BaseException) -> str:
    """What a library says of its failure, short enough for a note."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def library_fault(error: BaseException) -> str | None:
    """What a library says of its failure; None for what is none, such as Ctrl-C.

    A library written in Rust may panic, which is no Exception; its class cannot be imported.
    """
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return first_line(error)[:_LONGEST]
    return None


@contextmanager
def tokenizer_faults(
    name: object, raised: Callable[[str], HeadstartError] = BadConfig
) -> Iterator[None]:
    """Whatever the tokenizer of `name` fails with inside becomes an error of ours."""
    try:
        yield
    except HeadstartError:
        raise
    except BaseException as error:
        raise_fault(error, name, raised)


def raise_fault(
    error: BaseException, name: object, raised: Callable[[str], HeadstartError] = BadConfig
) -> NoReturn:
    """Raise what the tokenizer of `name` failed with as an error of ours; Ctrl-C as it is."""
    fault = library_fault(error)
    if fault is None:
        raise error
    raise raised(tokenizer_failed(name, fault)) from error


def tokenizer_failed(name: object, fault: str) -> str:
    return (
        f"the tokenizer of {name} fails ({fault}). Download tokenizer.json, tokenizer_config.json "
        "and their like again."
    )


def some(items: Iterable[object], limit: int = 3) -> str:
    """A few items and a count, for messages: `a, b, c and 7 more`."""
    listed = [
        text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..." for text in map(str, items)
    ]
    shown = ", ".join(listed[:limit])
    return shown if len(listed) <= limit else f"{shown} and {len(listed) - limit} more"


def install(extra: str) -> str:
    """How an optional dependency is installed, for messages of MissingExtra."""
    return f"pip install 'headstart[{extra}]', or from a clone pip install -e '.[{extra}]'"
