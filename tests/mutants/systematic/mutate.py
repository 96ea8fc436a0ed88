"""All small mutants of a source file, by rule: each changes one expression or one statement.

A mutant is a replacement of a stretch of text, so the rest of the file stays as it is. Its id names the file, a hash of
the line, the operator and a counter among equal ones: an edit elsewhere in the file leaves it alone. Texts for people
(docstrings, errors, progress, `__repr__`), annotations and decorators are skipped.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}
PAIRS = (
    ("sum", "mean"),
    ("min", "max"),
    ("amin", "amax"),
    ("argmin", "argmax"),
    ("minimum", "maximum"),
    ("clamp_min", "clamp_max"),
    ("any", "all"),
    ("add_", "sub_"),
    ("mul_", "div_"),
    ("zeros", "ones"),
    ("zeros_like", "ones_like"),
    ("floor", "ceil"),
)
NAMES = dict(PAIRS) | {b: a for a, b in PAIRS}
METHODS_ONLY = {"sum", "mean"}
"""`sum` alone is the built-in, which has no `mean` beside it."""
TEXT_CALLS = {
    "print",
    "echo",
    "warn",
    "warning",
    "info",
    "debug",
    "log",
    "phase",
    "announce",
    "note",
    "status",
    "update",
}
TEXT_CALLS |= {"MissingExtra", "Refused", "FedgraftWarning", "exit", "TypeVar", "cast", "getLogger", "describe"}
TEXT_FUNCTIONS = {"__repr__", "__str__", "__rich__", "label", "describe", "description", "summary", "sentence"}
TEXT_KEYWORDS = {
    "hint",
    "help",
    "label",
    "title",
    "ylabel",
    "xlabel",
    "unit",
    "description",
    "name",
    "doc",
    "message",
    "stacklevel",
    "indent",
}
ASSERTING_KEYWORDS = {"strict", "check"}
"""Like assertions, they hold, or there is a bug already: `zip(..., strict=True)`, `subprocess.run(..., check=True)`."""
NEVER_SWAPPED = {"isinstance", "issubclass", "getattr", "hasattr", "setattr"}
NEVER_SWAPPED |= {"min", "max", "minimum", "maximum", "equal", "allclose", "dot", "lcm", "gcd"}  # commutative
Place = tuple[int, int]


@dataclass(frozen=True)
class Mutant:
    """One replacement of text in one file under `src/fedgraft`."""

    id: str
    file: str
    operator: str
    line: int
    end_line: int
    start: int
    end: int
    """Bytes of the file that are replaced."""
    new: str
    statement: Place
    """First and last line of the statement, of a compound one its head."""
    function: Place | None
    """First and last line of the function around it."""
    imported: bool
    """Whether the import of the module executes it, not a call."""

    def apply(self, source: str) -> str:
        """Return the mutated file."""
        raw = source.encode()
        return (raw[: self.start] + self.new.encode() + raw[self.end :]).decode()

    def describe(self, source: str) -> str:
        """Return the change as one line: what stands there, and what replaces it."""
        old = " ".join(source.encode()[self.start : self.end].decode().split())
        return f"{self.file}:{self.line} {self.operator}: {old} -> {' '.join(self.new.split())}"


def mutants_of(path: Path, package: Path) -> list[Mutant]:
    """Return every mutant of a file, in the order of the text."""
    source = path.read_text()
    file = str(path.relative_to(package))
    lines = source.splitlines()
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    count: Counter[str] = Counter()
    mutants = []
    edits = _Finder(ast.parse(source), signatures(package)).edits
    for edit in sorted(edits, key=lambda edit: (edit.node.lineno, edit.node.col_offset)):
        node = edit.node
        digest = hashlib.blake2b(lines[node.lineno - 1].strip().encode(), digest_size=4).hexdigest()
        key = f"{file}:{digest}:{edit.operator}"
        count[key] += 1
        last = edit.node.end_lineno or node.lineno
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[last - 1] + (node.end_col_offset or 0)
        name = f"{key}:{count[key] - 1}"
        place = (edit.statement, edit.function, edit.imported)
        mutants.append(Mutant(name, file, edit.operator, node.lineno, last, begin, end, edit.new, *place))
    return mutants


@cache
def signatures(package: Path) -> dict[str, list[str]]:
    """Return the annotations of the positional parameters of every function whose name is defined once."""
    parameters: dict[str, list[str]] = {}
    repeated: set[str] = set()
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            if node.name in parameters:
                repeated.add(node.name)
            annotations = [ast.unparse(a.annotation) if a.annotation else "" for a in node.args.args if a.arg != "self"]
            parameters[node.name] = annotations
    return {name: annotations for name, annotations in parameters.items() if name not in repeated}


@dataclass(frozen=True)
class _Edit:
    operator: str
    node: ast.expr | ast.stmt
    new: str
    statement: Place
    function: Place | None
    imported: bool


class _Finder(ast.NodeVisitor):
    """Collect the edits of a module; the other attributes follow the walk."""

    def __init__(self, tree: ast.Module, signatures: dict[str, list[str]]) -> None:
        self.signatures = signatures
        self.edits: list[_Edit] = []
        self.statement: Place = (1, 1)
        self.function: Place | None = None
        self.imported = True
        self.returns_none = False
        self.assigned: set[str] = set()
        self.visit(tree)

    def put(self, operator: str, node: ast.expr | ast.stmt, new: ast.expr | str) -> None:
        """Note that `node` may be replaced by `new`; expressions in parentheses, so that precedence cannot change."""
        text = new if isinstance(new, str) else f"({ast.unparse(new)})"
        self.edits.append(_Edit(operator, node, text, self.statement, self.function, self.imported))

    def negate(self, test: ast.expr) -> None:
        """Negate a condition, unless another operator does that already."""
        single = isinstance(test, ast.Compare) and len(test.ops) == 1
        if single and isinstance(test.ops[0], ast.Eq | ast.NotEq | ast.In | ast.NotIn | ast.Is | ast.IsNot):
            return
        if not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
            self.put("negate-if", test, ast.UnaryOp(ast.Not(), test))

    # What is walked, and what is left out.

    def visit(self, node: ast.AST) -> None:
        """Visit a node and note which statement it belongs to."""
        if not isinstance(node, ast.stmt):
            super().visit(node)
            return
        outer = self.statement
        last = node.end_lineno or node.lineno
        body = getattr(node, "body", None)
        if body:
            last = max(node.lineno, body[0].lineno - 1)
        self.statement = (node.lineno, last)
        super().visit(node)
        self.statement = outer

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Walk defaults and body, neither decorators nor annotations; nothing of functions that make texts."""
        if node.name in TEXT_FUNCTIONS:
            return
        outer = (self.returns_none, self.assigned, self.function, self.imported)
        self.function = (node.lineno, node.end_lineno or node.lineno)
        self.returns_none = node.returns is not None and "None" in ast.unparse(node.returns).split(" | ")
        self.assigned = {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit(default)
        self.imported = False
        for statement in node.body:
            self.visit(statement)
        self.returns_none, self.assigned, self.function, self.imported = outer

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Walk the body only."""
        for statement in node.body:
            self.visit(statement)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave texts alone (and their parts have no places of their own before Python 3.12)."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave assertions alone: they hold, or there is a bug already."""

    # Statements.

    def visit_If(self, node: ast.If) -> None:
        """Negate the condition; skip blocks for type checkers."""
        if ast.unparse(node.test).endswith("TYPE_CHECKING"):
            return
        self.negate(node.test)
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Drop the error; its text is not mutated."""
        self.put("drop-raise", node, "pass")

    def visit_Assign(self, node: ast.Assign) -> None:
        """Drop an assignment that replaces a value: without a first one the name would be missing at once."""
        names = {part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)}
        plain = all(isinstance(target, ast.Name) for target in node.targets)
        if self.function is not None and (not plain or names <= self.assigned):
            self.put("drop-assignment", node, "pass")
        self.assigned |= names
        self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Walk the value, not the annotation."""
        if node.value is not None:
            self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Drop it, or turn the operator round."""
        self.put("drop-assignment", node, "pass")
        if type(node.op) in ARITHMETIC and not _is_text(node.value):
            turned = copy.copy(node)
            turned.op = ARITHMETIC[type(node.op)]()
            self.put("arithmetic", node, ast.unparse(turned))
        self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        """Drop a call made for its effect."""
        if isinstance(node.value, ast.Call) and not _makes_text(node.value):
            self.put("drop-call", node, "pass")
        self.visit(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        """Return nothing where the signature allows it."""
        if node.value is None:
            return
        if self.returns_none and ast.unparse(node.value) != "None":
            self.put("return-none", node, "return None")
        self.visit(node.value)

    # Expressions.

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """Negate the condition."""
        self.negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        """Negate each filter."""
        for test in node.ifs:
            self.negate(test)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Swap each comparison with its neighbour."""
        for place, operator in enumerate(node.ops):
            turned = copy.copy(node)
            turned.ops = list(node.ops)
            turned.ops[place] = COMPARISONS[type(operator)]()
            self.put("compare", node, turned)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Swap the operator, unless it joins texts or lists."""
        if type(node.op) in ARITHMETIC and not _is_text(node.left) and not _is_text(node.right):
            self.put("arithmetic", node, ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Swap `and` and `or`."""
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self.put("boolean", node, ast.BoolOp(other, node.values))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Remove `not` and the minus sign."""
        if isinstance(node.op, ast.Not):
            self.put("boolean", node, node.operand)
        elif isinstance(node.op, ast.USub):
            self.put("arithmetic", node, node.operand)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Flip truth values, move numbers."""
        value = node.value
        if isinstance(value, bool):
            self.put("constant", node, str(not value))
        elif isinstance(value, int):
            self.put("constant", node, str(value + 1))
            if value == 1:
                self.put("constant", node, "0")
        elif isinstance(value, float):
            self.put("constant", node, repr(2 * value if value else 1.0))

    def visit_Slice(self, node: ast.Slice) -> None:
        """Move each end by one."""
        lower = node.lower or ast.Constant(0)
        if node.lower is not None:
            self.put("slice", node.lower, ast.BinOp(lower, ast.Add(), ast.Constant(1)))
            if not isinstance(node.lower, ast.Constant):
                self.visit(node.lower)
        if node.upper is not None:
            self.put("slice", node.upper, ast.BinOp(node.upper, ast.Sub(), ast.Constant(1)))
            if not isinstance(node.upper, ast.Constant):
                self.visit(node.upper)

    def alike(self, function: str, place: int, pair: list[ast.expr]) -> bool:
        """Whether two neighbouring arguments have equal types as far as signatures say, or are two names if unknown."""
        if ast.dump(pair[0]) == ast.dump(pair[1]):
            return False
        if function in NEVER_SWAPPED or not all(isinstance(part, ast.Name | ast.Attribute) for part in pair):
            return False
        if function in self.signatures:
            annotations = self.signatures[function][place : place + 2]
            return len(annotations) == 2 and annotations[0] == annotations[1] != ""
        return all(isinstance(part, ast.Name) for part in pair)

    def visit_Call(self, node: ast.Call) -> None:
        """Swap twins (`sum` and `mean`), swap neighbouring arguments, drop keywords, sort the other way."""
        name = _name(node.func)
        if _makes_text(node):
            return
        if name in NAMES and (isinstance(node.func, ast.Attribute) or name not in METHODS_ONLY):
            function = copy.copy(node.func)
            setattr(function, "attr" if isinstance(function, ast.Attribute) else "id", NAMES[name])
            self.put("twin", node.func, ast.unparse(function))
        for place in range(len(node.args) - 1):
            pair = node.args[place : place + 2]
            if self.alike(name, place, pair):
                swapped = copy.copy(node)
                swapped.args = [*node.args[:place], *reversed(pair), *node.args[place + 2 :]]
                self.put("swap-arguments", node, swapped)
        for keyword in node.keywords:
            if keyword.arg and keyword.arg not in TEXT_KEYWORDS | ASSERTING_KEYWORDS:
                shorter = copy.copy(node)
                shorter.keywords = [other for other in node.keywords if other is not keyword]
                self.put("drop-keyword", node, shorter)
        if name in ("sorted", "sort") and not any(
            keyword.arg in ("reverse", "descending") for keyword in node.keywords
        ):
            backwards = copy.copy(node)
            word = "reverse" if name == "sorted" or not node.args else "descending"
            backwards.keywords = [*node.keywords, ast.keyword(word, ast.Constant(True))]
            self.put("sort", node, backwards)
        self.visit(node.func)
        for argument in node.args:
            self.visit(argument)
        for keyword in node.keywords:
            if keyword.arg not in TEXT_KEYWORDS | ASSERTING_KEYWORDS:
                self.visit(keyword.value)


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_text(node: ast.expr) -> bool:
    """Whether a sum with this operand joins texts or sequences."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str | bytes)
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp)


def _makes_text(call: ast.Call) -> bool:
    """Whether a call makes an error, a log line or a line of progress."""
    name = _name(call.func)
    return name in TEXT_CALLS or name.endswith(("Error", "Warning"))
