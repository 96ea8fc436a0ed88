"""What a reference loop starts from: data, a network, who took part; and models as tensors by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from tests.references.draws import Draws
from torch import Tensor, nn

State = dict[str, Tensor]
"""A model, or a difference of models: parameters and batch-norm statistics by name, float64."""
Outcome = dict[str, State]
"""What a loop ends with: the common model, models of clients, memories; each by name."""
Selection = Callable[[str], bool]
"""Which parameters and statistics are trained, by name."""


@dataclass(frozen=True)
class Problem:
    """A federation as data: who holds which rows, who took part in which round, at which rate."""

    network: Any
    """Float64, as the run began."""
    inputs: Tensor
    labels: Tensor
    rows: Sequence[Tensor]
    """Training rows by client."""
    cohorts: Sequence[Sequence[int]]
    rates: Sequence[float]
    """Learning rates by round."""
    draws: Draws
    probe: Tensor
    """Inputs that every client has; for heads in one exchange the rows of validation."""
    mask: Mapping[str, Tensor] | None = None
    """With a sparse edit: the coordinates that may move."""

    def start(self) -> State:
        """Return the model that the run began with."""
        return state_of(self.network)

    def examples(self, clients: Iterable[int]) -> list[float]:
        """Return the numbers of training examples of these clients."""
        return [float(len(self.rows[client])) for client in clients]

    def copy_with(self, state: State) -> Any:
        """Return a network of its own with this model."""
        network = copy.deepcopy(self.network)
        load(network, state)
        return network

    @cached_property
    def workbench(self) -> Any:
        """A copy of the network in which models are trained, one after another."""
        return copy.deepcopy(self.network)

    @cached_property
    def window(self) -> Any:
        """A copy of the network through which models are looked at, always in evaluation mode."""
        return copy.deepcopy(self.network).eval()

    def view(self, state: State) -> Any:
        """Return a network with this model in evaluation mode; the next call changes it."""
        load(self.window, state)
        return self.window

    def features(self, state: State, inputs: Tensor) -> Tensor:
        """Return the pooled features under this model, in evaluation mode."""
        network = self.view(state)
        with torch.no_grad():
            features: Tensor = network.features(inputs)
        return features

    def loss(self, state: State, rows: Tensor) -> float:
        """Return the mean cross-entropy of this model on these rows, in evaluation mode."""
        network = self.view(state)
        with torch.no_grad():
            logits = network(self.inputs[rows])
        return float(nn.functional.cross_entropy(logits, self.labels[rows]))


def everything(name: str) -> bool:
    """Select all parameters and statistics."""
    return True


def is_head(name: str) -> bool:
    """Return whether a parameter belongs to the head."""
    return name.startswith("head.")


def is_body(name: str) -> bool:
    """Return whether a parameter or statistic lies before the head."""
    return not is_head(name)


def is_statistic(name: str) -> bool:
    """Return whether this is a running statistic of a batch norm, which no optimizer moves."""
    return "running_" in name


def state_of(network: nn.Module) -> State:
    """Return copies of all parameters and statistics of the network."""
    state = {}
    for name, tensor in network.state_dict().items():
        if tensor.is_floating_point():
            state[name] = tensor.detach().clone()
    return state


def load(network: nn.Module, state: State) -> None:
    """Write a model into the network."""
    tensors = network.state_dict()
    with torch.no_grad():
        for name, tensor in state.items():
            tensors[name].copy_(tensor)


def minus(left: State, right: State) -> State:
    """Return the difference of two models."""
    return {name: left[name] - right[name] for name in left}


def plus(model: State, update: State, factor: float = 1.0) -> State:
    """Return the model moved by `factor` times the update."""
    return {name: model[name] + factor * update[name] for name in model}


def mean(states: Sequence[State], weights: Sequence[float] | Tensor) -> State:
    """Return the weighted mean; the weights are divided by their sum."""
    total = float(sum(weights))
    result: State = {}
    for name in states[0]:
        weighted = torch.zeros_like(states[0][name])
        for state, weight in zip(states, weights, strict=True):
            weighted = weighted + float(weight) / total * state[name]
        result[name] = weighted
    return result


def zeros(state: State, selected: Selection = everything) -> State:
    """Return zeros for the selected parameters, without statistics."""
    result = {}
    for name, tensor in state.items():
        if selected(name) and not is_statistic(name):
            result[name] = torch.zeros_like(tensor)
    return result


def restricted(state: State, selected: Selection) -> State:
    """Return the selected tensors of a model."""
    return {name: tensor for name, tensor in state.items() if selected(name)}


def without_statistics(state: State) -> State:
    """Return the parameters of a model."""
    return restricted(state, lambda name: not is_statistic(name))


def flat(state: State) -> Tensor:
    """Return all tensors of the state as one vector."""
    return torch.cat([tensor.reshape(-1) for tensor in state.values()])


def like(vector: Tensor, state: State) -> State:
    """Return the vector cut into tensors as `state` has them."""
    result = {}
    begin = 0
    for name, tensor in state.items():
        end = begin + tensor.numel()
        result[name] = vector[begin:end].view(tensor.shape)
        begin = end
    return result
