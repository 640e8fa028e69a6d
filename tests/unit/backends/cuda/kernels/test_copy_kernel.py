"""The kernel that goes on with copied drafts, against the same in plain Python."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton")

from headstart.backends.cuda.kernels.copies import TOKENS, follow_copies

WINDOW, WIDTH, DRAFTS = 9, 14, 6


@dataclass
class Case:
    """One request: its newest tokens, the head's drafts, and what it may copy."""

    length: int
    newest: list[int]  # that came since the head read, the last one included
    head: list[int]
    limit: int
    start: int
    copy: list[int]
    confirmed: bool

    def expected(self, of_head: int, columns: int) -> tuple[list[int], int, int]:
        """Drafts, how many, and how many of these are the head's."""
        head, behind = min(self.limit, of_head), self.length - self.start
        if self.copy and 0 <= behind <= len(self.newest) and behind < len(self.copy):
            came = self.newest[len(self.newest) - behind :]
            rest = self.copy[behind : behind + columns]
            if came == self.copy[:behind]:
                both = min(head, len(rest))
                agreed = head if self.head[:both] == rest[:both] and len(rest) > head else 0
                if not self.confirmed or agreed:
                    return rest, len(rest), agreed
        return self.head[:head], head, head


def cases(seed: int) -> list[Case]:
    numbers = random.Random(seed)
    made = []
    for _ in range(40):
        newest = [numbers.randrange(3) for _ in range(numbers.randrange(1, WINDOW))]
        behind = numbers.randrange(len(newest) + 2)
        head = [numbers.randrange(3) for _ in range(DRAFTS)]
        copy = [*newest[max(0, len(newest) - behind) :], *head[:2],
                *(numbers.randrange(3) for _ in range(numbers.randrange(8)))]  # fmt: skip
        if copy and numbers.random() < 0.4:
            copy[numbers.randrange(len(copy))] = 7
        copy = [] if numbers.random() < 0.2 else copy[:WIDTH]
        length = 20 + numbers.randrange(9)
        made.append(Case(length, newest, head, numbers.randrange(4), length - behind, copy,
                         numbers.random() < 0.5))  # fmt: skip
    return made


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("of_head", "columns"), [(2, 6), (0, 6), (3, 3)])
def test_copies_go_on_where_the_text_agrees(seed: int, of_head: int, columns: int) -> None:
    given = cases(seed)
    count = len(given)
    copies = torch.zeros(count, TOKENS + WIDTH, dtype=torch.int64)
    tokens = torch.full((count, WINDOW), 9)
    ids = torch.zeros(count, 1 + DRAFTS, dtype=torch.int64)
    for at, case in enumerate(given):
        row = [case.start, len(case.copy), int(case.confirmed), *case.copy]
        copies[at, : len(row)] = torch.tensor(row)
        tokens[at, : len(case.newest)] = torch.tensor(case.newest)
        ids[at, 1:] = torch.tensor(case.head)
    numbers = [[len(case.newest) for case in given], [case.length for case in given],
               [case.limit for case in given]]  # fmt: skip
    pending, lengths, limits = (torch.tensor(own, dtype=torch.int32) for own in numbers)
    made = torch.zeros(2, count + 3, dtype=torch.int32)  # a batch has room for more
    follow_copies(
        copies, tokens, pending, lengths, limits, ids, made, of_head=of_head, columns=columns
    )
    kinds = set()
    for at, case in enumerate(given):
        drafts, total, own = case.expected(of_head, columns)
        assert (int(made[0, at]), int(made[1, at])) == (total, own)
        assert ids[at, 1 : 1 + total].tolist() == drafts
        kinds.add(total > own)
    assert kinds == {True, False}
