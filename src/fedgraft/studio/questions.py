"""The questions of a reproduction below a folder: `q1.md` with `q1/numbers.json` and its figures, as it writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedgraft.core.errors import FedgraftError
from fedgraft.report.sections import PICTURE_TYPES

_PLACES = ("numbers.json", "*/numbers.json", "*/*/numbers.json", "docs/results/*/numbers.json")
_MOST_PICTURES = 60
_TEXT = 20_000  # characters of a page that are read


class Questions:
    """The questions below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __bool__(self) -> bool:
        return bool(self._folders())

    def read(self) -> list[dict[str, Any]]:
        """Return each question: `title`, `question`, its tables' headings and the paths of its figures."""
        questions = []
        for folder in self._folders():
            page = folder.with_suffix(".md")
            title = folder.name
            paragraphs: list[str] = []
            if page.is_file():
                text = page.read_text(encoding="utf-8", errors="replace")[:_TEXT]
                blocks = [block.strip() for block in text.split("\n\n") if block.strip()]
                if blocks and blocks[0].startswith("# "):
                    title = blocks[0].removeprefix("# ")
                paragraphs = [block for block in blocks[1:2] if not block.startswith("#")]
            pictures = []
            for file in self._pictures(folder):
                path = file.relative_to(self.root).as_posix()
                pictures.append({"path": path, "caption": path})
            questions.append({"name": folder.name, "title": title, "text": paragraphs, "pictures": pictures})
        return questions

    def picture(self, path: str) -> Path:
        """Return the file of one of the questions' figures; raise for any other path."""
        for folder in self._folders():
            for file in self._pictures(folder):
                if file.relative_to(self.root).as_posix() == path:
                    return file
        raise FedgraftError("E-STUDIO-PICTURE", f"no question has a figure {path!r}", "reload the page", path=path)

    def _folders(self) -> list[Path]:
        """Return the folders of the questions, by name; one in a run's folder is none."""
        folders: dict[Path, None] = {}
        for place in _PLACES:
            for file in sorted(self.root.glob(place)):
                if not (file.parent / "run.json").exists():
                    folders[file.parent] = None
        return sorted(folders)

    def _pictures(self, folder: Path) -> list[Path]:
        """Return the figures of a question: those in its folder, and in the folders of its parts beside it."""
        files = []
        for part in [folder, *sorted(folder.parent.glob(f"{folder.name}-*"))]:
            if part.is_dir():
                files += [file for file in sorted(part.iterdir()) if file.suffix in PICTURE_TYPES]
        return files[:_MOST_PICTURES]
