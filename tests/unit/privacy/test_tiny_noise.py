"""The account of hardly any noise: told at once, never below the true epsilon, infinity where it means nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binom, norm
from tests.support.errors import raises
from tests.support.tiny import tiny, without_pictures

from fedgraft.privacy import accounting
from fedgraft.privacy.accounting import Budget, epsilon, epsilon_known_cohorts, epsilon_rdp, noise_for
from fedgraft.report.display import protection_rows
from fedgraft.runs.loop import run
from fedgraft.runs.plan import plan_run

PRIVATE = [
    "rounds.sampling=poisson",
    "algorithm.weighting=uniform",
    "rounds.fraction=0.5",
    "partition.clients=4",
    "trainable.kind=head",
]


@pytest.fixture(autouse=True)
def library() -> None:
    pytest.importorskip("dp_accounting")


def forbid_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an account fail that composes distributions of privacy loss: tiny noise takes it minutes or all memory."""

    compose = accounting._composed_epsilon

    def refuse(library: Any, accountant: object, probability: float, noise: float, rounds: int, delta: float) -> float:
        assert not isinstance(accountant, library.PLD), f"PLD at noise {noise}"
        return compose(library, accountant, probability, noise, rounds, delta)

    monkeypatch.setattr(accounting, "_composed_epsilon", refuse)


def least_true_epsilon(probability: float, noise: float, rounds: int, delta: float) -> float:
    """A lower bound by hand: somebody sums all releases and asks whether the sum is above a threshold."""
    best = 0.0
    for multiple in range(1, rounds + 1):
        threshold = multiple - 0.5
        with_client = sum(
            binom.pmf(k, rounds, probability) * norm.sf((threshold - k) / (noise * math.sqrt(rounds)))
            for k in range(rounds + 1)
        )
        log_without = float(norm.logsf(threshold / (noise * math.sqrt(rounds))))
        if with_client > delta:
            best = max(best, math.log(with_client - delta) - log_without)
    return best


@pytest.mark.parametrize("noise", [0.05, 0.03, 0.01])
@pytest.mark.parametrize("probability", [0.1, 1.0])
def test_tiny_noise_is_bounded_from_above_without_distributions(
    noise: float, probability: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_distributions(monkeypatch)
    epsilon.cache_clear()
    spent = epsilon(probability, noise, 8, 1e-5)
    assert spent >= least_true_epsilon(probability, noise, 8, 1e-5) > 0
    assert spent <= epsilon_rdp(probability, noise, 8, 1e-5)


def test_next_to_no_noise_is_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_distributions(monkeypatch)
    for noise in (1e-9, 1e-200, 1e-320):
        account = Budget(math.inf, 1e-5, 0.5, noise, 3, 3)
        account.check()
        assert account.epsilon == account.unamplified == math.inf
        assert Budget(8.0, 1e-5, 0.5, noise, 3).affordable == 0
        assert epsilon(0.5, noise, 0, 1e-5) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("probability", "noise", "rounds"), [(0.1, 0.3, 5), (0.5, 0.5, 3), (1.0, 1.0, 10), (0.2, 2.0, 20)]
)
def test_at_moderate_noise_the_account_is_that_of_dp_accounting_and_the_bound_lies_above(
    probability: float, noise: float, rounds: int
) -> None:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, pld

    account = pld.PLDAccountant()
    account.compose(PoissonSampledDpEvent(probability, GaussianDpEvent(noise)), rounds)
    tight = account.get_epsilon(1e-5)
    assert epsilon(probability, noise, rounds, 1e-5) == pytest.approx(tight, rel=1e-9)
    assert epsilon_known_cohorts(probability, noise, rounds, 1e-5) >= tight * (1 - 1e-6)


def test_a_target_that_promises_nothing_is_refused() -> None:
    with raises("E-PRIVACY-NO-GUARANTEE"):
        noise_for(1e7, 0.5, 10, 1e-5)


@pytest.mark.parametrize("noise", [0.03, 1e-9])
def test_a_run_with_tiny_noise_ends_with_its_account(noise: float, tmp_path: Path) -> None:
    with without_pictures():
        summary = run(tiny(*PRIVATE, f"privacy.dp.noise={noise}"), tmp_path / "run", console=False)
    stored = json.loads((tmp_path / "run" / "summary.json").read_text())["privacy"]
    rows = protection_rows(stored)
    if noise == 1e-9:
        assert summary["privacy"]["epsilon"] == math.inf
        assert stored["epsilon"] is None and "no meaningful guarantee" in rows["privacy"]
    else:
        assert stored["epsilon"] > 500


def test_the_account_is_computed_before_anything_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An account that cannot be told ends a run before it has a folder, not after its last round."""
    monkeypatch.setattr(accounting, "epsilon", lambda *numbers: math.nan)
    with raises("E-PRIVACY-ACCOUNT-NAN"):
        run(tiny(*PRIVATE, "privacy.dp.noise=1.0"), tmp_path / "run", console=False)
    assert not (tmp_path / "run").exists()


def test_the_plan_warns_of_a_promise_that_is_none() -> None:
    told = "\n".join(plan_run(tiny(*PRIVATE, "privacy.dp.noise=0.03")))
    assert "no meaningful guarantee" in told
