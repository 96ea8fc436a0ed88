"""The documents' zero-sum scheme: it sums, and it is insecure."""

from __future__ import annotations

import torch
from reproduction.zero_sum_demo import InsecureZeroSumDemo
from tests.support.errors import raises


def stream(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_zero_sum_demo_sums_and_is_insecure() -> None:
    before = torch.random.get_rng_state()
    vectors = {u: torch.randn(100, generator=stream(u)) * 0.02 for u in range(5)}
    demo = InsecureZeroSumDemo(3, 1, tuple(vectors))
    masked = {u: demo.mask(u, v) for u, v in vectors.items()}
    exact = torch.stack(list(vectors.values())).sum(0)
    assert torch.allclose(demo.total(masked), exact, atol=1e-5)
    assert torch.equal(before, torch.random.get_rng_state())
    assert not torch.allclose(masked[2], vectors[2], atol=0.5)
    assert torch.allclose(demo.unmask_as_server(2, masked[2]), vectors[2], atol=1e-6)  # why it is insecure
    loud = InsecureZeroSumDemo(3, 1, tuple(vectors), sigma=1e4)
    error = (loud.total({u: loud.mask(u, v) for u, v in vectors.items()}) - exact).abs().max()
    assert error > 1e-4  # float cancellation: hiding well costs precision
    with raises("E-REPRODUCTION-ZERO-SUM"):
        demo.total({u: masked[u] for u in range(4)})
