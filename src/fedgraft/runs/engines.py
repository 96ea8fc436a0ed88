"""The engines of a run: which one carries out its requests, on this machine or on others."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Protocol
from weakref import WeakSet

from torch import Tensor

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.context import ClientContext
from fedgraft.core.client_memory import ClientMemory
from fedgraft.core.device import Device
from fedgraft.core.messages import Request, Response
from fedgraft.engines.batched import Batched, batching_obstacle
from fedgraft.engines.choice import NO_PACKS, Choice, Packing, Wanted, choose_engine
from fedgraft.engines.in_process import InProcess
from fedgraft.engines.packed import Packed, packing_obstacle
from fedgraft.engines.pool import Pool
from fedgraft.local.forward_memory import clients_at_once
from fedgraft.runs.setup import RunSetup
from fedgraft.server.example_counts import ExampleCounts
from fedgraft.server.secure_sum import Sums

log = logging.getLogger("fedgraft")


class Remote(Protocol):
    """An engine whose clients are on other machines, to which the tensors of the edit space must be sent."""

    memory: MutableMapping[int, ClientMemory]
    sent: int
    received: int
    """Bytes of all messages so far, whatever for."""

    def open(self, run: str, tensors: Mapping[str, Tensor]) -> None: ...
    def present_clients(self) -> list[int]: ...
    def exchange(self, requests: Sequence[Request]) -> Iterable[Response | tuple[int, Response | bytes | str]]: ...


AnyEngine = InProcess | Pool | Batched | Packed | Remote


class Engines:
    """Makes the engines of one run and ends their worker processes."""

    def __init__(self, setup: RunSetup, remote: Remote | None = None) -> None:
        self.setup = setup
        self.remote = remote
        self._pools: WeakSet[Pool] = WeakSet()
        self._sums: list[Sums] = []

    def preparing(self, context: ClientContext) -> AnyEngine:
        """Return the engine for requests before the first round: the remote one, or a new one here, never batched."""
        if self.remote is not None:
            return self.remote
        return self._make(self.setup.algorithm, context, preparing=True)

    def training(self, algorithm: Algorithm, context: ClientContext) -> AnyEngine:
        """Return a new engine for the rounds, where all clients are on this machine; log which one and why."""
        choice = self.choice(algorithm, context)
        name = "reference"
        if choice.mode in ("batched", "packed"):
            name = choice.mode
        log.info("engine: %s, %s", name, choice.why)
        return self._make(algorithm, context)

    def _make(self, algorithm: Algorithm, context: ClientContext, preparing: bool = False) -> AnyEngine:
        """Return a new engine of the kind that `choice` chooses; a pool is remembered so that `close` ends its workers.

        `preparing`: it is for requests before the first round.
        """
        choice = self.choice(algorithm, context, preparing)
        if choice.mode == "batched":
            return Batched(algorithm, context)
        if choice.mode == "packed":
            return Packed(algorithm, context, choice.pack, choice.workers)
        if choice.mode == "in_process":
            return InProcess(algorithm, context)
        pool = Pool(algorithm, context, choice.workers, self.setup.config.rounds.deadline, self.setup.devices.all)
        self._pools.add(pool)
        return pool

    def choice(self, algorithm: Algorithm, context: ClientContext, preparing: bool = False) -> Choice:
        """Return which engine carries out requests in this context, and why; `preparing`: before the first round."""
        config = self.setup.config
        network = self.setup.task.network
        wanted: Wanted = "reference"
        if not preparing and config.engine != "flower-sim":
            wanted = config.engine
        obstacle = None
        if wanted != "reference":
            obstacle = batching_obstacle(algorithm, context)
        if context.examples.entry == network.depth:
            work = 0.0
        elif preparing:
            work = math.inf
        else:
            work = self._work(algorithm, context)
        accelerators = 0
        if not Device.of(network).is_host:
            accelerators = len(self.setup.devices.all)
        packing = NO_PACKS
        if wanted == "auto" and obstacle is not None and config.pack != "off":
            packing = self._packing(algorithm, context)
        per_round = self.setup.federation.per_round
        return choose_engine(wanted, config.workers, obstacle, work, accelerators, per_round, packing)

    def _packing(self, algorithm: Algorithm, context: ClientContext) -> Packing:
        """Return whether clients of this context can be packed, and how many the device's memory holds."""
        batch = min(algorithm.local.batch_size, self.setup.task.data.largest)
        parameters = 0
        for part in context.space.parts:
            parameters += part.numel  # of a mask the whole tensor is stacked
        fitting = clients_at_once(context.network, context.examples.entry, batch, parameters)
        return Packing(self.setup.config.pack, packing_obstacle(algorithm, context), fitting)

    def _work(self, algorithm: Algorithm, context: ClientContext) -> float:
        """Return the least multiply-adds of a round: each image is multiplied with every weight behind its entry."""
        network = self.setup.task.network
        federation = self.setup.federation
        entry = context.examples.entry
        weights = 0
        for name, parameter in network.named_parameters():
            if network.block_of(name) >= entry:
                weights += parameter.numel()
        images_per_client = max(1, self.setup.task.data.total // federation.clients)
        images = algorithm.local.batch_size * algorithm.local.steps_for(images_per_client)
        return float(weights * images * federation.per_round)

    def sums(self, context: ClientContext, clients: Sequence[int] | None = None) -> Sums:
        """Return the `Sums` that requests sums from these clients (None: all founders) before the first round.

        It uses secure aggregation where the run does. Who was lost in an earlier hidden sum is not asked again: the
        others' ledgers refuse a sum about the same rows that is over more clients.
        """
        setup = self.setup
        if clients is None:
            clients = setup.federation.founders
        if setup.algorithm.privacy.collects_sum:
            lost = {client for sums in self._sums for client in sums.lost}
            clients = [client for client in clients if client not in lost]
        exchange = self.preparing(context).exchange
        sums = Sums(exchange, setup.federation.run, clients, setup.task.network, setup.algorithm.privacy)
        sums.example_counts = ExampleCounts(setup.task.data.sizes_by_client(), dealt=setup.task.data.rows_known)
        self._sums.append(sums)
        return sums

    def presence(self) -> list[str]:
        """Return the words of a cached result for who can be asked now; [] where all clients are on this machine.

        A sum over the nodes that were there in an earlier run is another sum than one over those of today.
        """
        if self.remote is None:
            return []
        return ["present", *map(str, self.remote.present_clients())]

    def close(self) -> None:
        """End the worker processes that are left."""
        for pool in list(self._pools):
            pool.close()
