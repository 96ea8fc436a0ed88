"""`fedgraft deploy`: a federation across machines, on Flower. The commands are in `deploy_*.py`, listed here."""

from __future__ import annotations

import typer

from fedgraft.cli import deploy_ask as queries
from fedgraft.cli import deploy_coordinator as coordinator
from fedgraft.cli import deploy_launch as launch
from fedgraft.cli import deploy_node as node
from fedgraft.cli import deploy_trust as trust

app = typer.Typer(
    no_args_is_help=True,
    help=(
        "Run on other people's machines, over TLS, with Flower. The coordinator uses init, register, server, "
        "preflight, submit, status, evaluate, compare, stop, revoke, renew; a data owner uses key, policy, trust, "
        "node, audit, ledger, clean. `slurm`, `compose`, `k8s` write files that start a node. `local` does all of it "
        "on this machine; `app` writes an app for somebody else's Flower federation. "
        "See docs/deploy.md."
    ),
)
for _command in (
    coordinator.init,
    node.key,
    coordinator.register,
    coordinator.server,
    node.node,
    queries.preflight,
    coordinator.submit,
    coordinator.status,
    queries.evaluate,
    queries.compare,
    queries.release,
    coordinator.stop,
    node.local,
    coordinator.app,
    launch.slurm,
    launch.compose,
    launch.k8s,
    trust.policy,
    trust.fingerprint,
    trust.trust,
    trust.audit,
    trust.ledger,
    trust.clean,
    trust.revoke,
    trust.renew,
):
    app.command()(_command)
