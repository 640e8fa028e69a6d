"""The numbers of the recipe, in one place. `small` is the same recipe for a try on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

CONTEXTS = ("prefix", "sequence")
LOSSES = ("ce", "kl", "lk", "tv", "e2e-tv")
STAGES = (
    "evaluation", "answers", "stock", "study", "closer", "score", "final", "score", "publish",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides the result; paths are given by whoever runs it."""

    work: Path
    prompts: Path  # to learn from: JSONL that `headstart distill` reads
    questions: Path | None  # MT-Bench's question file; never trained on
    model: str = "demo"
    device: str = "auto"
    processes: int = 1  # side by side on one GPU

    # answers
    samples: int = 2
    max_tokens: int = 256
    max_len: int = 1024  # prompt and answer
    temperature: float = 0.6
    heldout: float = 0.03
    running: int = 512  # requests at once
    num_evaluated: int = 160  # held-out prompts that are scored, over all categories

    # training
    vocab_size: int = 8192  # of the draft vocabulary
    batch_sequences: int = 64  # answers in a step
    pack_tokens: int = 16384  # all of them at once: more passes would wait for Python
    final_size: int = 2  # times so many in the last training, which has time
    # Learning rates that every row is tried with. Muon's came from a first look at fresh heads.
    rates: dict[str, tuple[float, ...]] = field(
        default_factory=lambda: {"muon": (1e-2, 2e-2, 4e-2), "adamw": (1e-3, 2e-3, 4e-3)}
    )
    stock_rate: float = 2e-2
    published_rate: float = 5e-5  # FastMTP's, tried besides
    train_depths: tuple[int, ...] = (1, 2, 5)  # beside 3, for the two best rows
    seeds: tuple[int, ...] = (1, 2)  # beside 0, for the closest rows
    eval_limit: int = 96

    # Seconds of each stage, about: the number of steps is chosen to fit. `closer` trains as many
    # steps as `study`, with fewer heads.
    seconds: dict[str, float] = field(
        default_factory=lambda: {
            "answers": 150, "stock": 60, "study": 300, "final": 300,
        }
    )  # fmt: skip

    @property
    def answers(self) -> Path:
        return self.work / "answers"

    @property
    def evaluation(self) -> dict[str, Path]:
        """Name -> dataset of answers to score on."""
        sets = {"held-out, T=0.6": "heldout-0.6", "held-out, T=0": "heldout-0"}
        if self.questions is not None:
            sets["MT-Bench, T=0"] = "mt-bench"
        return {name: self.work / "evaluation" / folder for name, folder in sets.items()}

    @property
    def vocab(self) -> Path:
        return self.work / "draft_vocab.json"

    @property
    def stock(self) -> Path:
        """The head that everything else starts from."""
        return self.work / "stock" / "head"

    @property
    def final(self) -> Path:
        """The result."""
        return self.work / "final" / "head"


def small(settings: Settings) -> Settings:
    """A few prompts and steps: does everything run?"""
    from dataclasses import replace

    return replace(
        settings, samples=1, max_tokens=24, heldout=0.3, running=8, num_evaluated=6,
        rates={"muon": (1e-2,), "adamw": (1e-3,)},
        vocab_size=2048, batch_sequences=4, pack_tokens=1024, train_depths=(2,), seeds=(1,),
        eval_limit=4, seconds={**dict.fromkeys(settings.seconds, 1.0), "answers": 60.0},
    )  # fmt: skip
