"""Forgetting a client: the run again without it, to the very bytes of a run that never had it.

A run that never had a client is the same config with `partition.without = [client]`: cohorts are drawn as before, and
the client is then not asked; numbers and random streams of all others stay. Images that the server itself holds for
validation stay too. Since runs are deterministic, a replay is exact. It starts after the last round of which nothing
depends on the client, of a run whose head, mask and class counts were not made from its sums.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgraft.config.load import Config, from_folder, merge, to_toml, validate
from fedgraft.errors import FedgraftError
from fedgraft.runs import checkpoint
from fedgraft.runs.files import write_text
from fedgraft.runs.job import Job, job_of, left_out
from fedgraft.runs.run import run
from fedgraft.runs.run_folder import RunFolder
from fedgraft.runs.tracking import Progress

log = logging.getLogger("fedgraft")

CANNOT = (
    "what others already have cannot be called back: models that were delivered, and sums that were opened with this "
    "client in them"
)


@dataclass(frozen=True)
class Replay:
    """How a client is forgotten: where the replay goes, after which round it starts, and what it costs."""

    config: Config
    folder: Path
    client: int
    start: int
    """Rounds that are kept as they are; 0: everything is done again."""
    rounds: int
    """Rounds of the run."""
    took_part: int
    """Rounds that the client took part in."""
    why: str


def plan(folder: Path, client: str, to: Path | None = None) -> Replay:
    """What forgetting this client takes; a run that cannot be repeated is refused."""
    record = RunFolder.open(folder)
    config = from_folder(folder)
    if record.config_digest != config.digest:
        raise FedgraftError(f"{folder} cannot be run again from its config.toml alone, so nothing can be replayed.")
    if config.privacy.dp is not None and config.privacy.dp.secret:
        raise FedgraftError(f"the noise of {folder} is not repeatable (privacy.dp.secret), so a replay is another run.")
    without = validate(merge(config.table, {"partition": {"without": [*config.partition.without, client]}}))
    job = job_of(without)
    before = left_out(config, job.task.data)
    if job.federation.without == before:
        raise FedgraftError(f"{folder} never had the client {client!r}.")
    number = min(job.federation.without - before)
    lines = record.metrics()
    rounds = [int(line["round"]) for line in lines if number in (line.get("clients") or {}).get("ids", [])]
    start, why = _start(job, folder, min(rounds, default=len(lines)))
    place = to or folder.with_name(f"{folder.name}-without-{client}")
    done = max((int(line["round"]) for line in lines), default=0)
    return Replay(without, place, number, start, done, len(rounds), why)


def _start(job: Job, folder: Path, first: int) -> tuple[int, str]:
    """The round after whose checkpoint a replay may start, and why not a later one."""
    a, head = job.algorithm, job.config.model.head
    if head != "random":
        return 0, f"the {head} head was made from sums with this client"
    if a.trainable.scores_data:
        return 0, "the mask was chosen by scores with this client"
    if a.federation_counts:
        return 0, "the class counts are a sum with this client"
    kept = [found.round for found in _good(folder) if found.round < first]
    return max(kept, default=0), f"it first took part in round {first}"


def _good(folder: Path) -> list[checkpoint.Checkpoint]:
    found = []
    for path in sorted((folder / "checkpoints").glob("round-*.safetensors")):
        try:
            found.append(checkpoint.load(path))
        except checkpoint.BadCheckpoint:
            continue
    return found


def unlearn(replay: Replay, source: Path, progress: Progress | None = None, console: bool = True) -> dict[str, Any]:
    """Carry the replay out; the summary of the run without the client. Interrupted, it goes on where it stopped."""
    record = RunFolder.create(replay.folder, to_toml(replay.config), replay.config.digest)
    if replay.start and not any(record.checkpoints.iterdir()):
        old = next(found for found in _good(source) if found.round == replay.start)
        meta = {**old.meta, "config_digest": replay.config.digest}
        lines = [line for line in RunFolder.open(source).metrics() if line["round"] <= replay.start]
        write_text(record.metrics_path, "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
        checkpoint.save(record.checkpoints, old.round, old.tensors, meta, best=old.best)
    log.info("forgetting client %d: %s; %s", replay.client, replay.why, CANNOT)
    summary = run(replay.config, replay.folder, progress, console)
    told = {"client": replay.client, "from_round": replay.start, "rounds": replay.rounds - replay.start,
            "took_part": replay.took_part, "exact": True, "why": replay.why, "cannot": CANNOT}  # fmt: skip
    write_text(replay.folder / "unlearned.json", json.dumps(told, indent=2) + "\n")
    return summary
