"""The mutants of the package, and a sample of them in proportion to the lines of code of each folder."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.systematic.mutate import Mutant, mutants_of

PACKAGE = Path(__file__).resolve().parents[3] / "src" / "fedgraft"
FOLDERS = ("core", "local", "aggregate", "edit", "privacy", "client", "server", "metrics", "data/partition", "runs")
FOLDERS += ("consortium",)


def folder_of(file: str) -> str:
    """Return the folder of the list a file belongs to."""
    return next(folder for folder in FOLDERS if file.startswith(f"{folder}/"))


def all_mutants() -> dict[str, list[Mutant]]:
    """Return every mutant of every folder."""
    return {folder: _in_folder(folder) for folder in FOLDERS}


def _in_folder(folder: str) -> list[Mutant]:
    mutants = []
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        mutants += mutants_of(path, PACKAGE)
    return mutants


def code_lines(folder: str) -> int:
    """Count the lines of a folder that hold statements."""
    total = 0
    for path in (PACKAGE / folder).rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        total += len({node.lineno for node in nodes if isinstance(node, ast.stmt | ast.expr)})
    return total


def rank(seed: int, mutant: Mutant) -> str:
    """Return the place of a mutant in the draw: by its id alone, so that an edit elsewhere moves no other mutant."""
    return hashlib.blake2b(f"{seed}:{mutant.id}".encode()).hexdigest()


def shares(size: int, weights: Sequence[int]) -> list[int]:
    """Share `size` out in proportion to `weights`, what is left to the largest remainders."""
    total = sum(weights)
    counts = [size * weight // total for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: -(size * weights[i] % total))
    for i in by_remainder[: size - sum(counts)]:
        counts[i] += 1
    return counts


def draw(size: int, seed: int) -> list[Mutant]:
    """Return a sample, its folders mixed, so that every beginning of it is a sample too."""
    mutants = all_mutants()
    counts = shares(size, [code_lines(folder) for folder in FOLDERS])
    chosen: list[Mutant] = []
    for folder, count in zip(FOLDERS, counts, strict=True):
        chosen += sorted(mutants[folder], key=lambda mutant: rank(seed, mutant))[:count]
    return sorted(chosen, key=lambda mutant: rank(seed, mutant))
