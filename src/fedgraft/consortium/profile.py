"""`fedgraft profile RUN`: where the seconds, bytes and megabytes of a finished run went, by phase and by layer.

Phases come from the run's own record. Layers are measured anew: one batch of the run's images, block by block, forward
and backward, on one thread. Beside each stands the least time that the machine's measured peak rates allow, and how
many times longer it took.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedgraft.consortium.roofline import Roofline, best_seconds, measure_roofline
from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import write_text
from fedgraft.local.memory import one_thread
from fedgraft.report import figures
from fedgraft.report.run_page import write_report
from fedgraft.runs.adapted import Adapted, adapted
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.reporting import PHASES_FILE


@dataclass(frozen=True)
class Row:
    """One phase or layer: its seconds, what it did, and the least time for that (0: not modelled)."""

    name: str
    seconds: float
    flops: float = 0.0
    moved: float = 0.0
    least: float = 0.0

    @property
    def distance(self) -> float | None:
        """How many times the least time it took."""
        return self.seconds / self.least if self.least else None


@dataclass(frozen=True)
class Profile:
    """Everything `fedgraft profile` shows."""

    phases: tuple[Row, ...]
    layers: tuple[Row, ...]
    sent: Mapping[str, int]
    megabytes: Mapping[str, float]
    roofline: Roofline


def profile_run(folder: Path) -> Profile:
    """Read the record, measure the layers, write profile.json and figures/profile.png, and renew the report."""
    record = RunFolder.open(folder)
    lines = record.metrics()
    if not lines:
        raise FedgraftError(f"{folder} has no finished round yet, so there is nothing to profile; let it run.")
    run = adapted(folder)
    with one_thread():
        roofline = measure_roofline()
        layers = measure_layers(run, roofline)
    kept = _kept(folder)
    phases = phase_rows(lines, kept.get("seconds", {}), work_of(run, layers), roofline)
    sent = {key: sum(int(line.get(key, 0)) for line in lines) for key in ("bytes_up", "bytes_down")}
    found = Profile(phases, layers, sent, kept.get("megabytes", {}), roofline)
    write_text(folder / "profile.json", json.dumps(asdict(found), indent=2) + "\n")
    draw(found, folder / "figures" / "profile.png")
    write_report(folder, partition=run.setup.task.data.histogram(), classes=run.classes)
    return found


def _kept(folder: Path) -> dict[str, Any]:
    path = folder / PHASES_FILE
    return dict(json.loads(path.read_text())) if path.exists() else {}


def phase_rows(
    lines: list[dict[str, Any]], other: Mapping[str, float], work: Mapping[str, tuple[float, float]], roofline: Roofline
) -> tuple[Row, ...]:
    """Seconds by phase over all rounds, then what happens once; `work`: (flops, bytes) of one round's phase."""
    names = dict.fromkeys(name for line in lines for name in line["seconds"])
    rows = []
    for name in names:
        found = [float(line["seconds"][name]) for line in lines if name in line["seconds"]]
        flops, moved = (len(found) * amount for amount in work.get(name, (0.0, 0.0)))
        rows.append(Row(name, sum(found), flops, moved, roofline.seconds(flops, moved)))
    return (*rows, *(Row(name, seconds) for name, seconds in other.items()))


def work_of(run: Adapted, layers: tuple[Row, ...]) -> dict[str, tuple[float, float]]:
    """Operations and bytes of one round by phase, from the layers of one training batch."""
    local, data, m, size = (
        run.setup.algorithm.local,
        run.setup.task.data,
        run.setup.federation.per_round,
        len(_rows(run)),
    )
    steps = sum(local.steps_for(int(n)) for n in data.partition.sizes()) / data.clients
    forward = sum(row.flops for row in layers if row.name.endswith("forward"))
    both = sum(row.flops for row in layers)
    held = len(run.setup.judging_rows)
    vectors = 4.0 * run.opened.space.size * (m + 1)
    scale = min(local.batch_size, int(data.partition.sizes().max())) / size
    return {
        "exchange": (both * scale * steps * m, 0.0),
        "aggregate": (0.0, vectors),
        "evaluate": (forward * held / size, 0.0),
    }


