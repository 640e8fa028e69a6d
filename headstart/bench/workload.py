"""What is asked: questions of one or more turns, the same ones for every variant.

From a file (any form that headstart/data reads: JSONL prompts, MT-Bench and Spec-Bench questions,
ShareGPT), or made up with given lengths. When they are asked is the business of arrivals.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from typing import Literal

from headstart.bench.made_up import WORDS, made_up_text
from headstart.data.conversations import Conversation, read_conversations
from headstart.errors import ConfigError

Api = Literal["chat", "completions"]
Prompt = str | tuple[int, ...] | Conversation
CountTokens = Callable[[str], int]
AS_IN_FILE = "file"
_DEFAULT_REQUESTS = 80
_DEFAULT_INPUT, _DEFAULT_OUTPUT = "512", "256"
_NUM_WARM_UP, _WARM_UP_TOKENS = 16, 32
_CHARACTERS_PER_TOKEN = 4  # of English text, where no tokenizer is at hand


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens, both ends included."""

    low: int
    high: int

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)


def parse_lengths(text: str) -> Lengths:
    """`2500`, or `100-500` for any number of that range."""
    low, dash, high = text.partition("-")
    try:
        found = Lengths(int(low), int(high if dash else low))
    except ValueError:
        found = Lengths(0, 0)
    if not 1 <= found.low <= found.high:
        raise ConfigError(f"the length {text!r} cannot be read; give 2500, or a range as 100-500.")
    return found


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    prompts: Path | None = field(
        default=None, metadata={"help": "JSONL prompts, MT-Bench, Spec-Bench or ShareGPT file"}
    )
    num_requests: int | None = field(
        default=None, metadata={"help": f"default: the file once, else {_DEFAULT_REQUESTS}"}
    )
    input_tokens: str | None = field(
        default=None,
        metadata={
            "help": f"made-up prompts of this length: 2500, or 100-500; default: {_DEFAULT_INPUT}"
        },
    )
    output_tokens: str | None = field(
        default=None,
        metadata={
            "help": "most tokens of an answer: 256, 100-500, or `file`: as long as its own; "
            f"default: {_DEFAULT_OUTPUT}"
        },
    )
    api: Api | None = field(
        default=None,
        metadata={"help": "chat or completions; default: chat, where there is a chat template"},
    )
    ignore_eos: bool | None = field(
        default=None, metadata={"help": "write on to the full length; default: for made-up prompts"}
    )
    temperature: float = field(default=0.0, metadata={"help": "0 takes the most likely token"})
    seed: int = field(default=0, metadata={"help": "same seed, same prompts, lengths and arrivals"})
    shuffle: bool = field(default=False, metadata={"help": "take the file in another order"})

    def __post_init__(self) -> None:
        if self.num_requests is not None and self.num_requests < 1:
            raise ConfigError(f"num_requests is {self.num_requests}; give at least 1.")
        if not 0 <= self.temperature <= 100:
            raise ConfigError(f"temperature is {self.temperature}; give 0 to 100.")
        if self.prompts is not None and self.input_tokens is not None:
            raise ConfigError("prompts and input_tokens are both given; give a file or a length.")
        if self.output_tokens == AS_IN_FILE and self.prompts is None:
            raise ConfigError("output_tokens is `file` without a file; give prompts, or a length.")
        if self.shuffle and self.prompts is None:
            raise ConfigError("shuffle is set without a file to shuffle; give prompts too.")
        for text in (self.input_tokens, self.output_tokens):
            if text is not None and text != AS_IN_FILE:
                parse_lengths(text)


@dataclass(frozen=True, slots=True)
class Question:
    """One conversation to be had. A turn is asked when the one before it was answered."""

    id: str
    category: str
    prompt: Prompt
    max_tokens: tuple[int, ...]  # one for each turn
    seed: int

    @property
    def num_turns(self) -> int:
        return len(self.max_tokens)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Everything that is asked of a variant, and how."""

    questions: tuple[Question, ...]
    warm_up: tuple[Question, ...]  # asked before; none of them is among the questions
    api: Api
    temperature: float
    ignore_eos: bool
    notes: tuple[str, ...] = ()

    @property
    def num_requests(self) -> int:
        return sum(question.num_turns for question in self.questions)


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What is known of the model's tokens. With `size` made-up prompts of completions are token
    ids, exactly as long as asked for; else they are made of `words`."""

    count_tokens: CountTokens | None = None
    size: int | None = None
    words: Sequence[str] = WORDS
    notes: tuple[str, ...] = ()  # about made-up text


def make_workload(
    options: WorkloadOptions, vocabulary: Vocabulary | None = None, *, notes: Sequence[str] = ()
) -> Workload:
    """`notes` come before those about the questions."""
    vocabulary, notes = vocabulary or Vocabulary(), list(notes)
    count_tokens = vocabulary.count_tokens
    if options.prompts is None:
        notes += _made_up_notes(options, vocabulary)
        endless = _made_up(options, vocabulary, "made-up")
        wanted = options.num_requests or _DEFAULT_REQUESTS
    else:
        found = list(_from_file(options, count_tokens, notes))
        endless = _again_and_again(found)
        size = sum(question.num_turns for question in found)
        wanted = options.num_requests or size
        if wanted > size:
            notes.append(
                f"the file has {size} requests and {wanted} are asked: it is gone through again, "
                "which a prefix cache makes quicker"
            )
    ignore_eos = options.prompts is None or options.output_tokens == AS_IN_FILE
    return Workload(
        questions=tuple(_first(endless, wanted)),
        warm_up=tuple(_warm_up(options, vocabulary)),
        api=options.api or "chat",
        temperature=options.temperature,
        ignore_eos=ignore_eos if options.ignore_eos is None else options.ignore_eos,
        notes=tuple(notes),
    )


