"""What SECURITY.md says of the code: no pickle, network, other process or text run as code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "python").rglob("*.py"))

READS_OBJECTS = {"pickle", "cPickle", "marshal", "shelve", "dill", "joblib"}
NETWORK = {"socket", "ssl", "urllib", "http", "ftplib", "smtplib", "requests", "xmlrpc", "asyncio"}
PROCESSES = {"subprocess", "pty", "ctypes", "cffi"}
# multiprocessing sends pickles; ebb only asks it which process this is, and for its exit hooks.
OF_MULTIPROCESSING = {"parent_process", "current_process", "util"}
CALLS = {"eval", "exec", "compile", "__import__", "system", "popen", "fork", "spawnv", "execv"}
CALLS |= {"loads", "load"}  # of torch and pickle; those below are of TOML, JSON and ebb itself
HARMLESS = {"json.loads", "json.load", "tomllib.loads", "tomllib.load"}
HARMLESS |= {"Policy.load", "Report.load"}  # TOML, JSON
HARMLESS |= {"torch.compile", "re.compile"}
RUNS_THE_SCRIPT = ROOT / "python/ebb/__main__.py"
WRITES_FILES = ROOT / "python/ebb/_support/private_files.py"
OPENS_TO_WRITE = "ofstream|fstream|fopen|creat|mkos?temp|O_WRONLY|O_RDWR"
IN_CPP = r"\b(system|popen|exec[lv][pe]*|posix_spawnp?|v?fork|socket|connect)\s*\("


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").split(".")[0]


def dangerous_calls(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name.split(".")[-1] in CALLS and name not in HARMLESS:
                yield name


def writing_calls(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).split(".")[-1]
            modes = [*node.args[1:2], *(word.value for word in node.keywords if word.arg == "mode")]
            writes = name == "open" and any(set(ast.unparse(mode)) & set("wax+") for mode in modes)
            if writes or name in ("write_text", "write_bytes"):
                yield name


def faults(path):
    tree = ast.parse(path.read_text())
    names = set(imported(tree))
    found = names & (READS_OBJECTS | NETWORK | PROCESSES)
    if path != RUNS_THE_SCRIPT:
        found |= names & {"runpy"}
    if path != WRITES_FILES:
        found |= set(writing_calls(tree))
    return found | set(dangerous_calls(tree))


def test_python_reads_no_objects_starts_nothing_and_writes_private_files():
    assert len(SOURCES) > 100
    assert {str(path): faults(path) for path in SOURCES if faults(path)} == {}


def test_multiprocessing_is_only_asked_for_this_process():
    for path in SOURCES:
        used = re.findall(r"\bmultiprocessing\.(\w+)", path.read_text())
        used += re.findall(r"from multiprocessing import (\w+)", path.read_text())
        assert set(used) <= OF_MULTIPROCESSING, path


def test_cpp_starts_nothing_and_writes_only_the_disk_tier():
    sources = [p for p in (ROOT / "src").rglob("*") if p.suffix in (".h", ".cpp", ".cu")]
    assert len(sources) > 100
    for path in sources:
        code = re.sub(r"//.*", "", path.read_text())
        assert re.findall(rf"(?<!->)(?<!\.){IN_CPP}", code) == [], path
        writes = re.findall(rf"(?<!<)\b({OPENS_TO_WRITE})\b", code)
        assert writes == ["mkostemp"] * (path.name == "disk.cpp"), path


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from socket import socket",
        "import subprocess as s",
        "import runpy",
        "eval('1')",
        "torch.load(path)",
        "os.system('ls')",
        "pickle.loads(b'')",
        "path.write_text('')",
        "open(path, 'w')",
        "open(path, mode='ab')",
    ],
)
def test_such_a_line_would_be_found(tmp_path, line):
    path = tmp_path / "module.py"
    path.write_text(f"import json\nimport torch\n\ndef f():\n    {line}\n    json.loads('1')\n")
    assert len(faults(path)) == 1
