"""What tells code from other code: every part that decides what it does, and nothing that differs between processes."""

from __future__ import annotations

import functools
import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedgraft
from fedgraft.core.code_identity import code_identity_of, digest_of, module_code
from fedgraft.core.network_digest import digest


def written(source: str, name: str = "rule") -> Any:
    """What a user's file defines under this name."""
    space: dict[str, Any] = {"__name__": "mine", "torch": torch, "functools": functools, "nn": nn}
    exec(compile(source, "mine.py", "exec"), space)  # the user's file, in two versions
    return space[name]


CHANGES = {
    "a constant": ("def rule(x): return x * 0.5", "def rule(x): return x * 5.0"),
    "an equal number of another type": ("def rule(x): return x // 2", "def rule(x): return x // 2.0"),
    "a constant of a nested function": (
        "def rule(x): return (lambda y: y + 1)(x)",
        "def rule(x): return (lambda y: y + 2)(x)",
    ),
    "a name": ("def rule(x): return x.amin()", "def rule(x): return x.amax()"),
    "a default": ("def rule(x, k=1): return x * k", "def rule(x, k=2): return x * k"),
    "a keyword default": ("def rule(x, *, k=1): return x * k", "def rule(x, *, k=2): return x * k"),
    "a global value": ("K = 1\ndef rule(x): return x * K", "K = 2\ndef rule(x): return x * K"),
    "a global of a nested function": (
        "K = 1\ndef rule(x): return (lambda: x * K)()",
        "K = 2\ndef rule(x): return (lambda: x * K)()",
    ),
    "a global function": (
        "def half(x): return x / 2\ndef rule(x): return half(x)",
        "def half(x): return x / 3\ndef rule(x): return half(x)",
    ),
    "a closure": (
        "def made(k):\n  def rule(x): return x * k\n  return rule\nrule = made(1)",
        "def made(k):\n  def rule(x): return x * k\n  return rule\nrule = made(2)",
    ),
    "an argument of a partial": (
        "def f(x, k): return x * k\nrule = functools.partial(f, 1)",
        "def f(x, k): return x * k\nrule = functools.partial(f, 2)",
    ),
    "a keyword of a partial": (
        "def f(x, k): return x * k\nrule = functools.partial(f, k=1)",
        "def f(x, k): return x * k\nrule = functools.partial(f, k=2)",
    ),
    "an attribute of a callable object": (
        "class A:\n  def __init__(self, k): self.k = k\n  def __call__(self, x): return x * self.k\nrule = A(1)",
        "class A:\n  def __init__(self, k): self.k = k\n  def __call__(self, x): return x * self.k\nrule = A(2)",
    ),
    "a slot of a callable object": (
        "class A:\n  __slots__ = ('k',)\n  def __init__(self, k): self.k = k\n  def __call__(self, x): 0\nrule = A(1)",
        "class A:\n  __slots__ = ('k',)\n  def __init__(self, k): self.k = k\n  def __call__(self, x): 0\nrule = A(2)",
    ),
    "the code of a callable object": (
        "class A:\n  def __call__(self, x): return x * 1\nrule = A()",
        "class A:\n  def __call__(self, x): return x * 2\nrule = A()",
    ),
    "the code of a base class": (
        "class B:\n  def f(self, x): return x\nclass A(B):\n  def __call__(self, x): return self.f(x)\nrule = A()",
        "class B:\n  def f(self, x): return -x\nclass A(B):\n  def __call__(self, x): return self.f(x)\nrule = A()",
    ),
    "the object of a bound method": (
        "class A:\n  def __init__(self, k): self.k = k\n  def f(self, x): return x * self.k\nrule = A(1).f",
        "class A:\n  def __init__(self, k): self.k = k\n  def f(self, x): return x * self.k\nrule = A(2).f",
    ),
    "a property": (
        "class A:\n  @property\n  def k(self): return 1\n  def __call__(self, x): return x * self.k\nrule = A()",
        "class A:\n  @property\n  def k(self): return 2\n  def __call__(self, x): return x * self.k\nrule = A()",
    ),
    "a tensor": (
        "T = torch.tensor([1.0])\ndef rule(x): return x * T",
        "T = torch.tensor([2.0])\ndef rule(x): return x * T",
    ),
    "a function behind a cache": (
        "@functools.lru_cache\ndef rule(x): return x * 1",
        "@functools.lru_cache\ndef rule(x): return x * 2",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_code_does_changes_its_identity(change: str) -> None:
    before, after = CHANGES[change]
    assert digest_of(written(before)) == digest_of(written(before))
    assert digest_of(written(before)) != digest_of(written(after))


def test_where_code_stands_does_not_count() -> None:
    """Comments and lines are no behaviour, nor is the folder of the file."""
    plain, moved = "def rule(x): return x", "# about it\n\n\ndef rule(x): return x  # so"
    assert digest_of(written(plain)) == digest_of(written(moved))


def test_circles_end() -> None:
    source = "class A:\n  def __init__(self): self.me = self\n  def __call__(self, x): return A\nrule = A()"
    assert digest_of(written(source)) == digest_of(written(source))
    both = "def even(x): return odd(x)\ndef odd(x): return even(x)\nrule = even"
    assert digest_of(written(both)) == digest_of(written(both))


SCRIPT = """
import functools, sys
sys.path.insert(0, {folder!r})
import mine
from fedgraft.core.code_identity import digest_of
print(digest_of(mine.rule, mine.names, functools.partial(mine.rule, 2), mine.Rule(3), mine.Rule(4).f))
"""
MINE = """
import math
import torch
import helpers
names = {"north", "south", "east", "west", "up", "down"}
PAIR = (0.25, ("a", "b"))
class Rule:
    def __init__(self, k): self.k, self.names = k, set(names)
    def f(self, x): return x if x in ("a", "b") else PAIR
    def __call__(self, x): return torch.relu(x) * self.k
def rule(x, kinds=frozenset({"a", "b", "c"})):
    return x in {"q", "r", "s", "t"}, helpers.scaled(x), math.pi, PAIR, (0.25, ("a", "b"))
"""


def test_the_identity_is_that_of_every_process(tmp_path: Path) -> None:
    """Sets are ordered by their hashes, which each process draws; the second process loads the compiled file."""
    (tmp_path / "mine.py").write_text(MINE)
    helpers = tmp_path / "helpers.py"
    helpers.write_text("def scaled(x): return x * 2\n")
    source = str(Path(fedgraft.__file__).parents[1])

    def printed(seed: int) -> str:
        env = {"PYTHONHASHSEED": str(seed), "PYTHONPATH": source, "PATH": "/usr/bin"}
        command = [sys.executable, "-c", SCRIPT.format(folder=str(tmp_path))]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout

    first = printed(1)
    assert len(first.strip()) == 16 and printed(2) == first and printed(3) == first
    helpers.write_text("def scaled(x): return x * 33\n")
    assert printed(1) != first  # a module of one's own that the rule calls


def test_what_cannot_be_identified_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    lock = threading.Lock()
    with caplog.at_level(logging.WARNING, "fedgraft"):
        first, second = code_identity_of(lock), code_identity_of(threading.Lock())
    assert first == second and "0x" not in str(first)
    assert caplog.text.count("cannot be distinguished from another one") == 1


def test_rules_of_the_library_differ_by_what_they_close_over() -> None:
    assert digest_of(fedgraft.fedprox(0.01)) == digest_of(fedgraft.fedprox(0.01))
    assert digest_of(fedgraft.fedprox(0.01)) != digest_of(fedgraft.fedprox(0.5))


LAYER = """
class rule(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.factor = FACTOR
    def forward(self, x):
        self.seen = x
        return self.fc(x) FORWARD
"""


def test_the_code_of_ones_own_layers_counts() -> None:
    def layer(factor: str = "1.0", forward: str = "* self.factor") -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(written(LAYER.replace("FACTOR", factor).replace("FORWARD", forward))())

    before = module_code(layer())
    used = layer()
    used(torch.ones(1, 3))
    assert before and module_code(layer()) == before == module_code(used)  # activations that it keeps do not count
    assert module_code(layer(factor="2.0")) != before
    assert module_code(layer(forward="+ self.factor")) != before
    assert module_code(nn.Sequential(nn.Linear(3, 3))) == ""
    assert digest(layer()) != digest(layer(forward="+ self.factor"))  # type: ignore[arg-type]


def test_packages_that_an_environment_borrows_are_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual environment may take packages of another one, so that they lie outside its own folders."""
    from fedgraft.core import code_identity

    monkeypatch.setattr(code_identity, "_PATHS", ("/nowhere",))
    assert code_identity._origin(torch.nn.Linear) == "library"
    monkeypatch.setattr(code_identity, "_PACKAGE_FOLDERS", frozenset())
    assert code_identity._origin(torch.nn.Linear) == "user"
