"""Forgetting a client: the run again without it, to the very bytes of a run that never had it.

A run that never had a client is the same config with `partition.without = [client]`: cohorts are drawn as before, and
the client is then not asked; numbers and random streams of all others stay. Images that the server itself holds for
validation stay too. Since runs are deterministic, a replay is exact. It starts after the last round of which nothing
depends on the client, of a run whose head, mask and class counts were not made from its sums. A round whose record does
not say who took part (differential privacy, an aborted or skipped round) counts as one with the client.

`subtract` is quick and only approximate: it takes what the client added in its rounds off the last model, as far as a
run kept it (`rounds.keep_contributions`). What others learned from models with the client in them stays, and so do a
head, a mask and counts made from its sums. How far it lies from the exact one is measured where that is there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgraft.config.load import Config, from_folder, merge, to_toml, validate
from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import write_text
from fedgraft.runs import checkpoint
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.loop import is_finished, run
from fedgraft.runs.saving import UNMEASURED
from fedgraft.runs.setup import RunSetup, clients_left_out, setup_of
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
    took_part: int | None
    """Rounds that the client took part in; None where some round does not say who did."""
    why: str
    named: str
    """What the client was called by who asked."""


def plan(folder: Path, client: str, to: Path | None = None, fast: bool = False) -> Replay:
    """What forgetting this client takes; a run that cannot be repeated is refused."""
    record = RunFolder.open(folder)
    config = from_folder(folder)
    if record.config_digest != config.digest:
        raise FedgraftError(f"{folder} cannot be run again from its config.toml alone, so nothing can be replayed.")
    if config.privacy.dp is not None and config.privacy.dp.secret:
        raise FedgraftError(f"the noise of {folder} is not repeatable (privacy.dp.secret), so a replay is another run.")
    without = validate(merge(config.table, {"partition": {"without": [*config.partition.without, client]}}))
    setup = setup_of(without, for_training=False)
    before = clients_left_out(config, setup.task.data)
    if setup.federation.without == before:
        raise FedgraftError(f"{folder} never had the client {client!r}.")
    number = min(setup.federation.without - before)
    lines = [line for line in record.metrics() if line["round"] > 0]
    first = _first_round(lines, number)
    start, why = _start(setup, folder, first, number in setup.federation.joins)
    place = to or folder.with_name(f"{folder.name}-without-{client}{'-approximate' * fast}")
    done = max((int(line["round"]) for line in lines), default=0)
    return Replay(without, place, number, start, done, _took_part(lines, number), why, client)


@dataclass(frozen=True)
class First:
    """The first round that may depend on a client."""

    round: int
    named: bool
    """Whether its record names the client; else it does not say who took part."""


def _participants(line: Mapping[str, Any]) -> list[int] | None:
    """The clients whose updates a round used, or None where its record does not say."""
    clients = line.get("clients") or {}
    return clients.get("ids")


def _first_round(lines: Sequence[Mapping[str, Any]], client: int) -> First | None:
    """The first round that may depend on a client; None where every round says that it does not.

    An update that was refused counts too: what is usual, and with it who else is refused, is judged by all that came.
    """
    for line in lines:
        ids = _participants(line)
        if ids is None:
            return First(int(line["round"]), False)
        refused = [one["client"] for one in line.get("dropped") or []]
        if client in ids or client in refused:
            return First(int(line["round"]), True)
    return None


def _took_part(lines: Sequence[Mapping[str, Any]], client: int) -> int | None:
    """In how many rounds a client took part, or None where the records do not say."""
    rounds = 0
    for line in lines:
        ids = _participants(line)
        if ids is None and not line.get("skipped"):
            return None
        rounds += client in (ids or ())
    return rounds


def subtract(replay: Replay, source: Path, progress: Progress | None = None, console: bool = True) -> dict[str, Any]:
    """Forget a client approximately, in a folder of its own: the last model without what the client added to it."""
    old = checkpoint.load_latest(source / "checkpoints")
    name = f"contribution/{replay.client}"
    if old is None or (replay.took_part != 0 and name not in old.tensors):
        raise FedgraftError(
            f"{source} kept no contributions, so nothing can be subtracted; run with rounds.keep_contributions=true, "
            "or forget exactly, without --fast."
        )
    vector = old.tensors["vector"] - old.tensors.get(name, torch.zeros(()))
    gone = (f"memory/{replay.client}/", "contribution/")
    tensors = {key: t for key, t in old.tensors.items() if not key.startswith(gone)}
    # Nobody validated this model. `stale` stays as it is: a run that stopped for want of a better model stays stopped.
    best = {**old.meta["best"], "accuracy": -1.0, "score": UNMEASURED, "round": old.round}
    meta = {**old.meta, "config_digest": replay.config.digest, "best": best}
    record = _begun(replay, source, old.round, {**tensors, "vector": vector, "best/vector": vector}, meta)
    summary = run(replay.config, record.path, progress, console)
    told = {
        "client": replay.client,
        "took_part": replay.took_part,
        "exact": False,
        "rounds": summary["rounds"] - old.round,
        "cannot": CANNOT,
        **_distance(replay, source, vector, old.tensors["vector"]),
    }
    write_text(record.path / "unlearned.json", json.dumps(told, indent=2) + "\n")
    return summary | {"unlearned": told}


def _distance(replay: Replay, source: Path, vector: Tensor, before: Tensor) -> dict[str, Any]:
    """How far the approximate model lies from the exact one, absolutely and by how far the run itself does."""
    exact = exact_folder(source, replay)
    found = checkpoint.load_latest(exact / "checkpoints") if is_finished(exact) else None
    if found is None or found.tensors["vector"].shape != vector.shape:
        return {"distance": None, "of_the_run": None}
    far, run_itself = (float((v - found.tensors["vector"]).double().norm()) for v in (vector, before))
    return {"distance": far, "of_the_run": run_itself}


def exact_folder(source: Path, replay: Replay) -> Path:
    """Where the exact replay is, unless it was put elsewhere."""
    return source.with_name(f"{source.name}-without-{replay.named}")


def _begun(
    replay: Replay, source: Path, round: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]
) -> RunFolder:
    """The replay's folder with a checkpoint to go on from and the lines up to it; one that is begun stays as it is."""
    record = RunFolder.create(replay.folder, to_toml(replay.config), replay.config.digest)
    if not any(record.checkpoints.iterdir()):
        lines = [line for line in RunFolder.open(source).metrics() if line["round"] <= round]
        write_text(record.metrics_path, "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
        checkpoint.save(record.checkpoints, round, tensors, meta)
    return record


def _start(setup: RunSetup, folder: Path, first: First | None, joined: bool) -> tuple[int, str]:
    """The round after whose checkpoint a replay may start, and why not a later one."""
    a, head = setup.algorithm, setup.config.head
    if head != "random" and not joined:
        return 0, f"the {head} head was made from sums with this client"
    if a.trainable.scores_data and not joined:
        return 0, "the mask was chosen by scores with this client"
    if a.federation_counts and not joined:
        return 0, "the class counts are a sum with this client"
    if not len(setup.task.data.validation_rows):
        return 0, "the best round was chosen by images of all clients"
    kept = [found.round for found in _good(folder) if first is None or found.round < first.round]
    start = max(kept, default=0)
    if first is None:
        return start, "it took part in no round"
    if first.named:
        return start, f"it first took part in round {first.round}"
    return start, f"the record of round {first.round} does not say who took part"


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
    _refuse_later_start(replay)
    if replay.start:
        old = next(found for found in _good(source) if found.round == replay.start)
        _begun(replay, source, old.round, old.tensors, {**old.meta, "config_digest": replay.config.digest})
    log.info("forgetting client %d: %s; %s", replay.client, replay.why, CANNOT)
    summary = run(replay.config, replay.folder, progress, console)
    told = {
        "client": replay.client,
        "from_round": replay.start,
        "rounds": replay.rounds - replay.start,
        "took_part": replay.took_part,
        "exact": True,
        "why": replay.why,
        "cannot": CANNOT,
    }
    write_text(replay.folder / "unlearned.json", json.dumps(told, indent=2) + "\n")
    return summary


def _refuse_later_start(replay: Replay) -> None:
    """Refuse a folder whose replay kept rounds that may have the client in them: it would be called exact."""
    path = replay.folder / "unlearned.json"
    if not path.exists():
        return
    earlier = int(json.loads(path.read_text()).get("from_round", 0))
    if earlier > replay.start:
        raise FedgraftError(
            f"{replay.folder} kept the rounds up to {earlier}, and the client may be in those after {replay.start}; "
            "delete that folder, or name another with --to."
        )
