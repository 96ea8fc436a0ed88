"""Scale: cost of a round and memory against the clients K, the cohort m, the model d and the edit k.

Every point runs in a process of its own, so that its peak memory is its own. Head: a linear head on given features,
batched engine, `m` clients of `K`. Mixing: `K` personal models of `d` weights on a shelf, of which a cohort is mixed by
the similarity of their representations, which is computed too. Edit: `m` clients of an edit of `k` of ViT-S/16's
weights: reset, four optimizer steps without the network's passes, and the mean. The least time of a mixing round is the
larger of its bytes at copy speed and its products at the peak rate: with a cohort of m the product has 2·m²·d
operations, so beyond some tens of clients it is compute that binds. Beside it stands the time of writing the mixed
models to a plain file, which a shelf cannot avoid. ResNet-18 has 11.2 million weights; a thousand such models are
45 GB, so the curve against d has a cohort of ten, and that against the cohort smaller models. Secure: a cohort through
secure aggregation on its graph of neighbours, one in twenty gone before sending, by stage, clients one after the other.
Writes runs/benchmarks/scale.json and scale.png.

    python benchmarks/bench_scale.py           # up to a million clients and 1,000 a round
    python benchmarks/bench_scale.py --small   # a quick look
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedgraft.aggregate.mean import weighted_mean
from fedgraft.aggregate.mixing import blended, mixing_matrix
from fedgraft.aggregate.similarity import crsm
from fedgraft.algorithms import fedavg
from fedgraft.client.context import ClientContext
from fedgraft.consortium.roofline import measure_roofline
from fedgraft.core.rng import torch_stream
from fedgraft.core.space import EditSpace, Part, select
from fedgraft.core.state import Federation
from fedgraft.data.examples import PrecomputedExamples
from fedgraft.edit import dense
from fedgraft.engines.batched import Batched
from fedgraft.local.optimizers import sgdm
from fedgraft.local.schedules import constant_rate
from fedgraft.local.train import LocalTraining
from fedgraft.models.backbones import load_network
from fedgraft.privacy.secagg.keys import Identity
from fedgraft.privacy.secagg.plan import Plan
from fedgraft.privacy.secagg.secure_sum import (
    SecureClient,
    SecureServer,
    drive,
    rounding,
    weighted_input,
    weighted_segments,
)
from fedgraft.privacy.secagg.secure_sum import weighted_mean as weighted_mean_of
from fedgraft.runs.personal_store import PersonalStore
from fedgraft.server.collect import ServerContext
from fedgraft.server.round import run_round
from fedgraft.server.sample import start

OUT = Path("runs") / "benchmarks" / "scale.json"
POOL = 50_000
"""Examples there are; clients hold fifty rows each, which may be the same rows."""


def head(clients: int, cohort: int, width: int, rounds: int = 3) -> dict[str, float]:
    """The best seconds of a round and the peak memory of this process."""
    torch.set_num_threads(1)
    network = load_network(f"features:width={width}", 100)
    draw = torch_stream(0, "scale")
    examples = PrecomputedExamples(torch.randn(POOL, width, generator=draw), torch.arange(POOL) % 100, 0)
    algorithm = fedavg(local=LocalTraining(steps=4, batch_size=50), trainable=dense.head())
    space = select(network, lambda name: name.startswith("head."))
    context = ClientContext(network, space, examples, lambda k: torch.arange(50) + 50 * (k % (POOL // 50)), 0)
    federation = Federation("scale", 0, clients, cohort, rounds, constant_rate(0.05))
    server_context = ServerContext(space.digest, space.size, space.trained, network.width, network.classes)
    state, engine, seconds = start(algorithm, space.gather(network), space.trained), Batched(algorithm, context), []
    for _ in range(rounds):
        began = time.perf_counter()
        state, _ = run_round(algorithm, federation, state, engine, server_context)
        seconds.append(time.perf_counter() - began)
    return {"seconds": min(seconds), "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def mixing(clients: int, cohort: int, length: int) -> dict[str, float]:
    """One mixing round of a cohort whose models lie on a shelf, beside the least time."""
    torch.set_num_threads(1)
    peak = measure_roofline()
    anchor = torch.zeros(length)
    shown = [torch.randn(64, 64, generator=torch_stream(0, "shown", k)) + k / cohort for k in range(cohort)]
    update = 1e-3 * torch.randn(length, generator=torch_stream(0, "update"))
    with tempfile.TemporaryDirectory(dir=".") as folder:
        personal_store, seconds = PersonalStore.create(Path(folder) / "shelf", length), []
        chosen = [i * clients // cohort for i in range(cohort)]
        for round in range(4):
            models = [personal_store.get(k, anchor) for k in chosen]

            def offsets(piece: slice, models: list[torch.Tensor] = models) -> torch.Tensor:
                found = torch.empty(len(models), piece.stop - piece.start)
                for row, model in zip(found, models, strict=True):
                    torch.add(model[piece], update[piece], out=row)
                return found

            began = time.perf_counter()
            matrix = mixing_matrix(crsm(shown).double())
            personal_store = personal_store.renewed(round, chosen, blended(anchor, offsets, matrix), True)
            seconds.append(time.perf_counter() - began)
        row, written = memoryview(update.numpy()).cast("B"), []
        for _ in range(3):
            began = time.perf_counter()
            with (Path(folder) / "plain").open("wb") as file:
                for _ in range(cohort):
                    file.write(row)
            written.append(time.perf_counter() - began)
    moved = 4.0 * length * cohort * 3  # read, stack, write
    least = peak.seconds(2.0 * cohort * (cohort * length + 64**3 + cohort * 64 * 64), moved)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    # The first round reads no model from the shelf: nobody has one yet.
    return {"seconds": min(seconds[1:]), "least": least, "written": min(written), "megabytes": memory}


def edit(clients: int, cohort: int, size: int) -> dict[str, float]:
    """What a round of a sparse edit costs beside the network's own passes."""
    torch.set_num_threads(1)
    shapes = [*[(384, 384)] * 4, (1536, 384), (384, 1536)] * 12
    network, total = nn.ParameterList(torch.zeros(shape) for shape in shapes), sum(a * b for a, b in shapes)
    draw, rule, parts = torch_stream(0, "edit"), sgdm(0.9), []
    for context, (a, b) in enumerate(shapes):
        index = torch.randperm(a * b, generator=draw)[: round(size * a * b / total)].sort().values
        parts.append(Part(str(context), (a, b), index))
    space = EditSpace(tuple(parts))
    bound, vector, seconds = space.bind(network), torch.zeros(space.size), []  # type: ignore[arg-type]
    gradient = 1e-3 * torch.randn(space.trained, generator=draw)
    for _ in range(4):
        began, updates = time.perf_counter(), []
        for _ in range(cohort):
            bound.load(vector)
            state = rule.init(space.trained)
            for _ in range(4):
                rule.step(bound.values, gradient.clone(), state, 1e-3)
                bound.push()
            updates.append(bound.values - vector)
        vector = vector + weighted_mean(updates, torch.ones(cohort))
        seconds.append(time.perf_counter() - began)
    return {"seconds": min(seconds), "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def secure(clients: int, cohort: int, size: int) -> dict[str, float]:
    """Seconds of one secure sum by stage: of all its clients together, and of the server."""
    torch.set_num_threads(1)
    segments = weighted_segments(size, 8.0)
    plan = Plan("scale", 0, tuple(range(cohort)), segments, degree=min(40, cohort - 2))
    members = {k: SecureClient(plan, k, Identity.fresh()) for k in plan.clients}
    update = 1e-2 * torch.randn(size, generator=torch_stream(0, "secure"))
    spent: dict[str, float] = {}

    def words(k: int) -> np.ndarray:
        return plan.ring.encode(weighted_input(update, 0.5), rounding(0, plan, k))

    def ask(stage: str, outbox: Mapping[int, Any]) -> dict[int, Any]:
        began = time.perf_counter()
        here = {k: data for k, data in outbox.items() if stage != "masked" or k % 20}
        found = {k: members[k].answer(stage, data, partial(words, k)) for k, data in here.items()}
        spent[stage] = time.perf_counter() - began
        return found

    began = time.perf_counter()
    result = drive(SecureServer(plan), ask)
    total = time.perf_counter() - began
    mean, _, _ = weighted_mean_of(result)
    assert torch.allclose(mean, update, atol=1e-5), "the sum is not that of the survivors"
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    stages = {f"clients: {stage}": seconds for stage, seconds in spent.items()}
    return {"seconds": total, "megabytes": memory, **stages, "server": total - sum(spent.values())}


def points(small: bool) -> dict[str, list[tuple[int, int, int]]]:
    """What is measured: (clients, cohort, size) by curve."""
    if small:
        return {
            "head against K": [(k, 20, 32) for k in (100, 1000)],
            "head against the cohort": [(1000, m, 32) for m in (10, 40)],
            "head against d": [(1000, 20, d) for d in (32, 128)],
            "mixing against d": [(100, 10, d) for d in (1000, 10_000)],
            "mixing against the cohort": [(100, m, 1000) for m in (5, 20)],
            "edit against k": [(10, 2, k) for k in (10_000, 100_000)],
            "secure against the cohort": [(m, m, 1000) for m in (10, 40)],
        }
    return {
        "head against K": [(k, 1000, 384) for k in (1000, 30_000, 1_000_000)],
        "head against the cohort": [(100_000, m, 384) for m in (10, 100)],
        "head against d": [(100_000, 100, d) for d in (96, 1536)],
        "mixing against d": [(1000, 10, d) for d in (100_000, 11_200_000)],
        "mixing against the cohort": [(1000, m, 100_000) for m in (10, 1000)],
        "edit against k": [(100, 10, k) for k in (20_000, 2_000_000)],
        "secure against the cohort": [(m, m, 38_500) for m in (100, 1000)],
    }


def measure(small: bool, out: Path) -> dict[str, list[dict[str, float]]]:
    """Every point in a process of its own; what there is so far is always in the file."""
    found: dict[str, list[dict[str, float]]] = {}
    for name, some in points(small).items():
        found[name] = []
        for clients, cohort, size in some:
            overrides = [sys.executable, __file__, "--point", name.split()[0], *map(str, (clients, cohort, size))]
            done = subprocess.run(overrides, check=True, capture_output=True, text=True)
            row = {"clients": clients, "cohort": cohort, "size": size, **json.loads(done.stdout)}
            found[name].append(row)
            print(name, row, flush=True)
            out.write_text(json.dumps({"curves": found, "small": small}, indent=2))
    return found


def section(path: Path = OUT) -> str:
    """The result of the last run as Markdown."""
    found = json.loads(path.read_text())
    lines = [
        "## Scale",
        "",
        "Command: `python benchmarks/bench_scale.py`. One process a point, best of three rounds.",
        "",
    ]
    for name, rows in found["curves"].items():
        lines += [
            f"**{name}**",
            "",
            f"| K | cohort | {'k' if name.endswith(' k') else 'd'} | ms a round | peak MB | times the least | "
            "times writing its result |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in rows:
            ratio = f"{row['seconds'] / row['least']:.2f}" if "least" in row else ""
            sizes = f"{row['clients']:,} | {row['cohort']:,} | {row['size']:,}"
            file = f"{row['seconds'] / row['written']:.2f}" if "written" in row else ""
            lines.append(f"| {sizes} | {1e3 * row['seconds']:.1f} | {row['megabytes']:.0f} | {ratio} | {file} |")
        lines.append("")
        if any("server" in row for row in rows):
            stages = [key for key in rows[0] if key.startswith("clients: ")]
            lines += [f"| cohort | {' | '.join(stages)} | server | seconds in all |", "|---" * (len(stages) + 3) + "|"]
            for row in rows:
                each = " | ".join(f"{row[stage] / row['cohort'] * 1e3:.1f} ms each" for stage in stages)
                lines.append(f"| {row['cohort']:,} | {each} | {row['server']:.1f} s | {row['seconds']:.1f} |")
            lines.append("")
    first, last = found["curves"]["head against K"][0], found["curves"]["head against K"][-1]
    slower = last["seconds"] / first["seconds"]
    lines.append(
        f"{last['clients']:,} clients against {first['clients']:,}: a round takes {slower:.2f} "
        f"times as long and {last['megabytes'] / first['megabytes']:.2f} times the memory."
    )
    return "\n".join([*lines, "", "![Growth of the cost](scale.png)", ""])


def bars(path: Path = OUT) -> list[tuple[str, str, float, float, bool]]:
    """What was to be shown: workload, what, bar, found, reached."""
    curves = json.loads(path.read_text())["curves"]
    first, last = curves["head against K"][0], curves["head against K"][-1]
    slower, larger = last["seconds"] / first["seconds"], last["megabytes"] / first["megabytes"]
    mixed = curves["mixing against d"][-1]
    ratio = mixed["seconds"] / mixed["written"]
    clients = f"{last['clients']:,} clients, times {first['clients']:,}"
    return [
        ("Scale", f"seconds of a round with {clients} (about 1)", 1.1, slower, slower <= 1.1),
        ("Scale", f"memory with {clients} (at most)", 1.2, larger, larger <= 1.2),
        (
            "Scale",
            f"mixing {mixed['size']:,} weights, times writing them (at most)",
            1.2,
            ratio,
            ratio <= 1.2,
        ),
    ]


def draw(found: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Growth of time and memory from the least to the most of each curve, as bars: times its first point."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    axis = {"K": "clients", "cohort": "cohort", "d": "size", "k": "size"}
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
    grown = {name: rows[-1][axis[name.split()[-1]]] / rows[0][axis[name.split()[-1]]] for name, rows in found.items()}
    names = [f"{name}\n({times:,.0f} times as many)" for name, times in grown.items()]
    for panel, key in zip(panels, ("seconds", "megabytes"), strict=True):
        ratios = [rows[-1][key] / rows[0][key] / grown[name] for name, rows in found.items()]
        panel.barh(names, ratios, color="#475569")
        panel.axvline(1, color="#c2410c", linewidth=1)
        panel.set_xlabel(f"growth of the {key} over that of the size\n(1: in step, 0: none)")
    panels[0].invert_yaxis()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    """Measure one point, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--point", nargs=4, metavar=("KIND", "K", "COHORT", "SIZE"))
    given = parser.parse_args()
    if given.point:
        kind, *numbers = given.point
        print(json.dumps({"head": head, "mixing": mixing, "edit": edit, "secure": secure}[kind](*map(int, numbers))))
        return
    given.out.parent.mkdir(parents=True, exist_ok=True)
    found = measure(given.small, given.out)
    draw(found, given.out.with_suffix(".png"))
    print(section(given.out))


if __name__ == "__main__":
    main()
