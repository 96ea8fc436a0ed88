"""What a private run promises: secret cohorts, a delta that means something, nothing of the data outside the account,
and an attack that tells neighbouring runs apart no better than the told epsilon allows."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch
from scipy.stats import norm
from tests.support.epsilon_attack import epsilon_lower_bound
from tests.support.errors import raises

from fedgraft.config.build import build_algorithm, private_delta
from fedgraft.config.load import load
from fedgraft.core.errors import FedgraftError
from fedgraft.core.state import Federation
from fedgraft.local.schedules import constant_rate
from fedgraft.privacy.accounting import Budget, epsilon
from fedgraft.privacy.dp import Mechanism, bound_key
from fedgraft.server import sample as server

PRIVATE = ["privacy.dp.noise=1.0", "rounds.sampling=poisson", "algorithm.weighting=uniform", "partition.clients=20"]


def test_cohorts_from_a_secret_cannot_be_predicted_and_those_of_the_seed_can() -> None:
    known = Federation("r", 3, 20, 10, 100, constant_rate(0.1), "poisson")
    secret = replace(known, secret=os.urandom(32))
    guesses = [set(server.sample(known, t)) for t in range(400)]
    hits = sum(
        len(guess & set(server.sample(secret, t))) + len(set(range(20)) - guess - set(server.sample(secret, t)))
        for t, guess in enumerate(guesses)
    )
    assert abs(hits / 8000 - 0.5) < 5 * math.sqrt(0.25 / 8000)  # five standard errors around chance
    assert all(guess == set(server.sample(known, t)) for t, guess in enumerate(guesses))  # the broken variant


def test_the_default_delta_suits_few_clients_and_one_over_a_tenth_of_a_client_is_refused() -> None:
    assert private_delta(load(None, PRIVATE)) == 1e-5
    with raises("E-PRIVACY-DELTA"):
        build_algorithm(load(None, [*PRIVATE, "privacy.dp.delta=0.006"]))
    build_algorithm(load(None, [*PRIVATE, "privacy.dp.delta=0.005"]))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("model.head=ridge", "sums of the clients' data"),
        ("personal.evaluate=end", "single clients"),
        ("data.validation=0", "validation images"),
        ("trainable.kind=sparse", "scores of the clients' data"),
    ],
)
def test_what_no_noise_covers_is_refused(override: str, sentence: str) -> None:
    config = load(None, PRIVATE)
    assert config.head == "random" and load(None, []).head == "ridge"
    build_algorithm(config)
    with pytest.raises(FedgraftError, match=sentence):
        build_algorithm(load(None, [*PRIVATE, override]))


@pytest.mark.slow
def test_epsilon_without_amplification_is_the_gaussian_mechanisms_own() -> None:
    """Balle and Wang 2018: T rounds of noise z are one with mu = sqrt(T)/z, whose delta has a closed form."""
    account = Budget(math.inf, 1e-5, 0.5, 2.0, 10, 10)
    told, mu = account.unamplified, math.sqrt(10) / 2.0
    exact = norm.cdf(mu / 2 - told / mu) - math.exp(told) * norm.cdf(-mu / 2 - told / mu)
    assert exact == pytest.approx(1e-5, rel=0.02) and account.epsilon < told


def attack(pairs: int, noise: float, told: float, delta: float, seed: int) -> float:
    """The Clopper-Pearson lower bound (95 %) on epsilon of telling runs with a client from those without it.

    The client's clipped update is a unit vector; the attacker knows it and all others. Released is what `Mechanism`
    releases, with a key of its own each time; four rounds are added up along the client's direction.
    """
    mechanism, rounds, base = Mechanism(noise, 1.0, 8), 4, torch.zeros(16)
    own = torch.zeros(16)
    own[0] = 1.0
    scores = {True: [], False: []}  # type: dict[bool, list[float]]
    for there in scores:
        for pair in range(pairs):
            key = (seed * 10**6 + 2 * pair + there).to_bytes(32, "big")
            total = base + own if there else base
            said = [mechanism.release(total, 1.0, bound_key(key, total), t) for t in range(rounds)]
            scores[there].append(sum(float(s[0]) for s in said) * mechanism.expected)
    return epsilon_lower_bound(scores[True], scores[False], delta)


@pytest.mark.slow
def test_an_attack_finds_no_more_than_the_told_epsilon_and_more_where_a_sixth_of_the_noise_is_added() -> None:
    delta = 0.01
    told = epsilon(1.0, 5.0, 4, delta)  # mu = 0.4
    assert attack(1000, 5.0, told, delta, seed=1) < told
    assert attack(1000, 5.0 / 6, told, delta, seed=2) > told
