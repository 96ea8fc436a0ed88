"""`fedgraft deploy`, the safeguards of a data owner: policy, fingerprints, trust, revoking, renewing, the audit log."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedgraft.cli.console import echo, import_runtime, print_line
from fedgraft.cli.deploy_coordinator import Fed
from fedgraft.cli.overrides import Overrides, config_of
from fedgraft.core.errors import FedgraftError

if TYPE_CHECKING:
    from fedgraft.algorithms.algorithm import Algorithm
    from fedgraft.config.load import Config

Key = Annotated[Path, typer.Option("--key", help="this node's private key, NAME.key")]


def policy(
    overrides: Overrides = None,
    key: Annotated[Path | None, typer.Option("--key", help="write policy.toml beside this node's key")] = None,
    check: Annotated[
        Path | None, typer.Option("--check", help="a policy.toml to check the config against; nothing is written")
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option("--allow", help="also answer: preflight, evaluate, comparison, membership (as sums)"),
    ] = None,
) -> None:
    """Node: print a safe policy for a config (or a federation's folder), or which rules of yours it breaks."""
    import_runtime()
    from fedgraft.client.ledger import DataLedger
    from fedgraft.client.policy import in_words, policy_toml
    from fedgraft.config.agreement import safe_policy
    from fedgraft.config.build import build_algorithm
    from fedgraft.deploy.node_state import NodeState

    config = _config(overrides)
    algorithm = build_algorithm(config)
    if check is not None:
        _check_policy(check, config, algorithm)
        return
    for action in allow or ():
        if action not in {"preflight", "evaluate", "comparison", "membership"}:
            raise FedgraftError(
                "E-CLI-ALLOW",
                f"--allow {action} is neither preflight, evaluate, comparison nor membership",
                "leave it out: the actions of a run are allowed",
                action=action,
            )
    known = DataLedger()
    if key is not None:
        known = NodeState(key.absolute().with_suffix(".home")).data_ledger()
    policy = safe_policy(config, algorithm, allow or (), known.most_questions, known.epsilon)
    print_line("a node with this policy carries out a request only if it follows all of these rules:")
    for sentence in in_words(policy):
        echo(f"  {sentence}", "    ")
    if not policy.secure:
        print_line("this config has no secure aggregation: the coordinator sees this node's updates one by one")
    if policy.secure and policy.epsilon is None:
        print_line(
            "a class that this site alone has is not hidden by the sum: what is added to it comes from here. Clipping "
            "and noise of the clients hide it: privacy.dp with privacy.dp.noise_source=distributed"
        )
    if policy.secure and config.data.class_names is None:
        print_line(
            "the class names are not in this config, so the coordinator names them: `deploy preflight --fix-classes` "
            "makes them part of it"
        )
    if policy.epsilon is None:
        print_line("this config has no differential privacy: the finished model may remember single images")
    if key is not None:
        path = key.absolute().parent / "policy.toml"
        if path.exists():
            raise FedgraftError(
                "E-CLI-POLICY-EXISTS",
                f"{path} exists already",
                f"move it away, or compare with: --check {path}",
                path=str(path),
            )
        path.write_text(policy_toml(policy))
        print_line(f"written: {path}; the node reads it at every request. Edit it, then see: --check {path}")


def _check_policy(file: Path, config: Config, algorithm: Algorithm) -> None:
    """Print the rules of the policy in `file` that the config breaks, and exit with 1 if there are any."""
    from fedgraft.client.policy import parse
    from fedgraft.config.agreement import broken_rules

    if not file.is_file():
        raise FedgraftError(
            "E-CLI-NO-POLICY",
            f"there is no {file}",
            "write one with: fedgraft deploy policy CONFIG --key NAME.key",
            path=str(file),
        )
    broken = broken_rules(parse(file.read_text(), str(file)), config, algorithm)
    for sentence in broken:
        print_line(f"refused by the rule {sentence}")
    if broken:
        raise typer.Exit(1)
    print_line(f"a node with {file} takes part in the run {config.digest}")


def _config(overrides: list[str] | None) -> Config:
    """Return the config that the arguments describe; a federation's folder stands for the config in it."""
    first, *rest = overrides or [""]
    file = Path(first) / "config.toml"
    if first and file.is_file():
        return config_of([str(file), *rest])
    return config_of(overrides)


def fingerprint(
    key: Annotated[Path, typer.Argument(metavar="NAME.key|NAME.pub", help="a node's key, private or public")],
) -> None:
    """Anybody: print the fingerprint that two people read to each other to verify a key."""
    from fedgraft.deploy.keys import announced_identity, key_fingerprint, short_identity

    public = key.with_suffix(".pub")
    name, identity = announced_identity(public)
    print_line(f"{name}: {key_fingerprint(public)}")
    print_line(f"identity in secure sums: {short_identity(identity)}")


def trust(
    key: Key,
    number: Annotated[int, typer.Argument(help="the peer's client number", min=0)],
    public: Annotated[
        Path, typer.Argument(metavar="PEER.pub", help="its public key, from the peer and not the server")
    ],
    remove: Annotated[bool, typer.Option("--remove", help="unpin the peer; PEER.pub is not read")] = False,
) -> None:
    """Node: pin a peer's identity for secure sums, so that no server can pose as it; otherwise trust on first use."""
    import tomllib

    from fedgraft.core.store import write_text
    from fedgraft.deploy.keys import announced_identity, short_identity

    path = key.absolute().parent / "peers.toml"
    peers: dict[str, Any] = {}
    if path.is_file():
        try:
            peers = tomllib.loads(path.read_text())
        except ValueError as error:
            raise FedgraftError(
                "E-CLI-PEERS-DAMAGED",
                f"{path} is not valid TOML: {error}",
                "delete it and pin the peers again",
                path=str(path),
            ) from None
    if remove:
        peers.pop(str(number), None)
        print_line(f"client {number} is no longer pinned; its key is trusted on first use")
    else:
        name, identity = announced_identity(public)
        peers[str(number)] = {"name": name, "identity": identity.hex()}
        print_line(
            f"client {number} is {name}, identity {short_identity(identity)}: compare this with its owner, by voice"
        )
    write_text(path, _peers_toml(peers))
    print_line(f"written: {path}; with `pinned_peers = true` in policy.toml, others are refused")


def _peers_toml(peers: Mapping[str, Mapping[str, str]]) -> str:
    """Return pinned peers as TOML, in order of their numbers."""
    import json

    tables = []
    for number in sorted(peers, key=int):
        peer = peers[number]
        tables.append(f"[{number}]\nname = {json.dumps(peer['name'])}\nidentity = {json.dumps(peer['identity'])}\n")
    return "\n".join(tables)


def revoke(fed: Fed, name: Annotated[str, typer.Argument(help="the node's name")]) -> None:
    """Coordinator: revoke a node's key, at once if the server is running. `deploy register` admits a new key."""
    from fedgraft.deploy.coordinator import running_server, synchronize_keys
    from fedgraft.deploy.folder import open_federation

    federation = open_federation(fed)
    registered = federation.registered()
    if name not in registered:
        raise FedgraftError(
            "E-CLI-NOT-REGISTERED",
            f"no key of {name!r} is registered",
            f"registered are: {', '.join(registered) or 'none'}",
            name=name,
        )
    federation.key(name).unlink()
    if running_server(federation) is not None:
        synchronize_keys(federation)
    print_line(f"revoked: the key of {name} (client {federation.names.index(name)})")


def renew(fed: Fed) -> None:
    """Coordinator: renew the server certificate from the same authority. Nodes need nothing new; restart the server."""
    from fedgraft.deploy.folder import open_federation
    from fedgraft.deploy.keys import days_left, renew_server_certificate

    federation = open_federation(fed)
    renew_server_certificate(federation.certificates, federation.host)
    server_days = days_left(federation.certificates / "server.crt")
    authority_days = days_left(federation.authority)
    print_line(f"the server's certificate is valid for {server_days} days, the authority's for {authority_days}")
    print_line(f"restart the server to use it: fedgraft deploy stop {fed}, then fedgraft deploy server {fed}")


def audit(
    key: Key,
    last: Annotated[int, typer.Option("--last", help="number of lines to show", min=1)] = 30,
) -> None:
    """Node: show what left this node and what it refused; exit code 1 if the log was changed."""
    from fedgraft.deploy.audit import EVENTS, read_entries

    path = key.absolute().with_suffix(".home") / "audit.jsonl"
    if not path.is_file():
        raise FedgraftError("E-CLI-NO-AUDIT", f"there is no {path}: nothing has left this node yet", path=str(path))
    lines = list(read_entries(path))
    for line in lines[-last:]:
        print_line(_audit_text(line))
    answers = [line for line in lines if line["kind"] not in EVENTS]
    sent = sum(line["bytes"] for line in answers)
    refused = sum(line["kind"] == "refused" for line in lines)
    print_line(
        f"{len(lines)} lines, hash chain intact; {sent:,} bytes left in {len(answers)} responses, "
        f"{refused} requests were refused"
    )


def _audit_text(line: Mapping[str, Any]) -> str:
    """Return one line of the audit log as text."""
    import time

    from fedgraft.deploy.audit import EVENTS, place_in_run

    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(line["time"]))
    action = line.get("action", "")
    if line.get("sums"):
        action += f" of {line['sums']}"
    place = place_in_run(line)
    if place:
        action += f", {place}"
    if line["kind"] in EVENTS:
        return f"{line['n']:6d}  {when}  {EVENTS[line['kind']]} {action}: {line['why']}"
    return f"{line['n']:6d}  {when}  {action}: {line['bytes']:,} bytes, {line['protection']}"


