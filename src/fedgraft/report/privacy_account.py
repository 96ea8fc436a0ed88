"""The privacy account of a run as it grows: one line a round in `account.jsonl`, written by the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ACCOUNT_FILE = "account.jsonl"


def read_account(folder: Path) -> list[dict[str, Any]]:
    """Return `round`, `epsilon`, `delta` and `target` after each round, in order; of a repeated round the last.

    Empty without differential privacy. An incomplete last line is left out.
    """
    path = folder / ACCOUNT_FILE
    if not path.is_file():
        return []
    by_round: dict[int, dict[str, Any]] = {}
    for text in path.read_bytes().split(b"\n")[:-1]:
        try:
            line = dict(json.loads(text))
            by_round[int(line["round"])] = line
        except (ValueError, TypeError, KeyError):
            continue  # a damaged line: the account itself is recomputed by the run, this file is for looking
    return [by_round[number] for number in sorted(by_round)]
