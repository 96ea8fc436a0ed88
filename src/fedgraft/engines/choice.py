"""Which engine carries out a run's orders: the one rule, as a function of what is asked for and what is possible.

| `engine` | the head alone moves, on kept features, and nothing forbids it | otherwise |
|---|---|---|
| `auto` | batched | reference |
| `batched` | batched | batched, which carries out one by one what it cannot stack, and says why |
| `reference` | reference | reference |

Reference orders run in `workers` processes, which does not change a byte: `workers=0` means one for each core where a
network is trained on a CPU, and none beside this process where only a head is, or on another device. The number of
workers never decides between batched and reference, because those differ in the last bits.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

Wanted = Literal["auto", "reference", "batched"]


@dataclass(frozen=True)
class Choice:
    """What was chosen, with the clause for the log."""

    mode: Literal["batched", "in_process", "pool"]
    workers: int
    why: str


def choose_engine(
    wanted: Wanted, workers: int, obstacle: str | None, head_only: bool, on_cpu: bool = True, clients: int = 1
) -> Choice:
    """The engine for these orders. `obstacle`: why they cannot be batched, None where they can."""
    if wanted == "batched" or (wanted == "auto" and obstacle is None):
        why = obstacle or "all clients of a round in one product"
        return Choice("batched", 1, why if obstacle is None else f"one by one, because {why}")
    asked = " as asked" if wanted == "reference" else ""
    reason = f"; not batched, because {obstacle}" if obstacle is not None and not asked else ""
    if workers:
        number, how = workers, f"workers={workers}{reason}"
    elif not on_cpu:
        number, how = 1, f"one process{asked}: the device is no CPU{reason}"
    elif head_only:
        number, how = 1, f"one process{asked}: a head alone is too little work for more{reason}"
    else:
        number = max(1, min(cores(), clients))
        how = f"{number} processes{asked}, one for each core, same bytes as one{reason}"
    return Choice("in_process" if number == 1 else "pool", number, how)


def cores() -> int:
    """Processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
