"""Files of states that another engine computed: which of them a record takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from support.training_data import random_records

from headstart.data.records import Record
from headstart.train.states.elsewhere import extracted_name, missing
from headstart.vllm_plugin.collected import Collected, write


def cut(record: Record) -> Record:
    return replace(record, ids=record.ids[:-1], mask=record.mask[:-1])


def test_states_of_another_trunk_or_another_cut_are_not_taken(tmp_path: Path) -> None:
    records = random_records(3)
    for record in records:
        ids = torch.from_numpy(record.ids.copy())
        states = torch.ones(len(ids), 4)
        write(tmp_path, extracted_name(record, "a"), Collected(ids, states, record.num_prompt))
    assert missing(tmp_path, records, "a") == []
    assert missing(tmp_path, records, "b") == records
    shorter = [cut(record) for record in records]
    assert missing(tmp_path, shorter, "a") == shorter
