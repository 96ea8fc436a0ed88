"""The front of the library: objects in, a Result out; the same bytes as the config door, and the same refusals."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.errors import raises
from tests.support.tiny import same_bits, tensors_of, without_pictures

import fedgraft as fg
from fedgraft.client import handle as client
from fedgraft.config.load import load, to_toml
from fedgraft.core.files import read_metrics, without_timing
from fedgraft.core.network_digest import digest
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.open_run import OpenRun

CONFIG = [
    "model.name=tiny",
    "data.source=digits",
    "data.image_size=16",
    "data.limit=60",
    "partition.clients=3",
    "rounds.total=2",
    "local.steps=2",
    "local.lr=0.02",
    "workers=1",
    "trainable.kind=sparse",
    "trainable.sparse.strategy=least_sensitive",
    "trainable.sparse.sparsity=0.9",
]
LOCAL = fg.LocalTraining(steps=2, lr=0.02)


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """No figures and no report, which play no part here."""
    with without_pictures():
        yield


def model() -> Any:
    return fg.model("tiny", 10, 16)


def clients() -> fg.FederatedData:
    """From the config door."""
    return fg.setup_of(load(None, CONFIG)).task.data


def fedavg(**slots: Any) -> fg.Algorithm:
    """What the config of these tests asks for, as objects."""
    return fg.fedavg(**{"trainable": fg.sparse("least_sensitive", 0.9), "local": LOCAL, **slots})


def adapt(folder: Path | str | None, algorithm: fg.Algorithm | None = None, **options: Any) -> fg.Result:
    options = {"rounds": 2, **options}
    return fg.run(algorithm or fedavg(), model(), clients(), folder=folder, workers=1, **options)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory, quick: None) -> fg.Result:
    """One finished run, for all that only look at it."""
    return adapt(tmp_path_factory.mktemp("objects") / "run")


# ---- the same run, whatever the door ---------------------------------------------------------------------------------


def test_objects_and_config_give_the_same_bytes(result: fg.Result, tmp_path: Path) -> None:
    config = load(None, CONFIG)
    summary = fg.run_config(config, tmp_path / "config", console=False)
    assert same_bits(tensors_of(result.folder), tensors_of(tmp_path / "config"))
    # Messages name their run, and that name is a few bytes longer for objects.
    lines = [
        [{key: value for key, value in line.items() if not key.startswith("bytes")} for line in without_timing(metrics)]
        for metrics in (read_metrics(result.folder), read_metrics(tmp_path / "config"))
    ]
    assert lines[0] == lines[1] and result.summary["test"] == summary["test"]
    other = adapt(tmp_path / "other", fedavg(trainable=fg.sparse("most_sensitive", 0.9)))
    assert not same_bits(tensors_of(other.folder), tensors_of(result.folder))  # the comparison sees another mask


def test_a_path_may_be_text_and_no_folder_is_a_temporary_one(result: fg.Result, tmp_path: Path) -> None:
    for folder in (str(tmp_path / "text"), None):
        repeated = adapt(folder)
        assert isinstance(repeated.folder, Path) and (repeated.folder / "metrics.jsonl").is_file()
        assert same_bits(tensors_of(repeated.folder), tensors_of(result.folder))


def test_further_options_are_tables_of_the_config(tmp_path: Path) -> None:
    untested = adapt(tmp_path / "run", rounds={"total": 2, "evaluate_every": 1, "test": False}, head="random")
    assert [n for n, _ in untested.curve()] == [0, 1, 2] and "test" not in untested.summary
    assert untested.accuracy == untested.summary["validation"]["accuracy"]


# ---- what a result shows and does ------------------------------------------------------------------------------------


def test_a_result_says_what_came_out(result: fg.Result) -> None:
    text = repr(result)
    first, last = result.curve()[0], result.curve()[-1]
    assert (first[0], last[0]) == (0, 2) and str(result.folder) in text and "2 rounds" in text
    assert f"validation {100 * first[1]:.1f} %" in text and f"test {100 * result.accuracy:.1f} %" in text
    page = result._repr_html_()
    assert page.count("<tr>") == 1 + len(result.curve()) and "2 rounds" in page
    assert result.report == result.folder / "report.html" and len(result.classes) == 10


def test_a_result_holds_the_model_it_measured(result: fg.Result, tmp_path: Path) -> None:
    assert result.evaluate().accuracy == result.accuracy == result.summary["test"]["accuracy"]
    result.save_pretrained(str(tmp_path / "model"))
    again, images = fg.model(tmp_path / "model", None), result.task.test_images.batch(torch.arange(20))
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(images), result.network.eval()(images), rtol=1e-6, atol=1e-6)
        assert not torch.allclose(again(images), model().eval()(images), rtol=1e-2, atol=1e-2)


def test_low_rank_factors_are_merged_when_they_are_saved(tmp_path: Path) -> None:
    low_rank = adapt(tmp_path / "run", fedavg(trainable=fg.lora(rank=2)))
    before = low_rank.evaluate()
    for name in ("once", "twice"):
        low_rank.save_pretrained(tmp_path / name)
        images = low_rank.task.test_images
        saved = fg.evaluate(fg.model(tmp_path / name, None), images, torch.arange(len(images)))
        assert saved.accuracy == before.accuracy and saved.loss == pytest.approx(before.loss, rel=1e-4)


class Listening(fg.Callback):
    """Notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_training_start(self, setup: fg.RunSetup, opened: OpenRun, state: fg.ServerState) -> None:
        self.heard.append(("start", setup.federation.clients, state.round))

    def on_round_end(self, line: Mapping[str, Any], state: fg.ServerState) -> None:
        self.heard.append((line["round"], state.round))

    def on_run_end(self, summary: Mapping[str, Any]) -> None:
        self.heard.append(summary["test"]["accuracy"])


