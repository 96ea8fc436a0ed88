"""All clients in one product: the reference within 1e-6, the same bytes always, and never where it would be wrong."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
import torch
from tests.support.toy import CLASSES, WIDTH, Toy, client_rows
from torch import Generator, Tensor, nn

from fedgraft import algorithms as zoo
from fedgraft.aggregate.codecs import codec, decode
from fedgraft.aggregate.slots import uniform
from fedgraft.algorithms.algorithm import Algorithm, ClientState, vary
from fedgraft.core.messages import Request, Response, pack
from fedgraft.core.space import select
from fedgraft.data.examples import FeatureExamples
from fedgraft.edit.dense import head
from fedgraft.engines import batched, together
from fedgraft.engines.batched import Batched, batching_obstacle
from fedgraft.engines.in_process import InProcess
from fedgraft.local.losses import Loss, cross_entropy
from fedgraft.local.optimizers import adamw, sgdm
from fedgraft.local.train import LocalTraining, drawn
from fedgraft.local.update_links import UpdateLink
from fedgraft.privacy.dp import AdaptiveClip, Mechanism
from fedgraft.privacy.protection import DifferentialPrivacy, Secure, private

HEAD = head()


class Mirrored(FeatureExamples):
    """Features of two views; which one is shown is drawn for each sample, as the feature cache does for flips."""

    def batch(self, rows: Tensor, generator: Generator | None = None) -> Tensor:
        if generator is None:
            return self.features[rows]
        flipped = torch.rand(len(rows), generator=generator) < 0.5
        return torch.where(flipped[:, None], 0.5 - self.features[rows], self.features[rows])


class Placed(Mirrored):
    """The same, written to where it is wanted."""

    def batch_into(self, rows: Tensor, generator: Generator | None, out: Tensor) -> None:
        out.copy_(self.batch(rows, generator))


def head_toy(algorithm: Algorithm, examples: type[FeatureExamples] = FeatureExamples, **options: Any) -> Toy:
    """The toy federation on kept features, with five clients a round of different sizes (20 to 12 examples)."""
    toy = Toy(algorithm, per_round=5, **options)
    with torch.no_grad():
        kept = toy.network.features(toy.examples.inputs)
    toy.context.examples = examples(kept, toy.examples.labels, toy.network.depth)
    return toy


def fedavg(loss: Loss | None = None, **local: Any) -> Algorithm:
    return zoo.fedavg(local=replace(LocalTraining(steps=4, batch_size=8), **local), loss=loss, trainable=HEAD)


def with_batched(toy: Toy, threads: int = 1) -> Toy:
    toy.engine = Batched(toy.algorithm, toy.context, threads)  # type: ignore[assignment]
    return toy


def difference(algorithm: Algorithm, rounds: int = 4, **options: Any) -> float:
    """The largest difference of the models, of client losses and of update norms after some rounds."""
    reference, toy = head_toy(algorithm, **options), with_batched(head_toy(algorithm, **options))
    assert toy.engine.reason is None  # type: ignore[attr-defined]
    worst = 0.0
    for _ in range(rounds):
        reference.run(1)
        toy.run(1)
        pairs = [(toy.state.vector, reference.state.vector)]
        for key in ("loss", "norm"):
            one, two = (torch.tensor(t.summary.record["clients"][key]) for t in (toy, reference))
            pairs.append((one, two))
        worst = max(worst, *(float((a - b).abs().max()) for a, b in pairs))
    return worst


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"optimizer": sgdm(0.0)},
    "momentum": {"optimizer": sgdm(0.9)},
    "decay": {"optimizer": sgdm(0.9, 0.01)},
    "decoupled": {"optimizer": sgdm(0.9, 0.01, decoupled=True)},
    "nesterov": {"optimizer": sgdm(0.9, 0.001, nesterov=True)},
    "dampened": {"optimizer": sgdm(0.5, dampening=0.3)},
    "smoothing": {"loss": cross_entropy(0.1)},
    "one step": {"steps": 1},
    "batches larger than some clients": {"batch_size": 17},
    "batches larger than all clients": {"batch_size": 1000},
    "whole epochs of unequal length": {"epochs": 2, "steps": None},
    "even displacement": {"momentum_correction": True, "epochs": 1, "steps": None},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_agrees_with_the_reference(name: str) -> None:
    assert difference(fedavg(**SETTINGS[name])) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("examples", [Mirrored, Placed])
@pytest.mark.parametrize("name", ["momentum", "batches larger than some clients"])
def test_agrees_with_the_reference_where_views_are_drawn(name: str, examples: type[FeatureExamples]) -> None:
    assert difference(fedavg(**SETTINGS[name]), examples=examples) < 1e-6


def test_agrees_when_features_are_gathered_in_pieces_and_clients_in_small_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batched, "BUDGET", 2 * 8 * WIDTH * 2)
    monkeypatch.setattr(batched, "CHUNK", 2)
    assert difference(fedavg(), examples=Mirrored) < 1e-6
    assert difference(fedavg(batch_size=17), examples=Mirrored) < 1e-6


@pytest.mark.parametrize("name", ["fedadam", "fedgma", "fedavgm", "local_only"])
def test_agrees_with_other_servers_and_with_a_model_per_client(name: str) -> None:
    """Server rules and mixtures do not concern the engine; with a mixture each client starts from its own model."""
    assert difference(zoo.named(name, local=LocalTraining(steps=3, batch_size=8), trainable=HEAD)) < 1e-5


def wrong_order(rows: Tensor, rule: LocalTraining, generator: Generator) -> Tensor:
    return drawn(rows, rule, generator).flip(0)


def wrong_smoothing(step: Any) -> Any:
    return lambda logits, y, smoothing: step(logits, y, smoothing / 2)


def unweighted(found: Any) -> Any:
    def wrong(*given: Any) -> tuple[Tensor, Tensor]:
        labels, weights = found(*given)
        return labels, torch.full_like(weights, 1 / weights.shape[3])  # padding counts

    return wrong


def forgetful(step: Any) -> Any:
    def wrong(stack: Any, error: Tensor, inputs: Tensor, rate: float, scale: float) -> None:
        stack.d_bias.zero_()  # the velocity of the biases is lost, that of the weights is not
        step(stack, error, inputs, rate, scale)

    return wrong


def without_biases(step: Any) -> Any:
    def wrong(stack: Any, error: Tensor, inputs: Tensor, rate: float, scale: float) -> None:
        stack.ones.zero_()  # the input of the biases is not 1
        step(stack, error, inputs, rate, scale)

    return wrong


def test_the_comparison_sees_planted_bugs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps in another order, half the smoothing, padding that counts: each far above the tolerance."""
    with monkeypatch.context() as patch:
        patch.setattr(together, "drawn", wrong_order)
        assert difference(fedavg(), rounds=1) > 1e-4
    with monkeypatch.context() as patch:
        patch.setattr(batched, "_loss_gradient", wrong_smoothing(batched._loss_gradient))
        assert difference(fedavg(cross_entropy(0.1)), rounds=1) > 1e-4
    with monkeypatch.context() as patch:
        patch.setattr(Batched, "_labels", unweighted(Batched._labels))
        assert difference(fedavg(batch_size=17), rounds=1) > 1e-4
    with monkeypatch.context() as patch:
        patch.setattr(batched.Stack, "step", forgetful(batched.Stack.step))
        assert difference(fedavg(**SETTINGS["momentum"]), rounds=1) > 1e-4
    with monkeypatch.context() as patch:
        patch.setattr(batched.Stack, "step", without_biases(batched.Stack.step))
        assert difference(fedavg(**SETTINGS["momentum"]), rounds=1) > 1e-4


