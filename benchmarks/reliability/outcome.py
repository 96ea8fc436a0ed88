"""What a check found, how it is kept between runs, and the page that shows it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STORE = ROOT / "runs" / "reliability"
PAGE = ROOT / "docs" / "reliability.md"
OVER_PROCESSES = "## Over real processes"

NOTES = """
## How to read them

- `dropouts`: losses add up over the stages, so about half of the random cases fall below their threshold. Those must
  end in a clean abort.
- `combinations`: every order goes through the rules that a client has; the arithmetic of the protocol is left out, and
  `tests/unit/test_combinations.py` compares what is opened with the real one. Every question about the same rows counts
  as the same quantity, which is more than a server has. Rounds are equations of their own.
- `cost`: the bar on bytes has a broken variant. The bar on time has none; its control is flwr's own repeats held
  against each other, which must give a ratio near 1. Both sides work in one process and one thread.
- `malformed`: every aggregator gets the common kinds and those about the fields that only it asks for. Of the 1,000
  replies of a kind ten come alone in a round; the others come with one of each other kind, all from one client. Where
  such a crowd is not dropped whole, each of its replies gets a round of its own, and that is counted.
- `thousand`: in a graph of neighbours a client's work does not grow with the cohort.
- `sizes`: how far the resident memory of a process rises while it screens one reply. The received bytes are in a mapped
  file and not counted.
- `noise`: a secure sum that is given up for want of one client is outside the account
  ([SECURITY.md](../SECURITY.md)).
- `liar`: the bar on accuracy is for a lie about similarity, with a poisoned change, where the server computes the
  scores. Where clients report their own score, or where the liar claims a billion examples too, only the cap on the
  weight is promised: a liar at that cap can cost far more than six points, as the row shows.
- Bounds on claims (ten times the median) and on lengths (30 times the usual) are on by default; the cap of 2/m on a
  weight in `liar` is the older one of the two that hold.
- `membership`: guesses are chosen on the first half of the rounds and counted on the second.
- `epsilon`: one bound is free of assumptions (Clopper and Pearson), the other takes the scores as Gaussian, which the
  mechanism's are, and is far tighter.
- `uneven`: the digits and a tiny network. At the full count a bound of 30 times the median refused 3 of 2,301 benign
  updates, of clients that take more steps than most (epochs); since then more steps may go further.
- `stages`: a node lost in the mask's sum, after the head's sum was opened over it, ends the run unopened: with one less
  the two would give it away (decision 27). Lost in the head's sum it is asked for no later one.
- `stages`: the nodes of a deployment asked in one process. `tests/deploy/test_deploy_kills.py` kills real nodes, links
  and runs at each stage.
- Over Flower (`pytest tests/deploy -m deploy`): `test_deploy_hostile.py` tells the same table of lies to a real node
  with its socket's bytes counted, lets a real node lie in 50 ways, and sends 300 MB both ways against the limits.
  `test_deploy_lost.py` loses answers inside a real node. What was seen, and where: the section below.
- `soak`: caches fill during the first few hundred rounds. A run of fewer than 2,000 shows a slope and gets no verdict.
"""


@dataclass(frozen=True)
class Outcome:
    """One check at one scale. It counts only if the bar is met and every broken variant misses it."""

    passed: bool
    """The bar is met."""
    result: str
    """What was found, in one sentence."""
    broken: Mapping[str, str]
    """Each deliberately broken variant, and what the same check says of it."""
    caught: bool
    """Every broken variant misses the bar."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    judged: bool = True
    """False: at this scale the bar cannot be judged, and the row says so."""


@dataclass(frozen=True)
class Check:
    """A row of the page: what is tested, the bar, where the code is, what it takes on one core at full count."""

    what: str
    bar: str
    module: str
    minutes: float


def share(full: int, scale: float, least: int = 1) -> int:
    """A count at this scale."""
    return max(least, round(full * scale))


def keep(store: Path, name: str, outcome: Outcome, about: Mapping[str, Any]) -> None:
    """Write a check's JSON whole or not at all."""
    store.mkdir(parents=True, exist_ok=True)
    temporary = store / f".{name}.json.tmp"
    temporary.write_text(json.dumps({**about, **asdict(outcome)}, indent=1) + "\n")
    temporary.replace(store / f"{name}.json")


def kept(store: Path, name: str) -> dict[str, Any] | None:
    """What `keep` wrote, if it is there."""
    path = store / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def page(store: Path, checks: Mapping[str, Check], before: str = "") -> str:
    """The Markdown page, from what is stored; rows of the page before stay where this machine has none."""
    found = {name: kept(store, name) for name in checks}
    old = before.splitlines()
    rows = {n: next((line for line in old if line.startswith(f"| `{n}`: ")), None) for n in checks if not found[n]}
    made = {n: next((line for line in old if line.startswith(f"| {n} | ")), None) for n in checks if not found[n]}
    lines = [
        "# Reliability",
        "",
        "One command runs everything: `make reliability`, which is `python -m benchmarks.reliability`. Names choose",
        "some checks, `--scale 0.1` takes a tenth of the counts. Each check runs in a process of its own on one",
        "thread and is kept in `runs/reliability/<check>.json`; this page is drawn from those files, so checks can be",
        "run one by one. A scale below 1 is a quick look and not the full count.",
        "",
        "A row counts when its bar is met **and** the same check, pointed at a deliberately broken variant, misses it.",
        "",
        "| check | bar | found | broken variants must miss it | scale | verdict |",
        "|---|---|---|---|---|---|",
    ]
    lines += [rows.get(name) or _row(name, checks[name], found[name]) for name in checks]
    lines += NOTES.splitlines()
    lines += _by_hand(old)
    lines += ["", "## How each row was made", "", "What it took is wall time on a machine that did other work too.", ""]
    lines += ["| check | command | date (UTC) | took | source | machine |"]
    told = {name: _made(name, one) if one else made[name] for name, one in found.items()}
    lines += ["|---|---|---|---|---|---|", *filter(None, told.values()), ""]
    return "\n".join(lines)


def _by_hand(old: Sequence[str]) -> list[str]:
    """The section that no check writes: what was seen of `make test-deploy`."""
    if OVER_PROCESSES not in old:
        return []
    rest = old[old.index(OVER_PROCESSES) :]
    end = next((i for i, line in enumerate(rest[1:], 1) if line.startswith("## ")), len(rest))
    return ["", *rest[: end - 1]]


def _row(name: str, check: Check, one: dict[str, Any] | None) -> str:
    if one is None:
        return f"| `{name}`: {check.what} | {check.bar} | not run on this machine | | | missing |"
    broken = "; ".join(f"{variant}: {said}" for variant, said in one["broken"].items())
    good = "holds" if one["scale"] >= 1 else "holds at this scale"
    verdict = good if one["passed"] and one["caught"] else "**fails**"
    verdict = verdict if one.get("judged", True) else "too short to judge"
    return f"| `{name}`: {check.what} | {check.bar} | {one['result']} | {broken} | {one['scale']:g} | {verdict} |"


def _made(name: str, one: dict[str, Any]) -> str:
    return (
        f"| {name} | `{one['command']}` | {one['date']} | {one['seconds']:.0f} s | {one['revision']} "
        f"| {one['machine']} |"
    )
