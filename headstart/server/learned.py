"""Between a server and its learning: answers that are handed on, and heads that are swapped in."""

from __future__ import annotations

import time
from pathlib import Path

from headstart.engine.engine import Engine
from headstart.engine.output import Completion, Result
from headstart.learn.certainty import counted
from headstart.learn.supervisor import Learning
from headstart.learn.texts import Text
from headstart.learn.vocabs import vocab_beside
from headstart.server.channels import Job
from headstart.server.worker import CUT, Worker

_SWAP_SECONDS = 60.0  # for the step that is running when a head is there
_WHOLE = ("stop", "length")  # reasons of answers that ended as they should
_REPLAYED = ("temperature", "top_k", "top_p", "min_p")


def attach(learning: Learning, worker: Worker, engine: Engine) -> None:
    """From now on answers are learned from, and heads swapped."""

    def swap(folder: Path) -> None:
        vocab = vocab_beside(folder)
        if vocab is not None and engine.draft_vocabs.why_not(vocab) is not None:
            vocab = None  # the engine was started with other lists, or with none
        prepared = engine.prepare_head(folder, vocab)
        done = worker.between_steps(lambda own: own.swap_head(prepared))
        try:
            done.result(_SWAP_SECONDS)
        except TimeoutError:
            if not done.cancel():  # it has begun after all
                done.result()
                return
            raise

    def finished(job: Job, result: Result) -> None:
        kind = job.learned_as
        assert kind is not None
        for output in result.outputs:
            # The collector bounds what it holds; nothing else may keep them alive.
            states, output.states = output.states, None
            is_whole = output.finish_reason in _WHOLE and output.stop_reason != CUT
            if is_whole and len(output.token_ids) > 1:
                # Made now: a result has more, log-probabilities for one, and could wait for long.
                text = text_of(job, result, output, time.time())
                learning.finished(counted(kind, [output.stats.acceptance]), text, states)

    worker.on_result = finished
    learning.attach(swap, lambda: bool(engine.scheduler.running or engine.scheduler.waiting))


def text_of(job: Job, result: Result, output: Completion, now: float) -> Text:
    """An answer as it is kept."""
    params, stats = job.asked.params, output.stats
    # Other settings change what the noise chooses: such answers are compared with arg-max drafts.
    is_plain = not (params.needs_history or params.is_restricted or job.grammar is not None)
    is_replayed = is_plain and params.acceptance == "match"
    return Text(
        id=f"{job.id}/{output.index}", prompt=result.prompt_token_ids, answer=output.token_ids,
        kind=job.learned_as or "", time=now, finish_reason=str(output.finish_reason),
        seed=stats.seed if is_replayed else None,
        sampling={name: getattr(params, name) for name in _REPLAYED} if is_replayed else {},
        max_tokens=stats.max_tokens,
    )  # fmt: skip
