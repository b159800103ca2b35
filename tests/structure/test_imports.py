"""The folders of the Python half: what a module may import, also inside of functions."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from ebb_tests.file_dependencies import circle, faults

ROOT = Path(__file__).resolve().parents[2]

# Lowest first. A module may import its own folder and those of lower floors. A folder is a package,
# a folder of the planner, or a module at the top.
FLOORS = (
    ("_C", "_ebb_switches", "_find_native"),
    ("_support",),
    ("_policy",),
    ("_report",),
    ("policies",),
    ("_region",),
    ("_config", "experimental"),
    ("_plan.profile",),
    ("_plan.simulate",),
    ("_plan.choose",),
    ("_plan.apply",),
    ("_plan",),
    ("integrations",),
    ("_launch",),
    ("__init__",),
    ("__main__", "_ebb_autoload"),
)

# Imports inside of functions, and why.
LAZY = {
    ("ebb._launch.frameworks.report_to", "ebb.integrations.transformers"): (
        "it imports transformers, and so waits until the program has done that"
    ),
    ("_ebb_autoload", "ebb"): (
        "runs in each process that imports torch, and imports ebb where a variable asks for it"
    ),
    ("ebb._launch.start", "ebb._launch.takeover"): (
        "it reads private functions of torch: only where it is asked for can they be missed, and "
        "then ebb is off"
    ),
}


class Imports(ast.NodeVisitor):
    """The imports of one module.

    Attributes:
        eager, lazy: names of modules that it imports when it is imported, and in functions.
    """

    def __init__(self, package, modules):
        self.eager, self.lazy = set(), set()
        self._package = package
        self._modules = modules
        self._functions = 0

    def visit_FunctionDef(self, node):
        for outside in (*node.decorator_list, node.args):
            self.visit(outside)
        self._inside(node.body)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node):
        self._inside([node.body])

    def visit_Import(self, node):
        for alias in node.names:
            self._add(alias.name)

    def visit_ImportFrom(self, node):
        parents = self._package.split(".")[: 1 - node.level or None] if node.level else []
        origin = ".".join([*parents, *([node.module] if node.module else [])])
        for alias in node.names:
            inner = f"{origin}.{alias.name}"
            self._add(inner if inner in self._modules else origin)

    def visit_Call(self, node):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in ("import_module", "__import__") and isinstance(node.args[0], ast.Constant):
            self._add(node.args[0].value)
        self.generic_visit(node)

    def _inside(self, body):
        self._functions += 1
        for node in body:
            self.visit(node)
        self._functions -= 1

    def _add(self, name):
        if name.partition(".")[0] == "ebb" or name.startswith("_ebb_"):
            (self.lazy if self._functions else self.eager).add(name)


def arrows_of(root):
    """Arrows of imports, those of modules and those inside of functions apart."""
    paths = {}
    for path in sorted([*root.rglob("*.py"), *root.rglob("*.pyi")]):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        paths[name.removesuffix(".__init__")] = path
    eager, lazy = set(), set()
    for name, path in paths.items():
        package = name if path.stem == "__init__" else name.rpartition(".")[0]
        imports = Imports(package, paths)
        imports.visit(ast.parse(path.read_text()))
        eager |= {(name, target) for found in imports.eager for target in chain(name, found)}
        lazy |= {(name, target) for target in imports.lazy}
    return eager, lazy


def chain(source, target):
    """A module, and the packages around it whose own code an import of it runs."""
    parts = target.split(".")
    around = [".".join(parts[:end]) for end in range(2, len(parts))]
    return [target, *(package for package in around if not f"{source}.".startswith(f"{package}."))]


def folder_of(module):
    parts = module.split(".")
    stage = ".".join(parts[1:3])
    if (stage,) in FLOORS:
        return stage
    return module if parts[0] != "ebb" else parts[1] if len(parts) > 1 else "__init__"


def faults_of(root, floors, lazy=()):
    eager, inside = arrows_of(root)
    found = [
        f"{source} imports {target} inside of a function"
        for source, target in sorted(inside - {*lazy})
    ]
    found += [
        f"the table has {source} -> {target}, which is not needed"
        for source, target in sorted({*lazy} - inside)
    ]
    return found + faults(eager | inside, folder_of, floors)


def test_imports_keep_the_order_of_the_folders():
    assert len(arrows_of(ROOT / "python")[0]) > 100
    assert faults_of(ROOT / "python", FLOORS, LAZY) == []


def test_each_package_says_what_it_is_for():
    for init in (ROOT / "python/ebb").glob("*/**/__init__.py"):
        tree = ast.parse(init.read_text())
        assert ast.get_docstring(tree), init
        if init.parent.name not in ("experimental", "paging", "integrations"):
            assert len(tree.body) == 1, f"{init} is more than a docstring"


def test_each_package_and_its_data_are_installed():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = [init.parent for init in (ROOT / "python").rglob("__init__.py")]
    names = {".".join(folder.relative_to(ROOT / "python").parts) for folder in folders}
    assert names == set(settings["packages"])
    for folder in folders:
        patterns = settings["package-data"].get(".".join(folder.relative_to(ROOT / "python").parts))
        for data in folder.glob("*.html"):
            assert any(data.match(pattern) for pattern in patterns or ()), data


def test_modules_that_the_core_names_exist():
    texts = [file.read_text() for file in (ROOT / "src/bindings").glob("*.cpp")]
    imports = re.compile(r'(?:importFrom|import)\("(ebb\.[\w.]+)"')
    named = {name for text in texts for name in imports.findall(text)}
    assert len(named) > 3
    for module in named:
        path = ROOT / "python" / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__init__.py").exists(), module


def test_the_package_does_without_what_is_for_tests():
    files = [*(ROOT / "python").rglob("*.py"), *(ROOT / "python").rglob("*.pyi")]
    assert len(files) > 50
    assert [file for file in files if re.search(r"\b_testing\b", file.read_text())] == []


# A made-up tree: low, high, and the package itself above them.
ROOMS = (("low",), ("high",), ("__init__",))
DOWN = {
    "__init__.py": "from ebb import high\n",
    "high/__init__.py": "",
    "high/a.py": "from ebb.low import b\nfrom ..low.b import f\n",
    "low/__init__.py": "",
    "low/b.py": "import os\n\ndef f():\n    import re\n",
}


@pytest.fixture
def tree(tmp_path):
    def write(files):
        for name, text in files.items():
            (tmp_path / "ebb" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "ebb" / name).write_text(text)
        return tmp_path

    assert faults_of(write(DOWN), ROOMS) == []
    assert arrows_of(tmp_path)[0] >= {("ebb.high.a", "ebb.low.b")}
    return write


BACK = "ebb.low.c needs ebb.high.a: high is not below low"


@pytest.mark.parametrize(
    "text",
    [
        "from ebb.high import a",
        "from ebb.high.a import f",
        "import ebb.high.a",
        "from ..high import a",
        "try:\n    from ebb.high import a\nexcept ImportError:\n    pass",
        "if TYPE_CHECKING:\n    from ebb.high.a import A",
        "class C:\n    from ebb.high import a",
        "import importlib\nimportlib.import_module('ebb.high.a')",
    ],
)
def test_an_import_that_runs_back_up_is_found(tree, text):
    assert BACK in faults_of(tree({"low/c.py": text}), ROOMS)


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    from ebb.high import a",
        "async def f():\n    with x:\n        import ebb.high.a",
        "class C:\n    def f(self):\n        from ebb.high.a import x",
        "f = lambda: __import__('ebb.high.a')",
    ],
)
def test_an_import_inside_of_a_function_is_found(tree, text):
    root = tree({"low/c.py": text})

    assert "ebb.low.c imports ebb.high.a inside of a function" in faults_of(root, ROOMS)
    assert BACK in faults_of(root, ROOMS, lazy=[("ebb.low.c", "ebb.high.a")])


def test_a_circle_inside_a_folder_is_found(tree):
    root = tree({"low/c.py": "import ebb.low.d\n", "low/d.py": "from ebb.low import c\n"})

    (fault,) = faults_of(root, ROOMS)
    assert fault.startswith("a circle: ebb.low.")


def test_a_circle_through_a_function_is_found(tree):
    root = tree({"low/c.py": "import ebb.low.d\n", "low/d.py": "def f():\n    import ebb.low.c\n"})

    (fault,) = faults_of(root, ROOMS, lazy=[("ebb.low.d", "ebb.low.c")])
    assert fault.startswith("a circle: ebb.low.")


def test_an_entry_that_is_not_needed_is_found(tree):
    root = tree({"high/c.py": "def f():\n    import ebb.low.b\n"})
    arrow, gone = ("ebb.high.c", "ebb.low.b"), ("ebb.high.a", "ebb.low.b")

    assert faults_of(root, ROOMS, lazy=[arrow]) == []
    assert faults_of(root, ROOMS, lazy=[arrow, gone]) == [
        "the table has ebb.high.a -> ebb.low.b, which is not needed"
    ]


def test_circles():
    assert circle([("a", "b"), ("b", "c"), ("a", "c")]) == []
    assert circle([("a", "a")]) == ["a circle: a <- a"]
    assert len(circle([("a", "b"), ("b", "c"), ("c", "a")])) == 1
