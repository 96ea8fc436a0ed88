"""The owner's policy as a file, in words, and against a config: each rule has a config or a value that breaks it."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
from tests.support.errors import raises
from tests.support.hostile import LIES
from tests.support.tiny import Open, tiny

from fedgraft.client.authorize import implied_policy
from fedgraft.client.policy import Policy, count_request, in_words, parse, policy_toml
from fedgraft.config.agreement import broken_rules, policy_of_config, safe_policy
from fedgraft.config.build import build_algorithm
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Request
from fedgraft.runs.setup import setup_of

SECURE = ["privacy.aggregation=secure", "partition.clients=6", "rounds.fraction=1", "local.steps=2"]
PRIVATE = ["privacy.dp.noise=1.5", "rounds.sampling=poisson", "algorithm.weighting=uniform"]


def broken(policy: Policy, *overrides: str) -> list[str]:
    config = tiny(*overrides)
    return [sentence.partition(":")[0] for sentence in broken_rules(policy, config, build_algorithm(config))]


def safe(*overrides: str) -> Policy:
    config = tiny(*overrides)
    return safe_policy(config, build_algorithm(config))


@pytest.mark.parametrize("overrides", [SECURE, [*SECURE, *PRIVATE], PRIVATE, []])
def test_a_safe_policy_allows_its_own_config_and_survives_its_file(overrides: list[str]) -> None:
    made = safe(*overrides)
    assert not broken(made, *overrides)
    assert parse(policy_toml(made)) == made and len(in_words(made)) >= 8
    assert "config" in broken(made, *overrides, "seed=5")


@pytest.mark.parametrize(
    ("overrides", "asked"),
    [
        ([], {"statistics"}),
        (["model.head=probe"], {"statistics", "head_gradient"}),
        (["model.head=ncm"], {"class_sums"}),
        (["model.head=random"], set()),
        (["trainable.kind=sparse"], {"statistics", "fisher_scores"}),
        (["trainable.kind=sparse", "trainable.sparse.strategy=random"], {"statistics"}),
        (["trainable.kind=sparse", "trainable.sparse.per_client=true"], {"statistics", "own_mask"}),
        (["trainable.kind=lora", "trainable.lora.aggregate=core"], {"statistics", "gradient"}),
        (["personal.evaluate=end"], {"statistics", "evaluate"}),
    ],
)
def test_a_safe_policy_allows_what_the_head_and_the_trainable_kind_ask_for(
    overrides: list[str], asked: set[str]
) -> None:
    assert set(safe(*overrides).actions) == {"train", "count"} | asked


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule, overrides",
    [
        ("secure", ["privacy.aggregation=clear"]),
        ("rounds", ["rounds.total=99"]),
        ("steps", ["local.steps=50"]),
        ("ranges.lr", ["local.lr=0.9"]),
        ("cohort", ["rounds.fraction=0.34"]),
        ("threshold", ["privacy.threshold=4", "partition.clients=7"]),
        ("actions", ["personal.evaluate=end"]),
        ("epsilon", ["privacy.dp=none"]),
        ("noise", ["privacy.dp.noise=0.7"]),
        ("most_clients", ["partition.clients=9"]),
    ],
)
def test_a_config_that_breaks_a_rule_is_told_which(rule: str, overrides: list[str]) -> None:
    base = [*SECURE, *PRIVATE] if rule in {"epsilon", "noise"} else SECURE
    assert rule in broken(replace(safe(*base), config=""), *base, *overrides)


def test_every_rule_is_broken_by_some_order_or_config() -> None:
    """A rule without a test is a rule that nobody checks."""
    here = {"request_megabytes"}  # tests/deploy/test_deploy_hostile.py
    here |= {"unit"}  # tests/unit/test_record_privacy.py
    here |= {
        "models",
        "steps",
        "delta",
        "most_clients",
        "pinned_peers",
        "in_the_clear",
        "config",
        "secure",
        "epsilon",
        "noise",
    }
    requests = {lie.rule.partition(".")[0] for lie in LIES.values()}
    assert {f.name for f in fields(Policy)} - requests - here == set()


@pytest.mark.parametrize(
    "text, code",
    [
        ("secure = 1", "E-CLIENT-POLICY-VALUE"),
        ("cohort = 'many'", "E-CLIENT-POLICY-VALUE"),
        ("epsilon = inf", "E-CLIENT-POLICY-VALUE"),
        ("hide = true", "E-CLIENT-POLICY-RULE"),
        ("secure =", "E-CLIENT-POLICY-TOML"),
        ("ranges = 3", "E-CLIENT-POLICY-VALUE"),
        ("actions = 'train'", "E-CLIENT-POLICY-VALUE"),
    ],
)
def test_a_policy_nobody_can_read_is_refused(text: str, code: str) -> None:
    with raises(code):
        parse(text)


def test_a_day_ends_and_a_clock_that_is_set_back_gives_no_second_one() -> None:
    policy, request, ledger = Policy(rounds_per_day=2), Request("r", 0, 0, "train"), b""
    for day in ("2030-01-01", "2030-01-01", "2030-01-02", "2030-01-02"):
        ledger = count_request(policy, request, ledger, lambda day=day: day)  # type: ignore[misc]
    for day in ("2030-01-02", "2030-01-01", "2029-01-01"):
        with raises("E-REFUSED-ROUNDS-PER-DAY", most=2):
            count_request(policy, request, ledger, lambda day=day: day)  # type: ignore[misc]


def test_an_owner_agrees_to_a_fingerprint_and_not_to_its_beginning() -> None:
    """A digest of 64 bits has a second config within 2^32 tries of whoever writes both; the fingerprint has not."""
    config, algorithm = tiny(), build_algorithm(tiny())
    whole = safe_policy(config, algorithm)
    assert whole.config == config.fingerprint and len(whole.config) == 64 and whole.config.startswith(config.digest)
    assert not broken_rules(whole, config, algorithm) and whole.agrees(config.digest)
    twin = replace(whole, config=config.digest + "0" * 48)  # another config of the same digest
    assert broken_rules(twin, config, algorithm) == ["config: it is not the config that was agreed to"]
    assert not replace(whole, config=config.digest).agrees(config.fingerprint) and not whole.agrees("")


def test_under_privacy_a_client_answers_nothing_that_no_noise_covers() -> None:
    config = tiny("privacy.dp.noise=1.0", "rounds.sampling=poisson", "algorithm.weighting=uniform")
    algorithm = build_algorithm(config)
    for policy in (policy_of_config(config, algorithm), implied_policy(algorithm)):
        policy.check_action(Request("", 0, 0, "train"))
        for action in ("statistics", "class_counts", "fisher_scores", "evaluate", "own_mask"):
            with raises("E-REFUSED-ACTIONS"):
                policy.check_action(Request("", 0, 0, action))


def test_a_run_in_this_process_keeps_the_policy_in_its_config(tmp_path: Path) -> None:
    """A config that breaks its own table is refused before any work; one that keeps it runs to the same bytes."""
    from fedgraft.runs.loop import run

    rules = ["policy.rounds=2", "policy.ranges.lr=[0.0, 0.1]"]
    assert tiny(*rules).digest == tiny().digest  # rules refuse, they decide no byte
    with pytest.raises(FedgraftError, match=r"rule policy\.rounds that it sets itself: it has 9 rounds"):
        run(tiny(*rules, "rounds.total=9"), tmp_path / "broken", console=False)
    with pytest.raises(FedgraftError, match=r"rule policy\.secure"):
        setup_of(tiny("policy.secure=true"))
    with raises("E-CLIENT-POLICY-RULE"):
        setup_of(tiny("policy.hide=true"))
    assert run(tiny(*rules), tmp_path / "kept", console=False)["rounds"] == 2


def test_the_policy_of_a_config_is_asked_at_every_order() -> None:
    open_ = Open(tiny("policy.ranges.lr=[0.0, 0.1]"))
    open_.context.policies[1].check(request := Request("", 0, 0, "train", settings={"lr": 0.05}), open_.algorithm)
    with raises("E-REFUSED-RANGES-LR"):
        open_.context.policies[1].check(replace(request, settings={"lr": 0.5}), open_.algorithm)
