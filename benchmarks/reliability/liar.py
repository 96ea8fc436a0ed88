"""One liar of ten under similarity weighting: how much it weighs, and what its lie costs the others.

Real small federations on digits: a small convolutional network learns from nothing, so a lie that counts shows at once.
The liar claims a perfect score wherever a client is asked for one and sends a poisoned change (engines/hostile). In a
second set of runs it also claims a billion examples; there the cap alone holds it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from benchmarks.reliability.outcome import Outcome, share
from fedgraft.config.load import load
from fedgraft.core.messages import Request, Response
from fedgraft.engines.attackers import Attacked
from fedgraft.metrics.evaluate import evaluate
from fedgraft.runs.engines import Engines
from fedgraft.runs.head_init import install_head
from fedgraft.runs.open_run import open_run
from fedgraft.runs.setup import setup_of
from fedgraft.server import sample as server
from fedgraft.server.example_counts import ExampleCounts
from fedgraft.server.round import run_round

CLIENTS, SEEDS = 10, (0, 1, 2)
ATTACKS = ("sign_flip", "gaussian")
OVERRIDES = [
    "data.source=digits",
    "data.image_size=16",
    "model.name=cnn",
    "model.head=random",
    "trainable.kind=everything",
    "partition.clients=10",
    "rounds.fraction=1.0",
    "local.steps=8",
    "local.batch_size=16",
    "local.lr=0.05",
    "algorithm.name=fedalign",
    'algorithm.layers=["block0", "block1"]',
    "algorithm.probe=64",
    "algorithm.keep=10",
    "algorithm.top=10",
    "workers=1",
]


class Boasting:
    """An engine whose client 0 claims the best score, and more examples than it has where `examples` says so."""

    def __init__(self, engine: Any, examples: int | None) -> None:
        self.engine, self.examples = engine, examples

    @property
    def memory(self) -> Any:
        """What clients keep."""
        return self.engine.memory

    def exchange(self, requests: Sequence[Request]) -> Iterator[Response]:
        """The replies, with the liar's claims."""
        for response in self.engine.exchange(requests):
            if response.client == 0:
                claimed = response.examples if self.examples is None else self.examples
                response = replace(response, examples=claimed, scalars=dict.fromkeys(response.scalars, 1.0))
            yield response


def federation(
    align: str, attack: str, rounds: int, *overrides: str, examples: int | None = None, believed: bool = False
) -> tuple[float, float]:
    """(test accuracy, largest weight of the liar) of one run; `attack` is empty for an honest one.

    With `believed`, the planted bug, the server takes any number of examples.
    """
    setup = setup_of(load(None, [*OVERRIDES, f"algorithm.align={align}", f"rounds.total={rounds}", *overrides]))
    network, tests = setup.task.network, setup.task.test_images
    with closing(Engines(setup)) as engines:
        install_head(setup, engines)
        opened = open_run(setup, engines)
        algorithm, space = setup.algorithm, opened.space
        federation_rules = setup.federation
        if believed:
            blind = replace(opened.server_context, example_counts=ExampleCounts())
            opened = replace(opened, server_context=blind)
            federation_rules = replace(federation_rules, largest=1)
        state = server.start(algorithm, space.gather(network), space.trained)
        engine = engines.training(algorithm, opened.context)
        if attack:
            engine = Boasting(Attacked(engine, frozenset({0}), attack), examples)  # type: ignore[arg-type, assignment]
        heaviest = 0.0
        for _ in range(rounds):
            state, summary = run_round(algorithm, federation_rules, state, engine, opened.server_context)
            clients = summary.record.get("clients", {"ids": []})
            if 0 in clients["ids"]:
                heaviest = max(heaviest, clients["weight"][clients["ids"].index(0)])
        opened.context.load_model(state.vector)
        return evaluate(network, tests, torch.arange(len(tests))).accuracy, heaviest


def compare(
    align: str, attack: str, rounds: int, benign: Sequence[float], examples: int | None = None, believed: bool = False
) -> dict[str, float]:
    """Over the seeds: the liar's largest weight, the mean accuracy, and the largest loss against the honest run."""
    runs = [
        federation(align, attack, rounds, f"seed={seed}", examples=examples, believed=believed)
        for seed in SEEDS[: len(benign)]
    ]
    lost = max(100 * (fair - found) for fair, (found, _) in zip(benign, runs, strict=True))
    mean = 100 * sum(found for found, _ in runs) / len(runs)
    return {"weight": max(weight for _, weight in runs), "accuracy": mean, "lost": lost}


def _said(one: dict[str, float]) -> str:
    return f"weight {one['weight']:.3f}, {one['accuracy']:.1f} %, at most {one['lost']:.1f} points lost"


def liar(scale: float) -> Outcome:
    """Scores by server and by client, honest and under each attack; and without the cap on a weight."""
    rounds, seeds = share(30, scale, 6), SEEDS if scale >= 1 else SEEDS[:1]
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("FEDGRAFT_CACHE", cache)
        fair = [federation("server", "", rounds, f"seed={seed}")[0] for seed in seeds]
        lied = {attack: compare("server", attack, rounds, fair) for attack in ATTACKS}
        boast = compare("server", "sign_flip", rounds, fair, examples=10**9)
        own = max(federation("client", "sign_flip", share(30, scale, 3), f"seed={s}", examples=10**9)[1] for s in seeds)
        bare = compare("server", "sign_flip", rounds, fair, examples=10**9, believed=True)
    heaviest = max(boast["weight"], own, *(one["weight"] for one in lied.values()))
    worst = max(one["lost"] for one in lied.values())
    return Outcome(
        heaviest <= 2 / CLIENTS + 1e-9 and worst <= 6,
        f"scores by the server (honest {100 * sum(fair) / len(fair):.1f} %): "
        + "; ".join(f"{attack}: {_said(one)}" for attack, one in lied.items())
        + f"; sign_flip and a billion claimed examples: {_said(boast)}"
        + f"; the same with a perfect score of its own (scores by clients): weight {own:.3f}"
        + f" ({rounds} rounds, seeds {', '.join(map(str, seeds))})",
        {"any claim believed, a billion claimed examples": _said(bare)},
        bare["weight"] > 2 / CLIENTS and bare["lost"] > 6,
        {"rounds": rounds, "honest": fair, "server": lied, "boast": boast, "client_weight": own, "uncapped": bare},
    )
