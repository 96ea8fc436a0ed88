"""Scans in whole runs: the same bytes as from images, and no value of a tag in anything that is written or sent."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.support.machines import Machines
from tests.support.tiny import CNN
from typer.testing import CliRunner

pytest.importorskip("pydicom")

from tests.support.dicom_files import PLANTED, write_dicom

from fedgraft.cli.main import app
from fedgraft.config.load import Config, from_folder, load
from fedgraft.core.errors import FedgraftError
from fedgraft.data.sources import scan_rows
from fedgraft.deploy.deployed import run_deployed
from fedgraft.deploy.preflight import collect_preflight
from fedgraft.runs import checkpoint
from fedgraft.runs.loop import run

WIDTH = int(os.environ.get("FEDGRAFT_PLANTED_WIDTH", "0"))
"""A wider network and more rounds, for looking through more bytes: 64 makes over 100 MB (docs/clinics.md)."""
RUN = [
    f"model.name=cnn:width={WIDTH},size=16" if WIDTH else CNN,
    "rounds.total=8" if WIDTH else "rounds.total=2",
    "rounds.fraction=1.0",
    "local.steps=2",
    "local.batch_size=8",
    "workers=1",
    "engine=reference",
]
INSTITUTIONS = ("Planted Hospital St Odile", "PLANTED CLINIC NORTH")
PATIENTS = 12
IMAGES = 4  # of each patient


def images() -> Iterator[tuple[int, int, str, np.ndarray]]:
    """Yield patient, number, class and pixels of each image, 12 bits, in the order of the rows."""
    for patient in range(PATIENTS):
        for number in range(IMAGES):
            pixels = np.random.default_rng([patient, number]).integers(0, 4096, (18, 16)).astype(np.uint16)
            yield patient, number, "ab"[patient % 2], np.clip(pixels + 600 * (patient % 2), 0, 4095).astype(np.uint16)


def write_images(folder: Path, kind: str, eight_bits: bool) -> Path:
    """Write a table of the images as PNG or DICOM files; every third DICOM file of 8 bits is inverted."""
    folder.mkdir(parents=True)
    lines = ["image,label,site,group"]
    for patient, number, label, deep in images():
        pixels = (deep >> 4).astype(np.uint8) if eight_bits else deep
        name = f"{patient}-{number}.{kind}"
        if kind == "png":
            Image.fromarray(pixels).save(folder / name)
        else:
            tags: dict[str, Any] = {"InstitutionName": INSTITUTIONS[patient % 2]}
            if not eight_bits:
                tags.update(BitsStored=12, HighBit=11)
            elif number % 3 == 0:
                tags["PhotometricInterpretation"] = "MONOCHROME1"
                pixels = 255 - pixels
            write_dicom(folder / name, pixels, f"PLANTED-{patient:02}", **tags)
        site = "" if kind == "dcm" else ["north", "south"][patient % 2]
        group = "" if kind == "dcm" else f"g{patient:02}"
        lines.append(f"{name},{label},{site},{group}")
    (folder / "labels.csv").write_text("\n".join(lines))
    if kind == "dcm":
        text = (folder / "labels.csv").read_text()
        (folder / "labels.csv").write_text(text.replace(",site,group", "").replace(",,", ""))
    return folder


def final_vector(folder: Path) -> bytes:
    """Return the bytes of the common model after the last round."""
    latest = checkpoint.load_latest(folder / "checkpoints", from_folder(folder).digest)
    assert latest is not None
    return latest.tensors["vector"].numpy().tobytes()


def trained(root: Path, name: str, kind: str, eight_bits: bool, *more: str) -> tuple[bytes, dict[str, Any]]:
    """Return model and summary of a run on the images as files of one kind; nothing is shared with another run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDGRAFT_CACHE", str(root / f"cache-{name}"))
        patch.setenv("FEDGRAFT_SITE_KEY", str(root / f"key-{name}" / "site.key"))
        data = write_images(root / f"data-{name}", kind, eight_bits)
        words = ["data.source=table", f"data.path={data}", "partition.kind=by_site", "partition.clients=2", *RUN, *more]
        summary = run(load(None, words), root / f"run-{name}")
    return final_vector(root / f"run-{name}"), summary


@pytest.mark.slow
@pytest.mark.parametrize("eight_bits", [True, False])
def test_a_dicom_site_and_a_png_site_train_to_the_same_bytes(tmp_path: Path, eight_bits: bool) -> None:
    window = [] if eight_bits else ["data.grey_window=[100,4000]"]
    png, png_summary = trained(tmp_path, "png", "png", eight_bits, *window)
    dcm, dcm_summary = trained(tmp_path, "dcm", "dcm", eight_bits, "data.site=tag:InstitutionName", *window)
    assert png == dcm
    for name in ("test_accuracy", "test_loss"):
        assert png_summary.get(name) == dcm_summary.get(name)
    # The broken variant: one value of the window more, and the bytes are others.
    if not eight_bits:
        other, _ = trained(
            tmp_path, "other", "dcm", eight_bits, "data.site=tag:InstitutionName", "data.grey_window=[100,4090]"
        )
        assert other != dcm


# ---- planted names ---------------------------------------------------------------------------------------------------


def spellings() -> list[bytes]:
    """Return the planted values as they could appear in a file: plain, small, in UTF-16, hexadecimal, base64."""
    values = [*PLANTED, *INSTITUTIONS, *[f"PLANTED-{patient:02}" for patient in range(PATIENTS)]]
    patterns = []
    for value in values:
        raw = value.encode()
        patterns += [raw, raw.lower(), value.encode("utf-16-le"), raw.hex().encode(), base64.b64encode(raw)[:-2]]
    return patterns


