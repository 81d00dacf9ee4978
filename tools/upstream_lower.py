"""From the library's Python 3.11 and torch 2.4 to the oldest that PML tests: Python 3.8 and torch 1.6.

Types stay, but are not evaluated; calls that old torch lacks go through `upstream_compat.py`; imports become
relative to the place in PML. Only what these rules name is touched, by position, so that comments and layout
stay. What no rule covers raises `CannotLowerError`: it is caught here, not by a user of old Python.
"""

import ast
import copy
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

PML = "pytorch_metric_learning"
LIBRARY = "pml_regularizers"
OLDEST_PYTHON = (3, 8)

# Names of typing that Python 3.8 has, and those that may be left to type checkers.
TYPING = {"Any", "ClassVar", "Literal", "NamedTuple", "Protocol", "TypeVar", "cast", "get_args"}
TYPING_CHECKED = {"Self"}
GENERICS = {
    "dict": "Dict",
    "frozenset": "FrozenSet",
    "list": "List",
    "set": "Set",
    "tuple": "Tuple",
}

# What torch 1.6 lacks -> its name in upstream_compat.py; a method only where it has the keyword, if any.
# And `with torch.device(...)`, which is default_device there.
FUNCTIONS = {
    "torch.autocast": "autocast",
    "torch.compiler.is_compiling": "is_compiling",
    "torch.fft.irfft": "irfft",
    "torch.fft.rfft": "rfft",
    "torch.isin": "isin",
    "torch.linalg.eigh": "eigh",
    "torch.maximum": "maximum",
    "torch.minimum": "minimum",
    "torch.vmap": "vmap",
    "torch._C._current_graph_task_id": "current_graph_task_id",
}
METHODS = {
    "amax": None,
    "minimum": None,
    "sort": "stable",
    "unflatten": None,
    "var": "correction",
}
IMPORTS = {("torch", "fx")}


class CannotLowerError(Exception):
    """A module uses what no rule covers."""


@dataclass(frozen=True)
class Module:
    """A module at its place: `folder` and `name` of the file in PML's package."""

    folder: str
    name: str

    def seen_from(self, other: "Module") -> str:
        """What `other` writes after `from` to import names of this module."""
        return f".{self.name}" if self.folder == other.folder else f"..{self.folder}.{self.name}"


COMPAT = Module("utils", "torch_compat")


def lower(
    source: str, module: Module, modules: Mapping[str, Module], definitions: Mapping[str, str]
) -> str:
    """The text of a library module for its place in PML, unformatted.

    Args:
        source: Its text in the library.
        module: Its place.
        modules: The places of all modules, by their names in the library.
        definitions: Names that PML's `losses` exports -> the files there that define them.

    Raises:
        CannotLowerError: naming the line.
    """
    tree, edits = ast.parse(source), _Edits(source)
    abstract = _abstract_types(tree)
    aliases = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and _is_type(node.value, abstract)
    ]
    evaluated = {n.id for value in aliases for n in ast.walk(value) if isinstance(n, ast.Name)}
    imports = _Imports(module, modules, definitions, evaluated & abstract)
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                if any(alias.name.split(".")[0] in (PML, LIBRARY) for alias in names):
                    raise CannotLowerError(
                        f"line {node.lineno}: write `from {names[0].name} import ...`"
                    )
            case ast.ImportFrom():
                edits.replace(node, ("\n" + " " * node.col_offset).join(imports.of(node)))
            case ast.Attribute() if (name := FUNCTIONS.get(ast.unparse(node))) is not None:
                edits.replace(node, imports.compat(name))
            case ast.Call(func=ast.Attribute(attr=attr, value=value)) if _is_newer_method(node):
                edits.insert(edits.start(value), f"{imports.compat(attr)}(")
                edits.cut(edits.end(value), edits.after("(", edits.end(node.func)), ", ")
            case ast.withitem(context_expr=ast.Call(func=function)) if (
                ast.unparse(function) == "torch.device"
            ):
                edits.replace(function, imports.compat("default_device"))
            case ast.Call(func=ast.Name("zip"), keywords=[ast.keyword("strict") as strict]):
                # Dropped: it guards against an error here, and changes no result.
                edits.cut(edits.end(node.args[-1]), edits.end(strict), "")
    for value in aliases:
        old = ast.unparse(_OldTypes().visit(copy.deepcopy(value)))
        edits.replace(value, old)
        if "typing." in old:
            imports.add("import typing")
    added = imports.added()
    if added:
        last = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)][-1]
        edits.insert(edits.end(last), "\n" + "\n".join(added))
    edits.insert(edits.end(tree.body[0]), "\n\nfrom __future__ import annotations\n")
    return edits.result()


def parenthesize(text: str) -> str:
    """Put `a if b else c` in parentheses where it takes several lines, as black does and ruff does not."""
    edits = _Edits(text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.IfExp) and node.lineno != node.end_lineno:
            start, end = edits.start(node), edits.end(node)
            if not edits.before(start).endswith("("):
                edits.insert(start, "(")
                edits.insert(end, ")")
    return edits.result()


def rename(text: str, modules: Mapping[str, Module], exports: Mapping[str, Module]) -> str:
    """Let comments and docstrings speak of PML: "`moments.py`" and the imports of examples.

    Args:
        text: A lowered module.
        modules: The places of all modules, by their names in the library.
        exports: The public names of the library -> where PML's users import them from.
    """
    for name, module in modules.items():
        text = text.replace(f"`{name}.py`", f"`{module.name}.py`")

    def example(match: re.Match[str]) -> str:
        names = match["names"].split(", ")
        places = [(exports[name], name) for name in names]
        return "\n".join(
            f"{match['prompt']}from {PML}.{place.folder}{'.' * bool(place.name)}{place.name} import {name}"
            for place, name in places
        )

    return re.sub(rf"(?P<prompt> *>>> )from {LIBRARY} import (?P<names>.+)", example, text)


