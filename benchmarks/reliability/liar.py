"""One liar of ten under similarity weighting: how much it weighs, and what its lie costs the others.

Real small federations on digits with the nano backbone, the whole body moving. The liar claims a perfect score where
clients score themselves, a billion examples in any case, and sends a poisoned change (engines/hostile).
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
from fedgraft import server
from fedgraft.engines.hostile import Hostile
from fedgraft.experiment.build import Setup
from fedgraft.experiment.config import load
from fedgraft.experiment.step_zero import install_head
from fedgraft.local.evaluate import evaluate
from fedgraft.messages import Order, Reply
from fedgraft.round import run_round

CLIENTS = 10
ATTACKS = ("sign_flip", "gaussian")
WORDS = [
    "data.source=digits", "model.name=nano", "partition.clients=10", "rounds.fraction=1.0", "local.steps=4",
    "local.batch_size=16", "local.lr=0.02", "moves.kind=everything", "algorithm.name=fedalign", "algorithm.probe=128",
    "algorithm.keep=10", "algorithm.top=10",
]  # fmt: skip


class Boasting:
    """An engine whose client 0 claims the best score and more examples than all others together."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    @property
    def memory(self) -> Any:
        """What clients keep."""
        return self.engine.memory

    def exchange(self, orders: Sequence[Order]) -> Iterator[Reply]:
        """The replies, with the liar's claims."""
        for reply in self.engine.exchange(orders):
            if reply.client == 0:
                reply = replace(reply, examples=10**9, scalars=dict.fromkeys(reply.scalars, 1.0))
            yield reply


def federation(align: str, attack: str, rounds: int, *words: str) -> tuple[float, float]:
    """(test accuracy, largest weight of the liar) of one run; `attack` is empty for an honest one."""
    setup = Setup(load(None, [*WORDS, f"algorithm.align={align}", f"rounds.total={rounds}", *words]))
    with closing(setup):
        install_head(setup)
        setup.open()
        state = server.start(setup.algorithm, setup.space.gather(setup.network), setup.space.trained)
        engine = setup.engine()
        if attack:
            engine = Boasting(Hostile(engine, frozenset({0}), attack))  # type: ignore[arg-type, assignment]
        heaviest = 0.0
        for _ in range(rounds):
            state, summary = run_round(setup.algorithm, setup.federation, state, engine, setup.judge)
            clients = summary.record.get("clients", {"ids": []})
            if 0 in clients["ids"]:
                heaviest = max(heaviest, clients["weight"][clients["ids"].index(0)])
        setup.space.scatter(state.vector, setup.network)
        return evaluate(setup.network, setup.tests, torch.arange(len(setup.tests))).accuracy, heaviest


def liar(scale: float) -> Outcome:
    """Client-side and server-side scores, honest and under each attack; and without the cap on a weight."""
    rounds = share(20, scale, 2)
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("FEDGRAFT_CACHE", cache)
        honest = {align: federation(align, "", rounds)[0] for align in ("client", "server")}
        lied = {(align, attack): federation(align, attack, rounds) for align in honest for attack in ATTACKS}
        accuracy, weight = federation("client", "sign_flip", rounds, "algorithm.cap=1.0")
    drops = {key: 100 * (honest[key[0]] - found) for key, (found, _) in lied.items()}
    heaviest, worst = max(w for _, w in lied.values()), max(drops.values())
    said = "; ".join(
        f"{align} scores, {attack}: weight {w:.3f}, accuracy {100 * a:.1f} % (honest {100 * honest[align]:.1f} %)"
        for (align, attack), (a, w) in lied.items()
    )
    return Outcome(
        heaviest <= 2 / CLIENTS + 1e-9 and worst <= 6,
        f"{said}; {rounds} rounds, seed 0",
        {"no cap on a weight": f"weight {weight:.3f}, accuracy {100 * accuracy:.1f} %"},
        weight > 2 / CLIENTS,
        {"rounds": rounds, "honest": honest, "heaviest": heaviest, "worst_drop": worst},
    )
