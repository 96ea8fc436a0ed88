"""The federation of the references, run through fedgraft: unequal clients, two networks, three rounds."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.references.draws import Draws
from tests.references.loops.local import Local
from tests.references.loops.problem import Outcome, Problem, State
from tests.support.toy import CLASSES, WIDTH, ToyExamples, ToyNetwork
from torch import Tensor, nn

import fedgraft as fg
from fedgraft.client.actions import action_named
from fedgraft.client.context import shared_and_private
from fedgraft.core.space import EditSpace, masked, select
from fedgraft.edit.trainable import TrainableSetup, layer_ranges
from fedgraft.engines.in_process import InProcess
from fedgraft.local.optimizers import adamw, sgdm
from fedgraft.local.schedules import constant_rate
from fedgraft.server.example_counts import ExampleCounts
from fedgraft.server.secure_sum import Sums

SEED = 144
"""Some clients return, one of them after a pause; one has five examples and one a single class."""
ROUNDS = 3
RATE = 0.05
HOLDINGS = ((24, 2, 2), (1, 9, 9), (2, 2, 1), (0, 0, 11), (6, 13, 0), (3, 3, 7), (4, 0, 8))
"""Examples of each class by client: 5 to 28 in all, from one class to three."""
PROBE = ToyExamples(64, seed=3)


class LayerNormNetwork(ToyNetwork):
    """The toy with layer norms; `block0` and `block1` are the outputs of its two blocks."""

    def default_probe_layers(self) -> tuple[str, ...]:
        return ("block0", "block1")

    def activations(self, inputs: Tensor, layers: Any, entry: int = 0) -> dict[str, Tensor]:
        activations = {}
        for name in layers:
            activations[name] = self.features(inputs, entry, int(name.removeprefix("block")) + 1)
        return activations


class BatchNormNetwork(LayerNormNetwork):
    """The same with batch norms in its blocks."""

    def __init__(self) -> None:
        super().__init__(norm=nn.BatchNorm1d)


NETWORKS: Mapping[str, type[LayerNormNetwork]] = {"layer norm": LayerNormNetwork, "batch norm": BatchNormNetwork}


def client_rows() -> list[Tensor]:
    """Return the rows of each client; rows of class c are c, c + 3, c + 6, ..."""
    dealt = [0] * CLASSES
    clients = []
    for counts in HOLDINGS:
        rows = []
        for label, count in enumerate(counts):
            for _ in range(count):
                rows.append(label + CLASSES * dealt[label])
                dealt[label] += 1
        clients.append(torch.tensor(rows))
    return clients


def local_training(local: Local) -> fg.LocalTraining:
    """Return the same options as fedgraft takes them."""
    if local.optimizer == "adamw":
        optimizer = adamw(weight_decay=local.weight_decay)
    else:
        optimizer = sgdm(local.momentum, local.weight_decay, local.nesterov, local.dampening, local.decoupled)
    steps: int | None = local.steps
    if local.epochs is not None:
        steps = None
    return fg.LocalTraining(
        steps=steps,
        epochs=local.epochs,
        batch_size=local.batch_size,
        lr=RATE,
        optimizer=optimizer,
        clip=local.clip,
        head_lr=local.head_lr,
        momentum_correction=local.momentum_correction,
        client_steps=local.client_steps,
        sampling=local.sampling,
    )


@dataclass(frozen=True)
class Arrangement:
    """How the federation of a row differs from the usual one."""

    clients: int = len(HOLDINGS)
    per_round: int = 3
    sampling: str = "fixed"
    schedule: Callable[[int, int, Any], float] = field(default_factory=lambda: constant_rate(RATE))
    rates: tuple[float, ...] = (RATE,) * ROUNDS
    """What the loop uses for it."""
    durations: tuple[float, ...] = ()
    """Time of a local training by client, for buffered rounds."""
    density: float | None = None
    """The share of the coordinates in a random mask."""
    fixed_statistics: bool = False
    """Batch-norm statistics stay outside the edit space, as in private runs."""


class Questions:
    """What a trainable kind may ask all clients before the first round."""

    def __init__(self, algorithm: fg.Algorithm, network: Any, rows: Sequence[Tensor]) -> None:
        self.seed = SEED
        self.clients = len(rows)
        self.examples = sum(len(own) for own in rows)
        space = select(network, lambda name: True, buffers=False)
        context = fg.ClientContext(network, space, ToyExamples(), lambda client: rows[client], SEED)
        self._engine = InProcess(algorithm, context)
        self._sums = Sums(self._engine.exchange, "references", range(self.clients), network, algorithm.privacy)

    def sums(self, action: str, vector: Tensor, settings: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Return the sums of the clients' answers."""
        return self._sums.ask(action_named(action), vector, settings)

    def each(self, action: str, vector: Tensor, settings: Any, coordinates: int) -> dict[int, Mapping[str, Tensor]]:
        """Return the answer of every client."""
        answers = {}
        for client in range(self.clients):
            request = fg.Request("references", -1, client, action, "", vector, {}, dict(settings))
            for response in self._engine.exchange([request]):
                assert isinstance(response, fg.Response), response
                answers[client] = response.evidence
        return answers

    def cached(self, recipe: Sequence[str], make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return what `make` gives; nothing is kept."""
        return make()


class Federated:
    """A federation ready to run rounds through `fg.run_round`."""

    def __init__(self, algorithm: fg.Algorithm, network: Any, arrangement: Arrangement) -> None:
        self.arrangement = arrangement
        self.network = network
        self.rows = client_rows()[: arrangement.clients]
        self.mask = None
        if arrangement.density is not None:
            self.mask = random_mask(network, arrangement.density)
        setup = self._open(algorithm)
        if setup.aggregate is not None:
            algorithm = fg.vary(algorithm, aggregate=setup.aggregate)
        self.algorithm = algorithm
        self.space, self.private = shared_and_private(algorithm, self.network, setup.space)
        self.start = copy.deepcopy(self.network)
        examples = ToyExamples()
        self.context = fg.ClientContext(
            self.network,
            self.space,
            examples,
            lambda client: self.rows[client],
            SEED,
            private=self.private,
            probe=PROBE,
            origin=self.space.gather(self.network),
            sends_buffers=setup.sends_buffers,
            class_counts=torch.bincount(examples.labels[torch.cat(self.rows)], minlength=CLASSES).double(),
        )
        if self.private is not None:
            self.context.private_start = self.private.gather(self.network)
        self.federation = fg.Federation(
            "references",
            SEED,
            arrangement.clients,
            arrangement.per_round,
            ROUNDS,
            arrangement.schedule,
            sampling=arrangement.sampling,  # type: ignore[arg-type]
            largest=40,
            durations=arrangement.durations,
        )
        sizes = {client: len(rows) for client, rows in enumerate(self.rows)}
        layers = layer_ranges(self.network, self.space, algorithm.weighting.options.get("layers", ()))
        self.server_context = fg.ServerContext(
            self.space.digest,
            self.context.sent,
            self.space.trained,
            WIDTH,
            CLASSES,
            setup.active,
            self.context.origin,
            example_counts=ExampleCounts(sizes),
            layers=layers,
        )
        self.engine = InProcess(algorithm, self.context)
        self.state = fg.start(algorithm, self.space.gather(self.network), self.space.trained)
        self.cohorts: list[list[int]] = []

    def _open(self, algorithm: fg.Algorithm) -> TrainableSetup:
        """Open what the algorithm trains."""
        if self.mask is not None:
            return TrainableSetup(masked(self.network, self.mask))
        setup = algorithm.trainable.open(self.network, Questions(algorithm, self.network, self.rows))
        if self.arrangement.fixed_statistics:
            return TrainableSetup(EditSpace(setup.space.parts))
        return setup

    def run(self) -> Outcome:
        """Run three rounds and return all models and memories by name."""
        for _ in range(ROUNDS):
            self.state, summary = fg.run_round(
                self.algorithm, self.federation, self.state, self.engine, self.server_context
            )
            assert not summary.rejections, summary.rejections
            assert "skipped" not in summary.record, summary.record
            self.cohorts.append(list(summary.cohort))
        return self.outcome()

    def outcome(self) -> Outcome:
        """Return the common model, the clients' models, the server's state and the clients' memories."""
        state = self.state
        outcome: Outcome = {"common": self.model(state.vector)}
        for client, vector in state.personal.items():
            outcome[f"personal {client}"] = self.model(vector)
        for name, tensor in state.rule.items():
            if name == "clusters":
                for cluster, offset in enumerate(tensor):
                    outcome[f"cluster {cluster}"] = self.model(state.vector + offset)
            else:
                outcome[f"rule/{name}"] = self.named(tensor)
        for client, memory in self.engine.memory.items():
            for name, tensor in memory.items():
                if name == "private":
                    assert self.private is not None
                    outcome[f"memory {client}/private"] = cut(tensor, self.private)
                else:
                    outcome[f"memory {client}/{name}"] = self.named(tensor)
        if state.clip:
            outcome["clip"] = {"": torch.tensor(state.clip)}
        return outcome

    def model(self, vector: Tensor) -> State:
        """Return the whole network with this vector of the edit space, by name."""
        network = copy.deepcopy(self.start)
        self.space.scatter(vector, network)
        tensors = {}
        for name, tensor in network.state_dict().items():
            if tensor.is_floating_point():
                tensors[name] = tensor
        return tensors

    def named(self, tensor: Tensor) -> State:
        """Return a vector of the edit space as tensors by name; anything else as it is."""
        if tensor.shape == (self.space.size,) or tensor.shape == (self.space.trained,):
            return cut(tensor, self.space)
        if self.private is not None and tensor.shape == (self.space.trained + self.private.trained,):
            return cut(tensor, EditSpace((*self.space.parts, *self.private.parts)))
        return {"": tensor}

    def problem(self) -> Problem:
        """Return the same federation as data for a loop."""
        examples = ToyExamples()
        return Problem(
            copy.deepcopy(self.start).double(),
            examples.inputs.double(),
            examples.labels,
            self.rows,
            self.cohorts,
            self.arrangement.rates,
            Draws(SEED),
            PROBE.inputs.double(),
            self.mask,
        )


def cut(vector: Tensor, space: EditSpace) -> State:
    """Return the pieces of a vector by the name of their tensor, with zeros outside a mask."""
    pieces = {}
    for part, begin, end in space.ranges:
        if end > len(vector):
            continue
        piece = vector[begin:end]
        if part.index is not None:
            whole = torch.zeros(math.prod(part.shape))
            whole[part.index] = piece
            piece = whole
        pieces[part.name] = piece
    return pieces


def random_mask(network: nn.Module, density: float) -> dict[str, Tensor]:
    """Return a random mask with at least one coordinate of every tensor."""
    generator = torch.Generator().manual_seed(0)
    mask = {}
    for name, parameter in network.named_parameters():
        chosen = torch.rand(parameter.shape, generator=generator) < density
        chosen.view(-1)[0] = True
        mask[name] = chosen
    return mask


def largest_difference(fedgraft: Outcome, reference: Outcome) -> float:
    """Return the largest difference, relative where numbers exceed 1; both must name the same models and memories."""
    assert fedgraft.keys() == reference.keys(), sorted(fedgraft.keys() ^ reference.keys())
    largest = 0.0
    for key, state in reference.items():
        tensors = fedgraft[key]
        assert tensors.keys() == state.keys(), (key, sorted(tensors.keys() ^ state.keys()))
        for name, expected in state.items():
            difference = (tensors[name].double().reshape(-1) - expected.reshape(-1)).abs()
            scale = max(1.0, float(expected.abs().max()))
            largest = max(largest, float(difference.max()) / scale)
    return largest
