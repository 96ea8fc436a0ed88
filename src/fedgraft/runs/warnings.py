"""Settings that work but do not mean what one may think: one sentence each, before the first round and in the plan."""

from __future__ import annotations

from fedgraft.algorithm import Mixing
from fedgraft.edit.choose import STRATEGIES
from fedgraft.runs.setup import Setup
from fedgraft.config.load import Config
from fedgraft.runs.parts import per_round


def warnings_for(config: Config, setup: Setup) -> list[str]:
    """All that holds for this run; with a deadline the edit space must be open, because the engine depends on it."""
    found = []
    m, stats = per_round(config), setup.federated.partition.statistics()
    if m == 1 and config.partition.clients > 1:
        found.append("one client per round: every weighting rule is the same; raise rounds.fraction")
    missing = stats["uncovered"]
    if len(missing):
        found.append(f"{len(missing)} classes are held by nobody, so they cannot be learned: {list(missing)[:10]}")
    found += stats["notes"]
    here = config.rounds.deadline is not None and setup.remote is None
    if here and (mode := setup.choice(setup.context).mode) != "pool":
        found.append(
            f"clients of the engine {mode!r} cannot be late, so rounds.deadline does nothing; it needs worker "
            "processes (engine='reference' with workers=2 or more) or a federation of machines"
        )
    if isinstance(setup.algorithm.aggregate, Mixing) and m < config.partition.clients:
        found.append("with partial participation only the cohort's models are mixed; the others wait")
    return found + _unprotected(config) + (_one_by_one(config, setup) if config.privacy.aggregation == "secure" else [])


def _scored(config: Config) -> bool:
    """Whether a mask is made from the clients' data."""
    return config.trainable.kind == "sparse" and STRATEGIES[config.trainable.sparse.strategy].source == "fisher"


def _unprotected(config: Config) -> list[str]:
    """What the protection or the privacy account does not cover."""
    p, found = config.privacy, []
    if p.aggregation == "zero_sum_demo":
        found.append("privacy.aggregation='zero_sum_demo' is INSECURE: the server can read every change; use 'secure'")
    where = "a secure sum, without noise" if p.aggregation == "secure" else "the clear"
    demands = p.dp is not None or p.aggregation == "zero_sum_demo"
    if demands and config.model.head != "random":
        found.append(f"step 0 sums feature statistics in {where}, outside the account; model.head='random' avoids it")
    if demands and _scored(config):
        found.append(f"the mask is calibrated from sensitivities summed in {where}, outside the account")
    return found


def _one_by_one(config: Config, setup: Setup) -> list[str]:
    """What a run with a secure sum still asks of each client by itself; masks that stay each client's are refused."""
    mask, found = config.trainable.sparse, []
    if _scored(config) and mask.merge != "score_mean":
        found.append(
            f"trainable.sparse.merge={mask.merge!r} shows the server masks of the clients' own, outside the secure sum; "
            "'score_mean' hides their scores"
        )
    if config.personal.evaluate != "never":
        found.append("personal.evaluate shows the server each client's own accuracy and count, outside the secure sum")
    if setup.federated.blind:
        found.append(
            "the model is measured on images that clients hold: the server sees each one's counts, outside the secure "
            "sum"
        )
    return found
