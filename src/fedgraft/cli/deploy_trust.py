"""`fedgraft deploy`, what an owner may insist on: policy, fingerprints, trust, revoking, renewing, the audit log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedgraft.cli.console import load, say
from fedgraft.cli.deploy_coordinator import Fed
from fedgraft.cli.overrides import Overrides, config_of
from fedgraft.core.errors import FedgraftError

if TYPE_CHECKING:
    from fedgraft.config.load import Config

Key = Annotated[Path, typer.Option("--key", help="this node's private key, NAME.key")]


def policy(
    overrides: Overrides = None,
    key: Annotated[Path | None, typer.Option("--key", help="write policy.toml beside this node's key")] = None,
    check: Annotated[
        Path | None, typer.Option("--check", help="a policy.toml to hold the config against; nothing is written")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option("--allow", help="also answer: preflight, evaluate (in the clear, as sums)")
    ] = None,
) -> None:
    """Node: a safe policy for a config (or a federation's folder), in plain words; or what of it breaks yours."""
    load()
    from fedgraft.client.policy import in_words, parse, to_toml
    from fedgraft.config.agreement import broken_rules, safe_for
    from fedgraft.config.build import build_algorithm

    config = _config(overrides)
    algorithm = build_algorithm(config)
    if check is not None:
        if not check.is_file():
            raise FedgraftError(f"there is no {check}; write one with: fedgraft deploy policy CONFIG --key NAME.key.")
        broken = broken_rules(parse(check.read_text(), str(check)), config, algorithm)
        for sentence in broken:
            typer.echo(f"refused by the rule {sentence}")
        if broken:
            raise typer.Exit(1)
        typer.echo(f"a node with {check} takes part in the run {config.digest}")
        return
    if strange := set(allow or ()) - {"preflight", "evaluate"}:
        raise FedgraftError(f"--allow {min(strange)} is none of preflight, evaluate; a run's own actions are allowed.")
    made = safe_for(config, algorithm, allow or ())
    typer.echo("a node with this policy carries out an order only if it keeps all of these rules:")
    for sentence in in_words(made):
        say(f"  {sentence}", "    ")
    if not made.secure:
        typer.echo("this config has no secure aggregation: the coordinator sees this node's updates one by one")
    if made.epsilon is None:
        typer.echo("this config has no differential privacy: the finished model may remember single images")
    if key is not None:
        path = key.absolute().parent / "policy.toml"
        if path.exists():
            raise FedgraftError(f"{path} is there already; move it away, or compare with: --check {path}.")
        path.write_text(to_toml(made))
        typer.echo(f"written: {path}; the node reads it at every order. Edit it, then see: --check {path}")


def _config(overrides: list[str] | None) -> Config:
    """The config that the words describe; a federation's folder stands for the config in it."""
    first, *rest = overrides or [""]
    folder = Path(first) / "config.toml"
    return config_of([str(folder), *rest] if first and folder.is_file() else overrides)


def fingerprint(
    key: Annotated[Path, typer.Argument(metavar="NAME.key|NAME.pub", help="a node's key, private or public")],
) -> None:
    """Anybody: what two people read to each other to know that a key is the right one."""
    from fedgraft.deploy.keys import announced_identity, short
    from fedgraft.deploy.keys import fingerprint as of

    public = key.with_suffix(".pub")
    name, identity = announced_identity(public)
    typer.echo(f"{name}: {of(public)}")
    typer.echo(f"identity in secure sums: {short(identity)}")


def trust(
    key: Key,
    number: Annotated[int, typer.Argument(help="the peer's client number", min=0)],
    public: Annotated[
        Path, typer.Argument(metavar="PEER.pub", help="its public key, from the peer and not the server")
    ],
    remove: Annotated[bool, typer.Option("--remove", help="take the peer out again; PEER.pub is not read")] = False,
) -> None:
    """Node: pin a peer's identity for secure sums: no server can pose as it. Otherwise its first use is believed."""
    import json
    import tomllib

    from fedgraft.core.files import write_text
    from fedgraft.deploy.keys import announced_identity, short

    path = key.absolute().parent / "peers.toml"
    known = tomllib.loads(path.read_text()) if path.is_file() else {}
    if remove:
        known.pop(str(number), None)
        typer.echo(f"client {number} is no longer pinned; its key is believed at first use")
    else:
        name, identity = announced_identity(public)
        known[str(number)] = {"name": name, "identity": identity.hex()}
        typer.echo(f"client {number} is {name}, identity {short(identity)}: compare this with its owner, by voice")
    table = [
        f"[{n}]\nname = {json.dumps(peer['name'])}\nidentity = {json.dumps(peer['identity'])}\n"
        for n, peer in sorted(known.items(), key=lambda item: int(item[0]))
    ]
    write_text(path, "\n".join(table))
    typer.echo(f"written: {path}; with `pinned_peers = true` in policy.toml, others are refused")


def revoke(fed: Fed, name: Annotated[str, typer.Argument(help="the node's name")]) -> None:
    """Coordinator: shut a node's key out, at once where the server runs. `deploy register` lets a new key in."""
    from fedgraft.deploy.folder import open_federation
    from fedgraft.deploy.server import admit, server_of

    found = open_federation(fed)
    if name not in found.registered():
        raise FedgraftError(f"no key of {name!r} is registered; those are: {', '.join(found.registered()) or 'none'}.")
    found.key(name).unlink()
    if server_of(found) is not None:
        admit(found)
    typer.echo(f"revoked: the key of {name} (client {found.names.index(name)}) is shut out")


def renew(fed: Fed) -> None:
    """Coordinator: a new server certificate from the same authority. Nodes need nothing new; restart the server."""
    from fedgraft.deploy.folder import open_federation
    from fedgraft.deploy.keys import days_left, renew_server_certificate

    found = open_federation(fed)
    renew_server_certificate(found.certificates, found.host)
    days = days_left(found.certificates / "server.crt"), days_left(found.authority)
    typer.echo(f"the server's certificate is good for {days[0]} days, the authority's for {days[1]}")
    typer.echo(f"restart the server to use it: fedgraft deploy stop {fed}, then fedgraft deploy server {fed}")


def audit(
    key: Key,
    last: Annotated[int, typer.Option("--last", help="how many lines to show", min=1)] = 30,
) -> None:
    """Node: what left this node and what it refused; exit code 1 if the log was changed."""
    import time

    from fedgraft.deploy.audit import entries

    path = key.absolute().with_suffix(".home") / "audit.jsonl"
    if not path.is_file():
        raise FedgraftError(f"there is no {path}: nothing has left this node yet.")
    lines = list(entries(path))
    for line in lines[-last:]:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(line["time"]))
        what = f"{line.get('action', '')}{' of ' + line['sums'] if line.get('sums') else ''}, round {line.get('round')}"
        if line["kind"] in ("refused", "believed"):
            typer.echo(f"{line['n']:6d}  {when}  {line['kind'].upper()} {what}: {line['why']}")
        else:
            typer.echo(f"{line['n']:6d}  {when}  {what}: {line['bytes']:,} bytes, {line['protection']}")
    sent = [line for line in lines if line["kind"] not in ("refused", "believed")]
    refused = sum(line["kind"] == "refused" for line in lines)
    typer.echo(
        f"{len(lines)} lines, unbroken; {sum(line['bytes'] for line in sent):,} bytes left in {len(sent)} answers, "
        f"{refused} orders were refused"
    )
