"""Choice of the engine for a run, from the config and from what the algorithm allows.

| `engine` | only the head is trained, on cached features, and nothing forbids batching | otherwise |
|---|---|---|
| `auto` | batched | reference |
| `batched` | batched | batched; requests that cannot be stacked are carried out one by one, with the reason logged |
| `reference` | reference | reference |

The reference engine uses `workers` processes, which does not change a byte of the result. `workers=0` means one worker
for each core if a network is trained on a CPU and a round has at least `WORTH` multiply-adds, otherwise this process
alone. Multiply-adds are counted as images times the weights they pass, a lower bound of the real cost. The number of
workers never decides between batched and reference, because these two differ in the last bits.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

Wanted = Literal["auto", "reference", "batched"]
"""The values of the config key `engine` for a simulated run."""
WORTH = 1e8
"""Multiply-adds of a round (some milliseconds) below which sending requests to workers takes longer than it saves."""


@dataclass(frozen=True)
class Choice:
    """The chosen engine, its number of worker processes, and the reason for the log."""

    mode: Literal["batched", "in_process", "pool"]
    workers: int
    why: str


def choose_engine(
    engine: Wanted, workers: int, obstacle: str | None, work: float, devices: int = 0, clients: int = 1
) -> Choice:
    """Return the engine and number of processes for a run, with the reason for the log.

    Args:
        engine: the config's `engine`.
        workers: the config's `workers`; 0: choose.
        obstacle: why requests cannot be batched; None if they can.
        work: a lower bound of the multiply-adds of a round; 0: only a head is trained.
        devices: number of accelerators; 0: the network is on a CPU.
        clients: clients per round.
    """
    if engine == "batched" or (engine == "auto" and obstacle is None):
        if obstacle is None:
            return Choice("batched", 1, "all clients of a round in one product")
        return Choice("batched", 1, f"one by one, because {obstacle}")
    configured = ""
    not_batched = ""
    if engine == "reference":
        configured = " as configured"
    elif obstacle is not None:
        not_batched = f"; not batched, because {obstacle}"
    if workers:
        processes = workers
        why = f"workers={workers}{not_batched}"
    elif devices:
        processes = min(devices, max(1, clients))
        why = f"{_count(processes)}{configured}: one for each accelerator{not_batched}"
    elif work < WORTH:
        processes = 1
        why = f"one process{configured}: {_describe_work(work)} too little work for more{not_batched}"
    else:
        processes = max(1, min(cores(), clients))
        why = f"{processes} processes{configured}, one for each core, results identical to one process{not_batched}"
    if processes == 1:
        return Choice("in_process", processes, why)
    return Choice("pool", processes, why)


def _count(processes: int) -> str:
    """Return a number of processes in words."""
    return "one process" if processes == 1 else f"{processes} processes"


def _describe_work(work: float) -> str:
    """Return subject and verb of the sentence that says how little work a round is."""
    if not work:
        return "training the head alone is"
    if work < 1e6:
        return "under a million multiply-adds per round are"
    return f"{work / 1e6:.0f} million multiply-adds per round are"


def cores() -> int:
    """Return the number of processor cores that this process may use (its affinity where the system has one)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
