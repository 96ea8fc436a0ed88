"""What a client's classes can be told from: the representations that FedSHIBU shows, with noise and without.

The attack knows the public head. It names every shown row's likeliest class, and guesses that the client holds the
classes that many rows have. Chance is 0.5 on balanced accuracy.
"""

from __future__ import annotations

import torch
from tests.support.toy import CLASSES, Toy

from fedgraft import algorithms as zoo
from fedgraft.config.load import load
from fedgraft.core.messages import Request
from fedgraft.deploy.node_state import noise_key
from fedgraft.local.train import LocalTraining
from fedgraft.privacy.secagg.client import as_tensor
from fedgraft.privacy.secagg.keys import Identity
from fedgraft.runs.head_init import install, probe_head
from fedgraft.runs.setup import setup_of
from fedgraft.runs.warnings import _noised_representations
from fedgraft.server.secure_sum import Sums


def guessing_accuracy(noise: float, similarity: str = "cka_linear") -> float:
    """Balanced accuracy of guessing each client's classes from what it shows, over several rounds."""
    algorithm = zoo.fedshibu(similarity, samples=16, noise=noise, probe=64, local=LocalTraining(steps=1, batch_size=6))
    toy = Toy(algorithm)
    install(toy.network, probe_head(Sums(toy.engine.exchange, "toy", range(5), toy.network, algorithm.privacy), 30))
    head, hits = toy.network.head.weight.detach(), []
    for round in range(8):
        requests = [
            Request("toy", round, k, "train", toy.space.digest, toy.state.vector, {}, {"lr": 1e-4}) for k in range(5)
        ]
        for response in toy.engine.exchange(requests):
            representation = next(iter(response.evidence.values()))
            guess = (
                torch.bincount((representation @ head.T).argmax(1), minlength=CLASSES) > len(representation) / CLASSES
            )
            held = torch.bincount(toy.examples.labels[toy.context.rows(response.client)], minlength=CLASSES) > 0
            hits.append((float(guess[held].float().mean()) + float((~guess[~held]).float().mean())) / 2)
    return sum(hits) / len(hits)


def test_own_images_tell_a_clients_classes_and_noise_hides_them() -> None:
    plain, some, much = guessing_accuracy(0.0), guessing_accuracy(1.0), guessing_accuracy(20.0)
    assert plain > 0.9  # the attack works, so that failing means something
    assert plain > some > much and much < 0.65


def test_a_shared_probe_tells_nothing_of_whose_images_it_is() -> None:
    """Everybody's probe is the same: what is left is what one step of training did."""
    assert guessing_accuracy(0.0, "probe_cka") < 0.65


def test_noise_zero_is_no_noise_and_the_mixing_still_runs() -> None:
    local = LocalTraining(steps=2, batch_size=6)
    same = [Toy(zoo.fedshibu(samples=12, local=local, **more)).run(2).vector for more in ({}, {"noise": 0.0})]
    assert torch.equal(*same)
    noisy = Toy(zoo.fedshibu(samples=12, noise=2.0, local=local))
    noisy.run(2)
    assert not noisy.summary.rejections


def representation_of(key: bytes, round: int = 3) -> torch.Tensor:
    """What client 1 shows with noise 1 on a machine that has this key."""
    toy = Toy(zoo.fedshibu(samples=12, noise=1.0, local=LocalTraining(steps=1, batch_size=6)))
    toy.context.noise_key = key
    request = Request("toy", round, 1, "train", toy.space.digest, toy.state.vector, {}, {"lr": 1e-4})
    (response,) = toy.engine.exchange([request])
    return response.evidence["representation"]


def test_noise_of_a_node_comes_from_its_own_key() -> None:
    """A server that knows seed, round and client can draw a simulation's noise again, and take it off; not a node's."""
    key = noise_key({"identity": as_tensor(Identity.fresh().to_bytes())})
    assert torch.equal(representation_of(b""), representation_of(b""))  # a simulation repeats
    assert torch.equal(
        representation_of(key), representation_of(key)
    )  # asked again: the same answer, not a second sample of the noise
    assert (
        float((representation_of(key) - representation_of(b"")).std()) > 1.0
        and float((representation_of(key) - representation_of(key, 4)).std()) > 1.0
    )


def test_what_noise_promises_is_told_before_the_run() -> None:
    setup = setup_of(
        load(None, ["model.name=tiny", "algorithm.name=fedshibu", "algorithm.noise=20", "rounds.total=10"])
    )
    warnings = _noised_representations(setup)
    assert any("at most epsilon 1.2 at delta 1e-05 in 10 rounds" in line for line in warnings), warnings
