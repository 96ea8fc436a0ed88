"""What a studio shows of a folder: runs, a federation, the questions of a reproduction; whatever there is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from fedgraft.studio.actions import Actions, FederationActions
from fedgraft.studio.library import RunLibrary
from fedgraft.studio.questions import Questions
from fedgraft.studio.server import Studio


def studio_of(folder: Path, allow_actions: bool = False, cache: Path | None = None) -> Studio:
    """Return the studio of a folder of runs, of one run, or of a federation; `cache` is where its index is kept."""
    root = folder.resolve()
    actions = Actions(root) if allow_actions else None
    federation = None
    elsewhere: Callable[[], Iterable[Path]] = tuple
    if (root / "federation.toml").is_file():
        from fedgraft.deploy.folder import open_federation
        from fedgraft.studio.federation import FederationView

        view = FederationView(open_federation(root))
        federation = view.state
        elsewhere = view.run_folders
        if allow_actions:
            actions = FederationActions(root)
    questions = Questions(root)
    return Studio(
        library=RunLibrary(root, cache, elsewhere),
        actions=actions,
        federation=federation,
        questions=questions,
    )
