"""The model card of an exported folder: what was trained, on which data, how well, and how it was protected."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from fedgraft.core.text import markdown_cell

_PATH = re.compile(r"(?<![\w/.:])(?:~|[A-Za-z]:)?(?:[/\\][\w.@-]+)+[/\\]?")

_LOAD = """```python
from transformers import pipeline

classify = pipeline("image-classification", model="this folder")
classify("image.png")
```"""
_LOAD_ADAPTER = """```python
import json
from peft import PeftModel
from transformers import AutoImageProcessor, AutoModelForImageClassification

labels = json.load(open("this folder/labels.json"))
base = AutoModelForImageClassification.from_pretrained("{base}", num_labels=len(labels), ignore_mismatched_sizes=True)
model = PeftModel.from_pretrained(base, "this folder").eval()
images = AutoImageProcessor.from_pretrained("this folder")
```
Where the images are of another size than the base was made for, call the model with `interpolate_pos_encoding=True`."""

_LOAD_EDIT = """```
fedgraft edit inspect adapted.edit
fedgraft edit apply adapted.edit --model {base} --to FOLDER     # FOLDER is what transformers loads
```
`labels.json` names the outputs in their order."""
_LOAD_ONNX = """```python
import json
import numpy as np
import onnxruntime
from PIL import Image

session = onnxruntime.InferenceSession("model.onnx")
labels = json.load(open("labels.json"))
rule = json.load(open("preprocessor_config.json"))
size = rule["size"].get("shortest_edge") or rule["size"]["height"]
image = Image.open("image.png").convert("RGB").resize((size, size), rule["resample"])
pixels = (np.asarray(image, np.float32) / 255 - rule["image_mean"]) / rule["image_std"]
logits = session.run(None, {"pixel_values": pixels.transpose(2, 0, 1)[None].astype(np.float32)})[0]
print(labels[logits.argmax()])
```
`preprocessor_config.json` says all of the preprocessing; images that are not square are resized as it says and cut to
the middle. `transformers.AutoImageProcessor` does just that, where it is at hand."""
_USE = {
    "merged": ("transformers", _LOAD),
    "adapter": ("peft", _LOAD_ADAPTER),
    "edit": ("fedgraft", _LOAD_EDIT),
    "onnx": ("onnx", _LOAD_ONNX),
}


@dataclass(frozen=True)
class Card:
    """The facts of a model card, which `text` writes as README.md.

    Of a path in them only the last piece is published.
    """

    title: str
    data: str
    base: str = ""
    licence: str = ""
    """The licence that the base's own card names."""
    training: Mapping[str, object] = field(default_factory=dict)
    metrics: Mapping[str, object] = field(default_factory=dict)
    protection: str = "none: updates were aggregated in the clear, without noise"
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """Of sets of findings: the probability (sigmoid of the logit) above which each is said."""

    def _thresholds(self) -> str:
        """Return the thresholds with a sentence on what they are; an empty text without any."""
        if not self.thresholds:
            return ""
        return (
            "An image has any number of findings. Each has the sigmoid of its own logit as probability, and is said "
            "where that is over its threshold, chosen on validation images for the greatest sum of sensitivity and "
            f"specificity.\n\n{_table(self.thresholds)}"
        )

    def text(self, kind: str = "merged", bundled: bool = False) -> str:
        """Return the card as README.md, with the front matter that the Hub reads.

        `kind` is merged, adapter, edit or onnx; `bundled`: the base lies in `base/`.
        """
        library, use = _USE[kind]
        front = [f"library_name: {library}", "pipeline_tag: image-classification"]
        licence = "The base names no licence."
        if self.licence:
            front.append(f"license: {self.licence.partition(',')[0]}")
            licence = f"Licence of the base: {self.licence}."
        if re.fullmatch(r"[\w.-]+/[\w.-]+", self.base):
            front.append(f"base_model: {self.base}")
        front.append("tags: [federated-learning, fedgraft]")
        base_path = self.base
        if bundled:
            base_path = "this folder/base"
        sections = {
            "Use": use.replace("{base}", base_path),
            "Base": f"{self.base or 'weights drawn from a seed'}. {licence}",
            "Data": self.data,
            "Training": _table(self.training),
            "Results": _table(self.metrics),
            "Thresholds": self._thresholds(),
            "Protection": self.protection,
        }
        body = "\n\n".join(f"## {name}\n{without_paths(text)}" for name, text in sections.items() if text)
        return "---\n" + "\n".join(front) + f"\n---\n# {without_paths(self.title)}\n\n{body}\n"


def without_paths(text: str) -> str:
    """Return the text with every absolute path cut down to its last part."""
    return _PATH.sub(_last_part, text)


def _last_part(path: re.Match[str]) -> str:
    """Return the last part of a matched path."""
    return re.split(r"[/\\]", path[0].rstrip("/\\"))[-1]


def _table(values: Mapping[str, object]) -> str:
    """Return a Markdown table of names and values, without those that are None; an empty text without values."""
    if not values:
        return ""
    lines = ["| | |", "|---|---|"]
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, float):
            value = f"{value:.4g}"
        lines.append(f"| {markdown_cell(str(name))} | {markdown_cell(str(value))} |")
    return "\n".join(lines)
