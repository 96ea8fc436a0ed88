"""The Flower app of fedgraft: two modules that import the apps of the installed package.

A federation of fedgraft's own sends the config of a run as a run setting, so its app is the same for every run. For
one that somebody else runs (`fedgraft deploy app`), the config is the app's default: `flwr run FOLDER` is enough.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from fedgraft.core.errors import FedgraftError

if TYPE_CHECKING:
    from fedgraft.config.load import Config

OLDEST_FLOWER = (1, 40)
NEWEST_FLOWER = (1, 41)
"""The versions of flwr whose interfaces were tried: oldest and newest, both included."""
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
config = {config}
folder = {folder}
release = ""
rare = ""
server-data = ""
server-source = ""
federation = ""
wait = ""
task = ""
model = ""
other = ""
metrics = ""
"""


def app_files(config: str = "", folder: str = "") -> dict[str, str]:
    """Return the contents of the app's files by path; `config` and `folder` are the defaults of these settings."""
    project = _PROJECT.format(version=version("fedgraft"), config=json.dumps(config), folder=json.dumps(folder))
    return {
        "pyproject.toml": project,
        "fedgraft_app/__init__.py": '"""The Flower app of fedgraft."""\n',
        "fedgraft_app/server.py": 'from fedgraft.deploy.flower_apps import server as app\n\n__all__ = ["app"]\n',
        "fedgraft_app/client.py": 'from fedgraft.deploy.flower_apps import client as app\n\n__all__ = ["app"]\n',
    }


def write_app(folder: Path, config: str = "", run_folder: str = "") -> None:
    """Write the app as a folder that `flwr run` accepts."""
    for name, text in app_files(config, run_folder).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


# ---- federations of others -------------------------------------------------------------------------------------------


def check_stock_nodes(config: Config) -> None:
    """Refuse a config whose promises need a node of fedgraft's own: a stock SuperNode has no key, policy or ledger."""
    reasons = {
        "privacy.aggregation=secure needs each node's ledger and its peers' pinned keys": (
            config.privacy.aggregation == "secure"
        ),
        "privacy.dp needs a secret of each node's own": config.privacy.dp is not None,
        "a [policy] is kept by a node of fedgraft's own": bool(config.policy),
    }
    for reason, applies in reasons.items():
        if applies:
            raise FedgraftError(
                "E-DEPLOY-NEEDS-OWN-NODE",
                f"{reason}, and a stock Flower node has none of it",
                "use `fedgraft deploy init`, `server` and `node`, or leave it out of the config",
                reason=reason,
            )


def check_flower_version(installed: str) -> None:
    """Refuse a version of flwr whose interfaces were not tried."""
    numbers = tuple(int(part) for part in installed.split(".")[:2] if part.isdigit())
    if OLDEST_FLOWER <= numbers <= NEWEST_FLOWER:
        return
    oldest, newest = (".".join(map(str, version_)) for version_ in (OLDEST_FLOWER, NEWEST_FLOWER))
    raise FedgraftError(
        "E-DEPLOY-FLOWER-VERSION",
        f"a deployed federation works with flwr {oldest} to {newest}, and {installed} is installed",
        f"install it with: pip install 'flwr>={oldest},<={newest}.99'",
        version=installed,
    )
