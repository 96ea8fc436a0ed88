"""What a run writes about itself: its report, its summary, its phases, and the description of its plan."""

from __future__ import annotations

import json
import logging
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgraft.core.capabilities import Capability
from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import json_ready
from fedgraft.core.space import EditSpace
from fedgraft.core.state import ServerState
from fedgraft.core.store import write_text
from fedgraft.data.federated import FederatedData
from fedgraft.models.network import VisionNetwork
from fedgraft.report.run_page import write_report
from fedgraft.report.run_view import HOLDINGS_FILE, TRAINED_FILE
from fedgraft.report.values import label
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.open_run import OpenRun
from fedgraft.runs.saving import Best, account_of, selected_score
from fedgraft.runs.setup import RunSetup
from fedgraft.server.round import RoundSummary

log = logging.getLogger("fedgraft")
PHASES_FILE = "phases.json"


def write_phases(folder: Path, seconds: Mapping[str, float]) -> None:
    """Write phases.json: `seconds` by phase outside the rounds, and peak memory (this process, its largest child)."""
    megabytes = {
        "this process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "largest child process": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
    }
    record = {"seconds": dict(seconds), "megabytes": megabytes}
    write_text(folder / PHASES_FILE, json.dumps(record, indent=2) + "\n")


def report_run(record: RunFolder, setup: RunSetup) -> None:
    """Write the report and the figures of a finished run into its folder."""
    data = setup.task.data
    try:
        write_report(record.path, partition=data.histogram(), classes=data.dataset.classes, clients=data.client_names)
    except OSError as error:
        raise FedgraftError(
            "E-RUN-REPORT-WRITE",
            f"the run is finished and its results are stored, but its report could not be written "
            f"({error.strerror}) in {record.path}",
            "make room and run it again, which only draws",
            path=str(record.path),
        ) from error


def setup_line(setup: RunSetup, opened: OpenRun) -> str:
    """Return one line for people: the algorithm, how many weights train, who takes part, where images enter, rates."""
    federation = setup.federation
    total = _parameters(setup)
    models = "one model"
    if Capability.PERSONAL_MODELS in setup.algorithm.provides:
        models = "one model per client"
    left_out = ""
    if federation.without:
        left_out = f" ({len(federation.without)} left out)"
    return (
        f"{setup.algorithm.name}: {opened.space.trained:,} of {total:,} weights train, "
        f"{federation.per_round} of {federation.clients} clients a round{left_out}, {federation.rounds} rounds, "
        f"{models}, {_entry(setup, opened)}, {rates(setup, opened)}"
    )


def _entry(setup: RunSetup, opened: OpenRun) -> str:
    """Return where images enter the network: as pixels, or as outputs of blocks that are computed once."""
    depth = setup.task.network.depth
    entry = opened.context.examples.entry
    if not depth:
        return "on given features"
    if not entry:
        return "from pixels"
    if entry == depth:
        return "features computed once"
    return f"blocks 1 to {entry} of {depth} computed once"


def _parameters(setup: RunSetup) -> int:
    """Return the number of weights of the network."""
    return sum(parameter.numel() for parameter in setup.task.network.parameters())


def rates(setup: RunSetup, opened: OpenRun) -> str:
    """Return the learning rates as they are, whether they were configured or chosen by default."""
    rate = setup.algorithm.lr * opened.server_context.rate_factor
    head_factor = setup.algorithm.local.head_lr
    if head_factor is None:
        return f"rate {rate:.3g}"
    return f"rate {rate:.3g}, the head's {rate * head_factor:.3g}"


def facts_of(data: FederatedData) -> dict[str, Any]:
    """Return what the card of a model may say about its data: no path, no names of owners."""
    return {
        "name": data.dataset.name,
        "images": data.total,
        "clients": data.clients,
        "classes": data.classes,
        "skipped": len(data.dataset.skipped),
    }


def write_skipped(folder: Path, data: FederatedData) -> None:
    """List the images that could not be read and were left out, one a line, in `skipped.txt`."""
    if data.dataset.skipped:
        lines = [f"{place}\t{reason}\n" for place, reason in data.dataset.skipped]
        write_text(folder / "skipped.txt", "".join(lines))


def write_holdings(folder: Path, data: FederatedData) -> None:
    """Write who holds what, images by client and class, where this machine knows the clients' data."""
    if not data.rows_known:
        return
    record = {"counts": data.histogram(), "classes": data.dataset.classes, "clients": data.client_names}
    write_text(folder / HOLDINGS_FILE, json.dumps(json_ready(record)) + "\n")


