"""A search for combinations: sequences of allowed orders from which one client's contribution can be solved for.

Every order goes through the rules that a client has: the written policy, the checks of the request, the derived plan,
the ledger. Only the arithmetic of the protocol is left out: which clients would send their masked input and sign which
list of survivors follows from the rules alone (`tests/unit/test_combinations.py` compares that with the real protocol).

What an opened sum tells is one equation: the sum over its clients of what each holds about some rows. To be on the safe
side every question about the same rows counts as the same quantity, whatever the action: statistics, gradients of a
head, scores. A contribution is solved for if a single unknown lies in the span of the equations.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from tests.support.hostile import CLIENTS, FOUR, World
from tests.support.tiny import tiny
from tests.support.toy import CLASSES, WIDTH
from torch import Tensor

from fedgraft.algorithms.algorithm import secure_segments
from fedgraft.client.action import SumScope
from fedgraft.client.actions import ACTIONS
from fedgraft.client.authorize import authorize, check_question, rows_of
from fedgraft.client.context import ClientContext
from fedgraft.client.ledger import DataLedger
from fedgraft.client.secure import check_plan
from fedgraft.config.agreement import safe_policy
from fedgraft.config.build import build_algorithm
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Request, Scalar
from fedgraft.core.space import select
from fedgraft.privacy.secagg.binding import request_digest
from fedgraft.privacy.secagg.client import as_tensor
from fedgraft.privacy.secagg.plan import Plan
from fedgraft.privacy.secagg.secure_sum import series

NAMES = ("head.weight\nhead.bias", "head.bias\nhead.weight", "head.weight\nhead.bias\nhead.bias")
SHARES = (1.0, 0.9999, 0.5)
HIDDEN = (
    "train",
    "statistics",
    "class_sums",
    "class_counts",
    "head_gradient",
    "gradient",
    "fisher_scores",
    "head_counts",
    "counts",
    "scores",
)
CLEAR = ("count", "evaluate", "own_mask", "statistics", "gradient", "train")
"""Actions that are asked for in the clear."""


@dataclass(frozen=True)
class Order:
    """One thing that the server asks of a set of clients."""

    action: str
    hidden: bool
    clients: tuple[int, ...]
    lost: tuple[int, ...] = ()
    """Clients that the server calls lost after their input came."""
    settings: tuple[tuple[str, Scalar], ...] = ()
    variant: int = 0
    """Which head or model it is about."""
    division: str = "a"
    """The config that it belongs to: another one divides the same images in another way."""

    @property
    def words(self) -> str:
        """The order in a few words, without its clients."""
        told = ", ".join(f"{name}={value!r}" for name, value in self.settings)
        return f"{self.action}{'' if self.hidden else ' in the clear'}({told})"


def draw_order(dice: random.Random) -> Order:
    """Return a random order: any action, any settings, all clients or some."""
    hidden = dice.random() < 0.8
    action = dice.choice(HIDDEN if hidden else CLEAR)
    settings: dict[str, Scalar] = {}
    if action in ("gradient", "fisher_scores", "own_mask"):
        settings = {"names": dice.choice(NAMES), "draw": dice.choice((0, 1)), "share": dice.choice(SHARES)}
    if action in ("fisher_scores", "own_mask"):
        settings |= {"estimator": "batched_gradient", "labels": "true", "batch": 8}
    if action == "head_counts":
        settings = {"models": 1}
    if action in ("counts", "scores", "count"):
        settings = {"split": dice.choice(("validation", "test"))}
    if action == "evaluate":
        settings = {"scores": True}
    size = dice.choice((5, 5, 4, 4, 3, 2))
    clients = tuple(sorted(dice.sample(CLIENTS, size)))
    lost = tuple(dice.sample(clients, dice.choice((0, 0, 0, 1)))) if hidden else ()
    variant = dice.choice((0, 0, 1))
    division = dice.choice(("a", "a", "a", "b"))
    return Order(action, hidden, clients, lost, tuple(settings.items()), variant, division)


@dataclass
class Rules:
    """Five clients with their ledgers under the written policy, or under the rules as they were before the ledger."""

    old: bool = False
    world: World = field(init=False)
    memories: dict[int, Any] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    """The next number of each series of sums; the server counts as it likes, so it counts right."""
    asked: dict[int, dict[str, set[str]]] = field(default_factory=dict)
    """Before the ledger: by client and action the digests of the requests that it answered, and"""
    cohorts: dict[int, dict[str, set[int]]] = field(default_factory=dict)
    """the clients of the latest sum of this action."""

    def __post_init__(self) -> None:
        self.world = shared_world(self.old)
        self.reset()

    def reset(self) -> None:
        """Forget all that was answered."""
        self.memories = {client: {} for client in CLIENTS}
        self.numbers, self.asked, self.cohorts = {}, {}, {}

    def equations(self, order: Order) -> list[tuple[str, tuple[int, ...]]]:
        """Return what the answers to an order tell: (quantity, clients whose contributions are added up)."""
        requests = {client: self._request(order, client) for client in order.clients}
        if order.hidden:
            return self._sum(order, requests)
        told = []
        for client, request in requests.items():
            try:
                memory = self.memories[client]
                self.memories[client] = authorize(request, self.world.algorithm, self._context(order), memory)
            except FedgraftError:
                continue
            if order.action == "evaluate" and not self.old:
                continue  # the number of right answers, and no contribution
            told.append((self._quantity(order, request), (client,)))
        return told

    def _sum(self, order: Order, requests: Mapping[int, Request]) -> list[tuple[str, tuple[int, ...]]]:
        """Return the equation of a hidden sum; none if it is not opened."""
        world, context = self.world, self._context(order)
        first = next(iter(requests.values()))
        action = ACTIONS[order.action]
        if len(order.clients) < 2:
            return []
        scope = SumScope(first.settings, context.network, world.algorithm, context.sent, context.space.trained)
        assert action.layout is not None
        segments = (
            secure_segments(world.algorithm, context.sent, context.space.trained, first.settings)
            if order.action == "train"
            else action.layout(scope)
        )
        try:
            plan = world.algorithm.privacy.plan_of_sum(
                series(first.run, order.action),
                first.round,
                order.clients,
                segments,
                action.in_rounds,
                request_digest(first),
            )
        except FedgraftError:
            return []
        ready = [c for c in order.clients if self._accepts(lambda c=c: self._begins(order, requests[c], plan, c))]
        if len(ready) < plan.fewest_survivors:
            return []
        ready = [c for c in ready if self._accepts(lambda c=c: self._works(order, requests[c], plan, c))]
        alive = [client for client in ready if client not in order.lost]
        if len(alive) < plan.fewest_survivors:
            return []
        signed = [c for c in alive if self._accepts(lambda c=c: self._signs(order, requests[c], plan, c, alive))]
        if len(signed) < plan.needed:
            return []
        return [(self._quantity(order, first), tuple(alive))]

    @staticmethod
    def _accepts(attempt: Any) -> bool:
        try:
            attempt()
        except FedgraftError:
            return False
        return True

    def _begins(self, order: Order, request: Request, plan: Plan, client: int) -> None:
        """Stage "keys": policy, plan, and the set of clients."""
        context = self._context(order)
        keys = replace(request, action="secure.keys", vector=None, auxiliary={"plan": as_tensor(plan.to_bytes())})
        authorize(keys, self.world.algorithm, context, self.memories[client])
        check_plan(plan, keys, self.world.algorithm, context)
        if order.action == "train":
            return
        if self.old:
            earlier = self.cohorts.get(client, {}).get(order.action)
            if earlier is not None and not set(order.clients) <= earlier:
                raise FedgraftError("E-OLD-COHORT", "clients that the sum before had not")
            if request_digest(request) in self.asked.get(client, {}).get(order.action, set()):
                raise FedgraftError("E-OLD-REPEAT", "asked before")
            return
        ledger = DataLedger.of(self.memories[client])
        ledger.require_same_set(rows_of(keys, ACTIONS[order.action], context), plan.clients, whole=False)

    def _works(self, order: Order, request: Request, plan: Plan, client: int) -> None:
        """Stage "masked": whether the request fits, and the question."""
        context = self._context(order)
        masked = replace(request, action="secure.masked")
        authorize(masked, self.world.algorithm, context, self.memories[client])
        if order.action == "train" or self.old:
            return
        ledger = DataLedger.of(self.memories[client])
        action = ACTIONS[order.action]
        question = check_question(masked, action, self.world.algorithm, context, ledger, plan.digest)
        ledger.hold_question(rows_of(masked, action, context), question, plan.digest, masked.run)
        self.memories[client] = ledger.write(self.memories[client])

    def _signs(self, order: Order, request: Request, plan: Plan, client: int, alive: Sequence[int]) -> None:
        """Stage "consistency": the survivors."""
        if order.action == "train":
            return
        if self.old:
            self.cohorts.setdefault(client, {})[order.action] = set(order.clients)
            self.asked.setdefault(client, {}).setdefault(order.action, set()).add(request_digest(request))
            return
        ledger = DataLedger.of(self.memories[client])
        rows = rows_of(request, ACTIONS[order.action], self._context(order))
        ledger.require_same_set(rows, alive, whole=True)
        ledger.record_set(rows, alive)
        ledger.record_held_question(rows, plan.digest)
        self.memories[client] = ledger.write(self.memories[client])

    def _context(self, order: Order) -> ClientContext:
        return replace(self.world.context, division=order.division)

    def _request(self, order: Order, client: int) -> Request:
        """Return the request of an order to one client, with the next number of its series."""
        world = self.world
        action = ACTIONS[order.action]
        name = series(world.run, order.action)
        if order.clients.index(client) == 0:
            self.numbers[name] = self.numbers.get(name, -1) + 1
        settings: dict[str, Scalar] = dict(order.settings)
        if order.hidden:
            settings["sums"] = order.action
        if order.action == "train":
            honest = world.request(client, settings={**settings, "largest": 20})
            return replace(honest, round=self.numbers[name], vector=honest.vector)
        vector = None
        if action.model == "all_weights":
            vector = whole_model(world) + order.variant
        elif action.model == "edit_space" or order.action == "count":
            vector = world.toy.state.vector + order.variant
        auxiliary: dict[str, Tensor] = {}
        if order.action == "head_gradient":
            auxiliary["head"] = torch.full((CLASSES, WIDTH + 1), float(order.variant), dtype=torch.float64)
        if order.action == "head_counts":
            auxiliary["heads"] = torch.full((1, CLASSES, WIDTH + 1), float(order.variant), dtype=torch.float64)
        space = order.action if order.hidden else world.toy.space.digest
        return Request(world.run, self.numbers[name], client, order.action, space, vector, auxiliary, settings)

    def _quantity(self, order: Order, request: Request) -> str:
        """Return the name of what a client adds: the same for all questions about the same rows, another each round."""
        if order.action == "train":
            return f"round {request.round} {order.hidden}"
        rows = rows_of(request, ACTIONS[order.action], self._context(order))
        share = float(request.settings.get("share", 1.0))
        if rows.split == "train" and share == 0.5:
            return f"train, half of draw {request.settings['draw']}"
        return rows.split


def whole_model(world: World) -> Tensor:
    network = world.context.network
    return select(network, lambda name: True, buffers=False).gather(network)


def shared_world(old: bool) -> World:
    """Return a toy federation under the policy that is written for a config that asks for as much as it can."""
    config = tiny("privacy.aggregation=secure", "partition.clients=5", "local.lr=0.1", "model.head=probe")
    world = World("secure")
    policy = safe_policy(config, build_algorithm(config), ("evaluate",))
    # The union of what written policies allow, so that no rule but those about combinations is in the way.
    policy = replace(
        policy,
        config="toy",
        actions=(),
        rounds=None,
        sums=None,
        rounds_per_day=None,
        queries_per_day=None,
        least_images=0,
        cohort=2,
        in_the_clear=("evaluate", "own_mask") if not old else ("evaluate", "own_mask", "count"),
    )
    world.context.policies = (policy,)
    return world


def solved(equations: Sequence[tuple[str, tuple[int, ...]]]) -> bool:
    """Return whether one client's contribution to one quantity follows from the equations, by linear algebra."""
    unknowns = sorted({(quantity, client) for quantity, clients in equations for client in clients})
    if not unknowns:
        return False
    matrix = np.zeros((len(equations), len(unknowns)))
    for row, (quantity, clients) in enumerate(equations):
        for client in clients:
            matrix[row, unknowns.index((quantity, client))] = 1
    rank = np.linalg.matrix_rank(matrix)
    single = np.eye(len(unknowns))
    return any(np.linalg.matrix_rank(np.vstack([matrix, row])) == rank for row in single)


