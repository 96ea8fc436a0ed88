"""Choice of the engine for a run, from the config and from what the algorithm allows.

| `engine` | only the head is trained, on cached features, and nothing forbids batching | otherwise |
|---|---|---|
| `auto` | batched | packed if `pack` says so and nothing forbids it, else reference |
| `batched` | batched | batched; requests that cannot be stacked are carried out one by one, with the reason logged |
| `reference` | reference | reference |

`pack=auto` packs clients on an accelerator, where small operations take as long as larger ones, and not on a CPU, where
a pack takes as long as its clients do and has other last bits. A number packs so many clients anywhere.

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
Pack = Literal["auto", "off"] | int
"""The values of the config key `pack`."""
WORTH = 1e8
"""Multiply-adds of a round (some milliseconds) below which sending requests to workers takes longer than it saves."""


@dataclass(frozen=True)
class Choice:
    """The chosen engine, its number of worker processes, and the reason for the log."""

    mode: Literal["batched", "packed", "in_process", "pool"]
    workers: int
    why: str
    pack: int = 1
    """Clients of one computation."""


@dataclass(frozen=True)
class Packing:
    """What the choice must know about packs of clients."""

    wanted: Pack = "auto"
    obstacle: str | None = None
    """Why clients cannot be packed; None if they can."""
    fitting: int = 1
    """Clients that the device's memory holds at once."""


NO_PACKS = Packing("off")


def choose_engine(
    engine: Wanted,
    workers: int,
    obstacle: str | None,
    work: float,
    devices: int = 0,
    clients: int = 1,
    packing: Packing = NO_PACKS,
) -> Choice:
    """Return the engine and number of processes for a run, with the reason for the log.

    Args:
        engine: the config's `engine`.
        workers: the config's `workers`; 0: choose.
        obstacle: why requests cannot be batched; None if they can.
        work: a lower bound of the multiply-adds of a round; 0: only a head is trained.
        devices: number of accelerators; 0: the network is on a CPU.
        clients: clients per round.
        packing: whether clients may be packed into one computation.
    """
    if engine == "batched" or (engine == "auto" and obstacle is None):
        if obstacle is None:
            return Choice("batched", 1, "all clients of a round in one product")
        return Choice("batched", 1, f"one by one, because {obstacle}")
    unpacked = ""
    if engine == "auto" and _wants_packs(packing, devices):
        unpacked = _why_not_packed(packing, devices)
        if not unpacked:
            return _packed(packing, workers, devices, clients)
    configured = ""
    not_batched = ""
    if engine == "reference":
        configured = " as configured"
    elif obstacle is not None:
        not_batched = f"; not batched, because {obstacle}{unpacked}"
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


def _wants_packs(packing: Packing, devices: int) -> bool:
    """Return whether clients should be packed if they can be."""
    if packing.wanted == "auto":
        return devices > 0
    return packing.wanted != "off" and packing.wanted > 1


def _why_not_packed(packing: Packing, devices: int) -> str:
    """Return the end of a sentence that says why clients are not packed; empty if they can be."""
    if devices > 1:
        return f"; not packed, because clients are spread over {devices} devices"
    if packing.obstacle is not None:
        return f"; not packed, because {packing.obstacle}"
    if packing.wanted == "auto" and packing.fitting < 2:
        return "; not packed, because the memory of the device holds one client at a time"
    return ""


def _packed(packing: Packing, workers: int, devices: int, clients: int) -> Choice:
    """Return the choice of packs: on a CPU in as many threads as there would be workers, on a device in one."""
    pack = packing.wanted if isinstance(packing.wanted, int) else packing.fitting
    pack = max(1, min(pack, clients))
    threads = 1
    if not devices:
        threads = max(1, min(workers or cores(), -(-clients // pack)))
    return Choice("packed", threads, f"{pack} clients in one computation", pack)


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
