"""Warnings about settings that work but may not do what was intended: before the first round, and in the plan."""

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
    """Return all warnings that apply to this run, one sentence each."""
    warnings = [f"the network: {note}" for note in setup.task.network.notes]
    warnings += _unused_files(setup)
    if setup.federation.per_round == 1 and setup.federation.clients > 1:
        warnings.append("one client per round: every weighting rule is the same; raise rounds.fraction")
    warnings += _partition(setup)
    warnings += _small_clients(setup)
    warnings += _unused_deadline(setup, opened, engines)
    has_personal_models = Capability.PERSONAL_MODELS in setup.algorithm.provides
    if has_personal_models and setup.federation.per_round < setup.federation.clients:
        warnings.append("with partial participation only the cohort's models are mixed; the others wait")
    warnings += _dominant_noise(setup, opened)
    warnings += _repeatable_noise(setup)
    warnings += _meaningless_epsilon(setup)
    warnings += _unpaired_rows(setup)
    warnings += _noised_representations(setup)
    warnings += _outside_account(setup)
    if setup.algorithm.privacy.collects_sum:
        warnings += _visible_per_client(setup)
    return warnings


def _unused_files(setup: RunSetup) -> list[str]:
    """Return warnings of images that cannot be read and of files that are no images."""
    dataset = setup.task.data.dataset
    warnings = []
    if dataset.skipped:
        examples = "; ".join(f"{place} ({reason})" for place, reason in dataset.skipped[:3])
        more = ""
        if len(dataset.skipped) > 3:
            more = f"; and {len(dataset.skipped) - 3} more, in skipped.txt of the run"
        count = f"{len(dataset.skipped)} images cannot be read and are"
        if len(dataset.skipped) == 1:
            count = "1 image cannot be read and is"
        warnings.append(f"{count} left out: {examples}{more}")
    others = len(dataset.other_files)
    if others:
        subject = f"{others} files among the images are"
        if others == 1:
            subject = "1 file among the images is"
        warnings.append(f"{subject} of no format that is read, and left out")
    return warnings


def _partition(setup: RunSetup) -> list[str]:
    """Return warnings of classes that no client holds, and of what the partition itself noticed."""
    statistics = setup.task.data.partition.statistics()
    missing = statistics["uncovered"]
    warnings = []
    if len(missing):
        warnings.append(f"{len(missing)} classes are held by nobody, so they cannot be learned: {list(missing)[:10]}")
    return [*warnings, *statistics["notes"]]


def _small_clients(setup: RunSetup) -> list[str]:
    """Return the warning of clients with fewer images than a batch, if there are some."""
    data = setup.task.data
    local = setup.algorithm.local
    sizes = data.partition.sizes()
    smallest = int(min(sizes, default=0))
    if not data.rows_known or smallest >= local.batch_size or local.epochs is not None:
        return []
    return [
        f"local.batch_size is {local.batch_size} and {sum(sizes < local.batch_size)} of {data.clients} clients hold "
        f"fewer images, the smallest {smallest}: a batch there is the client's whole data, each step the same images"
    ]


def _unused_deadline(setup: RunSetup, opened: OpenRun, engines: Engines) -> list[str]:
    """Return the warning of a deadline that clients of the chosen engine cannot miss, if there is one."""
    if setup.config.rounds.deadline is None or engines.remote is not None:
        return []
    mode = engines.choice(setup.algorithm, opened.context).mode
    if mode == "pool":
        return []
    return [
        f"clients of the engine {mode!r} cannot be late, so rounds.deadline does nothing; it needs worker "
        "processes (engine='reference' with workers=2 or more) or a federation of machines"
    ]


LOUD = 3.0
"""Times that noise may be as long as the longest update before a run warns of it.

vit-tiny's head on CIFAR-100, 40 rounds at epsilon 8 (docs/results/q5.md): as long left 37 of 57 %, 9 times 7 of 52."""


def _dominant_noise(setup: RunSetup, opened: OpenRun) -> list[str]:
    """Return the warning of noise that is much longer than the longest sum of updates, which are clipped."""
    dp = setup.algorithm.privacy.noise
    if dp is None:
        return []
    weights = opened.space.size
    times = dp.mechanism.noise * math.sqrt(weights) / dp.mechanism.expected
    if times <= LOUD:
        return []
    return [
        f"the noise of a round is {times:,.0f} times as long as the longest update can be, with {weights:,} weights "
        f"and about {dp.mechanism.expected:.3g} clients a round: expect to learn little; {times:,.0f} times the "
        "clients a round, fewer weights (trainable.kind=head) or a larger epsilon help"
    ]