class _Imports:
    """The import lines of one module."""

    def __init__(
        self,
        module: Module,
        modules: Mapping[str, Module],
        definitions: Mapping[str, str],
        evaluated: Set[str],
    ) -> None:
        self._module, self._modules, self._definitions = module, modules, definitions
        self._evaluated = evaluated
        self._added: set[str] = set()
        self._checked: set[str] = set()

    def of(self, node: ast.ImportFrom) -> Iterator[str]:
        """What an import of the library becomes."""
        origin = node.module or ""
        for alias in node.names:
            renamed = f" as {alias.asname}" if alias.asname else ""
            if node.level and not origin:  # from . import moments
                place = self._modules[alias.name]
                inside = "." if place.folder == self._module.folder else f"..{place.folder}"
                yield f"from {inside} import {place.name} as {alias.asname or alias.name}"
            elif node.level:
                source = self._modules[origin].seen_from(self._module)
                yield f"from {source} import {alias.name}{renamed}"
            elif origin.split(".")[0] == PML:
                yield f"from {self._pml(origin, alias.name, node)} import {alias.name}{renamed}"
            elif origin == "typing" and alias.name in TYPING_CHECKED:
                self._checked.add(alias.name)
            elif origin == "typing" and alias.name not in TYPING:
                raise CannotLowerError(
                    f"line {node.lineno}: is typing.{alias.name} in Python {_version()}? Then add it to TYPING"
                )
            elif origin == "collections.abc" and alias.name in self._evaluated:
                yield f"from typing import {alias.name}{renamed}"
            elif (origin, alias.name) in IMPORTS:
                yield f"from {COMPAT.seen_from(self._module)} import {alias.name}{renamed}"
            elif origin != "__future__":
                yield f"from {origin} import {alias.name}{renamed}"

    def _pml(self, origin: str, name: str, node: ast.ImportFrom) -> str:
        folder, *rest = origin.split(".")[1:] or [""]
        if folder == "losses" and not rest:
            # The file that defines it: `losses` may be half imported when we are.
            if name not in self._definitions:
                raise CannotLowerError(f"line {node.lineno}: this PML has no losses.{name}")
            rest = [self._definitions[name]]
        if folder == self._module.folder:
            return "." + ".".join(rest)
        return ".." + ".".join(filter(None, [folder, *rest]))

    def compat(self, name: str) -> str:
        inside = "." if COMPAT.folder == self._module.folder else f"..{COMPAT.folder}"
        self.add(f"from {inside} import {COMPAT.name}")
        return f"{COMPAT.name}.{name}"

    def add(self, line: str) -> None:
        self._added.add(line)

    def added(self) -> list[str]:
        if not self._checked:
            return sorted(self._added)
        checked = f"if TYPE_CHECKING:\n    from typing import {', '.join(sorted(self._checked))}"
        return [*sorted({*self._added, "from typing import TYPE_CHECKING"}), "", checked]


def _is_newer_method(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in METHODS:
        return False
    if ast.unparse(call.func) in FUNCTIONS:
        return False
    return METHODS[call.func.attr] in {None, *(keyword.arg for keyword in call.keywords)}


def _abstract_types(tree: ast.Module) -> set[str]:
    """What is imported from collections.abc: typing has it too, and there Python 3.8 can index it."""
    return {
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "collections.abc"
        for alias in node.names
    }


def _is_type(node: ast.expr, abstract: Set[str]) -> bool:
    """Whether a module-level value is a type that Python 3.8 cannot evaluate."""
    match node:
        case ast.BinOp(op=ast.BitOr()):
            return True
        case ast.Subscript(value=ast.Name(name)):
            return name in GENERICS or name in abstract
    return False


class _OldTypes(ast.NodeTransformer):
    """A | B -> typing.Union[A, B], and tuple[A] -> typing.Tuple[A]."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        sides = ast.Tuple([self.visit(node.left), self.visit(node.right)])
        return ast.Subscript(ast.parse("typing.Union", mode="eval").body, sides)

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id in GENERICS:
            node.value = ast.parse(f"typing.{GENERICS[node.value.id]}", mode="eval").body
        return node


class _Edits:
    """Replacements in a text by the positions of `ast`: lines, and bytes within a line."""

    def __init__(self, text: str) -> None:
        self._text = text.encode()
        self._lines = [0]
        for line in self._text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._edits: list[tuple[int, int, str]] = []

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        return self._lines[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)

    def before(self, position: int) -> str:
        """The text in front, without the white space that ends it."""
        return self._text[:position].decode().rstrip()

    def after(self, text: str, start: int) -> int:
        """The position behind the next `text`."""
        return self._text.index(text.encode(), start) + len(text)

    def cut(self, start: int, end: int, new: str) -> None:
        self._edits.append((start, end, new))

    def insert(self, position: int, new: str) -> None:
        self.cut(position, position, new)

    def replace(self, node: ast.expr | ast.stmt, new: str) -> None:
        self.cut(self.start(node), self.end(node), new)

    def result(self) -> str:
        text = self._text
        # From the last to the first; of several at one position the first, that of an outer call, stands first.
        order = sorted((start, end, i, new) for i, (start, end, new) in enumerate(self._edits))
        for start, end, _, new in reversed(order):
            text = text[:start] + new.encode() + text[end:]
        return text.decode()


def _version() -> str:
    return ".".join(map(str, OLDEST_PYTHON))