def _rows(run: Adapted) -> Tensor:
    return run.setup.task.data.train_rows[: min(64, run.setup.algorithm.local.batch_size)]


def measure_layers(run: Adapted, roofline: Roofline) -> tuple[Row, ...]:
    """Each block that a client passes through, forward and (where something behind it moves) backward."""
    network, space, examples = run.network, run.opened.space, run.opened.context.examples
    rows = _rows(run)
    first = min(space.first_block(network), network.depth + 1)
    space.bind(network)
    network.eval()
    inputs, found = examples.batch(rows), []
    for name, block, layer in _layers(run):
        x = inputs.detach().requires_grad_(block > first)
        flops = {"forward": _flops(lambda layer=layer, x=x: layer(x))}  # type: ignore[misc]
        out = layer(x)
        times = {"forward": best_seconds(lambda layer=layer, x=x: layer(x))}  # type: ignore[misc]
        if out.requires_grad:
            ones = torch.ones_like(out)
            both: Callable[[], object] = lambda layer=layer, x=x, ones=ones: layer(x).backward(ones)  # type: ignore[misc]  # noqa: E731
            times["backward"] = max(best_seconds(both) - times["forward"], 0.0)
            flops["backward"] = _flops(both) - flops["forward"]
        for way, seconds in times.items():
            found.append(Row(f"{name} {way}", seconds, flops[way], 0.0, roofline.seconds(flops[way])))
        inputs = out.detach()
    for parameter in network.parameters():
        parameter.grad = None
    return tuple(found)


def _layers(run: Adapted) -> list[tuple[str, int, Callable[[Tensor], Tensor]]]:
    """The network from where this run's examples enter it, cut at its entries: (name, block, function)."""
    network, found = run.network, []
    for entry in range(run.opened.context.examples.entry, network.depth):
        name = "stem, block 0" if entry == 0 else f"block {entry}"
        found.append((name, entry, lambda x, e=entry: network.features(x, e, e + 1)))
    head: nn.Linear = network.head
    return [*found, ("head", network.depth + 1, head)]


def _flops(work: Callable[[], object]) -> float:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        work()
    return float(counter.get_total_flops())


def draw(profile: Profile, path: Path) -> Path:
    """Seconds by phase and milliseconds by layer, each beside the least time."""
    phases = {row.name: row.seconds for row in profile.phases}
    least = {row.name: row.least for row in profile.phases if row.least}
    figures.bars(
        path.with_name("profile_phases.png"),
        {"measured": phases, "least by the roofline": least},
        ylabel="seconds",
        title="Where the seconds went",
    )
    layers = {row.name: 1e3 * row.seconds for row in profile.layers}
    ideal = {row.name: 1e3 * row.least for row in profile.layers}
    return figures.bars(
        path,
        {"measured": layers, "least by the roofline": ideal},
        ylabel="ms, one batch, one thread",
        title="One training batch, layer by layer",
    )


def table(profile: Profile) -> list[list[str]]:
    """Rows of text: name, seconds, share, GFLOP, MB moved, times the least."""
    out = []
    for group, rows in (("phase", profile.phases), ("layer", profile.layers)):
        total = sum(row.seconds for row in rows) or 1.0
        for row in rows:
            distance = "" if row.distance is None else f"{row.distance:.2f}"
            gflop = f"{row.flops / 1e9:,.2f}" if row.flops else ""
            moved = f"{row.moved / 1e6:,.1f}" if row.moved else ""
            share = f"{100 * row.seconds / total:.1f}"
            out.append([group, row.name, f"{row.seconds:.4f}", share, gflop, moved, distance])
    return out
