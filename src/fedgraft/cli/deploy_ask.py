"""`fedgraft deploy` queries to all nodes without training: preflight, evaluate and compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedgraft.cli.console import print_line
from fedgraft.cli.consortium import show_preflight
from fedgraft.cli.deploy_coordinator import Fed
from fedgraft.core.progress import phase

if TYPE_CHECKING:
    from fedgraft.deploy.folder import FederationFolder

Wait = Annotated[float, typer.Option("--wait", help="seconds to wait for absent nodes", min=0)]


def preflight(
    fed: Fed,
    out: Annotated[Path, typer.Option("--out", "-o", help="folder for the page and the figure")] = Path("preflight"),
    class_map: Annotated[
        Path | None, typer.Option("--class-map", help="a TOML file that maps class names; saved in FED/config.toml")
    ] = None,
    fix_classes: Annotated[
        bool, typer.Option("--fix-classes", help="make the nodes' class names part of FED/config.toml, if all is well")
    ] = False,
    wait: Wait = 30.0,
) -> None:
    """Coordinator: check every site's data before training, from sums; exit code 1 if there are errors."""
    from fedgraft.consortium.site_faults import findings
    from fedgraft.deploy import preflight as query
    from fedgraft.deploy import preflight_answers as stored
    from fedgraft.deploy.coordinator import run_task
    from fedgraft.deploy.folder import open_federation

    federation = open_federation(fed)
    if class_map is not None:
        _save_in_config(federation, "the class map is", {"class_map": str(class_map)})
    with phase("nodes inspect their images"):
        run_task(federation, federation.path / "preflight", wait, task=query.ACTION)
    answers = json.loads((federation.path / "preflight" / stored.ANSWERS_FILE).read_text())
    stored.check_answers(answers)
    sites, shared = stored.with_node_names(answers, federation.names)
    problems = [
        *findings(sites, federation.config.data.image_size, shared),
        *stored.missing_answers(answers, federation.names),
    ]
    if fix_classes and not any(problem.stops for problem in problems):
        names = sorted({name for site in sites for name in site["classes"]})
        _save_in_config(federation, "the classes are", {"class_names": names})
    show_preflight(out, sites, problems)


def _save_in_config(federation: FederationFolder, what: str, options: dict[str, Any]) -> None:
    """Write options of the data into the federation's config, and print the new fingerprint; `what` begins the line."""
    from fedgraft.config.load import merge, to_toml, validate
    from fedgraft.core.store import write_text

    config = validate(merge(federation.config.table, {"data": options}))
    file = federation.path / "config.toml"
    write_text(file, to_toml(config))
    print_line(f"{what} now part of {file}; its fingerprint, for policies, is {config.fingerprint}")


def evaluate(
    fed: Fed,
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="a run folder, or a folder of `fedgraft export`")],
    metrics: Annotated[str, typer.Option("--metrics", help="separated by commas (default: the config's)")] = "",
    wait: Wait = 30.0,
) -> None:
    """Coordinator: measure a model on every node's own test images, by site, from sums; nobody trains."""

    from fedgraft.config.load import to_toml
    from fedgraft.core.errors import FedgraftError
    from fedgraft.deploy import evaluate as query
    from fedgraft.deploy.coordinator import run_task
    from fedgraft.deploy.folder import open_federation
    from fedgraft.metrics.names import METRIC_NAMES

    federation = open_federation(fed)
    for name in metrics.split(","):
        if name and name not in METRIC_NAMES:
            raise FedgraftError(
                "E-CLI-METRIC",
                f"there is no metric {name!r}",
                f"choose from {', '.join(METRIC_NAMES)}",
                metric=name,
            )
    plan = query.plan_evaluation(federation.config, model, federation.path / "evaluations" / model.resolve().name)
    print_line(f"config of the request: {plan.config.fingerprint}")
    print_line("a node with a policy answers if its policy agrees to this config and allows the action evaluate")
    settings = {"config": to_toml(plan.config), "model": str(model.absolute()), "metrics": metrics}
    with phase("nodes evaluate the model"):
        run_task(federation, plan.folder, wait, task="evaluate", **settings)
    result = json.loads((plan.folder / "evaluation.json").read_text())
    for number, reason in result["refused"].items():
        print_line(f"{federation.names[int(number)]} did not answer: {reason}", error=True)
    if not result["clients"]:
        raise FedgraftError(
            "E-CLI-NO-ANSWER",
            "no node answered the request to evaluate the model",
            "ask the owners to allow the action 'evaluate' and this config",
        )
    lines = query.evaluation_table(result, federation.names)
    (plan.folder / "evaluation.md").write_text("\n".join(lines) + "\n")
    for line in lines:
        print_line(line)
    print_line(f"written: {plan.folder / 'evaluation.json'}")


