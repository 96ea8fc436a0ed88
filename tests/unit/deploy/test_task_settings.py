"""Flower takes only settings that its app declares: every one that a task reads or a command sends is declared."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra 'flower'")

from fedgraft.deploy import app, coordinator, flower_apps

SET_BY_THE_SERVER = {"run"}
"""The number of the run, which the server adds to the settings."""


def declared() -> set[str]:
    """Return the settings that the app declares."""
    return set(tomllib.loads(app.app_files()["pyproject.toml"])["tool"]["flwr"]["app"]["config"])


def read_and_sent() -> set[str]:
    """Return the settings that server and coordinator name in their sources."""
    names: set[str] = set()
    for module in (flower_apps, coordinator):
        source = Path(str(module.__file__)).read_text()
        names |= set(re.findall(r'settings(?:\.get\(|\[)"([\w-]+)"', source))
    return names


def test_every_setting_is_declared() -> None:
    assert {"release", "rare", "other", "model"} <= read_and_sent()
    assert read_and_sent() - SET_BY_THE_SERVER <= declared()
