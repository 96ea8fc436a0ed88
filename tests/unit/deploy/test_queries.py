"""Queries without training: preflight reports sums and follows the owner's policy, evaluation gives metrics by site."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.errors import raises
from tests.support.machines import Machines, refused_rule
from tests.support.tiny import tensors_of, without_pictures

from fedgraft.client.policy import policy_toml
from fedgraft.config.agreement import safe_policy
from fedgraft.config.build import build_algorithm
from fedgraft.config.load import Config, load
from fedgraft.consortium.site_faults import findings
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Request
from fedgraft.deploy import evaluate, preflight
from fedgraft.deploy.deployed import run_deployed
from fedgraft.deploy.evaluate import evaluation_table, plan_evaluation
from fedgraft.deploy.node import agreed_policies
from fedgraft.deploy.preflight_answers import with_node_names
from fedgraft.privacy.secagg.keys import Identity, context, public_key, sign
from fedgraft.runs.deliver import export_run
from fedgraft.runs.predict import predictor

NAMES = ("north", "south", "east")
SMALL = [
    "model.name=tiny",
    "rounds.total=1",
    "rounds.fraction=1.0",
    "local.steps=2",
    "local.batch_size=8",
    "seed=0",
    "partition.clients=3",
    "trainable.kind=everything",
    "data.source=folder",
    "data.validation=0.2",
    "workers=1",
    "data.image_size=16",
    "engine=reference",
]


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))
    stream = np.random.default_rng(1)
    for site in NAMES:
        for part, count in (("train", 9), ("test", 6)):
            for level, name in enumerate(("benign", "melanoma")):
                (tmp_path / site / part / name).mkdir(parents=True)
                for i in range(count):
                    pixels = stream.normal(90 + 60 * level, 25, (16, 16, 3)).clip(0, 255).astype(np.uint8)
                    Image.fromarray(pixels).save(tmp_path / site / part / name / f"{i}.png")
    return {site: tmp_path / site for site in NAMES}


def machines(config: Config, sites: dict[str, Path], monkeypatch: pytest.MonkeyPatch, **more: Any) -> Machines:
    root = next(iter(sites.values())).parent
    return Machines(config, root / "there", root / "keys", monkeypatch, data=list(map(str, sites.values())), **more)


def collect(sites: dict[str, Path], monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[dict[str, Any], Machines]:
    config = load(None, [*SMALL, *options])
    engine = machines(config, sites, monkeypatch, task="preflight")
    return preflight.collect_preflight(config, engine.root / "preflight", engine), engine


def kinds(answers: dict[str, Any]) -> set[str]:
    named, shared = with_node_names(answers, NAMES)
    return {finding.kind for finding in findings(named, 16, shared)}


def allow(engine: Machines, client: int, config: Config, also: Sequence[str] = ()) -> None:
    made = safe_policy(config, build_algorithm(config), also)
    (engine.home(client).parent / "policy.toml").write_text(policy_toml(made))


@pytest.mark.slow
def test_nodes_report_sums_and_the_server_finds_what_is_wrong(
    sites: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    clean, engine = collect(sites, monkeypatch)
    assert kinds(clean) == {"no_policy"} and not clean["refused"]
    (sites["south"] / "train/melanoma").rename(sites["south"] / "train/Melanoma")
    (sites["south"] / "test/melanoma").rename(sites["south"] / "test/Melanoma")
    shutil.copy(sites["north"] / "train/benign/0.png", sites["east"] / "train/benign/copy.png")
    (sites["north"] / "train/benign/1.png").write_bytes(b"no image")
    answers, _ = collect(sites, monkeypatch)
    assert {"class_case", "duplicates_across", "unreadable"} <= kinds(answers)
    assert answers["shared"] == [[0, 2, 1]] and list(answers["facts"]["0"]["unreadable"].values()) == [None]
    assert kinds(collect(sites, monkeypatch, 'data.class_map={"Melanoma"="melanoma"}')[0]).isdisjoint({"class_case"})
    left = engine.log(0)
    assert [line["action"] for line in left if line.get("round") == 0][:2] == ["preflight", "preflight"]


def test_no_digest_of_an_image_can_be_tested_by_the_server(
    sites: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tags differ by pair of sites, and follow from no key that passes the server."""
    config = load(None, SMALL)
    engine = machines(config, sites, monkeypatch, task="preflight")
    seen = list[dict[str, Any]]()
    real = Machines.deliver

    def deliver(self: Machines, request: Request) -> Any:
        answer = real(self, request)
        seen.append(json.loads(answer[1]))
        return answer

    monkeypatch.setattr(Machines, "deliver", deliver)
    answers = preflight.collect_preflight(config, engine.root / "preflight", engine)
    tags = [answer["tags"] for answer in seen if "tags" in answer]
    assert len(tags) == 3 and not set(tags[0]["1"]) & set(tags[0]["2"])  # the same images, under two keys
    assert not any(tag in json.dumps(answers) for tag in tags[0]["1"])  # nothing of them is stored
    forged = {
        str(k): "00" * 32 + answer["key"][64:] for k, answer in enumerate(seen[:3])
    }  # a server's own key in between
    request = Request(config.digest, 0, 0, "preflight", settings={"keys": json.dumps(forged)})
    assert refused_rule(real(engine, request)[1]) == "pinned_peers"


