"""The pretend accelerator itself: the CPU's numbers, CUDA's refusals, and counts that can be foretold."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable

import pytest
import torch
from tests.support.pretend_device import NAME, counted
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap


def on_device(*shape: int) -> Tensor:
    return torch.ones(*shape).to(NAME)


REFUSED: dict[str, Callable[[], object]] = {
    "a CPU tensor in a sum": lambda: on_device(3) + torch.ones(3),
    "a CPU tensor as output": lambda: torch.add(on_device(3), 1.0, out=torch.empty(3)),
    "a CPU index for index_select": lambda: on_device(3).index_select(0, torch.tensor([0])),
    "a CPU index for gather": lambda: on_device(3).gather(0, torch.tensor([0])),
    "a device index for a CPU tensor": lambda: torch.ones(3)[torch.tensor([0]).to(NAME)],
    "a CPU mask for where": lambda: torch.where(torch.tensor([True, False, True]), on_device(3), on_device(3)),
    "CPU values behind an index": lambda: on_device(3).index_put_((torch.tensor([0, 1]).to(NAME),), torch.ones(2)),
    "CPU labels in a loss": lambda: nn.functional.cross_entropy(on_device(2, 3), torch.tensor([0, 1])),
    "two devices in one product": lambda: on_device(2, 2) @ torch.ones(2, 2).to(f"{NAME}:1"),
    "a list of tensors of both": lambda: torch.cat([on_device(3), torch.ones(3)]),
    "numpy": lambda: on_device(3).numpy(),
    "a generator of the CPU": lambda: torch.rand(3, device=NAME, generator=torch.Generator()),
    "a pickled tensor": lambda: __import__("pickle").dumps(on_device(3)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cuda_refuses_is_refused(what: str) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        REFUSED[what]()


def test_what_cuda_allows_is_allowed() -> None:
    assert (on_device(3) + torch.tensor(1.0)).tolist() == [2.0, 2.0, 2.0]  # a scalar travels with the launch
    assert on_device(3)[torch.tensor([0, 2])].tolist() == [1.0, 1.0]
    assert on_device(3).copy_(torch.arange(3.0)).tolist() == [0.0, 1.0, 2.0]
    assert torch.arange(3, device=NAME).tolist() == [0, 1, 2]
    assert torch.tensor([1.0], device=f"{NAME}:1").device == torch.device(NAME, 1)


def small_network() -> nn.Module:
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LayerNorm(144), nn.Linear(144, 5)]
    return nn.Sequential(*body)


def trained(network: nn.Module, device: str) -> dict[str, Tensor]:
    """The weights and statistics after three steps of AdamW."""
    images = torch.linspace(-1, 1, 4 * 3 * 64).view(4, 3, 8, 8).to(device)
    labels = torch.tensor([0, 1, 2, 3]).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()
    return {name: tensor.cpu() for name, tensor in network.state_dict().items()}


def test_training_gives_the_bits_of_the_cpu() -> None:
    network = small_network()
    moved = copy.deepcopy(network).to(NAME)
    again = copy.deepcopy(moved)
    assert {parameter.device.type for parameter in again.parameters()} == {NAME}
    here, there = trained(network, "cpu"), trained(again, NAME)
    assert all(torch.equal(here[name], there[name]) for name in here)


def test_gradients_by_example_attention_and_autocast() -> None:
    layer = nn.Linear(4, 3).to(NAME)
    weights = {name: tensor.detach() for name, tensor in layer.named_parameters()}
    loss = lambda given, x: functional_call(layer, given, (x[None],)).pow(2).sum()  # noqa: E731
    assert vmap(grad(loss), (None, 0))(weights, on_device(2, 4))["weight"].shape == (2, 3, 4)
    query = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    attention = nn.functional.scaled_dot_product_attention
    moved = query.to(NAME)
    torch.testing.assert_close(attention(moved, moved, moved).cpu(), attention(query, query, query))
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast(NAME, dtype):
            assert layer(on_device(2, 4)).dtype == dtype
            assert torch.softmax(layer(on_device(2, 4)), 1).dtype == torch.float32


def test_copies_and_waits_are_counted() -> None:
    here = torch.arange(4.0)
    with counted() as moved:
        there = here.to(NAME)
        there.copy_(here)
    assert (moved.uploads, moved.downloads, moved.waits) == (2, 0, 0)
    with counted() as computed:
        there.mul_(2).sum()
    assert (computed.uploads, computed.waits, computed.launches) == (0, 0, 2)
    reads: tuple[Callable[[], object], ...] = (there.sum().item, there.cpu, there.tolist, lambda: bool(there.any()))
    for read in reads:
        with counted() as waited:
            read()
        assert waited.waits == 1
    with counted() as indexed:
        there[torch.tensor([0, 1])]
        there[there > 1]
    assert (indexed.uploads, indexed.waits) == (1, 2)


def test_a_forked_child_cannot_use_it() -> None:
    child = os.fork()
    if child == 0:
        try:
            torch.zeros(1, device=NAME)
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
