"""Sections of PML's documents, made from docstrings: name, paper, signature, equation, parameters."""

import ast
import re
import textwrap

HEADERS = ("Args", "Shape", "Returns", "Raises", "Example")


def section(
    node: ast.ClassDef | ast.FunctionDef, called: str, paper: str = "", equation: str = ""
) -> str:
    """The section of a class or a function.

    Args:
        node: Its definition.
        called: How a user of PML writes it: "losses.HORDELoss".
        paper: A link.
        equation: Of its module: indented lines.
    """
    parts = _parts(ast.get_docstring(node) or "")
    blocks = [f"## {node.name}"]
    if paper:
        blocks[0] += f"\n{paper}{{target=_blank}}"
    blocks.append(f"```python\n{_signature(node, called)}\n```")
    blocks.append(parts[""])
    if equation:
        blocks.append(f"**Equation**:\n\n{equation}")
    if "Args" in parts:
        blocks.append("**Parameters**:\n\n" + _bullets(parts["Args"]))
    blocks += [f"**{name}**:\n\n{parts[name]}" for name in ("Shape", "Returns") if name in parts]
    if "Example" in parts:
        blocks.append(f"**Example**:\n\n```python\n{parts['Example']}\n```")
    return "\n\n".join(filter(None, blocks)) + "\n"


def equations(docstring: str) -> str:
    """The first indented block of a module's docstring."""
    found = re.search(r"(?:^ {4,}\S.*\n(?:^\s*\n(?= {4}))?)+", docstring + "\n", re.MULTILINE)
    return found.group().rstrip() if found else ""


def insert(document: str, name: str, text: str) -> str:
    """Add a section in alphabetical order; the rest of the document keeps every character.

    Raises:
        ValueError: if it has a section of that name with another text.
    """
    starts = {
        match[1]: match.start() for match in re.finditer(r"^## +(\w+)", document, re.MULTILINE)
    }
    if name in starts:
        if not document[starts[name] :].startswith(text):
            raise ValueError(f"it has another section {name}")
        return document
    after = [start for other, start in starts.items() if other.lower() > name.lower()]
    if not after:
        return f"{document.rstrip()}\n\n\n{text}" if document.strip() else text
    return f"{document[: min(after)]}{text}\n\n{document[min(after) :]}"


def _parts(docstring: str) -> dict[str, str]:
    """Text by header; what stands under none, by "". A header's lines are indented."""
    lines: dict[str, list[str]] = {"": []}
    header = ""
    for line in docstring.splitlines():
        if line.rstrip(":") in HEADERS and line.endswith(":"):
            header = line.rstrip(":")
            lines[header] = []
        else:
            if line and not line.startswith(" "):
                header = ""
            lines[header].append(line)
    texts = {name: textwrap.dedent("\n".join(part)).strip() for name, part in lines.items()}
    return {name: re.sub(r"\n{3,}", "\n\n", text) for name, text in texts.items()}


def _bullets(arguments: str) -> str:
    bullets: list[str] = []
    for line in arguments.splitlines():
        if found := re.match(r"(\*{0,2}\w+): (.*)", line):
            bullets.append(f"* **{found[1].replace('*', chr(92) + '*')}**: {found[2]}")
        else:
            bullets[-1] += f" {line.strip()}"
    return "\n".join(bullets)


def _signature(node: ast.ClassDef | ast.FunctionDef, called: str) -> str:
    """The call, without annotations."""
    function: ast.stmt | None = node
    if isinstance(node, ast.ClassDef):
        found = [part for part in node.body if getattr(part, "name", "") == "__init__"]
        function = found[0] if found else None
    if not isinstance(function, ast.FunctionDef):
        return f"{called}(**kwargs)"
    arguments = ast.parse(f"def f({ast.unparse(function.args)}): pass").body[0].args  # type: ignore[attr-defined]
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    if arguments.args and arguments.args[0].arg == "self":
        del arguments.args[0]
    return f"{called}({ast.unparse(arguments)})"