@pytest.mark.parametrize(("smoothing", "scale"), [(0.0, 1.0), (0.2, 1.0), (0.0, 1e3)])
def test_the_written_out_gradient_is_that_of_autograd(smoothing: float, scale: float) -> None:
    """Also where logits lie a thousand apart and a probability is zero in any precision."""
    g = torch.Generator().manual_seed(0)
    c, k, d, b = 3, 4, 5, 7
    values = scale * torch.randn(c * k * (d + 1), generator=g, dtype=torch.float64)
    inputs = torch.randn(c, b, d, generator=g, dtype=torch.float64)
    labels = torch.randint(0, k, (c, 1, b), generator=g)
    weights = torch.rand(c, 1, b, generator=g, dtype=torch.float64)
    stack = batched.Stack(values.clone(), torch.zeros_like(values), (c, k, d, b), sgdm(0.0))
    room = torch.baddbmm(stack.bias, stack.weight, inputs.transpose(1, 2))
    error, found = batched._loss_gradient(room, labels, smoothing)
    losses = -(found * weights).sum((1, 2))
    stack.step(error.mul_(weights), inputs, 0.0, 1.0)
    leaf = values.requires_grad_()
    weight, bias = leaf[: c * k * d].view(c, k, d), leaf[c * k * d :].view(c, 1, k)
    logits = (inputs @ weight.transpose(1, 2) + bias).transpose(1, 2)  # (c, k, b)
    each = nn.functional.cross_entropy(logits, labels[:, 0], reduction="none", label_smoothing=smoothing)
    expected = (each * weights[:, 0]).sum(1)
    expected.sum().backward()
    torch.testing.assert_close(losses, expected.detach())
    torch.testing.assert_close(stack.gradient, values.grad)


