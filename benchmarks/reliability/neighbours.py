"""What an adversary makes of a private run: who was in which cohort, and runs with a client told from those without.

`membership` guesses cohorts from everything that a node and the run folder know. `epsilon` runs neighbouring pairs of
whole private runs and bounds epsilon from below by how well the best test tells them apart.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from scipy.stats import beta, norm
from tests.support.tiny import tiny, without_pictures

from benchmarks.reliability.outcome import Outcome, share
from fedgraft import algorithms as zoo
from fedgraft.aggregate.slots import Step
from fedgraft.core.rng import numpy_stream
from fedgraft.core.state import Federation
from fedgraft.local.schedules import constant_rate
from fedgraft.privacy.accounting import epsilon as told_epsilon
from fedgraft.privacy.dp import Mechanism
from fedgraft.privacy.protection import DifferentialPrivacy
from fedgraft.runs import loop as running
from fedgraft.runs.secrets import secret_path
from fedgraft.runs.setup import setup_of
from fedgraft.server import sample as server
from fedgraft.server.sample import start

CLIENTS = 12
PRIVATE = [f"partition.clients={CLIENTS}", "data.limit=240", "rounds.fraction=0.5", "rounds.sampling=poisson"]
PRIVATE += ["algorithm.weighting=uniform", "privacy.dp.noise=1.0", "rounds.evaluate_every=0", "local.steps=1"]

# ---- membership ------------------------------------------------------------------------------------------------------


def membership(scale: float) -> Outcome:
    """Guesses are chosen on the first half of the rounds and counted on the second."""
    rounds = share(300, scale, 60)
    ours = _guessed(rounds, "true", running.without_cohort_size)
    seed = _guessed(rounds, "false", running.without_cohort_size)
    sizes = _guessed(rounds, "true", lambda line, federation: line)
    chance = 0.5 + 4 * math.sqrt(0.25 / (CLIENTS * (rounds // 2)))
    return Outcome(
        ours[0] < chance,
        f"{rounds} rounds of {CLIENTS} clients, each in a cohort with probability 1/2: the best of {ours[2]} guesses "
        f"({ours[1]}) is right in {ours[0]:.1%} of {CLIENTS * (rounds // 2):,} cases (chance 50 %, bar {chance:.1%})",
        {
            "cohorts from the seed": f"right in {seed[0]:.1%} ({seed[1]})",
            "bytes and seconds of each round on record": f"right in {sizes[0]:.1%} ({sizes[1]})",
        },
        seed[0] > chance and sizes[0] > chance,
        {"right": ours[0], "rounds": rounds},
    )


def _guessed(rounds: int, secret: str, shown: Callable[..., Any]) -> tuple[float, str, int]:
    """(share of right guesses, which guess, how many there were) for a run of so many rounds."""
    config = tiny(*PRIVATE, f"rounds.total={rounds}", f"privacy.dp.secret={secret}")
    with (
        tempfile.TemporaryDirectory() as name,
        without_pictures(),
        mock.patch.object(running, "without_cohort_size", shown),
    ):
        folder = Path(name) / "run"
        secret_path(folder).write_text(hashlib.sha256(b"so that the check can be repeated").hexdigest())
        running.run(config, folder, console=False)
        setup = setup_of(config, secret=bytes.fromhex(secret_path(folder).read_text()))
        truth = _matrix(setup.federation, rounds)
        public = tiny(*PRIVATE, f"rounds.total={rounds}", "privacy.dp.secret=false")  # what anybody can derive
        guesses = dict(_guesses(folder, setup_of(public).federation, truth, rounds))
    half = rounds // 2
    best = max(guesses, key=lambda one: float((guesses[one][:half] == truth[:half]).mean()))
    return float((guesses[best][half:] == truth[half:]).mean()), best, len(guesses)


def _matrix(federation: Federation, rounds: int) -> np.ndarray:
    """Who is in which round, bool (rounds, clients)."""
    there = np.zeros((rounds, federation.clients), bool)
    for t in range(rounds):
        there[t, server.sample(federation, t)] = True
    return there


def _guesses(folder: Path, known: Federation, truth: np.ndarray, rounds: int) -> Iterator[tuple[str, np.ndarray]]:
    """From seeds, from every long number in the folder as a secret, from a node's own past, from the record."""
    for seed in range(8):
        yield f"seed {seed}", _matrix(replace(known, seed=seed, secret=b""), rounds)
    texts = [p.read_bytes() for p in folder.rglob("*") if p.is_file()]
    words = {word for text in texts for word in re.findall(rb"[0-9a-f]{16,128}", text)}
    for word in sorted(words)[:40]:
        raw = bytes.fromhex(word.decode()[: len(word) // 2 * 2])
        for kind, secret in (("as it is", raw), ("hashed", hashlib.sha256(b"fedgraft cohorts" + raw).digest())):
            yield f"{word[:8].decode()} {kind}", _matrix(replace(known, secret=secret), rounds)
    yield "as in the round before", np.roll(truth, 1, 0)
    yield "otherwise than in the round before", ~np.roll(truth, 1, 0)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    columns = [_numbers(line) for line in lines if line["round"]]
    for name in sorted(set.intersection(*map(set, columns))):
        values = np.array([column[name] for column in columns])
        for sign in (1, -1):
            yield (
                f"{name} above its median" if sign > 0 else f"{name} below",
                np.repeat((sign * values > sign * np.median(values))[:, None], CLIENTS, 1),
            )


def _numbers(line: dict[str, Any], prefix: str = "") -> dict[str, float]:
    found = {f"{prefix}{k}": float(v) for k, v in line.items() if isinstance(v, int | float)}
    for k, v in line.items():
        found |= _numbers(v, f"{prefix}{k}.") if isinstance(v, dict) else {}
    return found


# ---- epsilon ---------------------------------------------------------------------------------------------------------

ROUNDS, SIZE, DELTA, NOISE = 4, 8, 0.01, 2.5


def epsilon(scale: float) -> Outcome:
    """The attacker knows the data, every model, the order of all things, and lacks only the noise and the cohorts."""
    pairs = share(1000, scale, 100)
    found = {
        name: _bounds(*_scores(pairs, q, noise, known))
        for name, q, noise, known in (
            ("everybody takes part", 1.0, NOISE, True),
            ("half take part, secretly", 0.5, NOISE, False),
            ("a sixth of the noise", 1.0, NOISE / 6, True),
            ("half take part, cohorts known", 0.5, NOISE / 2, True),
        )
    }
    told = {
        "everybody takes part": told_epsilon(1.0, NOISE, ROUNDS, DELTA),
        "half take part, secretly": told_epsilon(0.5, NOISE, ROUNDS, DELTA),
        "a sixth of the noise": told_epsilon(1.0, NOISE, ROUNDS, DELTA),
        "half take part, cohorts known": told_epsilon(0.5, NOISE / 2, ROUNDS, DELTA),
    }
    honest, broken = list(found)[:2], list(found)[2:]
    say = {
        n: f"at least {max(found[n]):.2f} ({found[n][0]:.2f} without assumptions), told {told[n]:.2f}" for n in found
    }
    return Outcome(
        all(max(found[n]) < told[n] for n in honest),
        f"{pairs:,} pairs of runs with and without one client, {ROUNDS} rounds, delta {DELTA:g}: "
        + "; ".join(f"{n}: epsilon {say[n]}" for n in honest),
        {n: f"epsilon {say[n]}" for n in broken},
        all(max(found[n]) > told[n] for n in broken),
        {"found": found, "told": told},
    )


def _scores(pairs: int, q: float, noise: float, known: bool) -> tuple[list[float], list[float]]:
    """How much each run looks as if the client had been in it: of those with it, and of those without."""
    dp = DifferentialPrivacy(Mechanism(noise, q, 5), 1.0, bound_to_sum=True)
    both: tuple[list[float], list[float]] = ([], [])
    for there in (True, False):
        for pair in range(pairs):
            key = hashlib.sha256(f"{noise} {q} {known} {there} {pair}".encode()).digest()
            both[not there].append(_score(replace(dp, key=key), there, known, numpy_stream(pair, "epsilon", there)))
    return both


def _score(dp: DifferentialPrivacy, there: bool, known: bool, draws: np.random.Generator) -> float:
    """One run through the server's own private step, and the likelihood ratio of all that it released.

    The client's update is as long as the clip, along one coordinate; those of the others are known and stand as zero.
    Where cohorts are secret, the attacker mixes over whether the client was in; where they are known, it looks at one
    that is in every round.
    """
    state, total = start(zoo.fedavg(), torch.zeros(SIZE), SIZE), 0.0
    mu, q = 1 / dp.mechanism.noise, dp.mechanism.probability
    federation = Federation("pair", 0, 5, 5, 1, constant_rate(1.0), "poisson")
    own = torch.zeros(SIZE)
    own[0] = dp.clip
    for _ in range(ROUNDS):
        inside = there and (known or draws.random() < q)
        step = Step(federation, replace(state, clip=dp.clip), zoo.fedavg().server, 1.0)
        new = dp.advance_from_updates(step, [own] if inside else [], 0.0)
        seen = float((new.vector - state.vector)[0]) * dp.mechanism.expected / (dp.mechanism.noise * dp.clip)
        ratio, state = seen * mu - mu * mu / 2, new
        total += ratio if known else math.log1p(q * math.expm1(ratio))
    return total


def _bounds(there: list[float], without: list[float]) -> tuple[float, float]:
    """Lower bounds (95 %) on epsilon: by Clopper and Pearson, and as a Gaussian mechanism of the measured distance."""
    half, n = len(there) // 2, len(there) - len(there) // 2
    best, level = -math.inf, 0.0
    for cut in sorted(there[:half])[:: max(1, half // 50)]:
        right, wrong = (sum(s > cut for s in scores[:half]) for scores in (there, without))
        if right / half > DELTA and (gain := math.log((right / half - DELTA) / (max(1, wrong) / half))) > best:
            best, level = gain, cut
    hits, slips = (sum(s > level for s in scores[half:]) for scores in (there, without))
    low = beta.ppf(0.025, hits, n - hits + 1) if hits else 0.0
    high = beta.ppf(0.975, slips + 1, n - slips) if slips < n else 1.0
    plain = math.log(max(low - DELTA, 1e-9) / high)
    spread = math.sqrt((np.var(there, ddof=1) + np.var(without, ddof=1)) / 2)
    mu = (np.mean(there) - np.mean(without)) / spread - 1.96 * math.sqrt(2 / len(there))
    return float(plain), _gaussian(float(mu))


def _gaussian(mu: float) -> float:
    """Epsilon of a Gaussian mechanism with this distance (Balle and Wang 2018), by bisection."""
    if mu <= 0:
        return 0.0
    low, high = 0.0, 200.0
    for _ in range(80):
        middle = (low + high) / 2
        delta = norm.cdf(mu / 2 - middle / mu) - math.exp(min(middle, 700)) * norm.cdf(-mu / 2 - middle / mu)
        low, high = (middle, high) if delta > DELTA else (low, middle)
    return low
