"""The draft vocabularies of an engine, and which of them a request drafts with.

The choice moves acceptance and speed only: what is emitted is the trunk's choice over its whole
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from headstart.checkpoint.reader import Checkpoint
from headstart.data.fingerprints import ABSENT, tokenizer_sha
from headstart.data.prompt_reader import Prompt, PromptReader
from headstart.errors import ConfigError, DataError, RequestError, some
from headstart.vocab.draft_vocab import ALL, WHOLE_NAMES, DraftVocab
from headstart.vocab.files import read
from headstart.vocab.languages import language_of
from headstart.vocab.own_tokens import OwnRule, check_beside

# A file, ids, or vocabularies that were read already.
Source = str | Path | Sequence[int] | Sequence[DraftVocab]
# The end of a prompt is where the question stands, and its language tells the answer's.
_LAST_CHARACTERS, _LAST_TOKENS = 4000, 1000


class DraftVocabs:
    """Named maps; empty where the whole vocabulary is all there is."""

    def __init__(
        self, vocabs: Sequence[DraftVocab] = (), *, vocab_size: int, has_own: bool = False
    ):
        """vocab_size: of the model. has_own: requests draft tokens of their own text, too."""
        self._vocab_size, self._has_own = vocab_size, has_own
        self.by_name = {vocab.name: vocab for vocab in vocabs}
        if len(self.by_name) < len(vocabs):
            raise DataError(
                f"two draft vocabularies have the same name ({some(v.name for v in vocabs)})."
            )
        self._by_language = {vocab.language or vocab.name: vocab.name for vocab in vocabs}

    @classmethod
    def open(cls, source: Source | None, checkpoint: Checkpoint, own: int = 0) -> DraftVocabs:
        """Read and check against the model's vocabulary and tokenizer; own: tokens beside a map."""
        vocab_size = int(checkpoint.config.get("vocab_size", 0))
        if source is None:
            check_beside(own, "--draft-vocab")
            return cls(vocab_size=vocab_size)
        sha = tokenizer_sha(checkpoint)
        vocabs = _vocabs(source)
        for vocab in vocabs:
            vocab.check(
                vocab_size=vocab_size,
                tokenizer_sha=None if sha == ABSENT else sha,
                where=f"{source}: map {vocab.name!r}" if isinstance(source, str | Path) else "",
            )
        return cls(vocabs, vocab_size=vocab_size, has_own=own > 0)

    def own_rules(self, limit: int, vocab_size: int) -> dict[str, OwnRule]:
        """By map: which tokens of its text a request drafts beside it; none where limit is 0."""
        if not limit:
            return {}
        return {
            name: OwnRule.of(vocab.ids, vocab_size, limit) for name, vocab in self.by_name.items()
        }

    @property
    def notes(self) -> list[str]:
        sizes = ", ".join(f"{name} ({len(v.ids)} tokens)" for name, v in self.by_name.items())
        return [f"draft vocabularies: {sizes}"] if sizes else []

    def why_not(self, new: DraftVocab) -> str | None:
        """What keeps this one from taking the running one's place, or None."""
        if len(self.by_name) != 1:
            return f"{len(self.by_name)} draft vocabularies run, and one can be replaced"
        (running,) = self.by_name.values()
        if len(new.ids) != len(running.ids):
            return f"it has {len(new.ids)} tokens, the running one {len(running.ids)}"
        if self._has_own:
            return "requests draft tokens of their own beside the running one"
        if new.ids[-1] >= self._vocab_size:
            return f"it holds token {new.ids[-1]}, the model has 0 to {self._vocab_size - 1}"
        shas = running.tokenizer_sha, new.tokenizer_sha
        if None not in shas and shas[0] != shas[1]:
            return "it was made with another tokenizer than the running one"
        return None

    def replacing(self, new: DraftVocab) -> dict[str, tuple[int, ...]]:
        """The new ids by the running one's name; ConfigError where they cannot take its place."""
        if (reason := self.why_not(new)) is not None:
            raise ConfigError(f"draft vocabulary {new.name!r} cannot be swapped in: {reason}.")
        return dict.fromkeys(self.by_name, new.ids)

    def replaced(self, ids: Mapping[str, Sequence[int]]) -> None:
        """From now on these are the ids of the maps of these names."""
        for name, own in ids.items():
            self.by_name[name] = replace(self.by_name[name], ids=tuple(own), coverage=None)

    def _check(self, asked: str | None) -> None:
        """RequestError if a request names a vocabulary that is not there."""
        if asked is not None and asked not in (*self.by_name, *WHOLE_NAMES):
            there = f"There are {', '.join(self.by_name)}" if self.by_name else "None was loaded"
            raise RequestError(
                f"no draft vocabulary is called {asked!r}. {there}; {' or '.join(WHOLE_NAMES)} "
                f"stands for the whole vocabulary.",
                field="draft_vocab",
            )

    def choose(
        self, asked: str | None, prompt: Prompt, ids: Sequence[int], reader: PromptReader
    ) -> str | None:
        """The map for a request: the one it names, the only one, or the one of its language.

        None stands for the whole vocabulary, which is also taken where no map fits.
        """
        self._check(asked)
        if asked in WHOLE_NAMES or not self.by_name:
            return None
        if asked is not None:
            return asked
        if len(self.by_name) == 1:
            return next(iter(self.by_name))
        text = prompt_text(prompt)
        if text is None:  # only now: a tokenizer takes seconds to import
            last = list(ids)[-_LAST_TOKENS:]
            text = "" if reader.tokenizer is None else reader.decode(last)
        language = language_of(text[-_LAST_CHARACTERS:])
        return self._by_language.get(language, self._by_language.get(ALL))


def _vocabs(source: Source) -> list[DraftVocab]:
    if isinstance(source, str | Path):
        return read(Path(source))
    items: list[int | DraftVocab] = list(source)
    vocabs = [item for item in items if isinstance(item, DraftVocab)]
    ids = [item for item in items if not isinstance(item, DraftVocab)]
    if vocabs and ids:
        raise ConfigError(
            f"draft_vocab holds {len(vocabs)} draft vocabularies and {len(ids)} other items; give "
            "a file, draft vocabularies, or token ids.",
            field="draft_vocab",
        )
    return vocabs or [DraftVocab.of({int(item) for item in ids})]


def prompt_text(prompt: Prompt) -> str | None:
    """What was asked, without template: a text, or the last user message; None for ids."""
    if isinstance(prompt, str):
        return prompt
    messages = [item for item in prompt if isinstance(item, Mapping)]
    if not messages:
        return None
    asked = [m for m in messages if m.get("role") == "user"] or messages
    content = asked[-1].get("content") or ""
    if isinstance(content, str):
        return content
    return " ".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
