"""The ring that a secure sum adds in, and the secret sharing."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from tests.support.errors import raises
from torch import Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.privacy.secagg import shamir
from fedgraft.privacy.secagg.ring import Ring, Segment


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ring_sum(ring: Ring, vectors: list[Tensor]) -> Tensor:
    total = np.zeros(ring.length, dtype=np.uint32)
    for seed, v in enumerate(vectors):
        total += ring.encode({"x": v}, stream(seed))
    return ring.decode(total)["x"]


@pytest.mark.parametrize("clients", [1, 2, 3, 10, 16, 1000])
def test_a_sum_is_within_one_step_per_client_and_never_wraps(clients: int) -> None:
    ring = Ring((Segment("x", 4, 0.05),), clients)
    assert clients * ring.level < 2**31
    for vectors in (
        [torch.full((4,), s * 0.05, dtype=torch.float64) for s in [sign] * clients] for sign in (1.0, -1.0)
    ):
        exact = torch.stack(vectors).sum(0)
        assert (ring_sum(ring, vectors) - exact).abs().max() <= clients * ring.step("x")


def test_a_ring_made_for_fewer_clients_wraps() -> None:
    """The planted bug that the test above would see."""
    ring = Ring((Segment("x", 1, 1.0),), 2)
    assert float(ring_sum(ring, [torch.ones(1)] * 3)) < 0


def test_values_beyond_the_limit_saturate() -> None:
    ring = Ring((Segment("x", 3, 1.0),), 5)
    values = {"x": torch.tensor([3.0, -1e30, 0.5])}
    back = ring.decode(ring.encode(values, stream()))["x"]
    assert back.tolist() == pytest.approx([1.0, -1.0, 0.5], abs=1e-8)


def test_rounding_has_mean_zero_and_follows_the_seed() -> None:
    ring = Ring((Segment("x", 20_000, 1.0),), 1 << 20)  # coarse: a step of 5e-4
    values = {"x": torch.full((20_000,), 0.3337 * ring.step("x"))}
    words = ring.encode(values, stream(1))
    assert abs(words.mean() - 0.3337) < 5 * 0.5 / 20_000**0.5
    assert np.array_equal(words, ring.encode(values, stream(1)))
    assert not np.array_equal(words, ring.encode(values, stream(2)))


@pytest.mark.parametrize("bad", [torch.tensor([float("nan")]), torch.tensor([float("inf")]), torch.zeros(2)])
def test_what_cannot_be_summed_is_refused(bad: Tensor) -> None:
    ring = Ring((Segment("x", 1, 1.0),), 3)
    with raises("E-PRIVACY-RING-VALUES", segment="x"):
        ring.encode({"x": bad}, stream())
    with raises("E-PRIVACY-RING-SEGMENTS"):
        ring.encode({"y": torch.zeros(1)}, stream())


@pytest.mark.parametrize("limit", [0.0, -1.0, float("inf"), float("nan")])
def test_a_segment_needs_a_limit(limit: float) -> None:
    with pytest.raises(FedgraftError):
        Segment("x", 1, limit)


def test_two_segments_of_one_name_are_refused() -> None:
    with pytest.raises(FedgraftError):
        Ring((Segment("x", 1, 1.0), Segment("x", 2, 1.0)), 3)


def test_any_threshold_of_shares_gives_the_secret_and_fewer_do_not() -> None:
    secret = bytes(range(32))
    shares = shamir.split(secret, 3, [1, 2, 5, 9, 12])
    assert all(len(s) == shamir.SHARE_BYTES for s in shares.values())
    for chosen in itertools.combinations(shares, 3):
        assert shamir.combine({x: shares[x] for x in chosen}) == secret
    for few in itertools.combinations(shares, 2):
        with pytest.raises(shamir.WrongShares):
            shamir.combine({x: shares[x] for x in few})


def test_shares_agree_with_a_polynomial_evaluated_by_hand() -> None:
    coefficients = [7, 11]  # 66 bytes of entropy each: secret + 11 x + 7 x^2
    draws = iter(c.to_bytes(66, "big") for c in coefficients)
    shares = shamir.split((5).to_bytes(32, "big"), 3, [1, 2, 3], lambda n: next(draws))
    assert [int.from_bytes(shares[x], "big") for x in (1, 2, 3)] == [5 + 11 * x + 7 * x * x for x in (1, 2, 3)]


def test_a_wrong_share_is_passed_over_and_too_many_are_noticed() -> None:
    secret = random.Random(1).randbytes(32)
    shares = shamir.split(secret, 4, range(1, 10))
    spoiled = shares | {3: bytes(66)}
    assert shamir.recover(spoiled, 4, lambda s: s == secret) == secret
    with pytest.raises(shamir.WrongShares):
        shamir.recover(dict.fromkeys(range(1, 10), bytes(66)), 4, lambda s: s == secret)
    with pytest.raises(shamir.WrongShares):
        shamir.recover({x: shares[x] for x in (1, 2, 3)}, 4, lambda s: True)
    # Planted bug: without the check of the secret, a wrong share that stays in range goes unnoticed.
    close = shamir.split(bytes(32), 1, range(1, 10))
    assert shamir.recover(close, 1, lambda s: True) != secret


@pytest.mark.parametrize("call", [(b"x", 1, [1]), (bytes(32), 3, [1, 2]), (bytes(32), 1, [0]), (bytes(32), 0, [1])])
def test_impossible_sharings_are_refused(call: tuple[bytes, int, list[int]]) -> None:
    with pytest.raises(ValueError):
        shamir.split(*call)
