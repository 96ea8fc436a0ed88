"""What people type in Python is accepted, or refused in one sentence with a code; never an AttributeError."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.errors import raises
from tests.support.tiny import CNN

import fedgraft as fg
from fedgraft.runs.callbacks import as_callbacks

DIGITS = fg.data.digits
PIXELS = np.random.default_rng(1).integers(0, 256, (8, 8, 3), dtype=np.uint8)
NETWORK = CNN.partition("=")[2].strip('"')


@pytest.fixture(scope="module")
def clients() -> fg.FederatedData:
    pixels = np.random.default_rng(0).integers(0, 256, (60, 8, 8, 3), dtype=np.uint8)
    data = fg.data.arrays(images=pixels, labels=[number % 3 for number in range(60)])
    return fg.partition.iid(data, clients=2)


@pytest.fixture(scope="module")
def result(clients: fg.FederatedData, tmp_path_factory: pytest.TempPathFactory) -> fg.Result:
    return adapt(clients, tmp_path_factory.mktemp("typed"))


def adapt(clients: fg.FederatedData, folder: Path, algorithm: Any = "fedavg", **options: Any) -> fg.Result:
    return fg.run(algorithm, NETWORK, clients, folder=folder / "run", workers=1, **{"rounds": 1, **options})


# ---- algorithms and slots --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["fedprox", fg.fedprox, fg.fedprox()])
def test_a_name_a_function_and_an_object_are_the_same_algorithm(
    algorithm: Any, clients: fg.FederatedData, tmp_path: Path
) -> None:
    models = []
    for place, given in (("given", algorithm), ("object", fg.fedprox())):
        run = adapt(clients, tmp_path / place, given, head="random")
        models.append(torch.cat([value.flatten() for value in run.network.state_dict().values()]))
    assert torch.equal(*models)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ({"trainable": "head"}, {"trainable": fg.head()}),
        ({"local": {"steps": 8}}, {"local": fg.LocalTraining(steps=8)}),
        ({"weighting": "uniform"}, {"weighting": fg.uniform()}),
        ({"loss": "cross_entropy"}, {"loss": fg.cross_entropy()}),
    ],
)
def test_names_and_tables_stand_for_slots(typed: dict[str, Any], meant: dict[str, Any]) -> None:
    assert repr(fg.fedavg(**typed)) == repr(fg.fedavg(**meant))
    assert repr(fg.scaffold(**typed)) == repr(fg.scaffold(**meant))


def test_a_robust_rule_and_a_codec_by_name() -> None:
    algorithm = fg.fedavg(aggregate="median", compression="int8")
    assert algorithm.aggregate.name == "median" and algorithm.compression.name == "int8"


REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "a misspelt algorithm": ("E-CORE-UNKNOWN-NAME", lambda: fg.run("fedagv", NETWORK, None)),
    "a network first": ("E-RUN-ALGORITHM", lambda: fg.run(fg.model(NETWORK), fg.fedavg(), None)),
    "a number": ("E-RUN-ALGORITHM", lambda: fg.run(3, NETWORK, None)),  # type: ignore[arg-type]
    "a misspelt kind": ("E-CORE-UNKNOWN-NAME", lambda: fg.fedavg(trainable="heads")),
    "a factory without ()": ("E-ALGORITHM-SLOT-TYPE", lambda: fg.fedavg(trainable=fg.last_blocks)),  # type: ignore[arg-type]
    "a number of steps": ("E-ALGORITHM-SLOT-TYPE", lambda: fg.fedavg(local=8)),  # type: ignore[arg-type]
    "a misspelt weighting": ("E-ALGORITHM-SLOT-TYPE", lambda: fg.fedavg(weighting="unifrm")),
    "a misspelt slot": ("E-ALGORITHM-SLOT", lambda: fg.fedavg(trainables="head")),  # type: ignore[call-arg]
    "another word for the rate": ("E-CORE-UNKNOWN-ARGUMENT", lambda: fg.LocalTraining(learning_rate=0.1)),  # type: ignore[call-arg]
    "a misspelt step": ("E-CORE-UNKNOWN-ARGUMENT", lambda: fg.fedavg(local={"stepz": 8})),
    "another word for sparsity": ("E-CORE-UNKNOWN-ARGUMENT", lambda: fg.sparse(density=0.1)),
    "a misspelt option of a kind": ("E-CORE-UNKNOWN-ARGUMENT", lambda: fg.last_blocks(block=2)),
    "a callback that is a number": ("E-RUN-CALLBACK", lambda: as_callbacks(3)),
    "a callback's class": ("E-RUN-CALLBACK", lambda: as_callbacks([fg.Callback])),
    "a callback of nothing": ("E-RUN-CALLBACK", lambda: as_callbacks(lambda: None)),
    "a rate for the algorithm": ("E-ALGORITHM-SLOT", lambda: fg.fedavg(lr=0.1)),  # type: ignore[call-arg]
    "a list of kinds": ("E-ALGORITHM-SLOT-TYPE", lambda: fg.fedavg(trainable=["head"])),  # type: ignore[arg-type]
    "an optimizer of torch": ("E-LOCAL-OPTIMIZER", lambda: fg.LocalTraining(optimizer=torch.optim.SGD)),  # type: ignore[arg-type]
    "steps and epochs": ("E-LOCAL-STEPS-OR-EPOCHS", lambda: fg.LocalTraining(steps=4, epochs=1)),
    "minus one block": ("E-CORE-RANGE", lambda: fg.last_blocks(-1)),
    "percent instead of a share": ("E-CORE-RANGE", lambda: fg.sparse(sparsity=90)),
    "r of PEFT": ("E-CORE-UNKNOWN-ARGUMENT", lambda: fg.lora(r=4)),  # type: ignore[call-arg]
    "secure by name": ("E-PRIVACY-ALGORITHM", lambda: fg.secure("fedavg")),  # type: ignore[arg-type]
    "secure without ()": ("E-PRIVACY-ALGORITHM", lambda: fg.secure(fg.fedavg)),  # type: ignore[arg-type]
    "epsilon beside private": ("E-CORE-UNKNOWN-ARGUMENT", lambda: fg.private(fg.fedavg(), epsilon=8)),  # type: ignore[call-arg]
    "no model": ("E-CORE-ARGUMENTS", lambda: fg.model()),  # type: ignore[call-arg]
    "names as the number of classes": ("E-MODELS-CLASSES", lambda: fg.model(NETWORK, ["a", "b"])),  # type: ignore[arg-type]
    "num_classes": ("E-CORE-UNKNOWN-ARGUMENT", lambda: fg.model(NETWORK, num_classes=3)),  # type: ignore[call-arg]
    "a layer as a model": ("E-MODELS-SOURCE-TYPE", lambda: fg.model(torch.nn.Linear(3, 2))),
    "a network for tables": (
        "E-MODELS-FOREIGN-SIZE",
        lambda: fg.module(torch.nn.Sequential(torch.nn.Linear(192, 3))),
    ),
    "the name of data": ("E-DATA-NOT-A-DATASET", lambda: fg.partition.iid("digits", clients=4)),  # type: ignore[arg-type]
    "divided twice": ("E-DATA-NOT-A-DATASET", lambda: fg.partition.iid(fg.partition.iid(DIGITS(), 4), clients=2)),  # type: ignore[arg-type]
    "no clients": ("E-CORE-ARGUMENTS", lambda: fg.partition.iid(DIGITS())),  # type: ignore[call-arg]
    "num_clients": ("E-CORE-UNKNOWN-ARGUMENT", lambda: fg.partition.iid(DIGITS(), num_clients=4)),  # type: ignore[call-arg]
    "half a client": ("E-DATA-CLIENTS", lambda: fg.partition.iid(DIGITS(), clients=2.5)),  # type: ignore[arg-type]
    "more clients than images": ("E-DATA-CLIENTS", lambda: fg.partition.iid(DIGITS(), clients=5000)),
    "owners that nobody named": ("E-DATA-NO-COLUMN", lambda: fg.partition.by_site(DIGITS())),
    "given one dataset": ("E-DATA-GIVEN", lambda: fg.partition.given(DIGITS(), ["a"])),  # type: ignore[arg-type]
    "a folder that is not there": ("E-DATA-NO-FOLDER", lambda: fg.data.folder("/nowhere")),
    "x and y": ("E-CORE-UNKNOWN-ARGUMENT", lambda: fg.data.arrays(x=PIXELS[None], y=[0])),  # type: ignore[call-arg]
    "too few labels": ("E-DATA-LABEL-COUNT", lambda: fg.data.arrays(np.stack([PIXELS] * 3), [0, 1])),
    "a loader": ("E-DATA-DATASET-TYPE", lambda: fg.data.dataset(torch.utils.data.DataLoader([(PIXELS, 0)]))),  # type: ignore[arg-type]
    "a misspelt algorithm of the package": ("E-CORE-UNKNOWN-NAME", lambda: fg.fedvag),
    "resume in Python": ("E-CORE-UNKNOWN-NAME", lambda: fg.resume("runs/x")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_meant_is_one_sentence(name: str) -> None:
    code, typed = REFUSED[name]
    with raises(code):
        typed()


def test_the_hint_names_what_was_probably_meant() -> None:
    with raises("E-CORE-UNKNOWN-ARGUMENT", nearest="lr"):
        fg.LocalTraining(learning_rate=0.1)  # type: ignore[call-arg]
    with raises("E-CORE-UNKNOWN-ARGUMENT", nearest="blocks"):
        fg.last_blocks(block=2)


def test_help_names_the_slots_and_the_options() -> None:
    text = fg.fedprox.__doc__ or ""
    assert "trainable:" in text and "local:" in text and "mu:" in text


# ---- a run -----------------------------------------------------------------------------------------------------------


def test_a_plain_function_follows_a_run_and_stops_it(clients: fg.FederatedData, tmp_path: Path) -> None:
    rounds = []

    def stop_after_two(line: Mapping[str, Any]) -> fg.StopRun | None:
        rounds.append(line["round"])
        return fg.StopRun("two are enough") if line["round"] == 2 else None

    run = adapt(clients, tmp_path, rounds=5, callbacks=stop_after_two)
    assert rounds == [1, 2] and run.summary["rounds"] == 2
    states = []
    adapt(clients, tmp_path / "two", callbacks=[lambda line, state: states.append(state.round)])
    assert states == [1]


def test_a_raised_stop_is_explained(clients: fg.FederatedData, tmp_path: Path) -> None:
    def wrong(line: Mapping[str, Any]) -> None:
        raise fg.StopRun("two are enough")  # type: ignore[misc]

    with raises("E-RUN-CALLBACK"):
        adapt(clients, tmp_path, callbacks=wrong)


def test_owners_all_take_part_unless_told_otherwise(tmp_path: Path) -> None:
    pixels = np.zeros((60, 8, 8, 3), dtype=np.uint8)
    owners = ["a", "b", "c"] * 20
    data = fg.data.arrays(pixels, [number % 2 for number in range(60)], sites=owners)
    by_owner = fg.partition.by_site(data)
    assert len(adapt(by_owner, tmp_path / "all").metrics[-1]["clients"]["ids"]) == 3
    assert len(adapt(by_owner, tmp_path / "two", fraction=0.67).metrics[-1]["clients"]["ids"]) == 2
    assert len(adapt(fg.partition.iid(data, clients=4), tmp_path / "half").metrics[-1]["clients"]["ids"]) == 2


def test_the_table_of_rounds_and_of_the_head(clients: fg.FederatedData, tmp_path: Path) -> None:
    run = adapt(clients, tmp_path, rounds={"total": 2, "evaluate_every": 1}, head={"kind": "ridge", "ridge": 1.0})
    assert [number for number, _ in run.curve()] == [0, 1, 2]


# ---- images ----------------------------------------------------------------------------------------------------------


def encoded() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(PIXELS).save(buffer, "png")
    return buffer.getvalue()


@pytest.mark.parametrize(
    "typed",
    [
        PIXELS,
        PIXELS[None],
        PIXELS / 255,
        torch.from_numpy(PIXELS),
        torch.from_numpy(PIXELS).permute(2, 0, 1).float() / 255,
        Image.fromarray(PIXELS),
        [Image.fromarray(PIXELS)],
        encoded(),
        [encoded()],
    ],
    ids=["array", "several", "floats", "tensor", "channels first", "Pillow", "list", "bytes", "list of bytes"],
)
def test_an_image_is_predicted_alike_in_every_form(result: fg.Result, tmp_path: Path, typed: Any) -> None:
    path = tmp_path / "one.png"
    path.write_bytes(encoded())
    (meant,) = result.predict(path)
    (predicted,) = result.predict(typed)
    assert predicted.image == "image 0" and predicted.scores == pytest.approx(meant.scores)
    (other,) = result.predict(255 - PIXELS)
    assert other.scores != pytest.approx(meant.scores)  # the comparison sees another image


@pytest.mark.parametrize("typed", [42, None, [3.0], np.zeros(5), np.zeros((2, 2, 2, 2, 2))])
def test_what_is_no_image_is_one_sentence(result: fg.Result, typed: Any) -> None:
    with pytest.raises(fg.FedgraftError) as error:
        result.predict(typed)
    assert error.value.code.startswith("E-RUN-PREDICT")


def test_objects_are_read_in_one_line(clients: fg.FederatedData, result: fg.Result) -> None:
    for thing in (fg.fedavg(), clients, clients.partition, fg.model(NETWORK)):
        assert "\n" not in repr(thing) and " at 0x" not in repr(thing)
    lines = repr(result.evaluate()).splitlines()
    assert any(line.strip().startswith("accuracy:") for line in lines)


# ---- accepted in another form ----------------------------------------------------------------------------------------

IMAGES = np.random.default_rng(2).integers(0, 256, (12, 8, 8, 3), dtype=np.uint8)
LABELS = [number % 3 for number in range(12)]
ARRAYS: dict[str, Callable[[], fg.data.Dataset]] = {
    "tensors": lambda: fg.data.arrays(torch.from_numpy(IMAGES), torch.tensor(LABELS)),
    "channels first": lambda: fg.data.arrays(IMAGES.transpose(0, 3, 1, 2), LABELS),
    "floats": lambda: fg.data.arrays(IMAGES / 255, LABELS),
    "labels as text": lambda: fg.data.arrays(IMAGES, [str(label) for label in LABELS]),
    "a torch dataset": lambda: fg.data.dataset(
        torch.utils.data.TensorDataset(torch.from_numpy(IMAGES).permute(0, 3, 1, 2) / 255, torch.tensor(LABELS))
    ),
    "a subset": lambda: fg.data.dataset(
        torch.utils.data.Subset(list(zip(IMAGES, LABELS, strict=True)), list(range(12)))  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("form", ARRAYS)
def test_images_and_labels_are_taken_alike_in_every_form(form: str) -> None:
    meant = fg.data.arrays(IMAGES, LABELS)
    typed = ARRAYS[form]()
    assert typed.train.classes == meant.train.classes
    assert len(typed.train.labels) == len(meant.train.labels) and len(typed.test.labels) == len(meant.test.labels)


@pytest.mark.parametrize("optimizer", ["adamw", "AdamW", "sgd", "sgdm"])
def test_an_optimizer_by_name(optimizer: str) -> None:
    assert fg.LocalTraining(optimizer=optimizer).optimizer.name in ("adamw", "sgdm")  # type: ignore[arg-type]


@pytest.mark.parametrize("typed", [{"data": True}, {"rounds": "1"}, {"device": torch.device("cpu")}, {"metrics": "f1"}])
def test_arguments_of_run_in_other_forms(typed: dict[str, Any], clients: fg.FederatedData, tmp_path: Path) -> None:
    options: dict[str, Any] = {"rounds": 1, **typed}
    given: Any = clients
    if "data" in typed:
        given = None
        options["data"] = clients
    run = fg.run("fedavg", NETWORK, given, folder=tmp_path / "run", workers=1, **options)
    assert run.summary["rounds"] == 1


def test_a_result_measures_divided_data_and_says_what_it_has_not(result: fg.Result, clients: fg.FederatedData) -> None:
    assert result.evaluate(clients).metrics.keys() == result.evaluate(clients.dataset).metrics.keys()
    with raises("E-RUN-EVALUATE-TYPE"):
        result.evaluate((IMAGES, LABELS))  # type: ignore[arg-type]
    for name in ("plot", "history", "acuracy"):
        with raises("E-CORE-UNKNOWN-NAME", attribute=name):
            getattr(result, name)
        assert not hasattr(result, name)
    with pytest.raises(fg.FedgraftError, match="accuracy"):
        _ = result.acuracy


def test_sixty_things_are_typed_here() -> None:
    """The bar of a first hour in Python: at least sixty, none of which ends in a raw error."""
    forms = 3 + 4 + 2 + 9 + 5 + 4 + 4 + 4  # of algorithms, slots, rules, images, no images, optimizers, runs, results
    assert len(REFUSED) + len(ARRAYS) + forms >= 60