def _repeatable_noise(setup: RunSetup) -> list[str]:
    """Return the warning of noise that anybody can compute from the seed."""
    dp = setup.algorithm.privacy.noise
    record = setup.algorithm.privacy.records
    follows_secret = (dp is None or dp.bound_to_sum) and (record is None or bool(record.secret))
    if follows_secret:
        return []
    return [
        "REPEATABLE, FOR EXPERIMENTS: noise and cohorts follow from the public seed, so this epsilon protects "
        "nobody; set privacy.dp.secret=true"
    ]


def _meaningless_epsilon(setup: RunSetup) -> list[str]:
    """Return the warning of noise that is too small for a meaningful guarantee."""
    account = budget(setup.config, setup.algorithm, setup.config.rounds.total)
    if account is None or account.epsilon <= LARGE_EPSILON:
        return []
    return [
        f"privacy.dp.noise={account.noise:g} gives no meaningful guarantee: after {account.planned} rounds epsilon "
        f"is {format_epsilon(account.epsilon)}; raise the noise or set privacy.dp.epsilon"
    ]


UNPAIRED = ("mixture:cka_linear", "mixture:cka_rbf", "mixture:cka_debiased", "mixture:rsa")
"""Mixtures by similarities of two networks on the same rows, computed on each client's own images."""


def _unpaired_rows(setup: RunSetup) -> list[str]:
    """Return the warning of a similarity that compares rows of different images."""
    if setup.algorithm.aggregate.name not in UNPAIRED:
        return []
    return [
        "this similarity compares rows of different images, as published: it does not tell which clients hold the "
        "same classes, and acts as a weight of the own model (docs/results/q4.md); algorithm.name=fedshibu_probe or "
        "algorithm.similarity=probe_cka compares on images that all clients share"
    ]


def _noised_representations(setup: RunSetup) -> list[str]:
    """Return warnings of representations that clients send with noise, with what it guarantees to one image."""
    warnings = []
    for observation in setup.algorithm.wants:
        options = observation.options
        if observation.name == "representation" and options.get("noise"):
            warnings.append(_representation_guarantee(setup, int(options["samples"]), float(options["noise"])))
    return warnings


def _representation_guarantee(setup: RunSetup, samples: int, noise: float) -> str:
    """Return a sentence on what `noise` on the representations of `samples` images guarantees to one image.

    Rows have length 1, so one image changes a row by at most 2.
    """
    smallest = int(min(setup.task.data.partition.sizes(), default=1))
    repetitions = max(1, math.ceil(samples / max(1, smallest)))  # of an image among the samples of a client
    rounds = setup.config.rounds.total
    delta = 1e-5
    spent = gaussian_epsilon(noise / (2 * math.sqrt(repetitions)), rounds, delta)
    return (
        f"features that clients show with noise {noise:g} tell of one image, beyond what the update tells, at most "
        f"epsilon {spent:.3g} at delta {delta:g} in {rounds} rounds; in a simulation the noise follows from the seed"
    )


def _outside_account(setup: RunSetup) -> list[str]:
    """Return warnings of preparations of a private run that its privacy account does not cover."""
    algorithm = setup.algorithm
    if not algorithm.privacy.answers_only_accounted:
        return []
    channel = "the clear"
    if algorithm.privacy.collects_sum:
        channel = "secure aggregation, without noise"
    warnings = []
    if setup.config.makes_head:
        warnings.append(
            f"head initialisation sums feature statistics in {channel}, outside the account; "
            "model.head='random' avoids it"
        )
    if setup.config.head == "stored":
        warnings.append(
            "the account begins with the stored model: if that was trained on images of these clients, what it reveals "
            "of them is outside the account"
        )
    if algorithm.trainable.scores_data:
        warnings.append(f"the mask is calibrated from Fisher scores summed in {channel}, outside the account")
    return warnings


def _visible_per_client(setup: RunSetup) -> list[str]:
    """Return warnings of requests that a run under secure aggregation still sends to each client by itself."""
    merge = setup.config.trainable.sparse.merge
    warnings = []
    if setup.algorithm.trainable.scores_data and merge != "score_mean":
        warnings.append(
            f"trainable.sparse.merge={merge!r} shows the server masks of the clients' own, outside secure "
            "aggregation; 'score_mean' hides their scores"
        )
    if setup.config.personal.evaluate != "never":
        warnings.append(
            "personal.evaluate shows the server each client's own accuracy and count, outside the hidden sum"
        )
    if setup.task.data.blind:
        warnings.append(
            "the model is measured on images that clients hold: the server sees each one's counts, outside the hidden "
            "sum"
        )
    return warnings
