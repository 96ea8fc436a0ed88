"""The edit space: gather and scatter are exact, and nothing outside the space is ever written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.support.errors import raises
from tests.support.toy import ToyNetwork, random_mask, snapshot
from torch import Tensor, nn

from fedgraft.core.space import EditSpace, Part, masked, select


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def head(name: str) -> bool:
    return name.startswith("head")


@pytest.mark.parametrize("wanted", [lambda n: True, head, lambda n: not head(n), lambda n: "layers.1" in n])
def test_scatter_then_gather_returns_the_bits(wanted: Any) -> None:
    network = ToyNetwork()
    space = select(network, wanted)
    before = snapshot(network)
    vector = torch.randn(space.size, generator=torch.Generator().manual_seed(1))
    vector[:3] = torch.tensor([float("nan"), -0.0, 1e-45])
    space.scatter(vector, network)
    assert bits(space.gather(network)) == bits(vector)
    for name, tensor in network.state_dict().items():
        if not wanted(name):
            assert bits(tensor) == bits(before[name])


@settings(max_examples=20, deadline=None)
@given(st.floats(0.02, 1.0), st.integers(0, 1000))
def test_a_mask_touches_exactly_its_coordinates(density: float, seed: int) -> None:
    network = ToyNetwork()
    mask = random_mask(network, density, seed)
    assume(any(bool(m.any()) for m in mask.values()))  # an empty mask is refused, which is another test
    space = masked(network, mask)
    assert space.size == sum(int(m.sum()) for m in mask.values())
    before = snapshot(network)
    space.scatter(space.gather(network) + 1, network)
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor[~mask[name]], before[name][~mask[name]])
        assert torch.equal(tensor[mask[name]], before[name][mask[name]] + 1)


def test_a_full_mask_is_the_dense_space() -> None:
    network = ToyNetwork()
    full = masked(network, {n: torch.ones_like(p, dtype=torch.bool) for n, p in network.named_parameters()})
    assert full.digest == select(network, lambda n: True).digest


def test_masks_are_matched_by_name_not_by_place() -> None:
    """Another order of the mask's entries is the same space; a wrong name or shape is refused."""
    network = ToyNetwork()
    mask = random_mask(network)
    assert masked(network, dict(reversed(mask.items()))).digest == masked(network, mask).digest
    with raises("E-SPACE-MASK-NAME"):
        masked(network, {"model.head.weight": mask["head.weight"]})
    with raises("E-SPACE-MASK-SHAPE"):
        masked(network, {"head.weight": mask["head.weight"].T})
    with raises("E-SPACE-MASK-NAME"):
        masked(network, mask, dense=["nowhere"])


def test_dense_tensors_join_a_mask_whole() -> None:
    network = ToyNetwork()
    space = masked(network, {"head.weight": torch.zeros(3, 6, dtype=torch.bool)}, dense=["head.bias"])
    assert space.slices() == {"head.bias": slice(0, 3)}


def test_an_empty_space_is_refused() -> None:
    with raises("E-SPACE-EMPTY"):
        select(ToyNetwork(), lambda n: False)
    with raises("E-SPACE-EMPTY"):
        masked(ToyNetwork(), {"head.bias": torch.zeros(3, dtype=torch.bool)})


def test_the_digest_names_the_set_of_coordinates() -> None:
    network = ToyNetwork()
    mask = {"head.weight": torch.zeros(3, 6, dtype=torch.bool)}
    mask["head.weight"][0, 0] = True
    one = masked(network, mask).digest
    mask["head.weight"][0, 0], mask["head.weight"][0, 1] = False, True
    assert one != masked(network, mask).digest
    assert select(network, head).digest == select(ToyNetwork(seed=5), head).digest  # values do not matter


def test_a_vector_of_another_size_or_type_is_refused() -> None:
    network = ToyNetwork()
    space = select(network, head)
    for vector in (torch.zeros(space.size + 1), torch.zeros(space.size).double(), torch.zeros(1, space.size)):
        with raises("E-SPACE-VECTOR"):
            space.scatter(vector, network)


def test_the_first_block_with_something_to_train() -> None:
    network = ToyNetwork()
    assert select(network, head).first_block(network) == network.depth + 1
    assert select(network, lambda n: "layers.1" in n).first_block(network) == 1
    assert select(network, lambda n: True).first_block(network) == -1


class Normed(nn.Module):
    """One batch norm between two layers: buffers travel, but are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)


def test_buffers_travel_behind_the_trained_coordinates_and_counters_do_not() -> None:
    """An integer counter is nobody's mean; float statistics are the tail of the vector."""
    network = Normed()
    space = select(network, lambda n: True)  # type: ignore[arg-type]
    assert space.size - space.trained == 8
    assert {part.name for part in space.buffers} == {"norm.running_mean", "norm.running_var"}
    bound = space.bind(network)  # type: ignore[arg-type]
    network.train()
    network.norm(torch.randn(6, 4))
    assert bits(bound.values[space.trained :]) != bits(space.gather(network)[space.trained :])  # type: ignore[arg-type]
    bound.pull_buffers()
    assert bits(bound.values) == bits(space.gather(network))  # type: ignore[arg-type]
    bound.load(torch.full((space.size,), 0.5))
    buffers = dict(network.named_buffers())
    assert torch.equal(buffers["norm.running_var"], torch.full((4,), 0.5))
    assert int(buffers["norm.num_batches_tracked"]) == 1


def test_bound_gradients_are_the_gathered_gradients_and_are_cleared() -> None:
    network, other = ToyNetwork(), ToyNetwork()
    space = masked(network, random_mask(network))
    bound = space.bind(network)
    x = torch.randn(4, 5)
    network(x).square().sum().backward()
    other(x).square().sum().backward()
    found = {name: p.grad.view(-1) for name, p in other.named_parameters() if p.grad is not None}
    wanted = torch.cat([found[p.name] if p.index is None else found[p.name][p.index] for p in space.parts])
    assert torch.allclose(bound.gradient(), wanted)
    assert all(p.grad is None for p in network.parameters())
    assert not bound.gradient().any()  # nothing was computed since


def test_bound_tensors_without_a_coordinate_get_no_gradient() -> None:
    network = ToyNetwork()
    select(network, head).bind(network)
    assert [n for n, p in network.named_parameters() if p.requires_grad] == ["head.weight", "head.bias"]


def test_stepping_the_vector_steps_the_network() -> None:
    network = ToyNetwork()
    for space in (select(network, head), masked(network, random_mask(network))):
        bound = space.bind(network)
        with torch.no_grad():
            bound.values += 1
        bound.push()
        assert bits(space.gather(network)) == bits(bound.values)


def test_rebinding_one_network_to_another_space_leaves_the_first_space_alone() -> None:
    network = ToyNetwork()
    body, top = select(network, lambda n: not head(n)), select(network, head)
    first = body.bind(network)
    first.load(first.values + 1)
    before = body.gather(network)
    second = top.bind(network)
    second.load(second.values * 2)
    assert bits(body.gather(network)) == bits(before)


def test_a_part_knows_its_size() -> None:
    part = Part("x", (2, 3), torch.tensor([1, 4]))
    assert (part.numel, part.size) == (6, 2)
    assert EditSpace((part,)).size == 2
