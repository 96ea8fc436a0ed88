"""Settings that work but do not mean what one may think: one sentence each, before the first round and in the plan."""

from __future__ import annotations

import math

from fedgraft.config.build import budget
from fedgraft.core.capabilities import Capability
from fedgraft.privacy.accounting import LARGE_EPSILON, gaussian_epsilon
from fedgraft.report.values import format_epsilon
from fedgraft.runs.engines import Engines
from fedgraft.runs.open_run import OpenRun
from fedgraft.runs.setup import RunSetup


def warnings_for(setup: RunSetup, opened: OpenRun, engines: Engines) -> list[str]:
    """All that holds for this run."""
    config, data, algorithm, found = setup.config, setup.task.data, setup.algorithm, list[str]()
    m, stats, skipped = setup.federation.per_round, data.partition.statistics(), data.dataset.skipped
    found += [f"the network: {note}" for note in setup.task.network.notes]
    if skipped:
        named = "; ".join(f"{place} ({why})" for place, why in skipped[:3])
        more = f"; and {len(skipped) - 3} more, in skipped.txt of the run" if len(skipped) > 3 else ""
        found.append(f"{len(skipped)} images cannot be read and are left out: {named}{more}")
    if other := len(data.dataset.other_files):
        are = "1 file among the images is" if other == 1 else f"{other} files among the images are"
        found.append(f"{are} of no format that is read, and left out")
    if m == 1 and setup.federation.clients > 1:
        found.append("one client per round: every weighting rule is the same; raise rounds.fraction")
    missing = stats["uncovered"]
    if len(missing):
        found.append(f"{len(missing)} classes are held by nobody, so they cannot be learned: {list(missing)[:10]}")
    found += stats["notes"]
    batch, least = algorithm.local.batch_size, int(min(data.partition.sizes(), default=0))
    if data.rows_known and least < batch and algorithm.local.epochs is None:
        found.append(
            f"local.batch_size is {batch} and {sum(data.partition.sizes() < batch)} of {data.clients} clients hold "
            f"fewer images, the smallest {least}: a batch there is the client's whole data, each step the same images"
        )
    here = config.rounds.deadline is not None and engines.remote is None
    if here and (mode := engines.choice(algorithm, opened.context).mode) != "pool":
        found.append(
            f"clients of the engine {mode!r} cannot be late, so rounds.deadline does nothing; it needs worker "
            "processes (engine='reference' with workers=2 or more) or a federation of machines"
        )
    if Capability.PERSONAL_MODELS in algorithm.provides and m < setup.federation.clients:
        found.append("with partial participation only the cohort's models are mixed; the others wait")
    found += _drowned(setup, opened)
    return found + _unprotected(setup) + (_one_by_one(setup) if algorithm.privacy.collects_sum else [])


LOUD = 3.0
"""Times that noise may be as long as the longest update before a run says so.

vit-tiny's head on CIFAR-100, 40 rounds at epsilon 8 (docs/results/q5.md): as long left 37 of 57 %, 9 times 7 of 52."""


def _drowned(setup: RunSetup, opened: OpenRun) -> list[str]:
    """Whether noise is much longer than all that clients can say together: each update is clipped, noise is not."""
    dp, weights = setup.algorithm.privacy.noise, opened.space.size
    if dp is None:
        return []
    times = dp.mechanism.noise * math.sqrt(weights) / dp.mechanism.expected
    if times <= LOUD:
        return []
    return [
        f"the noise of a round is {times:,.0f} times as long as the longest update can be, with {weights:,} weights "
        f"and about {dp.mechanism.expected:.3g} clients a round: expect to learn little; {times:,.0f} times the "
        "clients a round, fewer weights (trainable.kind=head) or a larger epsilon help"
    ]


def _unprotected(setup: RunSetup) -> list[str]:
    """What the protection or the privacy account does not cover."""
    a, found = setup.algorithm, list[str]()
    if a.privacy.noise is not None and not a.privacy.noise.bound:
        found.append(
            "REPEATABLE, FOR EXPERIMENTS: noise and cohorts follow from the public seed, so this epsilon protects "
            "nobody; set privacy.dp.secret=true"
        )
    account = budget(setup.config, a, setup.config.rounds.total)
    if account is not None and account.epsilon > LARGE_EPSILON:
        found.append(
            f"privacy.dp.noise={account.noise:g} gives no meaningful guarantee: after {account.planned} rounds epsilon "
            f"is {format_epsilon(account.epsilon)}; raise the noise or set privacy.dp.epsilon"
        )
    for shown in (w for w in a.wants if w.name == "representation" and w.options.get("noise")):
        found.append(_shown(setup, int(shown.options["samples"]), float(shown.options["noise"])))
    where = "secure aggregation, without noise" if a.privacy.collects_sum else "the clear"
    demands = a.privacy.noise is not None
    if demands and setup.config.head != "random":
        found.append(
            f"head initialisation sums feature statistics in {where}, outside the account; "
            "model.head='random' avoids it"
        )
    if demands and a.trainable.scores_data:
        found.append(f"the mask is calibrated from Fisher scores summed in {where}, outside the account")
    return found


def _shown(setup: RunSetup, samples: int, noise: float) -> str:
    """What noise on shown representations promises one image: rows have length 1, so one changes by at most 2."""
    times = max(1, -(-samples // max(1, int(min(setup.task.data.partition.sizes(), default=1)))))
    rounds, delta = setup.config.rounds.total, 1e-5
    spent = gaussian_epsilon(noise / (2 * math.sqrt(times)), rounds, delta)
    return (
        f"features that clients show with noise {noise:g} tell of one image, beyond what the update tells, at most "
        f"epsilon {spent:.3g} at delta {delta:g} in {rounds} rounds; in a simulation the noise follows from the seed"
    )


def _one_by_one(setup: RunSetup) -> list[str]:
    """What a run under secure aggregation still asks of each client by itself."""
    mask, found = setup.config.trainable.sparse, list[str]()
    if setup.algorithm.trainable.scores_data and mask.merge != "score_mean":
        found.append(
            f"trainable.sparse.merge={mask.merge!r} shows the server masks of the clients' own, outside secure "
            "aggregation; 'score_mean' hides their scores"
        )
    if setup.config.personal.evaluate != "never":
        found.append("personal.evaluate shows the server each client's own accuracy and count, outside the hidden sum")
    if setup.task.data.blind:
        found.append(
            "the model is measured on images that clients hold: the server sees each one's counts, outside the hidden "
            "sum"
        )
    return found
