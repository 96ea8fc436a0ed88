"""What a finished run shows: its figures, its report, where its seconds and megabytes went."""

from __future__ import annotations

import json
import logging
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgraft.core.capabilities import Capability
from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import write_text
from fedgraft.core.state import ServerState
from fedgraft.data.federated import FederatedData
from fedgraft.report.run_page import write_report
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.open_run import OpenRun
from fedgraft.runs.saving import Best, account_of, selected
from fedgraft.runs.setup import RunSetup
from fedgraft.server.round import RoundSummary

log = logging.getLogger("fedgraft")
PHASES_FILE = "phases.json"


def keep_phases(folder: Path, seconds: Mapping[str, float]) -> None:
    """Note what is no part of a round, and the most memory this process and its largest child process held."""
    peaks = {"this process": resource.RUSAGE_SELF, "largest child process": resource.RUSAGE_CHILDREN}
    memory = {name: resource.getrusage(who).ru_maxrss / 1024 for name, who in peaks.items()}
    write_text(folder / PHASES_FILE, json.dumps({"seconds": dict(seconds), "megabytes": memory}, indent=2) + "\n")


def report_run(record: RunFolder, setup: RunSetup) -> None:
    """The report of a finished run."""
    try:
        data = setup.task.data
        write_report(record.path, partition=data.histogram(), classes=data.dataset.classes, clients=data.client_names)
    except OSError as error:
        raise FedgraftError(
            f"the run is finished and its results are stored, but its report could not be written "
            f"({error.strerror}) in {record.path}; make room and run it again, which only draws."
        ) from error


def describe(setup: RunSetup, opened: OpenRun) -> str:
    """One line for the log: what trains, who takes part, how it is carried out."""
    f, space, network, entry = setup.federation, opened.space, setup.task.network, opened.context.examples.entry
    below = "features" if entry == network.depth else f"blocks 1 to {entry} of {network.depth}"
    mode = f"{below} computed once" if entry else "from pixels"
    mode = mode if network.depth else "on given features"
    total = sum(p.numel() for p in network.parameters())
    kind = "one model"
    if Capability.PERSONAL_MODELS in setup.algorithm.provides:
        kind = "one model per client"
    left = f" ({len(f.without)} left out)" if f.without else ""
    return (
        f"{setup.algorithm.name}: {space.trained:,} of {total:,} weights train, "
        f"{f.per_round} of {f.clients} clients a round{left}, {f.rounds} rounds, {kind}, {mode}, {rates(setup, opened)}"
    )


def facts_of(data: FederatedData) -> dict[str, Any]:
    """What the card of a model may say about its data: no path, no names of owners."""
    told = {"name": data.dataset.name, "images": data.total, "clients": data.clients, "classes": data.classes}
    return {**told, "skipped": len(data.dataset.skipped)}


def keep_skipped(folder: Path, data: FederatedData) -> None:
    """List the images that could not be read and were left out, one a line, in `skipped.txt`."""
    if data.dataset.skipped:
        write_text(folder / "skipped.txt", "".join(f"{place}\t{why}\n" for place, why in data.dataset.skipped))


FEW = 100
"""With fewer validation images, one more or less is over a point."""


def note_of(start: float | None, best: Best, rounds: int, private: bool, images: int = 0) -> dict[str, str]:
    """A sentence for the first line of the result where no round beat the start; nothing where one did.

    `images` is how many validation images that was seen on, 0 where they are elsewhere.
    """
    if not rounds or start is None or not (best.round == 0 or (private and 0 <= best.accuracy <= start)):
        return {}
    seen = f"{round(start * images):,} of {images:,} validation images" if images else "on validation images"
    told = f"no round beat the model that the run began with ({100 * start:.1f} %{', ' if images else ' '}{seen})"
    then = "so that one is delivered"
    if private:
        then = f"which private training did not make, so the model after round {best.round} is delivered"
    return {"note": f"{told}, {then}; {_hint(start, private, images)}."}


def _hint(start: float, private: bool, images: int) -> str:
    """What may help where no round beat the start."""
    if start == 1 and not private:
        few = "so few images: add some, or take it as it is:" if 0 < images < FEW else "these images:"
        return f"it has nothing left to gain on {few} rounds.total=0 delivers it at once"
    hint = "try another learning rate (fedgraft find-lr), more rounds, or a stronger network (model.name)"
    if 0 < images < FEW:
        point = f"one image is {100 / images:.1f} points here, too few to tell rounds apart"
        return f"{point}: add images or hold out more (data.validation=0.3); or {hint}"
    return hint


def rates(setup: RunSetup, opened: OpenRun) -> str:
    """The learning rates as they are, whoever chose them."""
    lr, head = setup.algorithm.lr * opened.server_context.rate_factor, setup.algorithm.local.head_lr
    return f"rate {lr:.3g}" if head is None else f"rate {lr:.3g}, the head's {lr * head:.3g}"


def summary_of(
    setup: RunSetup, opened: OpenRun, state: ServerState, best: Best, lines: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What summary.json says of a finished run but for its test, its traffic and its time."""
    config, algorithm, data = setup.config, setup.algorithm, setup.task.data
    start = next((line["accuracy"] for line in lines if line["round"] == 0), None)
    judged = 0 if data.blind or config.select != "accuracy" else len(setup.judging_rows)
    summary = {
        "kind": config.kind,
        "validation": {"accuracy": best.accuracy, **selected(config.select, best)},
        "best_round": best.round,
        "rounds": state.round,
        "edited": {"coordinates": opened.space.trained, "of": sum(p.numel() for p in setup.task.network.parameters())},
        "start": start,
        "data": facts_of(data),
        **note_of(start, best, state.round, not algorithm.privacy.delivers_best_round, judged),
        **account_of(config, algorithm, state.round, lines),
    }
    return summary if data.rows_known else {**summary, "classes": list(data.dataset.classes)}


def noted(summary: RoundSummary, round: int) -> dict[str, Any]:
    """A round's line, after telling the log who was dropped and why nothing changed."""
    for rejection in summary.rejections:
        log.warning("round %d: client %d dropped: %s", round, rejection.client, rejection.reason)
    if summary.record.get("skipped"):
        log.warning("round %d: nothing changed: %s", round, summary.record.get("refused", "too few usable answers"))
    return dict(summary.record)
