"""Clients packed into one computation: the reference within 1e-5 for every small edit, the same bytes always."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support.tiny import Open, tiny
from torch import Tensor

from fedgraft.core.messages import Request, Response, pack
from fedgraft.engines.in_process import InProcess
from fedgraft.engines.packed import Packed, PackedClients, packing_obstacle
from fedgraft.models import vit_blocks
from fedgraft.models.packed_layers import PackedLinear, PackedNorm, packed_product
from fedgraft.server import sample as server

SPARSE = ("trainable.kind=sparse", "trainable.sparse.samples=8", "trainable.sparse.rounds=1")
SEVEN = ("local.batch_size=7", "local.steps=3")
EDITS: dict[str, tuple[str, ...]] = {
    "low rank": ("trainable.kind=lora",),
    "low rank, all targets": ("trainable.kind=lora", 'trainable.lora.targets=["q","k","v","proj","fc1","fc2"]'),
    "last block": ("trainable.kind=last_blocks", "trainable.blocks=1"),
    "last two blocks": ("trainable.kind=last_blocks", "trainable.blocks=2"),
    "sparse": SPARSE,
    "head from pixels": ('data.augment=["flip","jitter"]',),
    "adamw": ("trainable.kind=lora", "local.optimizer=adamw"),
    "proximal, clipped": ("trainable.kind=last_blocks", "algorithm.name=fedprox", "local.clip=5"),
    "epochs of unequal length": ("trainable.kind=last_blocks", "local.steps=none", "local.epochs=2"),
    "augmented": ("trainable.kind=last_blocks", 'data.augment=["flip","crop","jitter"]'),
    "smoothed": ("trainable.kind=lora", "loss.label_smoothing=0.1"),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in a run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def requests_of(job: Open) -> list[Request]:
    """The requests of a first round to all clients."""
    return server.instruct(job.algorithm, job.setup.federation, job.begin(), [0, 1, 2], job.space.digest)


def values_of(response: Response | tuple[int, str]) -> Tensor:
    assert isinstance(response, Response) and response.update is not None
    return response.update.arrays["values"]


def difference(job: Open) -> float:
    """The largest difference of the clients' updates, relative to the longest."""
    assert packing_obstacle(job.algorithm, job.context) is None
    requests = requests_of(job)
    theirs = list(InProcess(job.algorithm, job.context).exchange(requests))
    ours = Packed(job.algorithm, job.context, 3).exchange(requests)
    largest = 0.0
    for one, other in zip(ours, theirs, strict=True):
        assert isinstance(one, Response) and isinstance(other, Response)
        assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], abs=1e-5)
        assert one.metrics["steps"] == other.metrics["steps"] and one.examples == other.examples
        gap = (values_of(one) - values_of(other)).abs().max() / values_of(other).abs().max().clamp(min=1.0)
        largest = max(largest, float(gap))
    assert values_of(theirs[0]).abs().max() > 1e-4  # something trained
    return largest


@pytest.mark.slow
@pytest.mark.parametrize("edit", EDITS)
def test_agrees_with_the_reference(edit: str) -> None:
    assert difference(Open(tiny(*SEVEN, *EDITS[edit]))) < 1e-5


def test_same_bytes_every_time_and_with_any_number_of_threads() -> None:
    job = Open(tiny(*SEVEN, *EDITS["last two blocks"]))
    requests = requests_of(job)
    found = []
    for threads in (1, 2, 3):
        engine = Packed(job.algorithm, job.context, 2, threads)
        for _ in range(2):
            found.append([pack(response) for response in engine.exchange(requests) if isinstance(response, Response)])
    assert len(found[0]) == 3 and all(other == found[0] for other in found)


def test_the_networks_own_weights_keep_their_bits() -> None:
    job = Open(tiny(*EDITS["low rank"]))
    before = {name: parameter.detach().clone() for name, parameter in job.network.named_parameters()}
    Packed(job.algorithm, job.context, 3).exchange(requests_of(job))
    for name, parameter in job.network.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_what_cannot_be_packed_says_why() -> None:
    for options, reason in {
        ("trainable.kind=everything",): "ViTEmbeddings has no packed form",
        ("trainable.kind=lora", "model.dropout=0.1"): "dropout draws by client",
        ("algorithm.name=scaffold", "trainable.kind=last_blocks"): "the correction control_variates needs clients",
        ("trainable.kind=last_blocks", "local.amp=float16"): "local.amp='float16'",
        ("model.name=cnn:width=4,size=16", "trainable.kind=last_blocks"): "no packed form",
    }.items():
        job = Open(tiny(*options))
        assert reason in (packing_obstacle(job.algorithm, job.context) or "")


def test_the_plan_says_why_clients_are_not_packed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "fedgraft"):
        assert isinstance(Open(tiny("pack=3", "trainable.kind=everything")).engine(), InProcess)
        assert isinstance(Open(tiny("pack=3", "trainable.kind=lora")).engine(), Packed)
        assert isinstance(Open(tiny("trainable.kind=lora")).engine(), InProcess)  # a CPU has nothing to win
    said = [record.message for record in caplog.records if record.message.startswith("engine")]
    assert "not packed, because backbone.embeddings" in said[0]
    assert said[1] == "engine: packed, 3 clients in one computation"
    assert "packed" not in said[2]


# ---- the layers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", ["none", "weight", "bias"])
def test_a_packed_layer_is_the_layer_of_each_client(frozen: str) -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 5, 4, generator=draw)
    bias = torch.randn(3, 5, generator=draw)
    if frozen == "weight":
        weight = weight[:1].expand_as(weight)
    if frozen == "bias":
        bias = bias[:1].expand_as(bias)
    inputs = torch.randn(6, 7, 4, generator=draw)
    layer = PackedLinear(3, weight[0] if frozen == "weight" else weight, bias[0] if frozen == "bias" else bias)
    for client in range(3):
        mine = slice(2 * client, 2 * client + 2)
        expected = torch.nn.functional.linear(inputs[mine], weight[client], bias[client])
        torch.testing.assert_close(layer(inputs)[mine], expected)


def test_a_packed_norm_is_the_norm_of_each_client() -> None:
    draw = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(3, 4, generator=draw), torch.randn(4, generator=draw)
    inputs = torch.randn(6, 7, 4, generator=draw)
    norm = PackedNorm(3, torch.nn.LayerNorm(4), weight, bias)
    for client in range(3):
        mine = slice(2 * client, 2 * client + 2)
        torch.testing.assert_close(
            norm(inputs)[mine], torch.nn.functional.layer_norm(inputs[mine], (4,), weight[client], bias)
        )


def wrong_product(clients: int, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Clients in the opposite order."""
    return packed_product(clients, inputs, weight.flip(0) if weight.dim() == 3 else weight, bias)


def first_clients_norm(norm: PackedNorm, normalised: Tensor) -> Tensor:
    return normalised * norm.weight[0] + norm.bias[0]


BROKEN: dict[str, tuple[str, Any, str, Any]] = {
    "weights of another client": ("last two blocks", vit_blocks, "packed_product", wrong_product),
    "the norm of the first client": ("last block", PackedNorm, "scaled", first_clients_norm),
    "positions that are not written": ("sparse", PackedClients, "push", lambda packed: None),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_the_comparison_sees_planted_bugs(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    edit, owner, name, broken = BROKEN[fault]
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(AssertionError):
        assert difference(Open(tiny(*SEVEN, *EDITS[edit]))) < 1e-5
