"""What a client remembers between rounds, and what of it can be taken back.

A client's memory follows its answers: an answer that the server did not use leaves no trace. A control variate that
moved for a refused answer would no longer match the server's, which did not move. So the client goes on from the memory
that it had before, except for what must never go back: its key, its ledger, and the state of secure sums, which serves
each number once.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Protocol, runtime_checkable

from torch import Tensor

ClientMemory = Mapping[str, Tensor]
"""Named tensors: control variates, private parts, personal models, optimizer state, keys, the ledger."""

IDENTITY = "identity"
"""The name of the client's signing key."""
LEDGER = "ledger"
"""The name of the ledger of requests by day."""
SUMMED = "summed"
"""The name of what says which update was in which secure sum, where updates wait for their sum (buffered rounds)."""
SECURE = "secure/"
"""Begins the names of secure sums that are under way."""


@runtime_checkable
class Remembering(Protocol):
    """An engine that knows what its clients remember, or which step of it they have."""

    memory: MutableMapping[int, ClientMemory]

    def take_back(self, client: int, before: ClientMemory | None) -> None:
        """Give this client the memory back that it had before its last request; None: it had none."""
        ...


class Memories:
    """The part of an engine that holds its clients' memories itself."""

    memory: MutableMapping[int, ClientMemory]

    def take_back(self, client: int, before: ClientMemory | None) -> None:
        """Give this client the memory back that it had before its last request; None: it had none.

        Its key, ledger and secure sums stay as they are now.
        """
        if client not in self.memory:
            return
        earlier = earlier_memory(self.memory[client], before)
        if earlier:
            self.memory[client] = earlier
        else:
            del self.memory[client]


def never_goes_back(name: str) -> bool:
    """Return whether a part of a client's memory stays as it is when an answer is taken back."""
    return name in {IDENTITY, LEDGER, SUMMED} or name.startswith(SECURE)


def earlier_memory(now: ClientMemory, before: ClientMemory | None) -> ClientMemory:
    """Return the memory `before` a request (None: none), but key, ledger and secure sums as they are `now`."""
    memory = {}
    for name, tensor in (before or {}).items():
        if not never_goes_back(name):
            memory[name] = tensor
    for name, tensor in now.items():
        if never_goes_back(name):
            memory[name] = tensor
    return memory
