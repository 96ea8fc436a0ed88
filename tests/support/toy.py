"""A federation small enough to follow by hand: a tiny network with blocks, synthetic points, a few clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedgraft.algorithms.algorithm import Algorithm, vary
from fedgraft.client.context import ClientContext, shared_and_private
from fedgraft.core.space import EditSpace, select
from fedgraft.core.state import Federation, ServerState
from fedgraft.edit.trainable import TrainableSetup, layer_ranges
from fedgraft.engines.in_process import InProcess
from fedgraft.local.schedules import constant_rate
from fedgraft.server.collect import ServerContext
from fedgraft.server.example_counts import ExampleCounts
from fedgraft.server.round import run_round
from fedgraft.server.sample import start

WIDTH, CLASSES, INPUT = 6, 3, 5


class ToyNetwork(nn.Module):
    """Two residual blocks of one linear layer and a norm each, a final norm, a head."""

    def __init__(self, seed: int = 0, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.backbone = nn.ModuleDict(
            {
                "stem": nn.Linear(INPUT, WIDTH),
                "layers": nn.ModuleList([nn.Sequential(norm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]),
                "norm": nn.LayerNorm(WIDTH),
            }
        )
        self.head = nn.Linear(WIDTH, CLASSES)
        self.depth, self.width, self.classes = 2, WIDTH, CLASSES
        self.label_sets = False
        with torch.no_grad():
            for name, p in self.named_parameters():
                if "norm" not in name and p.ndim == 2:
                    p.copy_(torch.randn(p.shape, generator=generator) / p.shape[1] ** 0.5)
                elif p.ndim == 1 and name.endswith("bias"):
                    p.copy_(0.1 * torch.randn(p.shape, generator=generator))

    def features(self, inputs: Tensor, entry: int = 0, until: int | None = None) -> Tensor:
        until = self.depth if until is None else until
        if entry == until:
            return inputs
        x = self.backbone["stem"](inputs) if entry == 0 else inputs
        for block in self.backbone["layers"][entry:until]:
            x = x + torch.tanh(block(x))
        return self.backbone["norm"](x) if until == self.depth else x

    def forward(self, inputs: Tensor, entry: int = 0) -> Tensor:
        return self.head(self.features(inputs, entry))

    def block_of(self, name: str) -> int:
        if name.startswith("head"):
            return self.depth + 1
        if "layers" in name:
            return int(name.split(".")[2])
        return self.depth if "norm" in name else -1

    def default_probe_layers(self) -> tuple[str, ...]:
        return ("block0", "block1", "block2")

    def activations(self, inputs: Tensor, layers: Any, entry: int = 0) -> dict[str, Tensor]:
        return {name: self.features(inputs, entry, int(name.removeprefix("block"))) for name in layers}


def batch_norm_network() -> ToyNetwork:
    """The toy with batch normalisation in its blocks: running statistics that travel, but are not trained."""
    return ToyNetwork(norm=nn.BatchNorm1d)


class ToyExamples:
    """Points around one centre per class."""

    entry = 0

    def __init__(self, count: int = 120, seed: int = 1) -> None:
        g = torch.Generator().manual_seed(seed)
        centres = 2 * torch.randn(CLASSES, INPUT, generator=torch.Generator().manual_seed(0))
        self.labels = torch.arange(count) % CLASSES
        self.inputs = centres[self.labels] + torch.randn(count, INPUT, generator=g)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return self.inputs[rows]


def client_rows(k: int) -> Tensor:
    """Clients of different sizes, so that weights matter."""
    return torch.arange(120)[k::6][: 20 - 2 * k]


def opened_by(algorithm: Algorithm, network: ToyNetwork) -> TrainableSetup:
    """What the algorithm trains, where that needs nobody to be asked; else all weights."""
    kind = algorithm.trainable
    return TrainableSetup(select(network, lambda n: True)) if kind.scores_data else kind.open(network, None)


class Toy:
    """A toy federation, ready to run rounds of any algorithm."""

    def __init__(
        self,
        algorithm: Algorithm,
        space: EditSpace | None = None,
        clients: int = 5,
        per_round: int = 3,
        network: Callable[[], ToyNetwork] = ToyNetwork,
        **federation: Any,
    ) -> None:
        self.network = network()
        opened = opened_by(algorithm, self.network) if space is None else TrainableSetup(space)
        algorithm = algorithm if opened.aggregate is None else vary(algorithm, aggregate=opened.aggregate)
        self.space, private = shared_and_private(algorithm, self.network, opened.space)
        self.examples, self.tests = ToyExamples(), ToyExamples(60, seed=2)
        private_start = None if private is None else private.gather(self.network)
        self.context = ClientContext(
            self.network,
            self.space,
            self.examples,
            client_rows,
            7,
            self.tests,
            lambda k: torch.arange(k, 60, 6),
            private,
            private_start,
            probe=ToyExamples(64, seed=3),
            origin=self.space.gather(self.network),
            sends_buffers=opened.sends_buffers,
            held=lambda k: torch.arange(k, 120, 40),
        )
        self.algorithm = algorithm
        options: dict[str, Any] = {
            "run": "toy",
            "seed": 7,
            "rounds": 10,
            "schedule": constant_rate(0.05),
            "largest": 20,
        } | federation
        self.federation = Federation(clients=clients, per_round=per_round, **options)
        self.engine = InProcess(algorithm, self.context)
        self.state = start(algorithm, self.space.gather(self.network), self.space.trained)
        example_counts = ExampleCounts({k: len(client_rows(k)) for k in range(clients)} if clients <= 6 else None)
        sizes = self.context.sent, self.space.trained, WIDTH, CLASSES
        self.server_context = ServerContext(
            self.space.digest,
            *sizes,
            opened.active,
            self.context.origin,
            example_counts=example_counts,
            layers=layer_ranges(self.network, self.space, algorithm.weighting.options.get("layers", ())),
        )

    def run(self, rounds: int = 3) -> ServerState:
        """So many rounds; returns the state."""
        for _ in range(rounds):
            self.state, self.summary = run_round(
                self.algorithm, self.federation, self.state, self.engine, self.server_context
            )
        return self.state

    def loss(self) -> float:
        """The common model's loss on the clients' data."""
        from fedgraft.metrics.evaluate import evaluate

        self.space.scatter(self.state.vector, self.network)
        return evaluate(self.network, self.examples, torch.arange(120)).loss


def snapshot(network: nn.Module) -> dict[str, Tensor]:
    """Copies, not views: `state_dict` aliases live tensors."""
    return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}


def random_mask(network: nn.Module, density: float = 0.3, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {n: torch.rand(p.shape, generator=g) < density for n, p in network.named_parameters()}
