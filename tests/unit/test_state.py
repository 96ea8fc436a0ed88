"""What is written down of a run comes back: the server's state and what clients remember, field by field."""

from __future__ import annotations

from dataclasses import fields

import torch

from fedgraft.core.state import ServerState, from_tensors, to_tensors


def test_state_and_memories_come_back_whole() -> None:
    state = ServerState(
        4,
        torch.rand(3),
        {"control": torch.rand(3)},
        {2: torch.rand(3)},
        {},
        (0.5, 0.25),
        0.7,
        (2.0, 1.5),
    )
    memories = {0: {"control": torch.rand(3)}, 7: {"optimizer/0/velocity": torch.rand(2), "private": torch.rand(1)}}
    again, remembered = from_tensors(4, *to_tensors(state, memories))
    for field in fields(ServerState):
        old, new = getattr(state, field.name), getattr(again, field.name)
        if isinstance(old, dict):
            assert old.keys() == new.keys() and all(torch.equal(old[key], new[key]) for key in old), field.name
        else:
            assert torch.equal(old, new) if isinstance(old, torch.Tensor) else old == new, field.name
    assert remembered.keys() == memories.keys()
    for client, kept in memories.items():
        assert kept.keys() == remembered[client].keys()
        assert all(torch.equal(kept[name], remembered[client][name]) for name in kept)
