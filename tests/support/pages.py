"""Run folders with made-up numbers, and a page as a browser would act on it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from fedgraft.runs.folder import RunFolder

HOSTILE = "</script><script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)>\"'&@@DATA@@"


def line(round: int, **more: Any) -> dict[str, Any]:
    return {
        "round": round,
        "accuracy": None if round % 2 else round / 20,
        "loss": None if round % 2 else 2.0 / round,
        "train_loss": 2.5 / round,
        "update_norm": 1.0 / round,
        "lr": 0.1,
        "bytes_up": 2_000_000,
        "bytes_down": 10**6,
        "clients": {"ids": [1, 2], "loss": [1.0, 3.0], "norm": [0.5, 0.7], "drift": [0.1, None], "cosine": [0.9, 0.8]},
        "seconds": {"exchange": 0.5, "combine": 0.25},
        "dropped": [],
        **more,
    }


def finished(path: Path, rounds: int = 6, config: str = "", summary: Any = None, **more: Any) -> RunFolder:
    run = RunFolder.create(path, config or f'[algorithm]\nname = "{path.name}"\nlr = 0.1\n', path.name)
    with run.writing(console=False):
        for round in range(1, rounds + 1):
            run.append(line(round, **more))
        run.finish(
            {
                "test": {"accuracy": 0.6, "top5": 0.9, "count": 300},
                "best_round": 6,
                "bytes_up": 12_000_000,
                "bytes_down": 6_000_000,
                "seconds": 3725,
                **(summary or {}),
            }
        )
    return run


class Page(HTMLParser):
    """Collects what a browser would act on."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.overrides: list[str] = []
        self._inside = ""
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.overrides.append(data)

    @property
    def shown(self) -> str:
        return " ".join(" ".join(self.overrides).split())

    @property
    def data(self) -> dict[str, Any]:
        return dict(json.loads(self.scripts[0]))

    def violations(self) -> list[str]:
        """Everything that could send a request or run a script that is not the page's own."""
        found = []
        for tag, attributes in self.tags:
            if tag in {"link", "iframe", "object", "embed", "base", "form"}:
                found.append(tag)
            for key, value in attributes.items():
                if key.startswith("on"):
                    found.append(f"{tag} {key}")
                if key in {"src", "href", "action", "srcset", "data", "poster"} and not (value or "").startswith(
                    "data:"
                ):
                    found.append(f"{tag} {key}={value}")
        styles = re.findall(r"<style>(.*?)</style>", self.text, re.DOTALL)
        found += [rule for style in styles for rule in re.findall(r"url\(|@import", style)]
        return found + self.scripts[2:]