def write_trained(folder: Path, network: VisionNetwork, space: EditSpace) -> None:
    """Write how many weights of each layer of the network train, from the first layer to the head."""
    totals: dict[str, int] = {}
    names = dict(network.named_parameters())
    for name in sorted(names, key=network.block_of):
        layer = network.layer_name(name)
        totals[layer] = totals.get(layer, 0) + names[name].numel()
    trained = dict.fromkeys(totals, 0)
    for part in space.parts:
        trained[network.layer_name(part.name)] += part.size
    layers = [{"name": layer, "trained": trained[layer], "of": total} for layer, total in totals.items()]
    write_text(folder / TRAINED_FILE, json.dumps({"layers": layers}) + "\n")


def images_of_clients(setup: RunSetup) -> dict[str, int]:
    """Return the training images of each client, by its name, as far as this machine knows them."""
    names = setup.client_names
    return {names[client]: images for client, images in setup.task.data.sizes_by_client().items()}


FEW = 100
"""With fewer validation images, one more or less is over a point."""


def note_of(
    start: float | None, best: Best, rounds: int, private: bool, images: int = 0, select: str = "accuracy"
) -> dict[str, str]:
    """Return {"note": a sentence for the first line of the result} where no round beat the start; {} where one did.

    `start` is the accuracy of the initial model, `private`: the model after the last round is delivered, `images` the
    number of validation images, 0 where clients on other machines hold them; `select` the metric that chooses.
    """
    if not rounds or start is None:
        return {}
    is_worse_than_start = private and 0 <= best.accuracy <= start
    if best.round != 0 and not is_worse_than_start:
        return {}
    if images:
        measured = f", {round(start * images):,} of {images:,} validation images"
    else:
        measured = " on validation images"
    result = f"no round beat the model that the run began with ({100 * start:.1f} %{measured})"
    if select != "accuracy":
        result = f"no round beat the model that the run began with by {label(select)} on validation images"
    delivered = "so that one is delivered"
    if private:
        delivered = f"which private training did not make, so the model after round {best.round} is delivered"
    return {"note": f"{result}, {delivered}; {_hint(start, private, images)}."}


def _hint(start: float, private: bool, images: int) -> str:
    """Return a sentence on what may help where no round beat the start.

    `start` is the accuracy of the initial model; `private`: the last round is delivered, not the best, as differential
    privacy asks; `images` is the number of validation images, 0 where clients on other machines hold them.
    """
    has_few_images = 0 < images < FEW
    if start == 1 and not private:
        subject = "these images:"
        if has_few_images:
            subject = "so few images: add some, or take it as it is:"
        return f"it has nothing left to gain on {subject} rounds.total=0 delivers it at once"
    hint = "try another learning rate (fedgraft find-lr), more rounds, or a stronger network (model.name)"
    if has_few_images:
        point = f"one image is {100 / images:.1f} points here, too few to tell rounds apart"
        return f"{point}: add images or hold out more (data.validation=0.3); or {hint}"
    return hint


def summary_of(
    setup: RunSetup, opened: OpenRun, state: ServerState, best: Best, lines: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the entries of summary.json except those of the test, the traffic and the time.

    `lines` are the recorded rounds, `best` the model that is delivered.
    """
    config = setup.config
    algorithm = setup.algorithm
    data = setup.task.data
    start = None
    for line in lines:
        if line["round"] == 0:
            start = line["accuracy"]
            break
    validation_images = 0
    if not data.blind and config.select == "accuracy":
        validation_images = len(setup.evaluation_rows)
    is_private = not algorithm.privacy.delivers_best_round
    summary = {
        "kind": config.kind,
        "validation": {"accuracy": best.accuracy, **selected_score(config.select, best)},
        "best_round": best.round,
        "rounds": state.round,
        "edited": {"coordinates": opened.space.trained, "of": _parameters(setup)},
        "learning_rate": algorithm.lr,
        "start": start,
        "data": facts_of(data),
        **note_of(start, best, state.round, is_private, validation_images, config.select),
        **account_of(config, algorithm, state.round, lines, images_of_clients(setup)),
    }
    if not data.rows_known:
        summary["classes"] = list(data.dataset.classes)
    return summary


def log_round(summary: RoundSummary, round: int) -> dict[str, Any]:
    """Log which clients were dropped, and why if the model did not change; return the entries of the round's line."""
    for rejection in summary.rejections:
        log.warning("round %d: client %d dropped: %s", round, rejection.client, rejection.reason)
    if summary.record.get("skipped"):
        log.warning("round %d: nothing changed: %s", round, summary.record.get("refused", "too few usable answers"))
    return dict(summary.record)
