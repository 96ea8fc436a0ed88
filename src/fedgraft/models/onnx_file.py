"""Write a network as an ONNX file, checked by onnxruntime to give the network's own logits at several batch sizes."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedgraft.core.device import Device, fetch
from fedgraft.core.errors import FedgraftError, MissingExtra
from fedgraft.core.rng import torch_stream
from fedgraft.models.export import atomic_folder, label_names, write_labels, write_preprocessor_and_card
from fedgraft.models.network import VisionNetwork

FILE = "model.onnx"
INPUT = "pixel_values"
OUTPUT = "logits"
OPSET = 18
TOLERANCE = 1e-4
"""Largest difference of a logit: the runtime orders sums differently."""
BATCHES = (1, 3)
"""Numbers of images with which the file is tried; the number is not fixed in it."""


class _Logits(nn.Module):
    """A network under the input's name that `transformers` has for images."""

    def __init__(self, network: VisionNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return the logits of normalised pixels."""
        logits: Tensor = self.network(pixel_values)
        return logits


def export_onnx(
    network: VisionNetwork, folder: Path, labels: Sequence[str], preprocessor: Mapping[str, Any], card: str
) -> Path:
    """Write model.onnx, labels.json, preprocessor_config.json and README.md to the new `folder`; return it.

    The input is `pixel_values` (batch, 3, size, size), normalised as preprocessor_config.json says; the output is
    `logits`.
    """
    names = label_names(network, labels)
    with atomic_folder(folder) as new_folder:
        write_onnx(network, new_folder / FILE)
        write_labels(new_folder, names)
        write_preprocessor_and_card(new_folder, preprocessor, card)
    return folder


def write_onnx(network: VisionNetwork, path: Path) -> None:
    """Write the network to `path` as ONNX, and raise if onnxruntime does not give its logits."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        try:
            __import__(package)
        except ImportError:
            raise MissingExtra(package, "onnx", "an export as ONNX") from None
    model = _Logits(network).eval()
    example = _drawn(network, max(BATCHES))
    device = Device.of(network)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), redirect_stdout(StringIO()), torch.no_grad():
        warnings.simplefilter("ignore")  # of torch's own exporter
        torch.onnx.export(
            model,
            (device.put(example),),
            path,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes={INPUT: {0: torch.export.Dim("batch")}},
            opset_version=OPSET,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    _check_same_logits(network, path)


def _check_same_logits(network: VisionNetwork, path: Path) -> None:
    """Raise if the file's logits of drawn images differ from the network's by more than `TOLERANCE`."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    device = Device.of(network)
    largest = 0.0
    for batch in BATCHES:
        images = _drawn(network, batch)
        with torch.no_grad():
            expected = fetch(network(device.put(images))).float()
        logits = torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0])
        largest = max(largest, float((logits - expected).abs().max()))
    if not largest <= TOLERANCE:
        raise FedgraftError(
            "E-MODELS-ONNX",
            f"the ONNX file gives logits that differ by {largest:.2g} from the network's",
            "export it as merged instead, and report this with the network's name",
            difference=largest,
        )


def _drawn(network: VisionNetwork, batch: int) -> Tensor:
    """Return a batch of drawn pixels, the same in each call."""
    size = network.image_size
    return torch.randn(batch, 3, size, size, generator=torch_stream(0, "onnx", batch))
