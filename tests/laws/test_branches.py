"""Slots behave, so nobody has to ask what one is: the places that branch on a slot's type, kind or name are counted.

A branch is `isinstance(slot, ...)`, or `==`, `!=`, `is`, `in` on `slot.kind` or `slot.name`, or a `match` on one of
these, where the slot is a variable or an attribute with the name of a slot.
"""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "fedgraft"
SLOTS = frozenset(
    {
        "algorithm",
        "trainable",
        "loss",
        "update",
        "weighting",
        "aggregate",
        "server",
        "client_state",
        "privacy",
        "compression",
        "codec",
    }
)
MOST = 8


def slot_of(node: ast.expr) -> str:
    """The slot that a variable or an attribute is named after, or nothing."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name if name in SLOTS else ""


def asks_what_it_is(node: ast.expr) -> bool:
    """`slot.kind` or `slot.name`."""
    return isinstance(node, ast.Attribute) and node.attr in {"kind", "name"} and bool(slot_of(node.value))


def is_branch(node: ast.AST) -> bool:
    """Whether this node looks at what a slot is."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"isinstance", "type"}:
        return bool(node.args) and bool(slot_of(node.args[0]))
    if isinstance(node, ast.Compare):
        return any(asks_what_it_is(side) for side in (node.left, *node.comparators))
    return isinstance(node, ast.Match) and (asks_what_it_is(node.subject) or bool(slot_of(node.subject)))


def branches(text: str) -> list[tuple[int, str]]:
    """Line and source of every branch in a file."""
    return [(n.lineno, ast.unparse(n).splitlines()[0]) for n in ast.walk(ast.parse(text)) if is_branch(n)]  # type: ignore[attr-defined]


def test_few_places_ask_what_a_slot_is() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {source}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, source in sorted(branches(path.read_text(encoding="utf-8")))
    ]
    assert len(found) <= MOST, f"{len(found)} places branch on what a slot is, at most {MOST} may:\n" + "\n".join(found)


def test_every_way_to_ask_is_counted() -> None:
    """The planted branches, and what only looks like one."""
    asks = (
        "isinstance(algorithm.aggregate, Mixing)",
        "isinstance(trainable, Sparse)",
        "a.trainable.kind == 'head'",
        "config.trainable.kind != 'lora'",
        "server.name in ('adam', 'yogi')",
        "'x' == codec.name",
        "type(algorithm.loss) is Loss",
    )
    assert [len(branches(one)) for one in asks] == [1] * len(asks)
    assert len(branches("match algorithm.trainable.kind:\n    case 'head': pass")) == 1
    for harmless in ("x = algorithm.name", "path.name == 'a'", "isinstance(reply, Reply)"):
        assert not branches(harmless)