def many(toy: Toy, clients: int, round: int = 0) -> list[Request]:
    vector = toy.state.vector
    return [Request("toy", round, k, "train", toy.space.digest, vector, {}, {"lr": 0.05}) for k in range(clients)]


def bytes_of(responses: list[Response]) -> list[object]:
    """Replies as bytes; what a client refused stays (client, sentence)."""
    return [response if isinstance(response, tuple) else pack(response) for response in responses]


def test_same_bytes_every_time_and_with_any_number_of_threads() -> None:
    algorithm = fedavg(batch_size=17)
    found = []
    for threads in (1, 1, 2, 3):
        toy = head_toy(algorithm, Mirrored)
        toy.context.rows = lambda k: client_rows(k % 5)
        engine = Batched(algorithm, toy.context, threads)
        found.append([bytes_of(engine.exchange(many(toy, 23, round))) for round in range(3)])
    assert all(other == found[0] for other in found[1:])


def test_a_rounds_digests_are_those_of_the_bytes_that_came() -> None:
    """They are hashed while the updates are combined, which must neither change these nor mix clients up."""
    toy, came = with_batched(head_toy(fedavg()), threads=2), dict[int, str]()
    exchange = toy.engine.exchange

    def seen(requests: Any) -> Any:
        responses = exchange(requests)
        came.update({response.client: sha256(pack(response)).hexdigest()[:32] for response in responses})
        return responses

    toy.engine.exchange = seen  # type: ignore[method-assign]
    toy.run(1)
    assert len(set(came.values())) == 5 and toy.summary.digests == came


def test_replies_are_like_the_references_and_in_the_order_of_the_orders() -> None:
    algorithm = fedavg(epochs=1, steps=None)
    toy = head_toy(algorithm)
    requests = [many(toy, 5)[k] for k in (3, 0, 4, 1)]
    ours = Batched(algorithm, toy.context).exchange(requests)
    theirs = list(InProcess(algorithm, toy.context).exchange(requests))
    for one, two in zip(ours, theirs, strict=True):
        assert replace(one, update=None, metrics={}) == replace(two, update=None, metrics={})
        assert one.metrics["steps"] == two.metrics["steps"] and one.update is not None and two.update is not None
        assert one.update.codec == two.update.codec and one.update.length == two.update.length
        assert one.metrics["loss"] == pytest.approx(two.metrics["loss"], abs=1e-6)


MECHANISM = Mechanism(1.0, 1.0, 5)
LINKS: dict[str, Algorithm] = {
    "fednova": zoo.fednova(local=LocalTraining(epochs=1, batch_size=8, optimizer=sgdm(0.9)), trainable=HEAD),
    "clip": private(vary(fedavg(), weighting=uniform()), DifferentialPrivacy(MECHANISM, 0.05)),
    "adaptive clip": private(
        vary(fedavg(), weighting=uniform()),
        DifferentialPrivacy(MECHANISM, 0.05, AdaptiveClip(MECHANISM, count_noise=1.0)),
    ),
}


def sent(algorithm: Algorithm) -> list[tuple[float, float, float]]:
    """By client: how far its update and what goes with it are from the reference's, and its norm; some are cut."""
    toy, found = head_toy(algorithm), []
    requests = [replace(request, settings={"lr": 0.05, "clip": 0.05}) for request in many(toy, 5)]
    engine = Batched(algorithm, toy.context, 1)
    assert engine.reason is None
    for one, two in zip(engine.exchange(requests), InProcess(algorithm, toy.context).exchange(requests), strict=True):
        assert isinstance(one, Response) and isinstance(two, Response) and one.update and two.update
        assert (one.examples, one.metrics.keys(), one.scalars.keys()) == (
            two.examples,
            two.metrics.keys(),
            two.scalars.keys(),
        )
        ours, theirs = (decode(r.update, algorithm.compression, toy.space.size) for r in (one, two))
        apart = max([0.0, *(abs(one.scalars[name] - two.scalars[name]) for name in two.scalars)])
        found.append((float((ours - theirs).abs().max()), apart, float(ours.norm())))
    return found


@pytest.mark.parametrize("name", LINKS)
def test_links_that_scale_an_update_are_applied_as_the_reference_does(name: str) -> None:
    """FedNova's division and the clipping of differential privacy; a private client tells no loss and no examples."""
    found = sent(LINKS[name])
    assert max(apart for apart, _, _ in found) < 1e-5 and max(apart for _, apart, _ in found) < 1e-6
    assert name == "fednova" or max(norm for _, _, norm in found) <= 0.05


def test_a_forgotten_link_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "run_chain", lambda links, update, sending: (update, {}))
    assert max(apart for apart, _, _ in sent(LINKS["clip"])) > 1e-3