def test_callbacks_hear_every_round_and_change_nothing(result: fg.Result, tmp_path: Path) -> None:
    listener = Listening()
    followed = adapt(tmp_path / "run", callbacks=[listener, fg.Callback()])
    assert listener.heard == [("start", 3, 0), (1, 1), (2, 2), followed.accuracy]
    assert same_bits(tensors_of(followed.folder), tensors_of(result.folder))


# ---- a folder that is there already ----------------------------------------------------------------------------------


def test_an_interrupted_run_goes_on_in_its_folder(
    result: fg.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, real = 0, client.ACTIONS["train"]

    def stop(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:  # one client a round: the second round
            raise KeyboardInterrupt
        return real.work(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setitem(client.ACTIONS, "train", replace(real, work=stop))
        adapt(tmp_path / "run")
    assert RunFolder.open(tmp_path / "run").status == "interrupted"
    continued = adapt(tmp_path / "run")
    assert same_bits(tensors_of(continued.folder), tensors_of(result.folder))
    assert continued.evaluate() == result.evaluate()


def test_a_finished_run_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = adapt(tmp_path / "run")
    forbidden = replace(client.ACTIONS["train"], work=lambda *a: pytest.fail("trained again"))
    monkeypatch.setitem(client.ACTIONS, "train", forbidden)
    again = adapt(tmp_path / "run")
    assert again.summary == first.summary and again.evaluate() == first.evaluate()


@pytest.mark.parametrize(
    "other",
    [
        fg.fedprox(mu=0.5, trainable=fg.sparse("least_sensitive", 0.9), local=LOCAL),
        fedavg(trainable=fg.sparse("least_sensitive", 0.8)),
        fedavg(local=fg.LocalTraining(steps=3, lr=0.02)),
    ],
    ids=lambda a: a.name,
)
def test_a_folder_of_another_algorithm_is_refused(result: fg.Result, other: fg.Algorithm) -> None:
    with raises("E-RUN-FOLDER-FOREIGN"):
        adapt(result.folder, other)


def test_numbers_inside_functions_tell_algorithms_apart(tmp_path: Path) -> None:
    """`mu` lives in a closure; a folder of mu=0.1 must not take mu=0.5 for its own."""
    body = {"trainable": fg.head(), "local": LOCAL}
    adapt(tmp_path / "run", fg.fedprox(mu=0.1, **body))
    with raises("E-RUN-FOLDER-FOREIGN"):
        adapt(tmp_path / "run", fg.fedprox(mu=0.5, **body))


def test_a_folder_of_objects_says_that_its_config_is_not_all(result: fg.Result) -> None:
    with raises("E-RUN-FROM-OBJECTS"):
        fg.adapted(result.folder)


# ---- from a file -----------------------------------------------------------------------------------------------------


def test_a_config_file_as_objects(result: fg.Result, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(to_toml(load(None, [word for word in CONFIG if "lr" not in word])))
    for path in (tmp_path / "mine.toml", str(tmp_path / "mine.toml")):
        setup = fg.load(path, ["local.lr=0.02"])
        assert isinstance(setup, fg.RunParts) and setup.algorithm.local.lr == 0.02
        opened_again = fg.run(setup, folder=tmp_path / "run")  # the second time it is finished, and opened again
        assert same_bits(tensors_of(tmp_path / "run"), tensors_of(result.folder))
        assert opened_again.evaluate() == result.evaluate()


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (["algorithm.name=fedprox", "algorithm.muu=0.5"], "mu"),
        (["algorithm.mu=0.5"], "takes none"),  # fedavg has no mu
        (["loss.temperature=2"], "no option 'temperature'"),
        (["trainable.kind=sparse", "trainable.spars=0.5"], "sparsity"),
        (["trainable.knd=sparse"], "kind"),
        (["trainable.freeze_blocks=1"], "kind"),  # nothing would read it
        (["local.speed=2"], "local"),
        (["algorithm.name=fedavgg"], "fedavg"),
        (["trainable.kind=sparsee"], "sparse"),
        (["trainable.kind=sparse", "trainable.sparse.strategy=least"], "least_sensitive"),
        (["algorithm.robust=medain"], "median"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_mistyped_option_is_refused_in_a_config(words: list[str], nearest: str) -> None:
    plain = [word for word in CONFIG if not word.startswith("trainable.")]
    with pytest.raises(fg.FedgraftError, match=nearest):
        fg.setup_of(load(None, [*plain, *words]))


def test_a_mistyped_option_is_refused_in_python(tmp_path: Path) -> None:
    for make in (lambda: fg.fedprox(muu=0.5), lambda: fg.fedavg(mu=0.5), lambda: fg.named("fedprox", muu=0.5)):
        with pytest.raises(fg.FedgraftError) as caught:
            make()
        assert caught.value.code in ("E-ALGORITHM-SLOT", "E-CORE-UNKNOWN-OPTION")
    with raises("E-CORE-UNKNOWN-ARGUMENT", nearest="sparsity"):
        fg.sparse(sparsty=0.5)  # type: ignore[call-arg]
    for wrong in ({"rounds": {"totl": 3}}, {"head": {"kind": "ridge", "rigde": 1.0}}, {"sede": 3}):
        with pytest.raises(fg.FedgraftError, match="no option"):
            adapt(tmp_path / "run", **wrong)
    assert not (tmp_path / "run").exists()


def test_what_the_algorithm_decides_is_not_taken_from_a_table(tmp_path: Path) -> None:
    """A table that nobody reads would look like protection."""
    with raises("E-RUN-OPTION-OF-OBJECT"):
        adapt(tmp_path / "run", privacy={"aggregation": "secure"})


def test_a_mistyped_option_is_refused_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["algorithm.name=fedprox", "algorithm.muu=0.5", "model.name=tiny"]
    with warnings.catch_warnings():  # typer's own import of click warns with some pairs of versions
        warnings.simplefilter("ignore", DeprecationWarning)
        from fedgraft.cli import main as cli
    monkeypatch.setattr(sys, "argv", ["fedgraft", "run", *words, "-o", str(tmp_path / "run"), "-q"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    errors = capsys.readouterr().err
    assert ended.value.code and "'muu'" in errors and "'mu'" in errors
    assert "Traceback" not in errors and not (tmp_path / "run").exists()


def test_the_head_is_made_for_the_data_and_what_is_given_stays_as_it_is(tmp_path: Path) -> None:
    other, fits = fg.model("tiny", 7, 16), fg.model("tiny", 10, 16)
    bare = fg.model("tiny", image_size=16)
    assert bare.classes == 0
    before = [digest(candidate) for candidate in (other, bare, fits)]
    runs = [fg.run(fedavg(), candidate, clients(), rounds=1, workers=1) for candidate in (other, bare, fits)]
    assert [digest(candidate) for candidate in (other, bare, fits)] == before
    assert {finished.network.classes for finished in runs} == {10}
    assert len({digest(finished.network) for finished in runs}) == 1  # whatever head there was, the run's is the same


def test_what_is_no_clients_or_somebody_elses_to_say_is_a_sentence() -> None:
    data = fg.data.digits()
    with raises("E-RUN-UNDIVIDED-DATA"):
        fg.run(fedavg(), "tiny", data, rounds=1)  # type: ignore[arg-type]
    with raises("E-RUN-OPTION-OF-OBJECT", option="data.image_size"):
        fg.run(fedavg(), "tiny", clients(), rounds=1, data={"image_size": 32})
    with raises("E-RUN-OBJECTS-ELSEWHERE"):
        fg.run(fedavg(), "tiny", clients(), rounds=1, engine="flower-sim")


def test_a_list_of_datasets_is_one_client_each() -> None:
    x, y = np.random.default_rng(0).integers(0, 255, (40, 16, 16, 3)).astype(np.uint8), np.arange(40) % 2
    adapted_result = fg.run(fedavg(), "tiny", [(x[:20], y[:20]), (x[20:], y[20:])], rounds=1, workers=1)
    assert adapted_result.task.data.clients == 2 and adapted_result.classes == ("0", "1")


# ---- privacy ---------------------------------------------------------------------------------------------------------


def test_a_private_run_of_objects_has_its_account_and_the_refusals_of_a_config(tmp_path: Path) -> None:
    from fedgraft.aggregate.slots import uniform
    from fedgraft.privacy.accounting import epsilon
    from fedgraft.privacy.dp import Mechanism

    def private(probability: float = 1 / 3, clients: int = 3) -> fg.Algorithm:
        made = fg.fedavg(trainable=fg.head(), local=LOCAL, weighting=uniform())
        return fg.private(made, fg.DifferentialPrivacy(Mechanism(2.0, probability, clients), clip=0.5))

    account = adapt(tmp_path / "run", private()).summary["privacy"]
    assert (account["epsilon"], account["delta"]) == (epsilon(1 / 3, 2.0, 2, 1e-5), 1e-5)
    assert account["epsilon_without_amplification"] > account["epsilon"] and account["repeatable_noise"]
    with pytest.raises(fg.FedgraftError, match="which no noise covers"):
        adapt(tmp_path / "head", private(), head="ridge")
    with raises("E-PRIVACY-SAMPLING"):
        adapt(tmp_path / "fixed", private(), rounds={"sampling": "fixed"})
    with pytest.raises(fg.FedgraftError, match="the noise is for 5 clients"):
        adapt(tmp_path / "others", private(clients=5))


def test_given_features_bring_their_width_and_take_no_network_for_images(tmp_path: Path) -> None:
    z, y = np.random.default_rng(0).normal(size=(60, 7)).astype(np.float32), np.arange(60) % 3
    clients = fg.partition.iid(fg.data.features(z, y), clients=3)
    result = fg.run(fg.fedavg(local=LOCAL), "features", clients, rounds=1, folder=tmp_path / "given")
    assert result.network.head.weight.shape == (3, 7)
    with pytest.raises(fg.FedgraftError, match="the data are features"):
        fg.run(fg.fedavg(local=LOCAL), model(), clients, rounds=1)
    images = fg.partition.iid(fg.data.digits(), clients=3)
    with pytest.raises(fg.FedgraftError, match="the data are images"):
        fg.run(fg.fedavg(local=LOCAL), "features", images, rounds=1)


OWN_RULE = """
def rule(answers, weights):
    share = weights / weights.sum()
    mean = sum(float(w) * update for w, update in zip(share, answers.updates))
    return mean * FACTOR
"""
OWN_NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(3, 4, 4, stride=4)
        self.fc = nn.Linear(4, 10)
    def forward(self, x):
        return self.fc(ACTIVATION(self.body(x)).mean((2, 3)))
"""


def written(source: str, name: str) -> Any:
    """What a user's file defines under this name."""
    space: dict[str, Any] = {"__name__": "mine", "torch": torch, "nn": torch.nn}
    exec(compile(source, "mine.py", "exec"), space)  # the user's file, in two versions
    return space[name]


def test_an_edited_rule_does_not_get_the_old_result(tmp_path: Path) -> None:
    """0.5 became 5.0 in the user's own aggregation: the folder of the old one is refused, a new one has new bytes."""

    def scaled(factor: str) -> fg.Algorithm:
        rule = written(OWN_RULE.replace("FACTOR", factor), "rule")
        return fg.vary(fg.fedavg(trainable=fg.head(), local=LOCAL), aggregate=fg.Aggregator("own", rule))

    adapt(tmp_path / "run", scaled("0.5"))
    before = tensors_of(tmp_path / "run")
    adapt(tmp_path / "run", scaled("0.5"))  # the same rule finds its run
    with raises("E-RUN-FOLDER-FOREIGN"):
        adapt(tmp_path / "run", scaled("5.0"))
    adapt(tmp_path / "other", scaled("5.0"))
    assert not same_bits({"v": before["vector"]}, {"v": tensors_of(tmp_path / "other")["vector"]})


def test_an_edited_forward_does_not_get_the_old_features(tmp_path: Path) -> None:
    """The weights are the same, the activations are not: the cache of the one is not read for the other."""

    def tested(activation: str, cached: bool, place: str) -> fg.Result:
        torch.manual_seed(0)
        net = written(OWN_NET.replace("ACTIVATION", activation), "Net")()
        network = fg.module(net, image_size=16)
        algorithm = fg.fedavg(trainable=fg.head(), local=LOCAL)
        options: dict[str, Any] = {"data": {"cache_features": cached}}
        return fg.run(algorithm, network, clients(), rounds=1, folder=tmp_path / place, workers=1, **options)

    tested("torch.relu", True, "relu")
    with_sigmoid = tested("torch.sigmoid", True, "sigmoid")
    fresh = tested("torch.sigmoid", False, "fresh")
    assert with_sigmoid.summary["test"]["loss"] == pytest.approx(fresh.summary["test"]["loss"], abs=1e-5)
    vectors = [tensors_of(result.folder)["vector"] for result in (with_sigmoid, fresh)]
    torch.testing.assert_close(vectors[0], vectors[1], rtol=0, atol=1e-5)
