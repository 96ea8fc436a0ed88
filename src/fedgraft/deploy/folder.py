"""The coordinator's folder of a federation: nodes, config, certificates, registered keys, runs.

`federation.toml` names the host and the nodes (their order gives the client numbers), `config.toml` is the config of
its runs; `certificates/` holds the authority and the server's certificate, `keys/` the nodes' public keys, `home/`
Flower's private files. The folder's mode is 0700.
"""

from __future__ import annotations

import ipaddress
import json
import re
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgraft.core.errors import FedgraftError
from fedgraft.core.store import write_text
from fedgraft.deploy.app import write_app
from fedgraft.deploy.keys import make_certificates, public_key_line

if TYPE_CHECKING:
    from fedgraft.config.load import Config

NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
_HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*")


@dataclass(frozen=True)
class FederationFolder:
    """The folder of one federation on the coordinator's machine."""

    path: Path
    host: str
    names: tuple[str, ...]
    """The nodes' names, by client number."""

    @property
    def certificates(self) -> Path:
        """Return the folder of the authority (ca.crt, ca.key) and the server's certificate (server.crt, server.key)."""
        return self.path / "certificates"

    @property
    def authority(self) -> Path:
        """Return the path of the certificate that every node needs."""
        return self.certificates / "ca.crt"

    @property
    def home(self) -> Path:
        """Return the folder of Flower's own files: its database, the unpacked app."""
        return self.path / "home"

    @property
    def log(self) -> Path:
        """Return the path of the server process's log."""
        return self.path / "server.log"

    @property
    def server_record(self) -> Path:
        """Return the path of the record of the running server process."""
        return self.path / "server.json"

    @property
    def config(self) -> Config:
        """Return the config of its runs."""
        from fedgraft.config.load import load

        return load(self.path / "config.toml")

    def key(self, name: str) -> Path:
        """Return the path of a node's public key."""
        return self.path / "keys" / f"{name}.pub"

    def registered(self) -> list[str]:
        """Return the names of the nodes whose key is registered."""
        return [name for name in self.names if self.key(name).is_file()]

    def register(self, name: str, public_key: Path) -> None:
        """Store the public key of a node; refuse a key that another node has."""
        if name not in self.names:
            raise FedgraftError(
                "E-DEPLOY-UNKNOWN-NODE",
                f"this federation has no node {name!r}",
                f"its nodes are {', '.join(self.names)}",
                name=name,
            )
        line = public_key_line(public_key)
        for other in self.registered():
            if other != name and public_key_line(self.key(other)) == line:
                raise FedgraftError(
                    "E-DEPLOY-KEY-SHARED",
                    f"{public_key} is already the key of {other!r}",
                    "make a key of its own for every node",
                    name=name,
                    other=other,
                )
        write_text(self.key(name), f"{line} {name}\n")

    # ---- runs --------------------------------------------------------------------------------------------------------

    def runs(self) -> list[dict[str, str]]:
        """Return the runs submitted so far, oldest first: `id`, `folder` and, if recorded, the `reason` of the end."""
        path = self.path / "runs.json"
        if not path.is_file():
            return []
        return list(json.loads(path.read_text()))

    def record_run(self, run: int, folder: Path) -> None:
        """Record where a run writes."""
        self._write_runs([*self.runs(), {"id": str(run), "folder": str(folder)}])

    def record_end(self, run: int, reason: str) -> None:
        """Record why a run ended, if the SuperLink does not know."""
        records = self.runs()
        for record in records:
            if record["id"] == str(run):
                record["reason"] = reason
        self._write_runs(records)

    def end_reason(self, run: int) -> str:
        """Return the recorded reason of a run's end; empty if there is none."""
        for record in self.runs():
            if record["id"] == str(run):
                return record.get("reason", "")
        return ""

    def _write_runs(self, records: list[dict[str, str]]) -> None:
        """Replace the records of runs."""
        write_text(self.path / "runs.json", json.dumps(records, indent=2))


def create_federation(
    path: Path, config: Config, names: Sequence[str], host: str, one_machine: bool = False
) -> FederationFolder:
    """Write the folder of a new federation and return it; refuse a folder that is not empty.

    Args:
        names: of the nodes, by client number.
        host: by which nodes reach the server.
        one_machine: all nodes are on this machine and can read the config's data.
    """
    _check_names(names)
    _check_host(host)
    check_config(config, len(names), one_machine)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FedgraftError(
            "E-DEPLOY-FOLDER-EXISTS",
            f"{path} exists already and is not empty",
            "choose another folder for the federation",
            path=str(path),
        )
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)
    federation = FederationFolder(path.resolve(), host, tuple(names))
    try:
        _write_federation(federation, config)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)  # an incomplete folder could not be used or created again
        raise
    return federation


