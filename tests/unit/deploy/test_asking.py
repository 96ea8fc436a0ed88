"""Questions in which nobody trains: preflight tells sums and obeys the owner, evaluation gives each site's numbers."""

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
from tests.support.machines import Machines
from tests.support.tiny import tensors_of, without_pictures

from fedgraft.client.policy import policy_toml
from fedgraft.config.agreement import safe_for
from fedgraft.config.build import build_algorithm
from fedgraft.config.load import Config, load
from fedgraft.consortium.site_faults import findings
from fedgraft.core.errors import FedgraftError, Refused
from fedgraft.core.messages import Request
from fedgraft.deploy import evaluate, preflight
from fedgraft.deploy.deployed import run_deployed
from fedgraft.deploy.evaluate import lines, question
from fedgraft.deploy.node import agreed
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


def look(sites: dict[str, Path], monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[dict[str, Any], Machines]:
    config = load(None, [*SMALL, *options])
    engine = machines(config, sites, monkeypatch, task="preflight")
    return preflight.look(config, engine.root / "look", engine), engine


def kinds(told: dict[str, Any]) -> set[str]:
    named, shared = preflight.named(told, NAMES)
    return {one.kind for one in findings(named, 16, shared)}


def allow(engine: Machines, client: int, config: Config, also: Sequence[str] = ()) -> None:
    made = safe_for(config, build_algorithm(config), also)
    (engine.home(client).parent / "policy.toml").write_text(policy_toml(made))


@pytest.mark.slow
def test_nodes_tell_sums_and_the_server_finds_what_is_wrong(
    sites: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    clean, engine = look(sites, monkeypatch)
    assert kinds(clean) == {"no_policy"} and not clean["refused"]
    (sites["south"] / "train/melanoma").rename(sites["south"] / "train/Melanoma")
    (sites["south"] / "test/melanoma").rename(sites["south"] / "test/Melanoma")
    shutil.copy(sites["north"] / "train/benign/0.png", sites["east"] / "train/benign/copy.png")
    (sites["north"] / "train/benign/1.png").write_bytes(b"no image")
    told, _ = look(sites, monkeypatch)
    assert {"class_case", "duplicates_across", "unreadable"} <= kinds(told)
    assert told["shared"] == [[0, 2, 1]] and list(told["facts"]["0"]["unreadable"].values()) == [None]
    assert kinds(look(sites, monkeypatch, 'data.class_map={"Melanoma"="melanoma"}')[0]).isdisjoint({"class_case"})
    left = engine.log(0)
    assert [line["action"] for line in left if line.get("round") == 0][:2] == ["preflight", "preflight"]


def test_no_digest_of_an_image_can_be_tested_by_the_server(
    sites: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tags differ by pair of sites, and follow from no key that passes the server."""
    config = load(None, SMALL)
    engine, seen = machines(config, sites, monkeypatch, task="preflight"), list[dict[str, Any]]()
    real = Machines.deliver

    def deliver(self: Machines, request: Request) -> Any:
        answer = real(self, request)
        seen.append(json.loads(answer[1]))
        return answer

    monkeypatch.setattr(Machines, "deliver", deliver)
    told = preflight.look(config, engine.root / "look", engine)
    tags = [one["tags"] for one in seen if "tags" in one]
    assert len(tags) == 3 and not set(tags[0]["1"]) & set(tags[0]["2"])  # the same images, under two keys
    assert not any(tag in json.dumps(told) for tag in tags[0]["1"])  # nothing of them is kept
    forged = {str(k): "00" * 32 + one["key"][64:] for k, one in enumerate(seen[:3])}  # a server's own key in between
    request = Request(config.digest, 0, 0, "preflight", settings={"keys": json.dumps(forged)})
    assert "is not signed by it" in real(engine, request)[1]


def test_the_owners_policy_decides_who_answers(sites: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(None, [*SMALL, "privacy.aggregation=secure"])
    engine = machines(config, sites, monkeypatch, task="preflight")
    allow(engine, 0, config)
    allow(engine, 1, config, ["preflight"])
    allow(engine, 2, load(None, [*SMALL, "seed=9"]), ["preflight"])
    told = preflight.look(config, engine.root / "look", engine)
    assert set(told["facts"]) == {"1"} and told["facts"]["1"]["policy"] and told["facts"]["1"]["minimum"] == 10
    assert "rule 'actions'" in told["refused"]["0"] and "rule 'config'" in told["refused"]["2"]
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
        told = json.loads(data)
        if client == 1 and "facts" in told:
            whole = {"tags": {}, **lie} if "facts" in lie else lie if "key" in lie else {**told, **lie}
            told = whole if {"facts", "key", "tags"} & set(lie) else told | {"facts": told["facts"] | lie}
        return client, json.dumps(told).encode()

    monkeypatch.setattr(Machines, "deliver", deliver)
    told = preflight.look(config, engine.root / "look", engine)
    assert set(told["facts"]) == {"0", "2"} and "other software" in told["refused"]["1"]


def test_a_node_that_tells_its_facts_as_its_key_is_left_out_by_name(
    sites: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(None, SMALL)
    engine = machines(config, sites, monkeypatch, task="preflight")
    real = Machines.deliver

    def deliver(self: Machines, request: Request) -> Any:
        return real(self, replace(request, settings={"keys": "{}"}) if request.client == 1 else request)

    monkeypatch.setattr(Machines, "deliver", deliver)
    told = preflight.look(config, engine.root / "look", engine)
    assert set(told["facts"]) == {"0", "2"} and "other software" in told["refused"]["1"]


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
    """The owner allows what an order calls itself; what it would tell are the facts all the same."""
    config = load(None, [*SMALL, "privacy.aggregation=secure"])
    engine = machines(config, sites, monkeypatch, task="preflight")
    allow(engine, 0, config)
    request = Request(config.digest, 0, 0, action, settings=settings)
    assert "rule 'actions'" in engine.deliver(request)[1] and engine.log(0)[-1]["bytes"] == 0
    monkeypatch.setattr(preflight, "ACTION", action)  # as if its name were asked for
    if action.startswith("secure."):
        assert b"facts" in preflight.tell(replace(engine.requests[0], request=b""), request)


def stranger(number: int, run: str) -> str:
    """A key that a server made, well signed, for a client that is not there."""
    me, public = Identity.fresh(), public_key(bytes(32))
    return (public + me.public + sign(me.private, context("preflight", run, number, public.hex()))).hex()


@pytest.mark.parametrize("keys", ["[1]", "no keys", '{"x": "00"}', '{"1": 5}', '{"1": "zz"}', "[" * 9999, "stranger"])
def test_keys_that_are_none_or_a_strangers_are_refused_by_name(
    keys: str, sites: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(None, SMALL)
    engine = machines(config, sites, monkeypatch, task="preflight")
    rule, told = "request", keys
    if keys == "stranger":  # it could test images of its own
        rule, told = "most_clients", json.dumps({"99": stranger(99, config.digest)})
    said = engine.deliver(Request(config.digest, 0, 0, "preflight", settings={"keys": told}))[1]
    assert isinstance(said, str) and f"rule '{rule}'" in said


@pytest.fixture
def trained(sites: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> tuple[Config, Path]:
    config = load(None, SMALL)
    with without_pictures():
        run_deployed(config, sites["north"].parent / "there", machines(config, sites, monkeypatch))
    return config, sites["north"].parent / "there"


def asked(config: Config, model: Path, sites: dict[str, Path], patch: pytest.MonkeyPatch) -> dict[str, Any]:
    q = question(config, model, model.parent / "answers")
    engine = machines(q.config, sites, patch, task="evaluate")
    return evaluate.measure(q.config, q.folder, engine, str(model), ("accuracy", "auroc", "confusion"))


@pytest.mark.slow
def test_a_run_and_its_export_are_evaluated_alike_as_each_site_would(
    trained: tuple[Config, Path], sites: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, there = trained
    exported = export_run(there, there.parent / "adapted")
    told, again = asked(config, there, sites, monkeypatch), asked(config, exported, sites, monkeypatch)
    model = predictor(exported)
    for k, site in enumerate(sites.values()):
        own = model.evaluate(site)
        cell = told["clients"][str(k)]["accuracy"]
        assert (cell["n"], cell["value"]) == (own.count, own.accuracy)
    assert told["clients"] == again["clients"] and told["pooled"]["accuracy"]["n"] == 36
    assert np.sum(told["confusion"]) == 36
    assert [line.split(" | ")[0] for line in lines(told, NAMES)][2:] == ["| north", "| south", "| east", "| all sites"]


@pytest.mark.slow
def test_a_model_that_nodes_would_see_otherwise_is_refused_and_so_is_what_owners_did_not_allow(
    trained: tuple[Config, Path], sites: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, there = trained
    exported = export_run(there, there.parent / "adapted")
    with pytest.raises(FedgraftError, match="prepared in another way"):
        asked(load(None, [*SMALL, "data.image_size=24"]), exported, sites, monkeypatch)
    with pytest.raises(FedgraftError, match="another architecture"):
        asked(load(None, [*SMALL, "model.name=nano"]), exported, sites, monkeypatch)
    with pytest.raises(FedgraftError, match="neither a run nor an exported model"):
        question(config, there.parent, there)
    engine = machines(config, sites, monkeypatch, task="evaluate")
    allow(engine, 0, config)
    allow(engine, 1, config, ["evaluate"])
    told = evaluate.measure(config, there, engine, str(there))
    assert set(told["clients"]) == {"1", "2"} and "rule 'actions'" in told["refused"]["0"]


def test_an_evaluation_needs_the_whole_fingerprint_and_of_a_private_run_the_owners_word(
    sites: dict[str, Path],
) -> None:
    config = load(None, SMALL)
    owner = safe_for(config, build_algorithm(config), ["evaluate"])
    assert agreed(config, owner, "evaluate") and agreed(config, None, "evaluate")
    with pytest.raises(Refused, match="not the config that was agreed to"):  # the same 64 bits, another config
        agreed(config, replace(owner, config=config.digest + "0" * 48), "evaluate")
    noise = ["privacy.dp.noise=1.0", "rounds.sampling=poisson", "algorithm.weighting=uniform", "model.head=random"]
    private = load(None, [*SMALL, *noise])
    for policy in (None, safe_for(private, build_algorithm(private))):
        with pytest.raises(Refused, match="no noise covers an evaluation"):
            agreed(private, policy, "evaluate")
    assert agreed(private, safe_for(private, build_algorithm(private), ["evaluate"]), "evaluate")


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
        asked = {(line["action"]) for line in engine.log(2) if line.get("round", -1) >= 0 or line["kind"] != "facts"}
        assert asked == ({"evaluate", "count"} if option == "evaluate_only" else set())
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
