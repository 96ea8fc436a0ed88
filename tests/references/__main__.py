"""Write docs/references.md: every row of the table with its largest difference."""

from __future__ import annotations

from pathlib import Path

from tests.references.setting import HOLDINGS, ROUNDS, largest_difference
from tests.references.table import DEVIATIONS, ROWS, TOLERANCE, Row

import fedgraft as fg

PAGE = Path(__file__).resolve().parents[2] / "docs" / "references.md"
INTRODUCTION = f"""# References

Every algorithm of the public API is compared with a plain loop in float64 (`tests/references/loops/`), written from the
paper's formula around PyTorch's own optimizers, NumPy and SciPy. A loop reads of fedgraft only what the run drew at
random: the rows of a batch, permutations, a noise vector (`tests/references/draws.py`).

- {len(HOLDINGS)} clients of {min(sum(counts) for counts in HOLDINGS)} to {max(sum(counts) for counts in HOLDINGS)}
  examples with different classes, {ROUNDS} rounds, three of the clients in each (robust rules: five; Bulyan: seven).
- Two networks: one with layer norms, one with batch norms, whose statistics are compared too.
- Compared are the common model, the clients' own models, the server's state and everything clients remember.
- A row fails above {TOLERANCE:.0e}, relative where a tensor has numbers above 1. fedgraft computes in float32.
- Every row has a second test: the loop with one argument wrong must differ by more than that.
- An algorithm without a row fails (`test_every_algorithm_has_a_reference`).

```
python -m pytest tests/references     # the comparisons
python -m tests.references            # writes this page
```

The reasons for deviations are in [Algorithms](algorithms.md#where-fedgraft-deviates-from-a-paper).

| method | options | network | largest difference | deviation from the paper |
|---|---|---|---|---|
"""


def line_of(row: Row) -> str:
    """Return the row as a line of the page."""
    outcome, problem = row.runs
    difference = largest_difference(row.view(outcome), row.view(row.reference(problem)))
    deviations = [text for text in (DEVIATIONS.get(row.method, ""), row.deviation) if text]
    return f"| `{row.method}` | {row.options_text} | {row.network} | {difference:.1e} | {'; '.join(deviations)} |"


def main() -> None:
    """Compare all rows and write the page."""
    with fg.one_thread():
        lines = [line_of(row) for row in ROWS]
    PAGE.write_text(INTRODUCTION + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
