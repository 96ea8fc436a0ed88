"""`fedgraft profile RUN`: the seconds, bytes and megabytes of a finished run, by phase and by layer.

Phases come from the run's own record. Layers are measured anew: one batch of the run's images, block by block, forward
and backward, on one thread. Each is compared with the least time that the machine's measured peak rates allow.
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
from fedgraft.core.device import Device
from fedgraft.core.errors import FedgraftError
from fedgraft.core.store import write_text
from fedgraft.local.memory import one_thread
from fedgraft.report import figures
from fedgraft.report.run_page import write_report
from fedgraft.runs.adapted import Adapted, adapted
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.reporting import PHASES_FILE


@dataclass(frozen=True)
class Row:
    """One phase or layer."""

    name: str
    seconds: float
    flops: float = 0.0
    """Floating-point operations; 0: not counted."""
    moved: float = 0.0
    """Bytes read and written; 0: not counted."""
    least: float = 0.0
    """The least seconds by the roofline; 0: not modelled."""

    @property
    def distance(self) -> float | None:
        """Measured over least seconds; None without a least."""
        if not self.least:
            return None
        return self.seconds / self.least


@dataclass(frozen=True)
class Profile:
    """The result of `fedgraft profile`."""

    phases: tuple[Row, ...]
    layers: tuple[Row, ...]
    sent: Mapping[str, int]
    megabytes: Mapping[str, float]
    roofline: Roofline


def profile_run(folder: Path) -> Profile:
    """Return the profile of a finished run: time and traffic by phase from its record, time by layer measured now.
    Writes profile.json and figures/profile.png into its folder and renews the report.
    """
    lines = RunFolder.open(folder).metrics()
    if not lines:
        raise FedgraftError(
            "E-CONSORTIUM-NO-ROUND",
            f"{folder} has no finished round yet, so there is nothing to profile",
            "let it run",
            folder=str(folder),
        )
    run = adapted(folder)
    with one_thread():
        roofline = measure_roofline(device=Device.of(run.network))
        layers = measure_layers(run, roofline)
    recorded = _recorded_phases(folder)
    phases = phase_rows(lines, recorded.get("seconds", {}), work_of(run, layers), roofline)
    sent = {}
    for key in ("bytes_up", "bytes_down"):
        sent[key] = sum(int(line.get(key, 0)) for line in lines)
    profile = Profile(phases, layers, sent, recorded.get("megabytes", {}), roofline)
    write_text(folder / "profile.json", json.dumps(asdict(profile), indent=2) + "\n")
    draw_profile(profile, folder / "figures" / "profile.png")
    write_report(folder, partition=run.setup.task.data.histogram(), classes=run.classes)
    return profile


def _recorded_phases(folder: Path) -> dict[str, Any]:
    """Return the run's record of phases outside the rounds; empty if it has none."""
    path = folder / PHASES_FILE
    if not path.exists():
        return {}
    return dict(json.loads(path.read_text()))


def phase_rows(
    lines: list[dict[str, Any]], once: Mapping[str, float], work: Mapping[str, tuple[float, float]], roofline: Roofline
) -> tuple[Row, ...]:
    """Return the rows of all phases: those of the rounds, summed over rounds, then those that happen once.

    Args:
        lines: the lines of metrics.jsonl.
        once: seconds of the phases outside the rounds.
        work: (floating-point operations, bytes) of each phase in one round.
        roofline: the machine's peak rates, for the least time of each phase.
    """
    seconds: dict[str, list[float]] = {}
    for line in lines:
        for name, value in line["seconds"].items():
            seconds.setdefault(name, []).append(float(value))
    rows = []
    for name, values in seconds.items():
        flops, moved = work.get(name, (0.0, 0.0))
        flops = len(values) * flops
        moved = len(values) * moved
        rows.append(Row(name, sum(values), flops, moved, roofline.seconds(flops, moved)))
    for name, value in once.items():
        rows.append(Row(name, value))
    return tuple(rows)


def work_of(run: Adapted, layers: tuple[Row, ...]) -> dict[str, tuple[float, float]]:
    """Return (floating-point operations, bytes) of one round by phase, extrapolated from one measured batch.

    `layers` are the rows of `measure_layers`.
    """
    local = run.setup.algorithm.local
    data = run.setup.task.data
    cohort = run.setup.federation.per_round
    measured_images = len(_rows(run))
    sizes = data.partition.sizes()
    steps = sum(local.steps_for(int(n)) for n in sizes) / data.clients
    forward = sum(row.flops for row in layers if row.name.endswith("forward"))
    both = sum(row.flops for row in layers)
    vector_bytes = 4.0 * run.opened.space.size * (cohort + 1)
    scale = min(local.batch_size, int(sizes.max())) / measured_images
    return {
        "exchange": (both * scale * steps * cohort, 0.0),
        "aggregate": (0.0, vector_bytes),
        "evaluate": (forward * len(run.setup.evaluation_rows) / measured_images, 0.0),
    }


