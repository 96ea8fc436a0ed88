"""Run the configs of `configs.toml` and print one digest of trained bytes for each."""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from safetensors import safe_open

CONFIGS = Path(__file__).with_name("configs.toml")


def digest_of_checkpoint(run_folder: Path) -> str:
    """Return a digest over names, shapes and bytes of all tensors of the newest checkpoint."""
    checkpoints = sorted((run_folder / "checkpoints").glob("*.safetensors"))
    digest = hashlib.blake2b(digest_size=16)
    with safe_open(checkpoints[-1], framework="numpy") as file:
        for name in sorted(file.keys()):
            if name.endswith("/identity"):  # keys of secure aggregation are drawn anew in every run
                continue
            tensor = file.get_tensor(name)
            digest.update(f"{name} {tensor.shape} {tensor.dtype}".encode())
            digest.update(tensor.tobytes())
    return digest.hexdigest()


def run_config(name: str, overrides: list[str], folder: Path) -> str:
    """Run one config in a process of its own and return the digest of its last checkpoint."""
    run_folder = folder / name
    command = [sys.executable, "-m", "fedgraft", "run", *overrides, "--quiet", "--folder", str(run_folder)]
    environment = os.environ | {"FEDGRAFT_CACHE": str(folder / "cache")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        return f"failed: {done.stderr.strip()[-300:]}"
    return digest_of_checkpoint(run_folder)


def main() -> int:
    """Print `name digest` for each config; with `--expect` return 1 if one differs from the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--expect", type=Path, help="an earlier printout to compare with")
    arguments = parser.parse_args()
    expected: dict[str, str] = {}
    if arguments.expect is not None:
        for line in arguments.expect.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(" ")
            expected[name] = value
    table = tomllib.loads(CONFIGS.read_text(encoding="utf-8"))
    differing = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, overrides in table["configs"].items():
            value = run_config(name, [*table["base"]["overrides"], *overrides], Path(folder))
            line = f"{name} {value}"
            if expected and expected.get(name) != value:
                differing += 1
                line += "  DIFFERS"
            print(line, flush=True)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
