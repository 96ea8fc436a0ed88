"""What mkdocs needs beyond the pages in docs/: the pages at the root of the repository, and the commands' help."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md", "ARCHITECTURE.md": "architecture.md", "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md", "CHANGELOG.md": "changelog.md",
}  # fmt: skip


def on_files(files: Any, config: Any) -> Any:
    """Add the root's pages and the page of commands."""
    from mkdocs.structure.files import File

    for source, name in PAGES.items():
        text = linked((ROOT / source).read_text(encoding="utf-8"))
        if name == "index.md":  # the only page of its part: room for the code instead of an empty list of pages
            text = f"---\nhide: [navigation]\n---\n{text}"
        files.append(File.generated(config, name, content=text))
    files.append(File.generated(config, "reference/commands.md", content=commands()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Pages of docs/ that point to the root's pages point to their copies; folders, to their list of pages."""
    up = "../" * page.file.src_uri.count("/")
    for source, name in PAGES.items():
        markdown = re.sub(rf"\]\((?:\.\./)+{re.escape(source)}", f"]({up}{name}", markdown)
    return markdown


def linked(text: str) -> str:
    """A root page as one of docs/: its links lose the folder, links to folders and code become plain text."""
    for source, name in PAGES.items():
        text = text.replace(f"]({source}", f"]({name}")
    text = text.replace("](docs/", "](")
    return re.sub(
        r"(?<!!)\[([^\]]*)\]\((?!https?:|#)"
        r"(?:src/[^)]*|[^)]*?(?:/|\.py|\.toml|LICENSE|decisions|results|examples|reproduction))\)",
        r"\1",
        text,
    )


def commands() -> str:
    """Every command with its help, as the command line prints it."""
    import typer.main

    from fedgraft.cli.main import app

    lines = ["# Commands", "", "What `fedgraft COMMAND --help` prints.", ""]
    for path, command in walk(typer.main.get_command(app), "fedgraft"):
        import click

        with click.Context(command, info_name=path) as context:
            lines += [f"## {path}", "", "```text", command.get_help(context), "```", ""]
    return "\n".join(lines)


def walk(command: Any, path: str) -> list[tuple[str, Any]]:
    """The commands below this one, groups opened."""
    inner = getattr(command, "commands", None)
    if inner is None:
        return [(path, command)]
    return [found for name, one in inner.items() for found in walk(one, f"{path} {name}")]