def planted_in(pieces: dict[str, bytes]) -> list[str]:
    """Return the names of the pieces that contain a planted value."""
    patterns = spellings()
    return [name for name, content in pieces.items() if any(pattern in content for pattern in patterns)]


def files_below(folder: Path, *without: Path) -> dict[str, bytes]:
    """Return the content of all files below a folder, and their names, but of those in the folders `without`."""
    pieces = {}
    for path in folder.rglob("*"):
        if path.is_file() and not any(path.is_relative_to(place) for place in without):
            pieces[str(path.relative_to(folder))] = path.read_bytes() + str(path).encode()
    return pieces


class Recording(Machines):
    """Nodes whose traffic with the server is recorded, in both directions."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.traffic: dict[str, bytes] = {}

    def ask(self, client: int, request: Any) -> Any:
        answer = super().ask(client, request)
        for kind, message in (("request", request), ("response", answer)):
            plain = repr(asdict(message)).encode()
            binary = getattr(message, kind) + getattr(message, "opened", b"")
            self.traffic[f"{kind} {len(self.traffic)}"] = plain + binary
        return answer


def node_folders(root: Path) -> list[str]:
    """Write the images as a folder of classes for each of two nodes; return their paths."""
    places = []
    for node in range(2):
        place = root / f"images-{node}"
        for patient, number, label, deep in images():
            if patient // 2 % 2 == node:
                path = place / label / f"{patient}-{number}.dcm"
                write_dicom(path, deep, f"PLANTED-{patient:02}", BitsStored=12, HighBit=11)
        places.append(str(place))
    return places


def everything(root: Path, patch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> dict[str, bytes]:
    """Run a simulation, a preflight, a deployment, predictions and failures on scans; return all they left."""
    patch.setenv("FEDGRAFT_CACHE", str(root / "cache"))
    patch.setenv("FEDGRAFT_SITE_KEY", str(root / "site" / "site.key"))
    scans = write_images(root / "scans", "dcm", False)
    words = ["data.source=table", f"data.path={scans}", "data.site=tag:InstitutionName"]
    words += ["partition.kind=by_site", "partition.clients=2", *RUN]
    pieces: dict[str, bytes] = {}
    run(load(None, words), root / "simulation")
    runner = CliRunner()
    for name, arguments in {
        "preflight": ["preflight", *words, "-o", str(root / "preflight")],
        "predict": ["predict", str(root / "simulation"), str(scans), "--json"],
        "partition": ["partition", *words, "-o", str(root / "map.png")],
        "wrong tag": ["run", *words, "data.group=tag:PatientName", f"run={root / 'refused'}"],
        "no owner": ["run", *words, "data.site=tag:StationName", f"run={root / 'refused'}", "partition.clients=5"],
    }.items():
        result = runner.invoke(app, arguments)
        pieces[f"terminal of {name}"] = (result.output + repr(result.exception)).encode()
    damaged = write_images(root / "damaged", "dcm", False)
    for path in sorted(damaged.glob("*.dcm"))[:4]:
        content = path.read_bytes()
        path.write_bytes(content[:-400])  # cut within the pixels
    with pytest.raises(FedgraftError) as refusal:
        run(load(None, [*words, f"data.path={damaged}"]), root / "broken")
    pieces["sentence of an error"] = (str(refusal.value) + repr(refusal.value.fields)).encode()
    # Six patients a node: with the default share no node would have one for validation.
    config: Config = load(None, [*RUN, "partition.clients=2", "data.grey_window=[0,4095]", "data.validation=0.3"])
    machines = Recording(config, root / "deployed", root / "nodes", patch, data=node_folders(root))
    run_deployed(config, root / "deployed", machines)
    asked = Recording(config, root / "deployed", root / "nodes", patch, data=node_folders(root), task="preflight")
    answers = collect_preflight(config, root / "deployed-preflight", asked)
    assert len(answers["facts"]) == 2, answers["refused"]
    assert answers["facts"]["0"]["modalities"] == {"CR": 24}
    pieces["answers"] = json.dumps(answers).encode()
    for number, traffic in enumerate((machines.traffic, asked.traffic)):
        for name, content in traffic.items():
            pieces[f"{name} of {number}"] = content
    pieces["log"] = caplog.text.encode()
    own = [root / name for name in ("scans", "damaged", "images-0", "images-1")]
    return {**pieces, **files_below(root, *own)}


@pytest.mark.slow
def test_no_value_of_a_tag_is_in_anything_that_is_written_or_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pieces = everything(tmp_path, monkeypatch, caplog)
    kinds = {name.split("/")[0].split(" ")[0] for name in pieces}
    assert {"cache", "simulation", "deployed", "preflight", "nodes", "request", "response", "terminal"} <= kinds
    assert any("tags/" in name for name in pieces)
    assert planted_in(pieces) == []
    print(f"{sum(map(len, pieces.values())):,} bytes in {len(pieces)} pieces")


@pytest.mark.slow
def test_a_value_that_is_not_hashed_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The broken variant: tags are taken as they are, and rows are not numbered."""

    def value_itself(key: bytes, name: str, value: bytes) -> str:
        return value.decode()

    monkeypatch.setattr(scan_rows, "keyed_hash", value_itself)
    table = sys.modules["fedgraft.data.sources.table"]  # the package has a function of this name
    monkeypatch.setattr(table, "number_columns", lambda parts, names: None)
    places = {name.split("/")[0] for name in planted_in(everything(tmp_path, monkeypatch, caplog))}
    assert {"cache", "simulation"} <= places
