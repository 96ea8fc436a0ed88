"""Which engine carries out a run's orders: the one rule, as a function of what is asked for and what is possible.

| `engine` | the head alone moves, on kept features, and nothing forbids it | otherwise |
|---|---|---|
| `auto` | batched | reference |
| `batched` | batched | batched, which carries out one by one what it cannot stack, and says why |
| `reference` | reference | reference |

Reference orders run in `workers` processes, which does not change a byte: `workers=0` means one for each core where a
network is trained on a CPU and a round is worth it, and none beside this process otherwise. A round is worth it from
`WORTH` multiply-adds on, counted as images times the weights they meet, which is the least they can cost. The number
of workers never decides between batched and reference, because those differ in the last bits.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

Wanted = Literal["auto", "reference", "batched"]
WORTH = 1e8
"""Multiply-adds of a round, some milliseconds, below which sending orders to workers takes longer than it saves."""


@dataclass(frozen=True)
class Choice:
    """What was chosen, with the clause for the log."""

    mode: Literal["batched", "in_process", "pool"]
    workers: int
    why: str


def choose_engine(
    wanted: Wanted, workers: int, obstacle: str | None, work: float, on_cpu: bool = True, clients: int = 1
) -> Choice:
    """The engine for these orders. `obstacle`: why they cannot be batched, None where they can.

    `work` is the least number of multiply-adds of a round; 0 means that only a head is trained.
    """
    if wanted == "batched" or (wanted == "auto" and obstacle is None):
        why = obstacle or "all clients of a round in one product"
        return Choice("batched", 1, why if obstacle is None else f"one by one, because {why}")
    asked = " as asked" if wanted == "reference" else ""
    reason = f"; not batched, because {obstacle}" if obstacle is not None and not asked else ""
    if workers:
        number, how = workers, f"workers={workers}{reason}"
    elif not on_cpu:
        number, how = 1, f"one process{asked}: the device is no CPU{reason}"
    elif work < WORTH:
        amount = f"{work / 1e6:.0f}" if work >= 1e6 else "under a"
        what = f"{amount} million multiply-adds a round are" if work else "a head alone is"
        number, how = 1, f"one process{asked}: {what} too little work for more{reason}"
    else:
        number = max(1, min(cores(), clients))
        how = f"{number} processes{asked}, one for each core, same bytes as one{reason}"
    return Choice("in_process" if number == 1 else "pool", number, how)


def cores() -> int:
    """Processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
