"""The Flower app of fedgraft: two modules that import the apps of the installed package, the same for every federation.

The config of a run travels as a run setting, so a node can verify the app by comparing its files with its own.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

_PROJECT = """\
[project]
name = "fedgraft-app"
version = "{version}"
description = "Adapts one pretrained vision model to data that many owners keep private."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedgraft"

[tool.flwr.app.components]
serverapp = "fedgraft_app.server:app"
clientapp = "fedgraft_app.client:app"

[tool.flwr.app.config]
config = ""
folder = ""
server-data = ""
server-source = ""
federation = ""
wait = ""
task = ""
model = ""
metrics = ""
"""


def app_files() -> dict[str, str]:
    """Return the contents of the app's files by path."""
    return {
        "pyproject.toml": _PROJECT.format(version=version("fedgraft")),
        "fedgraft_app/__init__.py": '"""The Flower app of fedgraft."""\n',
        "fedgraft_app/server.py": 'from fedgraft.deploy.flower_apps import server as app\n\n__all__ = ["app"]\n',
        "fedgraft_app/client.py": 'from fedgraft.deploy.flower_apps import client as app\n\n__all__ = ["app"]\n',
    }


def write_app(folder: Path) -> None:
    """Write the app as a folder that `flwr run` accepts."""
    for name, text in app_files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