def _write_federation(federation: FederationFolder, config: Config) -> None:
    """Write everything that a new federation's folder contains."""
    from fedgraft.config.load import to_toml

    make_certificates(federation.certificates, federation.host)
    for folder in (federation.home, federation.path / "keys"):
        folder.mkdir(mode=0o700)
    write_text(federation.path / "config.toml", to_toml(config))
    write_app(federation.path / "app")
    nodes = "".join(f"  {json.dumps(name)},\n" for name in federation.names)
    text = f"host = {json.dumps(federation.host)}\nnodes = [\n{nodes}]\n"
    write_text(federation.path / "federation.toml", text)


def open_federation(path: Path) -> FederationFolder:
    """Return the folder of an existing federation."""
    file = path / "federation.toml"
    if not file.is_file():
        raise FedgraftError(
            "E-DEPLOY-NO-FEDERATION",
            f"there is no federation in {path}",
            f"create one with: fedgraft deploy init CONFIG --folder {path}",
            path=str(path),
        )
    try:
        table: dict[str, Any] = tomllib.loads(file.read_text())
        return FederationFolder(path.resolve(), str(table["host"]), tuple(map(str, table["nodes"])))
    except (ValueError, KeyError, TypeError):
        raise FedgraftError(
            "E-DEPLOY-FEDERATION-DAMAGED",
            f"{file} is damaged",
            "restore it, or create the federation again",
            path=str(file),
        ) from None


# ---- records of a run ------------------------------------------------------------------------------------------------


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    """Return the recorded rounds of a run without importing torch; skip a line that is still being written."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return []
    complete_lines = path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in complete_lines]


def describe_contributions(rounds: Sequence[Mapping[str, Any]]) -> dict[int, str] | None:
    """Return a text for each client: in which rounds its update is, and why it missed the last one it missed.

    `rounds` are lines of metrics.jsonl. None if no round records its clients: under differential privacy participation
    is not disclosed.
    """
    contributed: dict[int, list[int]] = {}
    missed: dict[int, str] = {}
    recorded = False
    for line in rounds:
        clients = line.get("clients") or {}
        if "ids" in clients:
            recorded = True
            for client in clients["ids"]:
                contributed.setdefault(client, []).append(line["round"])
        for drop in line.get("dropped") or ():
            missed[drop["client"]] = f"round {line['round']}: {drop['reason']}"
    if not recorded:
        return None
    total = rounds[-1]["round"]
    descriptions = {}
    for client in sorted({*contributed, *missed}):
        own_rounds = contributed.get(client, [])
        text = f"in {len(own_rounds)} of {total} rounds ({_format_spans(own_rounds)})"
        if client in missed:
            text += f"; left out last in {missed[client]}"
        descriptions[client] = text
    return descriptions


def _format_spans(rounds: Sequence[int]) -> str:
    """Return round numbers as `1-3, 5`."""
    spans: list[list[int]] = []
    for number in rounds:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    if not spans:
        return "none"
    texts = []
    for first, last in spans:
        if first == last:
            texts.append(f"{first}")
        else:
            texts.append(f"{first}-{last}")
    return ", ".join(texts)


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_config(config: Config, nodes: int, one_machine: bool = False) -> None:
    """Refuse a config that a deployed federation cannot run; on one machine all nodes can read the config's data."""
    if config.partition.clients != nodes:
        raise FedgraftError(
            "E-DEPLOY-CLIENT-COUNT",
            f"the config has {config.partition.clients} clients and the federation {nodes} nodes",
            "set partition.clients to the number of nodes: each node is one client",
            clients=config.partition.clients,
            nodes=nodes,
        )
    if config.data.path is not None and not one_machine:
        raise FedgraftError(
            "E-DEPLOY-DATA-PATH",
            "data.path names a place on one machine, and every node has its own data",
            "leave it out and start each node with --data PATH",
        )
    if config.engine == "batched":  # auto means reference here
        raise FedgraftError(
            "E-DEPLOY-ENGINE",
            "engine=batched works in one process only",
            "set engine=reference for a deployed federation",
            engine=config.engine,
        )


def _check_names(names: Sequence[str]) -> None:
    """Refuse names of nodes that are missing, malformed or not unique."""
    if not names:
        raise FedgraftError("E-DEPLOY-NO-NODES", "a federation needs at least one node", "use --nodes or --names")
    for name in names:
        if not NODE_NAME.fullmatch(name):
            raise FedgraftError(
                "E-DEPLOY-NODE-NAME",
                f"{name!r} cannot be the name of a node",
                "use up to 40 letters, digits, dots, dashes, underscores",
                name=name,
            )
    if len(set(names)) < len(names):
        raise FedgraftError("E-DEPLOY-NODE-NAMES", "two nodes have the same name", "use a different name for each node")


def _check_host(host: str) -> None:
    """Refuse a host that is neither a host name nor an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if not _HOST.fullmatch(host):
            raise FedgraftError(
                "E-DEPLOY-HOST",
                f"{host!r} is neither a host name nor an IP address",
                "use the one by which nodes reach this machine",
                host=host,
            ) from None