def _made_up_notes(options: WorkloadOptions, vocabulary: Vocabulary) -> Iterator[str]:
    yield (
        "prompts are made up: how many drafts are accepted says nothing about real text, unless "
        "the checkpoint is a calibrated one"
    )
    if options.api == "completions" and vocabulary.size is not None:
        return
    yield from vocabulary.notes
    if vocabulary.count_tokens is None:
        yield (
            "no tokenizer is known: a made-up prompt has about as many words as tokens, and "
            "prompts may be alike to the model; --tokenizer FOLDER helps"
        )


def _made_up(options: WorkloadOptions, vocabulary: Vocabulary, name: str) -> Iterator[Question]:
    """Without end. Another name, other prompts."""
    inputs = parse_lengths(options.input_tokens or _DEFAULT_INPUT)
    outputs = parse_lengths(options.output_tokens or _DEFAULT_OUTPUT)
    for number in count():
        draw = random.Random(f"{options.seed} {name} {number}")
        length, limit = inputs.draw(draw), outputs.draw(draw)
        prompt: Prompt
        size = vocabulary.size
        if options.api != "completions" or size is None:
            text = made_up_text(draw, length, vocabulary.count_tokens, vocabulary.words)
            prompt = text if options.api == "completions" else _single(text)
        else:
            # The lowest and the highest ids are special in most vocabularies.
            low, high = min(256, size // 4), max(1, size - size // 16)
            prompt = tuple(draw.randrange(low, high) for _ in range(length))
        yield Question(f"{name}-{number}", name, prompt, (limit,), draw.getrandbits(62))


def _warm_up(options: WorkloadOptions, vocabulary: Vocabulary) -> Iterator[Question]:
    """Prompts as long as the made-up ones, or short; short answers: nothing is measured here."""
    if options.prompts is not None:
        options = replace(
            options, prompts=None, shuffle=False, input_tokens="32", output_tokens=None
        )
    for q in islice(_made_up(options, vocabulary, "warm-up"), _NUM_WARM_UP):
        limit = min(q.max_tokens[0], _WARM_UP_TOKENS)
        yield Question(q.id, q.category, q.prompt, (limit,), q.seed)


def _from_file(
    options: WorkloadOptions, count_tokens: CountTokens | None, notes: list[str]
) -> Iterator[Question]:
    assert options.prompts is not None
    conversations = read_conversations(options.prompts)
    if options.shuffle:
        random.Random(f"{options.seed} order").shuffle(conversations)
    if options.output_tokens == AS_IN_FILE and count_tokens is None:
        notes.append("no tokenizer is known: lengths in the file are counted as 4 characters each")
    for conversation in conversations:
        draw = random.Random(f"{options.seed} {conversation.id}")
        prompt: Prompt = conversation
        if options.api == "completions":
            prompt = _bare_text(conversation)
        limits = _limits(options, conversation, draw, count_tokens)
        seed = draw.getrandbits(62)
        yield Question(conversation.id, conversation.category, prompt, limits, seed)


def _limits(
    options: WorkloadOptions, conversation: Conversation, draw: random.Random,
    count_tokens: CountTokens | None,
) -> tuple[int, ...]:  # fmt: skip
    if options.output_tokens != AS_IN_FILE:
        lengths = parse_lengths(options.output_tokens or _DEFAULT_OUTPUT)
        return tuple(lengths.draw(draw) for _ in range(conversation.num_turns))
    answers = [m["content"] for m in conversation.messages if m["role"] == "assistant"]
    # A last message of the user may have no answer; then the conversation ends before it.
    if not answers:
        raise ConfigError(
            f"{conversation.id!r} has no answer in the file; `file` takes lengths from answers. "
            "Give output_tokens, or a file with answers (ShareGPT)."
        )
    size = count_tokens or (lambda text: -(-len(text) // _CHARACTERS_PER_TOKEN))
    return tuple(max(1, size(text)) for text in answers[: conversation.num_turns])


def _single(text: str) -> Conversation:
    return Conversation("", "", ({"role": "user", "content": text},))


def _bare_text(conversation: Conversation) -> str:
    asked = [m for m in conversation.messages if m["role"] != "assistant"]
    if len(asked) != 1:
        raise ConfigError(
            f"{conversation.id!r} has {len(asked)} messages; /v1/completions continues one text. "
            "Ask the chat API (--api chat) instead, which needs a chat template."
        )
    return asked[0]["content"]


def _again_and_again(questions: list[Question]) -> Iterator[Question]:
    yield from questions
    for again in count(2):
        for q in questions:
            yield Question(f"{q.id}#{again}", q.category, q.prompt, q.max_tokens, q.seed)


def _first(questions: Iterable[Question], num_requests: int) -> Iterator[Question]:
    """So many requests; of the last conversation perhaps not all turns."""
    left = num_requests
    for q in questions:
        yield Question(q.id, q.category, q.prompt, q.max_tokens[:left], q.seed)
        left -= q.num_turns
        if left <= 0:
            return
