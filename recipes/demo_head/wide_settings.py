"""The numbers of the wider recipe, in one place. `small` is the same for a try on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kinds import SCORED_KINDS

# What the model's own user turns begin with. Half of them begin with nothing given.
OPENINGS = (
    "Write", "How", "Explain", "What", "Why", "I", "Can you", "Write a Python function",
    "Write a short story", "Write an email", "Imagine", "Act as", "Describe", "Compare", "Solve",
    "If", "A shop", "Given", "List", "Create", "Design", "Discuss", "Who", "When", "Which",
    "Tell me", "Suggest", "Summarize", "Rewrite", "Fix", "Implement", "Classify", "Help me",
    "What are the", "Is it", "Should I", "Could you", "Please", "Give me", "Here is", "My", "Find",
    "Calculate", "Let's", "The", "In", "Are", "Translate", "Write a program in", "Make",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Wide:
    """What decides the result; paths are given by whoever runs it."""

    work: Path
    passages: Path | None  # what collect.py wrote
    prompts: Path | None = None  # of people, as `headstart distill` reads them
    questions: Path | None = None  # MT-Bench's file; never trained on
    avoided: tuple[Path, ...] = ()  # more question files that no prompt may come near
    model: str = "demo"
    is_demo: bool = False  # whether the head that ships belongs to it
    device: str = "auto"
    processes: int = 1  # side by side on one GPU

    # the model's own questions
    num_questions: int = 90_000  # tried; some half of them are kept
    question_temperatures: tuple[float, ...] = (0.7, 0.9, 1.0)
    question_tokens: int = 128

    # answers: every prompt has one of each, in this order as far as the time goes
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0, 0.3)
    at_first: int = 2  # so many of them before any prompt gets another
    max_tokens: int = 320
    long_tokens: int = 768
    long_share: float = 0.2  # of the prompts may be answered at such length
    max_len: int = 2048  # prompt and answer
    follow_share: float = 0.15  # of the time, for second turns that the model writes
    running: int = 384  # requests at once in each process
    kv_bytes: int = 10_000_000_000  # on a GPU, of each process

    # evaluation, as the study had it
    num_evaluated: int = 160  # of the held-out prompts of people
    num_of_kind: int = 48  # held-out tasks of each kind
    evaluated_tokens: int = 256
    heldout: float = 0.03
    samples: int = 1
    temperature: float = 0.6

    # training
    vocab_size: int = 8192  # of the draft vocabulary
    batch_sequences: int = 64  # not used: steps are filled by tokens
    batch_tokens: int = 65_536
    pack_tokens: int = 65_536
    eval_limit: int = 256
    begin_rate: float = 2e-2
    begin_steps: int = 100  # at least, whatever the time: everything starts from this head
    validations: int = 16  # points of the curve
    options: dict[str, Any] = field(
        default_factory=lambda: {
            "context": "prefix", "loss": "tv", "num_depths": 3, "optimizer": "muon",
            "learning_rate": 1e-2, "schedule": "cosine", "average": 0.99,
        }
    )  # fmt: skip

    # Seconds of each stage, about.
    seconds: dict[str, float] = field(
        default_factory=lambda: {
            "questions": 120, "answers": 600, "begin": 90, "look": 240, "long": 900,
        }
    )  # fmt: skip

    @property
    def benchmarks(self) -> tuple[Path, ...]:
        """Files of questions that no prompt may come near."""
        return tuple(path for path in (self.questions, *self.avoided) if path is not None)

    @property
    def answers(self) -> Path:
        return self.work / "answers"

    @property
    def written(self) -> Path:
        """Questions of the model that were kept."""
        return self.work / "questions.jsonl"

    @property
    def asked(self) -> Path:
        """All prompts to learn from and to validate on, in the order in which they are asked."""
        return self.work / "prompts.jsonl"

    @property
    def sources(self) -> Path:
        """How many prompts came from where."""
        return self.work / "sources.json"

    @property
    def evaluation(self) -> dict[str, Path]:
        """Name -> dataset of answers to score on."""
        sets: dict[str, str] = {}
        if self.prompts is not None:
            sets |= {"held-out, T=0.6": "heldout-0.6", "held-out, T=0": "heldout-0"}
        if self.questions is not None:
            sets["MT-Bench, T=0"] = "mt-bench"
        if self.passages is not None:
            sets |= {f"{kind}, T=0": kind for kind in SCORED_KINDS}
        return {name: self.work / "evaluation" / folder for name, folder in sets.items()}

    @property
    def vocab(self) -> Path:
        return self.work / "draft_vocab.json"

    @property
    def stock(self) -> Path:
        """The head that the long training starts from."""
        return self.work / "begin" / "head"

    @property
    def final(self) -> Path:
        """The result; of a long training that its deadline stopped, the best head so far."""
        whole, stopped = self.work / "long" / "head", self.work / "stopped" / "head"
        return stopped if stopped.is_dir() and not whole.is_dir() else whole


def small(settings: Wide) -> Wide:
    """A few prompts and steps: does everything run?"""
    return replace(
        settings, num_questions=24, question_tokens=48, max_tokens=24, long_tokens=32, running=8,
        num_evaluated=4, num_of_kind=2, evaluated_tokens=24, max_len=1024, vocab_size=2048,
        batch_tokens=768, pack_tokens=1024, eval_limit=6, validations=2, begin_steps=6,
        seconds={**dict.fromkeys(settings.seconds, 1.0), "questions": 60.0, "answers": 60.0},
    )  # fmt: skip