def ledger(key: Key) -> None:
    """Node: show what was answered about this node's images; exit code 1 if the ledger is a restored one."""
    from fedgraft.deploy.node_state import NodeState

    known = NodeState(key.absolute().with_suffix(".home")).data_ledger()
    print_line(f"counter {known.counter}; it only grows, and peers hold its signature")
    for rows, questions in sorted(known.asked.items()):
        over = ", ".join(map(str, known.sets.get(rows, []))) or "this node alone"
        split = rows.partition("/")[0]
        print_line(f"{split} images ({rows}): {len(questions)} questions outside the rounds, sums over clients {over}")
    for run, (latest, count, _) in sorted(known.rounds.items()):
        print_line(f"run {run}: {count} hidden rounds, the latest is {int(latest) + 1}")
    for run, (epsilon, delta) in sorted(known.spent.items()):
        print_line(f"run {run}: epsilon {epsilon:.4g}, delta {delta:.2g}")
    print_line(f"all runs together: epsilon {known.epsilon:.4g}, delta {known.delta:.2g}")
    if known.proven:
        print_line(
            f"RESTORED FROM A BACKUP: a peer holds this node's signature of its ledger at {known.proven}. The node "
            "answers nothing. Put the newest ledger back, or make a new key, which begins a new ledger."
        )
        raise typer.Exit(1)


def clean(
    key: Key,
    cache: Annotated[bool, typer.Option("--cache", help="also this machine's cache of decoded images")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="remove it; without, it is only listed")] = False,
) -> None:
    """Node: remove what ended runs left on this machine; ledger, audit log, key and policy stay. End the node first."""
    from fedgraft.deploy.clean import removable, remove

    removals = removable(key.absolute().with_suffix(".home"), cache)
    if not removals:
        print_line("there is nothing to remove")
        return
    for removal in removals:
        print_line(f"{removal.path}: {removal.meaning}, {removal.bytes / 1e6:.1f} MB")
    if not yes:
        print_line("nothing was removed; to remove it: --yes")
        return
    remove(removals)
    print_line("removed")