def tells_a_client(orders: Sequence[Order], old: bool) -> bool:
    """Return whether these orders give one client away, under the rules in force or those before the ledger."""
    rules = Rules(old)
    equations: list[tuple[str, tuple[int, ...]]] = []
    for order in orders:
        equations += rules.equations(order)
    return solved(equations)


def search(sequences: int, seed: int, old: bool = False, longest: int = 4) -> tuple[list[tuple[Order, ...]], int]:
    """Return the sequences from which one client's contribution can be solved for, and how many orders were answered.

    A mask of a client's own (`own_mask`) is shown to the server by design, and is not counted.
    """
    dice = random.Random(seed)
    rules = Rules(old)
    found = []
    answered = 0
    for _ in range(sequences):
        rules.reset()
        orders = tuple(draw_order(dice) for _ in range(dice.randint(1, longest)))
        equations: list[tuple[str, tuple[int, ...]]] = []
        for order in orders:
            told = rules.equations(order)
            answered += bool(told)
            if order.action != "own_mask":
                equations += told
        if solved(equations):
            found.append(orders)
    return found, answered


ALL = (("names", NAMES[0]), ("draw", 0), ("share", 1.0))


def gradient(names: str = NAMES[0], draw: int = 0, share: float = 1.0) -> Order:
    return Order("gradient", True, FOUR, (), (("names", names), ("draw", draw), ("share", share)))


FIVE: dict[str, tuple[Order, ...]] = {
    "losses of chosen models in the clear": (Order("count", False, (1,), (), (("split", "validation"),)),),
    "confusion and histograms in the clear": (Order("evaluate", False, (1,), (), (("scores", True),)),),
    "statistics of five, gradients of a head over four": (
        Order("statistics", True, CLIENTS),
        Order("head_gradient", True, FOUR),
    ),
    "a gradient as another draw": (Order("gradient", True, CLIENTS, (), ALL), gradient(draw=1)),
    "a gradient as a share of nearly one": (Order("gradient", True, CLIENTS, (), ALL), gradient(share=0.9999)),
}
