"""The coordinator's folder of a federation: who takes part, the config, certificates, registered keys, runs.

`federation.toml` names the host and the nodes (their order is the client number), `config.toml` the run;
`certificates/` holds the authority and the server's certificate, `keys/` the nodes' public keys, `home/` Flower's
private files. The folder's mode is 0700.
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
from fedgraft.deploy.keys import make_certificates, public_key_of

if TYPE_CHECKING:
    from fedgraft.config.load import Config

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
_HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*")


@dataclass(frozen=True)
class FederationFolder:
    """One federation, as its coordinator keeps it."""

    path: Path
    host: str
    names: tuple[str, ...]

    @property
    def certificates(self) -> Path:
        """The authority (ca.crt, ca.key) and the server's certificate (server.crt, server.key)."""
        return self.path / "certificates"

    @property
    def authority(self) -> Path:
        """The certificate that every node needs."""
        return self.certificates / "ca.crt"

    @property
    def home(self) -> Path:
        """Flower's own files: its database, the app it unpacked."""
        return self.path / "home"

    @property
    def log(self) -> Path:
        """What the server's process wrote."""
        return self.path / "server.log"

    @property
    def config(self) -> Config:
        """The config of its runs."""
        from fedgraft.config.load import load

        return load(self.path / "config.toml")

    def key(self, name: str) -> Path:
        """Where the public key of a node is kept."""
        return self.path / "keys" / f"{name}.pub"

    def registered(self) -> list[str]:
        """The nodes whose key is here."""
        return [name for name in self.names if self.key(name).is_file()]

    def register(self, name: str, public_key: Path) -> None:
        """Keep the public key of a node; a key that another node has is refused."""
        if name not in self.names:
            raise FedgraftError(f"this federation has no node {name!r}; its nodes are {', '.join(self.names)}.")
        line = public_key_of(public_key)
        for other in self.registered():
            if public_key_of(self.key(other)) == line and other != name:
                raise FedgraftError(f"{public_key} is already the key of {other!r}; every node needs a key of its own.")
        write_text(self.key(name), f"{line} {name}\n")

    def note_run(self, run: int, folder: Path) -> None:
        """Remember where a run writes."""
        write_text(
            self.path / "runs.json", json.dumps([*self.runs(), {"id": str(run), "folder": str(folder)}], indent=2)
        )

    def note_end(self, run: int, reason: str) -> None:
        """Remember why a run ended where the engine does not know."""
        told = [known | ({"reason": reason} if known["id"] == str(run) else {}) for known in self.runs()]
        write_text(self.path / "runs.json", json.dumps(told, indent=2))

    def end_of(self, run: int) -> str:
        """Why a run ended, if that was noted."""
        return next((known.get("reason", "") for known in self.runs() if known["id"] == str(run)), "")

    def runs(self) -> list[dict[str, str]]:
        """The runs submitted so far, oldest first: id and folder."""
        path = self.path / "runs.json"
        return list(json.loads(path.read_text())) if path.is_file() else []


def create(path: Path, config: Config, names: Sequence[str], host: str, one_machine: bool = False) -> FederationFolder:
    """Write the folder of a new federation; an existing one is never touched."""
    from fedgraft.config.load import to_toml

    _check_names(names)
    _check_host(host)
    check_config(config, len(names), one_machine)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FedgraftError(f"{path} is there already and not empty; choose another folder for the federation.")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)
    try:
        made = FederationFolder(path.resolve(), host, tuple(names))
        make_certificates(made.certificates, host)
        for folder in (made.home, made.path / "keys"):
            folder.mkdir(mode=0o700)
        write_text(made.path / "config.toml", to_toml(config))
        write_app(made.path / "app")
        table = "".join(f"  {json.dumps(name)},\n" for name in names)
        write_text(made.path / "federation.toml", f"host = {json.dumps(host)}\nnodes = [\n{table}]\n")
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)  # half a federation would only be in the way
        raise
    return made


def open_federation(path: Path) -> FederationFolder:
    """An existing federation's folder."""
    file = path / "federation.toml"
    if not file.is_file():
        raise FedgraftError(
            f"there is no federation in {path}; make one with: fedgraft deploy init CONFIG --folder {path}."
        )
    try:
        table: dict[str, Any] = tomllib.loads(file.read_text())
        return FederationFolder(path.resolve(), str(table["host"]), tuple(map(str, table["nodes"])))
    except (tomllib.TOMLDecodeError, KeyError, TypeError):
        raise FedgraftError(f"{file} is damaged; restore it, or make the federation anew.") from None


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    """The rounds a run has recorded, without loading what a run needs; a line still being written is left out."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def contributions(lines: Sequence[Mapping[str, Any]]) -> dict[int, str] | None:
    """Which rounds each client's update is in, in words, with why the last one it missed lacks it.

    None where no round says: under differential privacy who took part is nobody's business.
    """
    told = [line for line in lines if "ids" in (line.get("clients") or {})]
    if not told:
        return None
    there, missed = dict[int, list[int]](), dict[int, str]()
    for line in told:
        for client in line["clients"]["ids"]:
            there.setdefault(client, []).append(line["round"])
    for line in lines:
        missed |= {one["client"]: f"round {line['round']}: {one['reason']}" for one in line.get("dropped") or ()}
    return {
        k: f"in {len(there.get(k, []))} of {lines[-1]['round']} rounds ({_spans(there.get(k, []))})"
        + (f"; left out last in {missed[k]}" if k in missed else "")
        for k in sorted({*there, *missed})
    }


def _spans(rounds: Sequence[int]) -> str:
    """Rounds as `1-3, 5`."""
    spans: list[list[int]] = []
    for one in rounds:
        if spans and one == spans[-1][1] + 1:
            spans[-1][1] = one
        else:
            spans.append([one, one])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans) or "none"


def check_config(config: Config, nodes: int, one_machine: bool = False) -> None:
    """Refuse a config that a deployed federation cannot carry out; on one machine everybody finds the config's data."""
    if config.partition.clients != nodes:
        raise FedgraftError(
            f"the config has {config.partition.clients} clients and the federation {nodes} nodes; "
            "each node is one client."
        )
    if config.data.path is not None and not one_machine:
        raise FedgraftError(
            "data.path names a place on one machine, and nodes have places of their own; leave it out and give "
            "each node its own with --data."
        )
    if config.engine == "batched":  # auto means reference here
        raise FedgraftError("engine=batched works in one process; a deployed federation needs engine=reference.")


def _check_names(names: Sequence[str]) -> None:
    if not names:
        raise FedgraftError("a federation needs at least one node; give --nodes or --names.")
    for name in names:
        if not NAME.fullmatch(name):
            raise FedgraftError(
                f"{name!r} is no name for a node; use up to 40 letters, digits, dots, dashes, underscores."
            )
    if len(set(names)) < len(names):
        raise FedgraftError("two nodes have the same name; every node needs a name of its own.")


def _check_host(host: str) -> None:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if not _HOST.fullmatch(host):
            raise FedgraftError(
                f"{host!r} is neither a host name nor an IP address; give the one by which nodes reach this machine."
            ) from None
