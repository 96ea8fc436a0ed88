"""Attacks do what their definitions say, repeat with the same generator, and move what they are meant to move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.errors import raises
from torch import Generator, Tensor

from fedgraft.aggregate import robust
from fedgraft.engines import attacks


def stream(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def benign(clients: int = 8, size: int = 60, spread: float = 0.3) -> Tensor:
    return torch.randn(size, generator=stream(9)) + spread * torch.randn(clients, size, generator=stream(1))


@pytest.mark.parametrize("name", attacks.ATTACKS)
def test_every_attack_has_the_right_shape_and_repeats(name: str) -> None:
    updates = benign()
    kept = updates.clone()
    first, second = (attacks.attacker_updates(name, updates, 2, stream(5)) for _ in range(2))
    assert first.shape == (2, 60)
    assert first.dtype == torch.float32
    assert torch.equal(first.nan_to_num(7), second.nan_to_num(7))
    assert torch.equal(updates, kept)
    first[0] = 0  # rows are memory of their own, not views of one


def test_definitions() -> None:
    updates, own = benign(), torch.randn(2, 60, generator=stream(3))
    mean, std = updates.mean(0), updates.std(0)

    def lie(name: str, **options: Any) -> Tensor:
        return attacks.attacker_updates(name, updates, 2, stream(), own=own, **options)

    torch.testing.assert_close(lie("sign_flip", scale=3.0), -3 * own)
    torch.testing.assert_close(lie("scaling"), own * 5)  # (8 + 2) / 2
    torch.testing.assert_close(lie("scaling", factor=7.0), own * 7)
    torch.testing.assert_close(lie("ipm", epsilon=0.1), (-0.1 * mean).expand(2, -1))
    torch.testing.assert_close(lie("alie", z=1.5), (mean - 1.5 * std).expand(2, -1))
    torch.testing.assert_close(lie("mimic", target=4), updates[4].expand(2, -1))
    assert (lie("zero") == 0).all()
    assert lie("nan").isnan().all()
    assert lie("inf").isinf().all()


def test_gaussian_scale() -> None:
    updates = benign(8, 20_000)
    noise = attacks.attacker_updates("gaussian", updates, 1, stream(), scale=4.0)
    assert float(noise.std()) == pytest.approx(4 * float(updates.square().mean().sqrt()), rel=0.03)
    assert not torch.equal(noise, attacks.attacker_updates("gaussian", updates, 1, stream(1), scale=4.0))


def test_alie_z_by_hand() -> None:
    # 40 honest, 10 liars: s = 25 + 1 - 10 = 16 supporters; (40 - 16) / 40 = 0.6; Phi^-1(0.6) = 0.2533.
    assert attacks.alie_z(40, 10) == pytest.approx(0.2533, abs=1e-4)
    assert attacks.alie_z(3, 3) >= 0


def test_replacement_replaces_the_mean() -> None:
    """Scaling by all / liars makes the plain mean the liars' wish when the honest changes are near zero."""
    updates, own = 1e-4 * benign(), torch.ones(2, 60)
    sent = attacks.attacker_updates("scaling", updates, 2, stream(), own=own)
    mean = robust.mean_rule()(torch.cat([updates, sent]), torch.ones(10))
    torch.testing.assert_close(mean, torch.ones(60), atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", ["sign_flip", "scaling", "gaussian", "ipm", "alie", "zero", "nan", "inf"])
def test_trimmed_mean_after_mixing_bears_what_the_mean_does_not(name: str) -> None:
    updates = benign(12)
    table: dict[str, dict[str, Any]] = {
        "ipm": {"epsilon": 10.0},
        "sign_flip": {"scale": 10.0},
        "scaling": {"factor": -50.0},
    }
    stack = torch.cat([updates, attacks.attacker_updates(name, updates, 3, stream(), **table.get(name, {}))])
    rule = robust.prepared(robust.trimmed_mean(0.2), robust.nearest_mixing(3))
    target = updates.mean(0)
    kept = (rule(stack, torch.ones(15)) - target).norm() / target.norm()
    bare = (robust.mean_rule()(stack, torch.ones(15)) - target).norm() / target.norm()
    assert kept < 0.25
    if name not in ("alie", "zero"):
        assert not bare < 0.5  # NaN is not below anything


def test_flip_labels() -> None:
    labels = torch.tensor([0, 3, 9])
    assert attacks.flip_labels(labels, 10).tolist() == [9, 6, 0]
    assert attacks.flip_labels(labels, 10, shift=1).tolist() == [1, 4, 0]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_stamp(dtype: torch.dtype) -> None:
    images = torch.zeros(2, 3, 8, 8, dtype=dtype)
    out = attacks.stamp(images, 2)
    assert out.dtype == dtype
    assert (out[..., 6:, 6:] == (255 if dtype == torch.uint8 else 1.0)).all()
    assert out.count_nonzero() == 2 * 3 * 4
    assert images.count_nonzero() == 0
    assert (attacks.stamp(images, 2, value=7)[..., 7, 7] == 7).all()


def test_refusals() -> None:
    with raises("E-ENGINES-ATTACK-NAME", attack="bribe"):
        attacks.attacker_updates("bribe", benign(), 1, stream())
    with raises("E-ENGINES-ATTACK-SHAPE"):
        attacks.attacker_updates("zero", benign(), 2, stream(), own=torch.zeros(1, 60))
    with raises("E-ENGINES-TRIGGER-SIZE"):
        attacks.stamp(torch.zeros(1, 4, 4), 5)