def test_a_bad_feature_of_one_client_does_not_reach_the_others() -> None:
    """Padding is zero, not what an earlier chunk left in the buffer: zero times infinity would spoil a neighbour."""
    algorithm = fedavg(batch_size=17)
    toy, clean = head_toy(algorithm), head_toy(algorithm)
    toy.context.examples.features[client_rows(0)] = torch.inf  # type: ignore[attr-defined]
    engine = Batched(algorithm, toy.context, 1)
    engine.exchange(many(toy, 1))
    spoiled, expected = (
        engine.exchange(many(toy, 5))[1:],
        Batched(algorithm, clean.context, 1).exchange(many(toy, 5))[1:],
    )
    assert bytes_of(spoiled) == bytes_of(expected)


def test_other_actions_are_carried_out_one_by_one() -> None:
    algorithm = fedavg()
    toy, context = head_toy(algorithm), head_toy(algorithm).context
    requests = [replace(request, action="statistics") for request in many(toy, 3)]
    assert bytes_of(Batched(algorithm, context).exchange(requests)) == bytes_of(list(toy.engine.exchange(requests)))


LOCAL = LocalTraining(steps=2, batch_size=8)
REFUSED: dict[str, tuple[Algorithm, str]] = {
    "body": (zoo.fedavg(local=LOCAL), "head-only"),
    "adamw": (fedavg(optimizer=adamw()), "adamw"),
    "clip": (fedavg(clip=1.0), "clip=1.0"),
    "amp": (fedavg(amp="bfloat16"), "bfloat16"),
    "fedprox": (zoo.fedprox(0.1, local=LOCAL, trainable=HEAD), "proximal"),
    "scaffold": (zoo.scaffold(local=LOCAL, trainable=HEAD), "control_variates"),
    "signs": (vary(fedavg(), update=(UpdateLink("signs", lambda u, s: (u.sign(), {})),)), "link signs"),
    "ifca": (zoo.ifca(local=LOCAL, trainable=HEAD), "clusters:2"),
    "ditto": (zoo.ditto(local=LOCAL, trainable=HEAD), "state that clients keep"),
    "top_k": (vary(fedavg(), compression=codec("top_k:0.5")), "top_k"),
    "crsm": (zoo.fedavg_crsm(samples=4, local=LOCAL, trainable=HEAD), "mixture:cka_linear"),
    "secure": (vary(fedavg(), privacy=Secure()), "secure aggregation"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_where_it_does_not_apply_it_says_why_and_gives_the_references_bytes(name: str) -> None:
    algorithm, why = REFUSED[name]
    toy, other = head_toy(algorithm), head_toy(algorithm)
    if name == "body":
        toy.context.examples = other.context.examples = toy.examples
    engine = Batched(algorithm, other.context)
    assert engine.reason == batching_obstacle(algorithm, other.context) and why in str(engine.reason)
    auxiliary = {key: toy.state.rule[key] for key in algorithm.local.correction.receives}
    for round in range(2):
        requests = [replace(request, auxiliary=auxiliary) for request in many(toy, 3, round)]
        assert bytes_of(engine.exchange(requests)) == bytes_of(list(toy.engine.exchange(requests)))
    assert engine.memory.keys() == toy.engine.memory.keys()


class Dropout(nn.Module):
    p = 0.5


def test_a_context_that_is_not_a_plain_head_on_features_is_refused() -> None:
    algorithm = fedavg()
    toy = head_toy(algorithm)
    assert batching_obstacle(algorithm, toy.context) is None
    train_images = replace(toy.context, examples=toy.examples)
    assert "features" in str(batching_obstacle(algorithm, train_images))
    lasting = vary(algorithm, client_state=ClientState(optimizer=True))
    assert "keep" in str(batching_obstacle(lasting, toy.context))
    half = replace(toy.context, space=select(toy.network, lambda n: n == "head.weight"))
    assert "head-only" in str(batching_obstacle(algorithm, half))
    toy.network.extra = Dropout()
    assert "dropout" in str(batching_obstacle(algorithm, toy.context))
    del toy.network.extra
    toy.network.forward = lambda inputs, entry=0: 2 * toy.network.head(inputs)  # type: ignore[method-assign]
    assert "more than its linear head" in str(batching_obstacle(algorithm, toy.context))


def test_orders_that_activate_a_part_go_to_the_reference_client() -> None:
    from fedgraft.core.messages import pack_bits

    algorithm = fedavg()
    toy, other = head_toy(algorithm), head_toy(algorithm)
    active = torch.arange((WIDTH + 1) * CLASSES) % 2 == 0
    requests = [replace(request, auxiliary={"active": pack_bits(active)}) for request in many(toy, 2)]
    assert bytes_of(Batched(algorithm, other.context).exchange(requests)) == bytes_of(
        list(toy.engine.exchange(requests))
    )
