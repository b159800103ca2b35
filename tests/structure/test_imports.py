"""Rules for the modules of ebb that neither `lint-imports` (see pyproject.toml) nor ruff checks."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / "python"
MODULES = [*PYTHON.rglob("*.py"), *PYTHON.rglob("*.pyi")]


def names_imported_from_ebb(module):
    """Names of `from ebb import ..`; `ebb` for `import ebb`."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "ebb" and node.level == 0:
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name == "ebb")


def is_module(name):
    path = PYTHON / "ebb" / name
    return name == "_C" or path.with_suffix(".py").exists() or path.is_dir()


def test_modules_import_only_modules_from_the_package():
    inside = [
        module for module in MODULES if module.parent != PYTHON and module.name != "__main__.py"
    ]
    found = {str(module): {*names_imported_from_ebb(module)} for module in inside}

    assert "_C" in set().union(*found.values())
    assert {name: names for name, names in found.items() if not all(map(is_module, names))} == {}


def test_each_package_says_what_it_is_for():
    for init in (PYTHON / "ebb").glob("*/**/__init__.py"):
        tree = ast.parse(init.read_text())
        assert ast.get_docstring(tree), init
        if init.parent.name not in ("experimental", "paging", "integrations"):
            assert len(tree.body) == 1, f"{init} is more than a docstring"


def test_each_package_and_its_data_are_installed():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = [init.parent for init in PYTHON.rglob("__init__.py")]
    names = {".".join(folder.relative_to(PYTHON).parts): folder for folder in folders}
    assert names.keys() == set(settings["packages"])
    for name, folder in names.items():
        for data in folder.glob("*.html"):
            assert any(data.match(pattern) for pattern in settings["package-data"][name]), data


def test_modules_that_the_core_names_exist():
    texts = [file.read_text() for file in (ROOT / "src/bindings").glob("*.cpp")]
    imports = re.compile(r'(?:importFrom|import)\("ebb\.([\w.]+)"')
    named = {name for text in texts for name in imports.findall(text)}
    assert len(named) > 3
    assert [name for name in named if not is_module(name.replace(".", "/"))] == []


def test_product_does_not_use_the_module_for_tests():
    assert [module for module in MODULES if re.search(r"\b_testing\b", module.read_text())] == []
