"""The present state of a federation, from its server, its door and the record of its latest run.

`fedgraft deploy status` prints it and the studio draws it; nobody asks in another way. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgraft.deploy.coordinator import connect_control, run_state, running_server
from fedgraft.deploy.door_link import transfers
from fedgraft.deploy.folder import FederationFolder, read_rounds

if TYPE_CHECKING:
    from fedgraft.config.load import Config

_RULE = "refused by the rule '"
"""How the reason of a client's refusal begins, with the rule's name behind it."""


@dataclass(frozen=True)
class NodeStatus:
    """One node, as the coordinator sees it."""

    number: int
    name: str
    registered: bool
    online: bool


@dataclass(frozen=True)
class FederationStatus:
    """A federation at one moment."""

    address: str
    """HOST:PORT of the running server; empty if it does not run."""
    process: int
    """Process id of the server; 0 if it does not run."""
    nodes: Sequence[NodeStatus]
    run: int | None
    """The latest run's id; None if there is none."""
    run_status: str = ""
    """As the SuperLink reports it; of a stopped server, as the run's folder says."""
    run_over: bool = False
    reason: str = ""
    """Why the run died, if it did."""
    folder: Path | None = None
    """The run's folder; None if it is unknown."""
    rounds: Sequence[Mapping[str, Any]] = ()
    """The recorded rounds of the run."""
    waits_for: Sequence[str] = ()
    """Nodes without which no secure sum of the run can be opened."""
    transfers: Sequence[Mapping[str, Any]] = ()
    """Messages to nodes and their answers on the way: `name` of the node, and bytes `down` and `up` of their totals."""
    refusals: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    """Refused requests of the run: `client`, `rule`, `times` and the `last` round."""


def federation_status(federation: FederationFolder) -> FederationStatus:
    """Return the present state of a federation, whether or not its server runs."""
    running = running_server(federation)
    if running is None:
        return _stopped(federation)
    with connect_control(federation) as control:
        registered_nodes = {node.name: node for node in control.nodes()}
        runs = control.runs()
    nodes = []
    names_by_id = {}
    for number, name in enumerate(federation.names):
        node = registered_nodes.get(name)
        online = node is not None and node.online
        nodes.append(NodeStatus(number, name, node is not None, online))
        if node is not None:
            names_by_id[node.id] = name
    address = f"{federation.host}:{running.port}"
    if not runs:
        return FederationStatus(address, running.pid, nodes, None)
    state, reason = run_state(federation, runs[0].id)
    folder = folder_of_run(federation, state.id)
    rounds = _rounds_of(folder)
    waits_for: list[str] = []
    on_the_way: list[Mapping[str, Any]] = []
    if not state.over:
        online_names = [node.name for node in nodes if node.online]
        waits_for = absent_from_sums(federation.config, federation.names, online_names)
        for transfer in transfers(federation.path):
            on_the_way.append({**transfer, "name": names_by_id.get(transfer["node"], "a node")})
    return FederationStatus(
        address=address,
        process=running.pid,
        nodes=nodes,
        run=state.id,
        run_status=state.status,
        run_over=state.over,
        reason=reason,
        folder=folder,
        rounds=rounds,
        waits_for=waits_for,
        transfers=on_the_way,
        refusals=refusals_by_rule(rounds),
    )


def _stopped(federation: FederationFolder) -> FederationStatus:
    """Return the state of a federation whose server does not run, with its last run from that run's folder."""
    from fedgraft.report.run_record import RunRecord

    registered = federation.registered()
    nodes = []
    for number, name in enumerate(federation.names):
        nodes.append(NodeStatus(number, name, name in registered, False))
    records = federation.runs()
    if not records:
        return FederationStatus("", 0, nodes, None)
    folder = Path(records[-1]["folder"])
    status = "never began"
    if (folder / "run.json").exists():
        status = RunRecord.open(folder).status
    rounds = _rounds_of(folder)
    refusals = refusals_by_rule(rounds)
    run = int(records[-1]["id"])
    return FederationStatus("", 0, nodes, run, status, True, "", folder, rounds, refusals=refusals)


def _rounds_of(folder: Path | None) -> list[dict[str, Any]]:
    """Return the recorded rounds of a run; none if its folder is unknown."""
    if folder is None:
        return []
    return read_rounds(folder)


def folder_of_run(federation: FederationFolder, run: int) -> Path | None:
    """Return the folder of a run; None if it is unknown."""
    for record in federation.runs():
        if record["id"] == str(run):
            return Path(record["folder"])
    return None


def absent_from_sums(config: Config, names: Sequence[str], online: Sequence[str]) -> list[str]:
    """Return the nodes that are not connected, if so many are that a secure sum of the run cannot be opened."""
    if config.privacy.aggregation != "secure":
        return []
    needed = config.privacy.threshold or len(names) * 2 // 3 + 1
    if len(set(online) & set(names)) >= needed:
        return []
    return [name for name in names if name not in online]


def refusals_by_rule(rounds: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the refusals in the recorded rounds by client and rule: how often, and the last round."""
    counts: dict[tuple[int, str], dict[str, Any]] = {}
    for line in rounds:
        for drop in line.get("dropped") or ():
            reason = str(drop.get("reason", ""))
            if not reason.startswith(_RULE):
                continue
            rule = reason.removeprefix(_RULE).partition("'")[0]
            entry = counts.setdefault((int(drop["client"]), rule), {"times": 0, "last": 0})
            entry["times"] += 1
            entry["last"] = line["round"]
    return [{"client": client, "rule": rule, **entry} for (client, rule), entry in sorted(counts.items())]
