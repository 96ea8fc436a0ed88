"""`fedgraft deploy` questions to all nodes in which nobody trains: preflight and evaluate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedgraft.cli.consortium import show_preflight
from fedgraft.cli.deploy_coordinator import Fed
from fedgraft.core.progress import phase

Wait = Annotated[float, typer.Option("--wait", help="seconds to wait for absent nodes", min=0)]


def preflight(
    fed: Fed,
    out: Annotated[Path, typer.Option("--out", "-o", help="folder for the page and the picture")] = Path("preflight"),
    class_map: Annotated[
        Path | None, typer.Option("--class-map", help="a TOML file that settles names; it goes into FED/config.toml")
    ] = None,
    wait: Wait = 30.0,
) -> None:
    """Coordinator: what every site holds, as sums, before anybody trains; exit code 1: settle something first."""
    from fedgraft.config.load import merge, to_toml, validate
    from fedgraft.consortium.site_faults import Finding, findings
    from fedgraft.core.files import write_text
    from fedgraft.deploy import preflight as asking
    from fedgraft.deploy.folder import open_federation
    from fedgraft.deploy.server import ask

    found = open_federation(fed)
    if class_map is not None:
        settled = validate(merge(found.config.table, {"data": {"class_map": str(class_map)}}))
        write_text(found.path / "config.toml", to_toml(settled))
        typer.echo(
            f"the class map is part of {fed}/config.toml now; its fingerprint, for policies, is {settled.fingerprint}"
        )
    with phase("the nodes look at their images"):
        ask(found, found.path / "preflight", wait, task=asking.ACTION)
    told = json.loads((found.path / "preflight" / "told.json").read_text())
    asking.check_told(told)
    sites, shared = asking.named(told, found.names)
    silent = [Finding("silent", found.names[int(k)], f"it did not tell: {why}") for k, why in told["refused"].items()]
    silent += [
        Finding("absent", name, "its node is not connected")
        for k, name in enumerate(found.names)
        if not {str(k)} & {*told["facts"], *told["refused"]}
    ]
    show_preflight(out, sites, [*findings(sites, found.config.data.image_size, shared), *silent])


def evaluate(
    fed: Fed,
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="a run folder, or a folder of `fedgraft export`")],
    metrics: Annotated[str, typer.Option("--metrics", help="apart by commas (default: the config's)")] = "",
    wait: Wait = 30.0,
) -> None:
    """Coordinator: a model on every node's own test images, per site, from sums; nobody trains."""
    from typing import get_args

    from fedgraft.config.load import to_toml
    from fedgraft.config.options import MetricName
    from fedgraft.core.errors import FedgraftError
    from fedgraft.deploy import evaluate as asking
    from fedgraft.deploy.folder import open_federation
    from fedgraft.deploy.server import ask

    found = open_federation(fed)
    if strange := [one for one in metrics.split(",") if one and one not in get_args(MetricName)]:
        raise FedgraftError(f"there is no metric {strange[0]!r}; there are {', '.join(get_args(MetricName))}.")
    asked = asking.question(found.config, model, found.path / "evaluations" / model.resolve().name)
    typer.echo(f"asked under the config {asked.config.fingerprint}")
    typer.echo("a node with a policy answers if that agrees to this config and allows the action evaluate")
    settings = {"config": to_toml(asked.config), "model": str(model.absolute()), "metrics": metrics}
    with phase("the nodes measure the model"):
        ask(found, asked.folder, wait, task="evaluate", **settings)
    told = json.loads((asked.folder / "evaluation.json").read_text())
    for k, why in told["refused"].items():
        typer.echo(f"{found.names[int(k)]} did not tell: {why}", err=True)
    if not told["clients"]:
        raise FedgraftError("no node told anything; ask the owners to allow the action 'evaluate' and this config.")
    lines = asking.lines(told, found.names)
    (asked.folder / "evaluation.md").write_text("\n".join(lines) + "\n")
    for line in lines:
        typer.echo(line)
    typer.echo(f"written: {asked.folder / 'evaluation.json'}")