def test_the_owners_policy_decides_who_answers(sites: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(None, [*SMALL, "privacy.aggregation=secure"])
    engine = machines(config, sites, monkeypatch, task="preflight")
    allow(engine, 0, config)
    allow(engine, 1, config, ["preflight"])
    allow(engine, 2, load(None, [*SMALL, "seed=9"]), ["preflight"])
    answers = preflight.collect_preflight(config, engine.root / "preflight", engine)
    assert set(answers["facts"]) == {"1"} and answers["facts"]["1"]["policy"] and answers["facts"]["1"]["minimum"] == 10
    assert {k: refused_rule(reason) for k, reason in answers["refused"].items()} == {"0": "actions", "2": "config"}
    assert engine.log(0)[-1]["kind"] == "refused"


@pytest.mark.slow
@pytest.mark.parametrize(
    "lie",
    [
        {"facts": {}},
        {"facts": {"images": -1}},
        {"classes": {"\x1b[31mred": 9}},
        {"intensity": [float("nan")]},
        {"faults": {"else": 3}},
        {"bits": {"eight": 3}},
        {"classes": ["a"]},
        {"tags": ["a"]},
        {"tags": {"0": [["a"]]}},
        {"key": ""},
    ],
)
def test_a_lying_node_is_left_out_by_name(
    lie: dict[str, Any], sites: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(None, SMALL)
    engine = machines(config, sites, monkeypatch, task="preflight")
    real = Machines.deliver

    def deliver(self: Machines, request: Any) -> Any:
        client, data = real(self, request)
        answers = json.loads(data)
        if client == 1 and "facts" in answers:
            whole = {"tags": {}, **lie} if "facts" in lie else lie if "key" in lie else {**answers, **lie}
            answers = whole if {"facts", "key", "tags"} & set(lie) else answers | {"facts": answers["facts"] | lie}
        return client, json.dumps(answers).encode()

    monkeypatch.setattr(Machines, "deliver", deliver)
    answers = preflight.collect_preflight(config, engine.root / "preflight", engine)
    assert set(answers["facts"]) == {"0", "2"} and answers["refused"] == {"1": preflight._BAD_ANSWER}


def test_a_node_that_sends_facts_instead_of_its_key_is_left_out_by_name(
    sites: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(None, SMALL)
    engine = machines(config, sites, monkeypatch, task="preflight")
    real = Machines.deliver

    def deliver(self: Machines, request: Request) -> Any:
        return real(self, replace(request, settings={"keys": "{}"}) if request.client == 1 else request)

    monkeypatch.setattr(Machines, "deliver", deliver)
    answers = preflight.collect_preflight(config, engine.root / "preflight", engine)
    assert set(answers["facts"]) == {"0", "2"} and answers["refused"] == {"1": preflight._BAD_ANSWER}


ALLOWED = {"sums": "train", "keys": "{}"}


@pytest.mark.parametrize(
    "action, settings",
    [
        ("secure.keys", ALLOWED),
        ("secure.masked", ALLOWED),
        ("train", {"keys": "{}"}),
        ("count", {}),
    ],
)
def test_a_preflight_under_another_name_is_none(
    action: str, settings: dict[str, str], sites: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner allows the name in the request; what it would report are the facts all the same."""
    config = load(None, [*SMALL, "privacy.aggregation=secure"])
    engine = machines(config, sites, monkeypatch, task="preflight")
    allow(engine, 0, config)
    request = Request(config.digest, 0, 0, action, settings=settings)
    assert refused_rule(engine.deliver(request)[1]) == "actions" and engine.log(0)[-1]["bytes"] == 0
    monkeypatch.setattr(preflight, "ACTION", action)  # as if the rules applied to its name
    if action.startswith("secure."):
        assert b"facts" in preflight.answer_preflight(replace(engine.requests[0], request=b""), request)


def stranger(number: int, run: str) -> str:
    """A key that a server made, well signed, for a client that is not there."""
    me = Identity.fresh()
    public = public_key(bytes(32))
    return (public + me.public + sign(me.private, context("preflight", run, number, public.hex()))).hex()


@pytest.mark.parametrize("keys", ["[1]", "no keys", '{"x": "00"}', '{"1": 5}', '{"1": "zz"}', "[" * 9999, "stranger"])
def test_keys_that_are_none_or_a_strangers_are_refused_by_name(
    keys: str, sites: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(None, SMALL)
    engine = machines(config, sites, monkeypatch, task="preflight")
    rule = "request"
    if keys == "stranger":  # it could test images of its own
        rule = "most_clients"
        keys = json.dumps({"99": stranger(99, config.digest)})
    _, reason = engine.deliver(Request(config.digest, 0, 0, "preflight", settings={"keys": keys}))
    assert refused_rule(reason) == rule


@pytest.fixture
def trained(sites: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> tuple[Config, Path]:
    config = load(None, SMALL)
    with without_pictures():
        run_deployed(config, sites["north"].parent / "there", machines(config, sites, monkeypatch))
    return config, sites["north"].parent / "there"


def evaluated(config: Config, model: Path, sites: dict[str, Path], patch: pytest.MonkeyPatch) -> dict[str, Any]:
    plan = plan_evaluation(config, model, model.parent / "answers")
    engine = machines(plan.config, sites, patch, task="evaluate")
    return evaluate.evaluate_on_nodes(plan.config, plan.folder, engine, str(model), ("accuracy", "auroc", "confusion"))


@pytest.mark.slow
def test_a_run_and_its_export_are_evaluated_alike_as_each_site_would(
    trained: tuple[Config, Path], sites: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, there = trained
    exported = export_run(there, there.parent / "adapted")
    of_run = evaluated(config, there, sites, monkeypatch)
    of_export = evaluated(config, exported, sites, monkeypatch)
    model = predictor(exported)
    for k, site in enumerate(sites.values()):
        own = model.evaluate(site)
        cell = of_run["clients"][str(k)]["accuracy"]
        assert (cell["n"], cell["value"]) == (own.count, own.accuracy)
    assert of_run["clients"] == of_export["clients"] and of_run["pooled"]["accuracy"]["n"] == 36
    assert np.sum(of_run["confusion"]) == 36
    assert [line.split(" | ")[0] for line in evaluation_table(of_run, NAMES)][2:] == [
        "| north",
        "| south",
        "| east",
        "| all sites",
    ]


@pytest.mark.slow
def test_a_model_that_nodes_would_see_otherwise_is_refused_and_so_is_what_owners_did_not_allow(
    trained: tuple[Config, Path], sites: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, there = trained
    exported = export_run(there, there.parent / "adapted")
    with raises("E-DEPLOY-MODEL-PREPROCESSING"):
        evaluated(load(None, [*SMALL, "data.image_size=24"]), exported, sites, monkeypatch)
    with raises("E-DEPLOY-MODEL-ARCHITECTURE"):
        evaluated(load(None, [*SMALL, "model.name=nano"]), exported, sites, monkeypatch)
    with pytest.raises(FedgraftError):
        plan_evaluation(config, there.parent, there)
    engine = machines(config, sites, monkeypatch, task="evaluate")
    allow(engine, 0, config)
    allow(engine, 1, config, ["evaluate"])
    result = evaluate.evaluate_on_nodes(config, there, engine, str(there))
    assert set(result["clients"]) == {"1", "2"} and refused_rule(result["refused"]["0"]) == "actions"


def test_an_evaluation_needs_the_whole_fingerprint_and_of_a_private_run_the_owners_word(
    sites: dict[str, Path],
) -> None:
    config = load(None, SMALL)
    owner = safe_policy(config, build_algorithm(config), ["evaluate"])
    assert agreed_policies(config, owner, "evaluate") and agreed_policies(config, None, "evaluate")
    with raises("E-REFUSED-CONFIG"):  # the same 64 bits, another config
        agreed_policies(config, replace(owner, config=config.digest + "0" * 48), "evaluate")
    noise = ["privacy.dp.noise=1.0", "rounds.sampling=poisson", "algorithm.weighting=uniform", "model.head=random"]
    private = load(None, [*SMALL, *noise])
    for policy in (None, safe_policy(private, build_algorithm(private))):
        with raises("E-REFUSED-ACTIONS"):
            agreed_policies(private, policy, "evaluate")
    assert agreed_policies(private, safe_policy(private, build_algorithm(private), ["evaluate"]), "evaluate")


@pytest.mark.slow
def test_a_site_that_only_evaluates_tests_the_model_and_nothing_is_made_from_it(
    sites: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deployed: no action but tests reaches it. The model is that of a federation without it."""
    models = []
    for option in ("evaluate_only", "without"):
        config = load(None, [*SMALL, "personal.evaluate=end", 'metrics=["accuracy"]', f'partition.{option}=["2"]'])
        engine = machines(config, sites, monkeypatch)
        with without_pictures():
            summary = run_deployed(config, engine.root / option, engine)
        models.append(tensors_of(engine.root / option)["vector"])
        actions = {line["action"] for line in engine.log(2) if line.get("round", -1) >= 0 or line["kind"] != "facts"}
        assert actions == ({"evaluate", "count"} if option == "evaluate_only" else set())
        assert set(summary["clients"]) == ({"0", "1", "2"} if option == "evaluate_only" else {"0", "1"})
        assert summary["test"]["count"] == (36 if option == "evaluate_only" else 24)
        shutil.rmtree(engine.root)  # new keys for another run
    assert torch.equal(*models)


@pytest.mark.parametrize("head", ["ridge", "probe", "ncm", "random"])
def test_the_policies_that_fedgraft_writes_let_their_own_run_through(
    head: str, sites: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guide's run: hidden sums, metrics, a server without images, a policy at every node."""
    more = ['metrics=["accuracy","auroc"]', "rounds.evaluate_every=1", "personal.evaluate=end", f"model.head={head}"]
    more += ["privacy.aggregation=secure", "data.validation=0.6", "model.probe_steps=3"]  # counts are of 10 images up
    config = load(None, [*SMALL, *more])
    engine = machines(config, sites, monkeypatch)
    for k in range(3):
        allow(engine, k, config)
    with without_pictures():
        summary = run_deployed(config, engine.root / "run", engine)
    assert set(summary["clients"]) == {"0", "1", "2"} and summary["test"]["count"] == 36
    assert not [line for k in range(3) for line in engine.log(k) if line["kind"] == "refused"]
