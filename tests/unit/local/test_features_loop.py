"""The one loop over features: the same numbers as one forward pass, modes and gradients left alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedgraft.core.rng import torch_stream
from fedgraft.local.features import evaluate_batch, feature_batches, hidden
from fedgraft.models import model

torch.set_num_threads(1)


@dataclass
class Rows:
    inputs: Tensor
    labels: Tensor
    entry: int = 0

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        assert generator is None  # features are never augmented
        return self.inputs[rows]


def rows(size: int) -> Rows:
    return Rows(torch.randn(10, 3, size, size, generator=torch_stream(0, "x")), torch.arange(10))


def test_every_row_once_and_in_order() -> None:
    net, examples = model("resnet18:width=8", 3), rows(32)
    picked = torch.tensor([7, 1, 1, 9, 0])
    net.train()
    net.backbone.get_submodule("encoder").eval()
    modes, before = [m.training for m in net.modules()], {n: b.clone() for n, b in net.named_buffers()}
    found = list(feature_batches(net, examples, picked, size=2))
    assert [len(z) for _, z in found] == [2, 2, 1] and torch.equal(torch.cat([r for r, _ in found]), picked)
    assert [m.training for m in net.modules()] == modes
    assert all(torch.equal(b, before[n]) for n, b in net.named_buffers())  # a training pass would move statistics
    with torch.no_grad():
        expected = net.eval().features(examples.inputs[picked])
    made = torch.cat([z for _, z in found])
    torch.testing.assert_close(made, expected)
    assert not made.requires_grad and not made.is_inference()


def test_entries_hidden_layers_and_single_looks() -> None:
    net, examples = model("tiny", 3), rows(16)
    held = torch.cat([z for _, z in feature_batches(net, examples, torch.arange(10), until=1, size=10)])
    later = Rows(held, examples.labels, entry=1)
    one = torch.cat([z for _, z in feature_batches(net, later, torch.arange(10), size=4)])
    torch.testing.assert_close(one, evaluate_batch(net, examples.inputs, net.features))
    names = net.default_probe_layers()
    expected = evaluate_batch(net, examples.inputs, lambda x: net.activations(x, names))
    for found, name in zip(hidden(net, ("early", names[1], "late"), examples, size=3), names, strict=True):
        torch.testing.assert_close(found, expected[name])
