"""Classes are whole and of a size that one can read."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for folder in ("src", "tests/native")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".h", ".cpp", ".cu"}
)
MOST_LINES = 500
MOST_METHODS = 20
MOST_MEMBERS = 12
# Classes over these limits: their methods and members today. These numbers may only fall, and the
# comment above each class says why the class is large.
LARGE = {
    "Copies": (31, 6),
    "Paging": (37, 9),
}
# The same for classes of python/ebb: methods, and attributes that the class assigns to `self`.
LARGE_IN_PYTHON: dict[str, tuple[int, int]] = {}


def without_comments(text: str) -> str:
    """Nor strings; places stay."""

    def blank(match: re.Match) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    return re.sub(r"//[^\n]*", blank, re.sub(r'"(?:\\.|[^"\\\n])*"', blank, text))


def matching(text: str, start: int) -> int:
    """The place behind the brace that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return i + 1
    raise AssertionError("braces do not match")


def statements(body: str) -> list[str]:
    """Declarations of a class: what its braces hold is left out."""
    flat, i = "", 0
    while i < len(body):
        if body[i] == "{":
            end = matching(body, i)
            flat += "{};" if "(" in flat.rsplit(";", 1)[-1] else "{}"
            i = end
        else:
            flat += body[i]
            i += 1
    flat = re.sub(r"\b(public|private|protected):", "", flat)
    return [" ".join(s.split()) for s in flat.split(";") if s.strip(" {}\n")]


def is_method(statement: str) -> bool:
    head = re.sub(r"<[^<>]*(<[^<>]*>)?[^<>]*>", "", statement).split("=")[0].split("{")[0]
    return "(" in head and not statement.startswith(("using", "friend", "static_assert"))


def is_member(statement: str) -> bool:
    skipped = ("using", "friend", "static_assert", "enum", "struct", "class", "template", "static")
    return not is_method(statement) and not statement.startswith(skipped)


def classes():
    pattern = re.compile(r"^(?:class|struct) (?:EBB_API )?(\w+)[^;{()]*\{", re.MULTILINE)
    for path in SOURCES:
        text = path.read_text()
        for found in pattern.finditer(text):
            above = text[: found.start()].rstrip("\n").split("\n")
            comment = []
            while above and above[-1].startswith("//"):
                comment.append(above.pop())
            start = text.index("{", found.start())
            body = text[start : matching(without_comments(text), start)]
            yield path, found[1], " ".join(comment), statements(without_comments(body)[1:-1])


CLASSES = list(classes())


def test_the_reader_sees_classes():
    seen = {name: (sum(map(is_method, s)), sum(map(is_member, s))) for _, name, _, s in CLASSES}
    assert len(seen) > 100
    assert seen["PythonMutex"] == (4, 2)
    assert seen["Spill"] == (14, 4)


def test_files_are_short():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert {path: length for path, length in lengths.items() if length > MOST_LINES} == {}


def test_large_classes_are_those_of_the_table():
    sizes = {name: (sum(map(is_method, s)), sum(map(is_member, s))) for _, name, _, s in CLASSES}
    large = {
        name: size
        for name, size in sizes.items()
        if size[0] > MOST_METHODS or size[1] > MOST_MEMBERS
    }
    assert large == LARGE


def test_no_class_is_defined_in_two_files():
    definition = re.compile(
        r"^(?!  )[^\n#/]*?\b([A-Z]\w+)::(?:[A-Z]\w+::)?~?\w+\([^;{}]*\)[^;{}]*\{", re.MULTILINE
    )
    files = defaultdict(set)
    for path in SOURCES:
        if path.suffix != ".h":
            for name in definition.findall(without_comments(path.read_text())):
                files[name].add(str(path.relative_to(ROOT)))
    assert len(files) > 40
    assert {name: paths for name, paths in files.items() if len(paths) > 1} == {}


def test_friends_have_a_reason():
    for path in SOURCES:
        lines = path.read_text().splitlines()
        for before, line in zip(["", *lines], lines, strict=False):
            if re.match(r"\s*friend (class|struct)", line):
                assert "//" in line or before.strip().startswith("//"), f"{path}: {line}"


def python_classes():
    """Each class of the package: its name, its methods and its attributes."""
    for path in sorted((ROOT / "python/ebb").rglob("*.py")):
        for found in ast.walk(ast.parse(path.read_text())):
            if isinstance(found, ast.ClassDef):
                methods = [
                    node
                    for node in found.body
                    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                ]
                yield found.name, methods, attributes_of(methods)


def attributes_of(methods):
    nodes = [node for method in methods for node in ast.walk(method)]
    return {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def test_the_reader_sees_python_classes():
    seen = {name: (len(methods), attributes) for name, methods, attributes in python_classes()}
    assert len(seen) > 80
    assert seen["Layers"] == (3, {"_write", "_below"})


def test_large_python_classes_are_those_of_the_table():
    large = {}
    for name, methods, attributes in python_classes():
        if len(methods) > MOST_METHODS or len(attributes) > MOST_MEMBERS:
            large[name] = (len(methods), len(attributes))
    assert large == LARGE_IN_PYTHON
