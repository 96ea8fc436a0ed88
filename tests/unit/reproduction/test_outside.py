"""The verdicts of the protocol by a second hand: `reproduction/checks/verdicts.py`, which shares no code with ours."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reproduction.answers import endpoints, read
from reproduction.answers_page import answers_page, claim_rows, claims_page, results
from reproduction.preset import cells
from reproduction.question import QUESTIONS, load_question

CHECK = Path(__file__).parents[3] / "reproduction" / "checks" / "verdicts.py"


def _draw(out: Path, rng: np.random.Generator) -> None:
    """Numbers of every cell of every question: arms far apart or close, seeds noisy or not, some runs missing."""
    for name in QUESTIONS:
        kept: dict[str, Any] = {}
        for part, preset in load_question(name).parts.items():
            if rng.random() < 0.1:
                continue  # not run yet
            spread, apart = rng.choice([0.05, 0.3, 1.0]), rng.choice([0.2, 2.0, 10.0])
            kept[part] = {"cells": {}}
            for cell in cells(preset, "laptop", part):
                level = 50 + apart * rng.standard_normal()
                seeds = {str(s): level + spread * rng.standard_normal() for s in range(1, preset.seeds + 1)}
                series = {s: None if rng.random() < 0.02 else x for s, x in seeds.items()}
                sizes = dict.fromkeys(seeds, float(rng.choice([100.0, 150.0, 1000.0])))
                measures = dict.fromkeys(("test", "last", "best", "personal", "finetuned", "balanced"), series)
                kept[part]["cells"][cell.label] = {
                    "evaluations": int(rng.choice([7, 8, 20], p=[0.02, 0.49, 0.49])),
                    "megabytes": sizes,
                    **measures,
                }
        (out / name).mkdir(parents=True, exist_ok=True)
        (out / name / "numbers.json").write_text(json.dumps(kept))


def test_a_second_hand_comes_to_the_same_verdicts(tmp_path: Path) -> None:
    again = runpy.run_path(str(CHECK))["verdicts"]
    rng, words = np.random.default_rng(0), set[str]()
    for _ in range(25):
        _draw(tmp_path, rng)
        ours = {name: verdict.word for name, (_, verdict) in endpoints(read(tmp_path)).items()}
        ours |= {row["claim"]: row["verdict"] for row in claim_rows(read(tmp_path)) if row["our part"] != "–"}
        assert {name: word for name, (_, word) in again(tmp_path).items()} == ours
        words |= set(ours.values())
    assert words >= {"supported", "contradicted", "undecided", "equivalent within 1"}
    assert words >= {"too noisy", "floor or ceiling", "too few evaluations"}
    assert words >= {"supported, at least 1", "contradicted, size undecided", "supported, below 1"}


def test_a_page_that_says_something_else_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _draw(tmp_path, np.random.default_rng(1))
    found, main = results(tmp_path), runpy.run_path(str(CHECK))["main"]
    pages = {"answers.md": answers_page(found), "claims.md": claims_page(found)}
    turned = {name: text.replace("**supported", "**contradicted") for name, text in pages.items()}
    monkeypatch.setattr("sys.argv", ["verdicts.py", str(tmp_path)])
    for shown, code in ((pages, 0), *((pages | {name: turned[name]}, 1) for name in pages)):
        for name, text in shown.items():
            (tmp_path / name).write_text(text)
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == code
