"""What is known before anything is measured: which API can be asked, and how tokens are counted.

A MODEL's folder says it at once. A server is asked: whether it chats, and what its /tokenize and
/detokenize make of words, so that made-up prompts differ to the model and not only to us.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headstart.bench.asking import Asking
from headstart.bench.made_up import WORDS, words_known
from headstart.bench.tokens import Tokens, folder_tokens, gguf_documents
from headstart.bench.workload import Api, CountTokens, Vocabulary
from headstart.checkpoint.config import read_json_object
from headstart.errors import ConfigError
from headstart.heads.formats.gguf import is_gguf_path, open_gguf

_OWN_WORDS = (
    "everyday words are all alike to this tokenizer: prompts are made of tokens of its own instead"
)
_ESTIMATED = (
    "lengths of made-up prompts are estimated with the server's /tokenize; --tokenizer FOLDER "
    "makes them exact"
)


@dataclass(frozen=True, kw_only=True)
class Facts:
    api: Api
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    count_answers: CountTokens | None = None  # None: only the server could, which takes its time
    notes: tuple[str, ...] = ()


def facts_of_folder(folder: Path, api: Api | None, *, tokenizer: Path | None = None) -> Facts:
    """Of a checkpoint that we serve ourselves, and another folder's tokenizer if given."""
    notes: tuple[str, ...] = ()
    if api != "completions" and not has_chat_template(folder):
        if api == "chat":
            raise ConfigError(
                f"{folder} has no chat template, which --api chat needs. Give --api completions, "
                "or put chat_template.jinja into the folder."
            )
        api, notes = "completions", (_completions(f"{folder.name} has no chat template"),)
    return _with_folder(tokenizer or folder, api or "chat", notes)


def facts_of_servers(
    servers: Sequence[Asking], api: Api | None, *, tokenizer: Path | None = None
) -> Facts:
    """Asks each whether it chats, and the first for its tokens where no folder has them."""
    notes: tuple[str, ...] = ()
    if api is None:
        refused = next((said for s in servers if (said := s.chat_refusal())), None)
        api = "chat" if refused is None else "completions"
        if refused is not None:
            notes = (_completions(f"the server says: {refused.rstrip('.')}"),)
    if tokenizer is not None:
        return _with_folder(tokenizer, api, notes)
    tokens = servers[0].tokens()
    if tokens is None:
        return Facts(api=api, notes=notes)
    words, about_words = _words(tokens)
    # One question for all prompts: to ask for each of them would take longer than the benchmark.
    per_word = max(1, tokens.count(" ".join(words))) / len(words)
    vocabulary = Vocabulary(
        count_tokens=lambda text: round(per_word * len(text.split())),
        words=words,
        notes=(*about_words, _ESTIMATED),
    )
    return Facts(api=api, vocabulary=vocabulary, notes=notes)


def _with_folder(folder: Path, api: Api, notes: tuple[str, ...]) -> Facts:
    tokens = folder_tokens(folder)
    words, about_words = _words(tokens)
    count = None if tokens is None else tokens.count
    vocabulary = Vocabulary(
        count_tokens=count, size=_vocab_size(folder), words=words, notes=about_words
    )
    return Facts(api=api, vocabulary=vocabulary, count_answers=count, notes=notes)


def has_chat_template(folder: Path) -> bool:
    if is_gguf_path(folder):
        return "chat_template.jinja" in gguf_documents(folder)
    if (folder / "chat_template.jinja").is_file():
        return True
    file = folder / "tokenizer_config.json"
    return file.is_file() and bool(read_json_object(file).get("chat_template"))


def _vocab_size(folder: Path) -> int | None:
    if is_gguf_path(folder):
        found = open_gguf(folder).config.get("vocab_size")
        return found if isinstance(found, int) else None
    file = folder / "config.json"
    document = read_json_object(file) if file.is_file() else {}
    inner = document.get("text_config")
    size = document.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)
    return size if isinstance(size, int) else None


def _words(tokens: Tokens | None) -> tuple[Sequence[str], tuple[str, ...]]:
    if tokens is None:
        return WORDS, ()
    words = words_known(tokens.encode, tokens.decode)
    return words, () if words is WORDS else (_OWN_WORDS,)


def _completions(why: str) -> str:
    return f"{why}; so --api completions is used: prompts are continued, not answered"