def compare(
    fed: Fed,
    first: Annotated[Path, typer.Argument(metavar="MODEL", help="a run folder, or a folder of `fedgraft export`")],
    second: Annotated[Path, typer.Argument(metavar="OTHER", help="the model that it is compared with")],
    wait: Wait = 30.0,
) -> None:
    """Coordinator: compare two models on every node's own test images by DeLong's and McNemar's tests, from sums."""
    from fedgraft.config.load import to_toml
    from fedgraft.core.errors import FedgraftError
    from fedgraft.deploy.compare import RESULT_FILE
    from fedgraft.deploy.coordinator import run_task
    from fedgraft.deploy.evaluate import config_for_any_model
    from fedgraft.deploy.folder import open_federation
    from fedgraft.report.paired import comparison_tables
    from fedgraft.runs.predict import predictor

    federation = open_federation(fed)
    for model in (first, second):
        predictor(model)  # refuses what is no model, before any node is asked
    config = config_for_any_model(federation.config)
    folder = federation.path / "comparisons" / f"{first.resolve().name}-{second.resolve().name}"
    print_line(f"config of the request: {config.fingerprint}")
    print_line("a node with a policy answers if it agrees to this config and allows the action comparison")
    models = {"model": str(first.absolute()), "other": str(second.absolute())}
    with phase("nodes compare the models"):
        run_task(federation, folder, wait, task="evaluate", config=to_toml(config), **models)
    result = json.loads((folder / RESULT_FILE).read_text())
    for number, reason in result["refused"].items():
        print_line(f"{federation.names[int(number)]} did not answer: {reason}", error=True)
    if not result["pooled"]:
        raise FedgraftError(
            "E-CLI-NO-ANSWER",
            "no node answered the request to compare the models",
            "ask the owners to allow the action 'comparison' and this config",
        )
    sites = {federation.names[int(number)]: tests for number, tests in result["clients"].items()}
    sites["all sites"] = result["pooled"]
    lines = comparison_tables(result["models"], sites)
    (folder / "comparison.md").write_text("\n".join(lines) + "\n")
    for line in lines:
        print_line(line)
    print_line(f"written: {folder / RESULT_FILE}")


def release(
    fed: Fed,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="the run folder of a finished run of this federation")],
    rules: Annotated[Path | None, typer.Option("--rules", help="the consortium's release.toml")] = None,
    rare: Annotated[
        list[str] | None, typer.Option("--rare", help="a class that is looked at apart; may be repeated")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="folder of the page (default: RUN/release)")] = None,
    wait: Wait = 30.0,
) -> None:
    """Coordinator: write the page that is signed before a model leaves, from counts of every node; nobody trains."""
    from fedgraft.cli.consortium import show_release
    from fedgraft.config.load import to_toml
    from fedgraft.consortium.release import judge
    from fedgraft.consortium.release_rules import read_rules
    from fedgraft.core.errors import FedgraftError
    from fedgraft.deploy.coordinator import run_task
    from fedgraft.deploy.evaluate import config_for_any_model
    from fedgraft.deploy.folder import open_federation
    from fedgraft.deploy.release import RESULT_FILE, answers_of, require_same_division
    from fedgraft.runs.predict import predictor

    agreed = read_rules(rules)
    federation = open_federation(fed)
    predictor(run)  # refuses what is no model, before any node is asked
    require_same_division(federation.config, run)
    config = config_for_any_model(federation.config)
    folder = federation.path / "releases" / run.resolve().name
    print_line(f"config of the request: {config.fingerprint}")
    print_line("a node with a policy answers if it agrees to this config and allows the action membership")
    settings = {"model": str(run.absolute()), "release": "1", "rare": "\n".join(rare or [])}
    with phase("nodes count the losses of their images"):
        run_task(federation, folder, wait, task="evaluate", config=to_toml(config), **settings)
    result = json.loads((folder / RESULT_FILE).read_text())
    for number, reason in result["refused"].items():
        print_line(f"{federation.names[int(number)]} did not answer: {reason}", error=True)
    if not result["clients"]:
        raise FedgraftError(
            "E-CLI-NO-ANSWER",
            "no node answered the request for a release",
            "ask the owners to allow the action 'membership' and this config",
        )
    show_release(out or run / "release", judge(run, answers_of(result, federation.names), agreed))
