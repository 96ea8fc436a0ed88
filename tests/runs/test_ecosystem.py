"""The adapted model on the Hub (a stand-in on loopback) and as ONNX, read by the programs it is made for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.errors import raises
from tests.support.fake_hub import fake_hub

import fedgraft as fg
from fedgraft.models import onnx_file

UPLOAD = """
import sys
from pathlib import Path
import fedgraft as fg

data = fg.data.digits()
clients = fg.partition.iid(data, clients=4)
result = fg.run(fg.fedavg(trainable="head"), "tiny", clients, rounds=1, folder=Path(sys.argv[1]) / "run", workers=1)
result.save_pretrained(Path(sys.argv[1]) / "exported")
print("COMMIT", result.push_to_hub("hospital/digits"))
try:
    result.push_to_hub("hospital/digits", token="wrong")
except fg.FedgraftError as error:
    print("REFUSED", error.code)
"""


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> fg.Result:
    folder = tmp_path_factory.mktemp("ecosystem") / "run"
    clients = fg.partition.iid(fg.data.digits(), clients=4)
    algorithm = fg.fedavg(trainable="lora", local={"steps": 2})
    return fg.run(algorithm, "tiny", clients, rounds=1, folder=folder, workers=1)


@pytest.mark.slow
def test_a_model_is_pushed_to_the_hub_and_loads_from_what_arrived(tmp_path: Path) -> None:
    """In a process of its own: the Hub's library reads its address when it is imported."""
    from transformers import AutoModelForImageClassification

    with fake_hub() as hub:
        environment = {
            "HF_ENDPOINT": hub.address,
            "HF_TOKEN": hub.token,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HOME": str(tmp_path),
            "PATH": "",
            "PYTHONPATH": ":".join(filter(None, sys.path)),
        }
        done = subprocess.run(
            [sys.executable, "-c", UPLOAD, str(tmp_path)], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"COMMIT {hub.address}/hospital/digits/commit/1" in done.stdout
        assert "REFUSED E-RUN-HUB" in done.stdout
    assert hub.repositories == {"hospital/digits": True}  # private unless told otherwise
    files = hub.files["hospital/digits"]
    assert {"config.json", "model.safetensors", "preprocessor_config.json", "README.md"} <= set(files)
    for name, content in files.items():
        path = tmp_path / "arrived" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "arrived")
    expected = AutoModelForImageClassification.from_pretrained(tmp_path / "exported")
    for name, value in expected.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tiny", "cnn:width=4,size=16"])
def test_an_onnx_file_gives_the_networks_logits(tmp_path: Path, kind: str) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    network = fg.model(kind).with_head(5, 0).eval()
    onnx_file.write_onnx(network, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    for batch in (1, 2, 5):  # sizes that the check at writing has and has not tried
        images = np.random.default_rng(batch).normal(size=(batch, 3, network.image_size, network.image_size))
        images = images.astype(np.float32)
        (logits,) = session.run(None, {"pixel_values": images})
        with torch.no_grad():
            expected = network(torch.from_numpy(images)).numpy()
        np.testing.assert_allclose(logits, expected, atol=1e-5)


@pytest.mark.slow
def test_a_run_is_exported_as_onnx_and_the_card_is_right(result: fg.Result, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    folder = result.save_pretrained(tmp_path / "onnx", "onnx")
    assert json.loads((folder / "labels.json").read_text()) == list(result.classes)
    code = (folder / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "image.png")
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == result.predict(pixels)[0].label


@pytest.mark.slow
def test_another_networks_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    onnx_file.write_onnx(fg.model("tiny").with_head(5, 0), tmp_path / "model.onnx")
    with raises("E-MODELS-ONNX"):
        onnx_file._check_same_logits(fg.model("tiny").with_head(5, 1), tmp_path / "model.onnx")
