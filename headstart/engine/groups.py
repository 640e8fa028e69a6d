"""What users have submitted, by id, with updates that wait and results that are not collected.

n samples share an id. A step advances all requests, whatever called it, so an update waits in its
group for the stream it belongs to, or for the next call of `step`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from headstart.engine.output import Completion, Result, Update
from headstart.engine.request import Request, State
from headstart.errors import RequestError

_ABORTED_KEPT = 256  # results of aborted requests that were not collected yet


@dataclass
class Group:
    """The requests of one id."""

    requests: list[Request]
    is_claimed: bool  # by a stream or `generate`: its updates are not for `step`
    is_aborted: bool = False
    is_quiet: bool = False  # only the whole result is wanted: updates are not kept
    updates: list[Update] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        return all(request.finish_reason is not None for request in self.requests)

    def take(self) -> list[Update]:
        """What was made since the last time."""
        taken, self.updates = self.updates, []
        return taken


class Groups:
    """What users have submitted, by id: open requests, updates not taken, results not collected."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self._aborted: dict[str, None] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, name: str) -> bool:
        """Whether an id is in use; one that was aborted may be used again."""
        return name in self._groups and not self._groups[name].is_aborted

    @property
    def names(self) -> list[str]:
        return list(self._groups)

    def open(self, name: str, requests: list[Request], *, is_claimed: bool) -> None:
        self.forget(name)
        self._groups[name] = Group(requests, is_claimed)

    def unfinished(self, name: str) -> list[Request]:
        """Samples that wait or run; none of an unknown id."""
        found = self._groups[name].requests if name in self._groups else []
        return [request for request in found if request.state is not State.FINISHED]

    def is_finished(self, name: str) -> bool:
        return name not in self._groups or self._groups[name].is_finished

    def put(self, updates: Iterable[Update]) -> None:
        for update in updates:
            group = self._groups[update.request_id]
            if not group.is_quiet:
                group.updates.append(update)

    def discard_updates(self, names: Iterable[str]) -> None:
        """Updates of these will not be taken: kept, each round's would wait for the last one."""
        for name in names:
            self._groups[name].is_quiet = True

    @property
    def has_updates(self) -> bool:
        """Whether `step` has something to hand out that was made before."""
        return any(group.updates for group in self._groups.values() if not group.is_claimed)

    def take(self) -> list[Update]:
        """All updates that belong to no stream."""
        groups = [group for group in self._groups.values() if not group.is_claimed]
        return [update for group in groups for update in group.take()]

    def find(self, name: str) -> Group | None:
        return self._groups.get(name)

    def abandon(self, name: str) -> None:
        """Keep an aborted group for its collector, but not for ever."""
        self._groups[name].is_aborted = True
        self._aborted[name] = None
        if len(self._aborted) > _ABORTED_KEPT:
            self.forget(next(iter(self._aborted)))

    def forget(self, name: str) -> None:
        self._groups.pop(name, None)
        self._aborted.pop(name, None)

    def collect(self, name: str) -> Result:
        """The result of a finished group, which is forgotten."""
        if name not in self._groups:
            raise RequestError(
                f"no request is called {name!r}; it was never added, or its result was collected."
            )
        group = self._groups[name]
        if not group.is_finished:
            raise RequestError(
                f"request {name!r} is still running; step until it is finished, or abort it."
            )
        self.forget(name)
        first, outputs = group.requests[0], [_completion(r) for r in group.requests]
        scores = first.prompt_scores
        return Result(
            name, first.prompt_ids, outputs, scores.entries() if scores is not None else None
        )


def _completion(request: Request) -> Completion:
    return Completion(
        index=request.sample,
        token_ids=request.output_ids,
        text=request.text.text if request.text is not None else "",
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        origins=request.origins,
        logprobs=request.logprobs if request.params.logprobs is not None else None,
        stats=request.stats,
        error=request.error,
        states=request.kept_states,
    )
