"""The test set stays closed while settings are chosen (`rounds.test=false`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedgraft.config.load import Config, validate
from fedgraft.runs.centralized import run_centralized
from fedgraft.runs.loop import run


def _config(test: bool) -> Config:
    return validate(
        {
            "data": {"source": "digits", "limit": 200, "image_size": 16, "validation": 0.3},
            "partition": {"clients": 2},
            "model": {"name": "tiny"},
            "trainable": {"kind": "head"},
            "centralized": {"kind": "probe", "epochs": 1},
            "rounds": {"total": 1, "test": test},
        }
    )


@pytest.mark.parametrize("how", [run, run_centralized])
def test_the_test_set_is_only_seen_on_request(how, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = how(_config(True), tmp_path / "open", console=False)
    shut = how(_config(False), tmp_path / "shut", console=False)
    assert 0 <= opened["test"]["accuracy"] <= 1 and "test" not in shut
    assert shut["validation"] == opened["validation"]
    assert (tmp_path / "shut/report.html").exists()
