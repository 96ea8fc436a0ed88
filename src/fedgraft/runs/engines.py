"""How a run's orders are carried out: here in one way or another, or on other machines."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol
from weakref import WeakSet

from torch import Tensor

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.context import ClientContext
from fedgraft.core.client_memory import ClientMemory
from fedgraft.core.messages import Request, Response
from fedgraft.engines.batched import Batched, batching_obstacle
from fedgraft.engines.choice import Choice, Wanted, choose_engine
from fedgraft.engines.in_process import InProcess
from fedgraft.engines.pool import Pool
from fedgraft.runs.setup import RunSetup
from fedgraft.server.example_counts import ExampleCounts
from fedgraft.server.secure_sum import Sums

log = logging.getLogger("fedgraft")


class Remote(Protocol):
    """An engine whose clients are on other machines, which must be told the edit space."""

    memory: dict[int, ClientMemory]
    sent: int
    received: int
    """Bytes of all messages so far, whatever for."""

    def open(self, run: str, tensors: Mapping[str, Tensor]) -> None: ...
    def exchange(self, requests: Sequence[Request]) -> Iterable[Response | tuple[int, Response | bytes | str]]: ...


AnyEngine = InProcess | Pool | Batched | Remote


class Engines:
    """Makes the engines of one run and ends their worker processes."""

    def __init__(self, setup: RunSetup, remote: Remote | None = None) -> None:
        self.setup, self.remote = setup, remote
        self._pools: WeakSet[Pool] = WeakSet()

    def preparing(self, context: ClientContext) -> AnyEngine:
        """An engine for what is asked before the first round; never batched."""
        return self.remote if self.remote is not None else self._make(self.setup.algorithm, context, preparing=True)

    def training(self, algorithm: Algorithm, context: ClientContext) -> AnyEngine:
        """The engine of the rounds, here."""
        choice = self.choice(algorithm, context)
        log.info("engine: %s, %s", "batched" if choice.mode == "batched" else "reference", choice.why)
        return self._make(algorithm, context)

    def _make(self, algorithm: Algorithm, context: ClientContext, preparing: bool = False) -> AnyEngine:
        choice = self.choice(algorithm, context, preparing)
        if choice.mode == "batched":
            return Batched(algorithm, context)
        if choice.mode == "in_process":
            return InProcess(algorithm, context)
        pool = Pool(algorithm, context, choice.workers, self.setup.config.rounds.deadline)
        self._pools.add(pool)
        return pool

    def choice(self, algorithm: Algorithm, context: ClientContext, preparing: bool = False) -> Choice:
        """How orders in this context are carried out."""
        config, setup = self.setup.config, self.setup
        wanted: Wanted = "reference" if preparing or config.engine == "flower-sim" else config.engine
        obstacle = batching_obstacle(algorithm, context) if wanted != "reference" else None
        on_cpu = setup.task.network.head.weight.device.type == "cpu"
        work = math.inf if preparing else self._work(algorithm, context)
        if context.examples.entry == setup.task.network.depth:
            work = 0.0
        return choose_engine(wanted, config.workers, obstacle, work, on_cpu, setup.federation.per_round)

    def _work(self, algorithm: Algorithm, context: ClientContext) -> float:
        """Multiply-adds of a round, at least: every image meets each weight behind its entry. 0: the head's alone."""
        network, rule, setup = self.setup.task.network, algorithm.local, self.setup
        entry = context.examples.entry
        met = sum(p.numel() for name, p in network.named_parameters() if network.block_of(name) >= entry)
        images = rule.batch_size * rule.steps_for(max(1, setup.task.data.total // setup.federation.clients))
        return float(met * images * setup.federation.per_round)

    def sums(self, context: ClientContext, clients: Sequence[int] | None = None) -> Sums:
        """What asks this run's clients (or these) for sums before the first round, hidden where the run hides them."""
        f, setup = self.setup.federation, self.setup
        exchange = self.preparing(context).exchange
        asking = Sums(
            exchange, f.run, f.founders if clients is None else clients, setup.task.network, setup.algorithm.privacy
        )
        asking.example_counts = ExampleCounts(setup.task.data.sizes_by_client(), dealt=setup.task.data.rows_known)
        return asking

    def close(self) -> None:
        """End the worker processes that are left."""
        for pool in list(self._pools):
            pool.close()
