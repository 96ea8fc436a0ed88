"""A Slurm script whose jobs divide the runs of a sweep among themselves."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from fedgraft.core.store import write_text


def write_array_script(root: Path, jobs: int) -> Path:
    """Write `sweep.sbatch` for an array of so many jobs that join the sweep in `root`, and return its path.

    Each job takes one run after the other until none is left; a job that is killed is replaced by the others, or by
    submitting the script again.
    """
    place = root.resolve()
    command = [sys.executable, "-m", "fedgraft", "sweep", "--join", str(place), "--processes", "0"]
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name=fedgraft-{_word(place.name)}",
        f"#SBATCH --array=0-{jobs - 1}",
        f"#SBATCH --output={place}/slurm-%A_%a.out",
        "#SBATCH --cpus-per-task=1",
        "# Add what your cluster asks for: --partition, --time, --mem, --gres=gpu:1.",
        "export OMP_NUM_THREADS=1",
        shlex.join(command),
        "",
    ]
    path = root / "sweep.sbatch"
    write_text(path, "\n".join(lines))
    return path


def _word(text: str) -> str:
    """Return a text with everything but letters, digits, dots and dashes replaced, as a job's name."""
    letters = []
    for letter in text:
        if letter.isalnum() or letter in ".-_":
            letters.append(letter)
        else:
            letters.append("-")
    return "".join(letters)