def _rows(run: Adapted) -> Tensor:
    """Return the training rows of the one batch whose layers are measured: at most 64."""
    return run.setup.task.data.train_rows[: min(64, run.setup.algorithm.local.batch_size)]


def measure_layers(run: Adapted, roofline: Roofline) -> tuple[Row, ...]:
    """Time each block that a client's images pass, forward and, if it has a gradient, backward; return a row for each.
    The network is bound to the run's edit space and its gradients are cleared.
    """
    network = run.network
    space = run.opened.space
    first_trained = min(space.first_block(network), network.depth + 1)
    space.bind(network)
    network.eval()
    inputs = Device.of(network).put(run.opened.context.examples.batch(_rows(run)))
    rows = []
    for name, block, layer in _layers(run):
        x = inputs.detach().requires_grad_(block > first_trained)
        rows += _measure_layer(name, layer, x, roofline)
        inputs = layer(x).detach()
    for parameter in network.parameters():
        parameter.grad = None
    return tuple(rows)


def _measure_layer(name: str, layer: Callable[[Tensor], Tensor], x: Tensor, roofline: Roofline) -> list[Row]:
    """Time a layer, called `name`, on inputs `x` and return its rows: forward, and backward if it has a gradient."""

    def forward() -> Tensor:
        return layer(x)

    forward_flops = _flops(forward)
    device = Device(x.device)
    forward_seconds = best_seconds(forward, device=device)
    rows = [Row(f"{name} forward", forward_seconds, forward_flops, 0.0, roofline.seconds(forward_flops))]
    output = forward()
    if output.requires_grad:
        ones = torch.ones_like(output)

        def both() -> None:
            layer(x).backward(ones)

        seconds = max(best_seconds(both, device=device) - forward_seconds, 0.0)
        flops = _flops(both) - forward_flops
        rows.append(Row(f"{name} backward", seconds, flops, 0.0, roofline.seconds(flops)))
    return rows


def _layers(run: Adapted) -> list[tuple[str, int, Callable[[Tensor], Tensor]]]:
    """Return the network from where this run's examples enter it, block by block: (name, block, function)."""
    network = run.network
    layers: list[tuple[str, int, Callable[[Tensor], Tensor]]] = []
    for entry in range(run.opened.context.examples.entry, network.depth):
        name = f"block {entry}"
        if entry == 0:
            name = "stem, block 0"
        layers.append((name, entry, lambda x, e=entry: network.features(x, e, e + 1)))  # type: ignore[misc]
    head: nn.Linear = network.head
    layers.append(("head", network.depth + 1, head))
    return layers


def _flops(work: Callable[[], object]) -> float:
    """Call `work` and return the floating-point operations that it took."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        work()
    return float(counter.get_total_flops())


def draw_profile(profile: Profile, path: Path) -> Path:
    """Write bar charts of milliseconds by layer to `path` and of seconds by phase beside it; return `path`.

    Each measured time stands beside the least time by the roofline.
    """
    phases = {}
    least = {}
    for row in profile.phases:
        phases[row.name] = row.seconds
        if row.least:
            least[row.name] = row.least
    figures.bars(
        path.with_name("profile_phases.png"),
        {"measured": phases, "roofline": least},
        ylabel="seconds",
        title="Time by phase",
    )
    layers = {}
    least_layers = {}
    for row in profile.layers:
        layers[row.name] = 1e3 * row.seconds
        least_layers[row.name] = 1e3 * row.least
    return figures.bars(
        path,
        {"measured": layers, "roofline": least_layers},
        ylabel="ms, one batch, one thread",
        title="One training batch by layer",
    )


def profile_rows(profile: Profile) -> list[list[str]]:
    """Return the table as rows of text: group, name, seconds, share in percent, GFLOP, MB moved, times the least."""
    return _group_table("phase", profile.phases) + _group_table("layer", profile.layers)


def _group_table(group: str, rows: tuple[Row, ...]) -> list[list[str]]:
    """Return the rows of text of one group."""
    total = sum(row.seconds for row in rows) or 1.0
    cells = []
    for row in rows:
        share = f"{100 * row.seconds / total:.1f}"
        gflop = ""
        moved = ""
        distance = ""
        if row.flops:
            gflop = f"{row.flops / 1e9:,.2f}"
        if row.moved:
            moved = f"{row.moved / 1e6:,.1f}"
        if row.distance is not None:
            distance = f"{row.distance:.2f}"
        cells.append([group, row.name, f"{row.seconds:.4f}", share, gflop, moved, distance])
    return cells
