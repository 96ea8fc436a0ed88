"""Unlearning a client: the run replayed without it, bit-identical to a run that never had it.

A run that never had a client is the same config with `partition.without = [client]`: cohorts are drawn as before, and
the client is then left out; numbers and random streams of all others stay. Images that the server itself holds for
validation stay too. Since runs are deterministic, a replay is exact. It starts after the last round that does not
depend on the client, provided that head, mask and class counts were not computed from its sums. A round whose record
does not say who took part (differential privacy, an aborted or skipped round) counts as one with the client.

`subtract` is fast and only approximate: it subtracts the client's recorded contributions to the model
(`rounds.keep_contributions`). What others learned from models that contain the client stays, and so do a head, a mask
and counts computed from its sums. The distance from the exact replay is measured if that exists.
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
from fedgraft.core.capabilities import Capability
from fedgraft.core.errors import FedgraftError
from fedgraft.core.store import write_text
from fedgraft.runs import checkpoint
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.loop import is_finished, run
from fedgraft.runs.saving import UNMEASURED
from fedgraft.runs.setup import RunSetup, clients_left_out, setup_of
from fedgraft.runs.tracking import Progress

log = logging.getLogger("fedgraft")

CANNOT = (
    "copies that others already have cannot be recalled: delivered models, and secure sums that were opened with this "
    "client in them"
)
"""The limit of unlearning, printed and recorded with every result."""


@dataclass(frozen=True)
class Replay:
    """How a client is unlearned: the folder of the replay, the round it starts after, and its cost."""

    config: Config
    folder: Path
    client: int
    start: int
    """Rounds that are taken over unchanged; 0: the whole run is repeated."""
    rounds: int
    """Rounds of the run."""
    took_part: int | None
    """Rounds that the client took part in; None if some round does not say who did."""
    why: str
    """Why the replay does not start later."""
    named: str
    """The name of the client as the user gave it."""


def plan_replay(folder: Path, client: str, to: Path | None = None, fast: bool = False) -> Replay:
    """Return the replay that unlearns this client; refuse a run that cannot be repeated. Nothing is run.

    Args:
        folder: the run's folder.
        client: name or number of the client.
        to: folder of the replay; None: beside the run.
        fast: the replay is for `subtract`, which has another default folder.
    """
    record = RunFolder.open(folder)
    config = from_folder(folder)
    if record.config_digest != config.digest:
        raise FedgraftError(
            "E-CONSORTIUM-NOT-REPEATABLE",
            f"{folder} was run with objects that its config.toml does not contain, so it cannot be replayed",
            folder=str(folder),
        )
    if config.privacy.dp is not None and config.privacy.dp.secret:
        raise FedgraftError(
            "E-CONSORTIUM-SECRET-NOISE",
            f"the noise of {folder} is not repeatable (privacy.dp.secret), so it cannot be replayed",
            folder=str(folder),
        )
    without = validate(merge(config.table, {"partition": {"without": [*config.partition.without, client]}}))
    setup = setup_of(without, for_training=False)
    already_left_out = clients_left_out(config, setup.task.data)
    if setup.federation.without == already_left_out:
        raise FedgraftError(
            "E-CONSORTIUM-NEVER-MEMBER",
            f"the client {client!r} never took part in {folder}",
            "name another client",
            client=client,
        )
    number = min(setup.federation.without - already_left_out)
    lines = [line for line in record.metrics() if line["round"] > 0]
    first = _first_round(lines, number)
    start, why = _start(setup, folder, first, number in setup.federation.joins)
    if to is None:
        suffix = f"-without-{client}"
        if fast:
            suffix += "-approximate"
        to = folder.with_name(f"{folder.name}{suffix}")
    rounds = max((int(line["round"]) for line in lines), default=0)
    return Replay(without, to, number, start, rounds, _took_part(lines, number), why, client)


@dataclass(frozen=True)
class First:
    """The first round that may depend on a client."""

    round: int
    named: bool
    """Whether its record names the client; else it does not say who took part."""


def _participants(line: Mapping[str, Any]) -> list[int] | None:
    """Return the clients whose updates a round used; None if its record does not say."""
    clients = line.get("clients") or {}
    return clients.get("ids")


def _first_round(lines: Sequence[Mapping[str, Any]], client: int) -> First | None:
    """Return the first round that may depend on a client; None if every round says that it does not.

    A refused update counts too: the usual size of updates, and so who else is refused, depends on all that arrived.
    """
    for line in lines:
        ids = _participants(line)
        if ids is None:
            return First(int(line["round"]), False)
        refused = [drop["client"] for drop in line.get("dropped") or []]
        if client in ids or client in refused:
            return First(int(line["round"]), True)
    return None


def _took_part(lines: Sequence[Mapping[str, Any]], client: int) -> int | None:
    """Return in how many rounds a client took part; None if the records do not say."""
    rounds = 0
    for line in lines:
        ids = _participants(line)
        if ids is None and not line.get("skipped"):
            return None
        rounds += client in (ids or ())
    return rounds


def subtract(replay: Replay, source: Path, progress: Progress | None = None, console: bool = True) -> dict[str, Any]:
    """Unlearn a client approximately: write the last model minus its contributions to the replay's folder.

    `source` is the run's folder. Returns the summary of the replay's run, with the record of the unlearning, which is
    also written to unlearned.json.
    """
    last = checkpoint.load_latest(source / "checkpoints")
    name = f"contribution/{replay.client}"
    if last is None or (replay.took_part != 0 and name not in last.tensors):
        raise FedgraftError(
            "E-CONSORTIUM-NO-CONTRIBUTIONS",
            f"{source} recorded no contributions, so nothing can be subtracted",
            "run with rounds.keep_contributions=true, or unlearn exactly, without --fast",
            folder=str(source),
        )
    vector = last.tensors["vector"] - last.tensors.get(name, torch.zeros(()))
    removed = (f"memory/{replay.client}/", "contribution/")
    tensors = {}
    for key, tensor in last.tensors.items():
        if not key.startswith(removed):
            tensors[key] = tensor
    tensors["vector"] = vector
    tensors["best/vector"] = vector
    # This model was not validated. `stale` stays: a run that stopped for want of a better model stays stopped.
    best = {**last.meta["best"], "accuracy": -1.0, "score": UNMEASURED, "round": last.round}
    meta = {**last.meta, "config_digest": replay.config.digest, "best": best}
    folder = _prepare_folder(replay, source, last.round, tensors, meta)
    summary = run(replay.config, folder.path, progress, console)
    record = {
        "client": replay.client,
        "took_part": replay.took_part,
        "exact": False,
        "rounds": summary["rounds"] - last.round,
        "cannot": CANNOT,
        **_distance(replay, source, vector, last.tensors["vector"]),
    }
    write_text(folder.path / "unlearned.json", json.dumps(record, indent=2) + "\n")
    return summary | {"unlearned": record}


def _distance(replay: Replay, source: Path, vector: Tensor, before: Tensor) -> dict[str, Any]:
    """Return the L2 distances of the approximate and of the original model from the exact replay.

    None if that is missing. `vector` is the approximate model, `before` the original one, `source` the run's folder.
    """
    unknown = {"distance": None, "of_the_run": None}
    exact = exact_folder(source, replay)
    if not is_finished(exact):
        return unknown
    replayed = checkpoint.load_latest(exact / "checkpoints")
    if replayed is None or replayed.tensors["vector"].shape != vector.shape:
        return unknown
    target = replayed.tensors["vector"]
    return {
        "distance": float((vector - target).double().norm()),
        "of_the_run": float((before - target).double().norm()),
    }


def exact_folder(source: Path, replay: Replay) -> Path:
    """Return the default folder of the exact replay."""
    return source.with_name(f"{source.name}-without-{replay.named}")


def _prepare_folder(
    replay: Replay, source: Path, round: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]
) -> RunFolder:
    """Return the replay's folder, with a checkpoint to resume from and the metrics of the source up to that round.

    A folder with checkpoints in it holds an earlier replay, and is returned as it is.
    """
    folder = RunFolder.create(replay.folder, to_toml(replay.config), replay.config.digest)
    if any(folder.checkpoints.iterdir()):
        return folder
    lines = []
    for line in RunFolder.open(source).metrics():
        if line["round"] <= round:
            lines.append(json.dumps(line, separators=(",", ":")) + "\n")
    write_text(folder.metrics_path, "".join(lines))
    checkpoint.save(folder.checkpoints, round, tensors, meta)
    return folder


def _start(setup: RunSetup, folder: Path, first: First | None, joined: bool) -> tuple[int, str]:
    """Return the round after whose checkpoint a replay may start, and why not a later one.

    `first` is the first round that may depend on the client (None: no round does); `joined`: the client joined after
    the start, so head, mask and counts do not depend on it. `folder` is the run's.
    """
    algorithm = setup.algorithm
    head = setup.config.head
    if setup.config.makes_head and not joined:
        return 0, f"the {head} head was computed from sums with this client"
    if algorithm.trainable.scores_data and not joined:
        return 0, "the mask was chosen by scores with this client"
    if Capability.CLASS_COUNTS in algorithm.requires and not joined:
        return 0, "the class counts are a sum with this client"
    if not len(setup.task.data.validation_rows):
        return 0, "the best round was chosen on images of all clients"
    start = 0
    for saved in _readable_checkpoints(folder):
        if first is None or saved.round < first.round:
            start = max(start, saved.round)
    if first is None:
        return start, "it took part in no round"
    if first.named:
        return start, f"it first took part in round {first.round}"
    return start, f"the record of round {first.round} does not say who took part"


def _readable_checkpoints(folder: Path) -> list[checkpoint.Checkpoint]:
    """Return the undamaged checkpoints of a run, in order of round."""
    checkpoints = []
    for path in sorted((folder / "checkpoints").glob("round-*.safetensors")):
        try:
            checkpoints.append(checkpoint.load(path))
        except checkpoint.BadCheckpoint:
            continue
    return checkpoints


def unlearn_client(
    replay: Replay, source: Path, progress: Progress | None = None, console: bool = True
) -> dict[str, Any]:
    """Carry the replay out in its folder and return the summary of the run without the client.

    An interrupted replay is resumed. `source` is the run's folder; unlearned.json is written to the replay's.
    """
    _refuse_later_start(replay)
    if replay.start:
        start = next(saved for saved in _readable_checkpoints(source) if saved.round == replay.start)
        meta = {**start.meta, "config_digest": replay.config.digest}
        _prepare_folder(replay, source, start.round, start.tensors, meta)
    log.info("unlearning client %d: %s; %s", replay.client, replay.why, CANNOT)
    summary = run(replay.config, replay.folder, progress, console)
    record = {
        "client": replay.client,
        "from_round": replay.start,
        "rounds": replay.rounds - replay.start,
        "took_part": replay.took_part,
        "exact": True,
        "why": replay.why,
        "cannot": CANNOT,
    }
    write_text(replay.folder / "unlearned.json", json.dumps(record, indent=2) + "\n")
    return summary


def _refuse_later_start(replay: Replay) -> None:
    """Refuse a folder whose replay took over rounds that may depend on the client: it would be recorded as exact."""
    path = replay.folder / "unlearned.json"
    if not path.exists():
        return
    earlier = int(json.loads(path.read_text()).get("from_round", 0))
    if earlier > replay.start:
        raise FedgraftError(
            "E-CONSORTIUM-LATER-START",
            f"{replay.folder} took over the rounds up to {earlier}, and those after {replay.start} may depend on the "
            "client",
            "delete that folder, or name another with --to",
            folder=str(replay.folder),
            round=earlier,
        )
