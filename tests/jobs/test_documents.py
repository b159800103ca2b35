"""What the README, CONTRIBUTING and the pages in docs say is true, as far as a machine can tell."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ebb
from ebb._policy.decision import Decision

ROOT = Path(__file__).resolve().parents[2]
DESIGN = ROOT / "docs/design"
REFERENCE = ROOT / "docs/reference"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = [
    path
    for folder in ("src", "tests/native")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".cpp", ".h", ".cu")
]

README_WORDS = 900

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def fences(page):
    """The language and the text of each block of code."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S)


def blocks(page, language):
    return [text for marked, text in fences(page) if marked == language]


def without_blocks(page):
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def run_shell(block):
    """`python` is the one that runs the tests."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("EBB")}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    done = subprocess.run(["bash", "-euc", block], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@every_page
def test_python_and_shell_blocks_run(page, tmp_path, monkeypatch, capsys):
    """A shell block is marked `sh`; plain ones are commands for a machine that is not this one. A
    comment `# prints ..` behind a call of print has all that it prints, line after line.
    """
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for language, block in fences(page):
        assert language in ("python", "sh", "toml", "cpp", "cmake", ""), language
        if language == "sh":
            run_shell(block)
        if language == "python":
            if name := re.match(r"# (\w+\.py)\n", block):
                (tmp_path / name[1]).write_text(block)
            capsys.readouterr()
            exec(compile(block, page.name, "exec"), namespace)
            printed = " ".join(capsys.readouterr().out.split())
            for told in re.findall(r"print\(.*\)  # prints (.*)", block):
                assert told in printed
    assert page.read_text().count("\n```") == 2 * len(fences(page)), "a block is not closed"


@every_page
def test_commands_name_what_exists(page):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    text = page.read_text()
    shown = "\n".join([*re.findall(r"`([^`\n]+)`", without_blocks(page)), *blocks(page, "")])
    assert set(re.findall(r"^make ([a-z][\w-]*)", shown, re.M)) <= targets
    for path in re.findall(r"python ((?:examples|benchmarks)/\S+?\.py)", text):
        assert (ROOT / path).exists(), path


@pytest.mark.sweep
def test_the_demo_prints_its_table_and_no_warning():
    command = [sys.executable, ROOT / "examples/train_gpt.py", "--steps", "1", "--layers", "2"]
    done = subprocess.run([*command, "--batch", "2"], capture_output=True, text=True, check=True)

    assert "ebb recompute_all ahead" in done.stdout
    assert [line for line in done.stderr.splitlines() if ": 1 steps, loss " not in line] == []


@every_page
def test_paths_that_are_named_exist(page):
    folders = "src|python|tests|include|examples|benchmarks|integration|docs|cmake"
    for path in re.findall(rf"`((?:{folders})/[\w./*-]*)`", without_blocks(page)):
        assert list(ROOT.glob(path.rstrip("/"))), path


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= README_WORDS


@every_page
def test_a_page_begins_with_what_it_is_for(page):
    heading, empty, sentence, *_ = page.read_text().splitlines()
    assert heading.startswith("# ")
    assert empty == ""
    assert re.match(r"\w", sentence), "a sentence before all else"


def test_every_page_can_be_reached():
    found, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop()
        if page not in found:
            found.add(page)
            links = re.findall(r"\]\((?!https?:)([^)#]+)", without_blocks(page))
            left += [to for link in links if (to := (page.parent / link).resolve()) in PAGES]
    assert set(PAGES) - found == set()


def test_policy_files_in_the_pages_are_policies(tmp_path):
    found = [block for page in PAGES for block in blocks(page, "toml")]
    assert found
    for block in found:
        (tmp_path / "policy.toml").write_text(block)
        if "[[regions]]" not in block and "[offload]" in block:  # a file of EBB_CONFIG
            for section, settings in tomllib.loads(block).items():
                assert {f"{section}.{name}" for name in settings} <= ebb.config.to_dict().keys()
            continue
        kind = ebb.ModulePolicies if "[[regions]]" in block else ebb.Policy
        kind.load(tmp_path / "policy.toml")


def test_every_note_that_is_cited_exists():
    sources = [p.read_text() for p in SOURCES]
    sources += [p.read_text() for p in (ROOT / "include").rglob("*.h")]
    sources += [p.read_text() for p in (ROOT / "python").rglob("*.py")]
    text = "\n".join(re.sub(r"\n\s*(?://|#) ?", " ", s) for s in sources)
    defined = {m for s in sources for m in re.findall(r"^\s*(?://|#) Note \[(.+?)\]$", s, re.M)}
    cited = set(re.findall(r"[Ss]ee Note \[(.+?)\]", re.sub(r"\s+", " ", text)))
    assert cited - defined == set()
    for page in PAGES:
        pages_text = re.sub(r"\s+", " ", page.read_text())
        for several in re.findall(r"Notes? ((?:\[[^]]+\](?:,| and)? ?)+)", pages_text):
            assert {*re.findall(r"\[(.+?)\]", several)} - {".."} <= defined, page.name
    in_docs = re.findall(r"^\| \d+ \|.*\| (.+) \|$", (DESIGN / "index.md").read_text(), re.M)
    assert len(in_docs) == 12
    for titles in in_docs:
        for title in titles.split("; "):
            assert title.startswith("(") or title in defined, title


def test_named_policies_are_documented():
    text = (ROOT / "docs/guide/policies.md").read_text()
    for name in ebb.policies.__all__:
        assert f"`{name}" in text
    for field in dataclasses.fields(ebb.Rule):
        assert field.name in text
    for decision in Decision:
        assert f"`ebb.{decision.name}`" in text


def test_the_page_of_the_headers_names_what_they_export():
    text = (REFERENCE / "api.md").read_text()
    described = dict(re.findall(r"^\| `ebb/(\w+)\.h` \| (.*) \|$", text, re.M))
    exports = r"^(?:class )?EBB_API (?:[^(;]*?[ >])??(\w+)(?:\(| \{| :)"
    found = set()
    for header in (ROOT / "include/ebb").glob("*.h"):
        for name in re.findall(exports, header.read_text(), re.M):
            assert f"`{name}`" in described[header.stem], name
            found.add(name)
    assert {"Region", "reports", "stats", "PageOverflow"} <= found


def test_messages_in_the_troubleshooting_page_are_ours():
    sources = [*(ROOT / "src").rglob("*.cpp"), *(ROOT / "python").rglob("*.py")]
    # Strings that the sources break into pieces are joined, and what they insert is cut out.
    text = " ".join(re.sub(r'"\s*f?"', "", path.read_text()) for path in sources)
    text = re.sub(r"\s+", " ", text)
    _, table = (ROOT / "docs/guide/troubleshooting.md").read_text().split("\n## Messages\n")
    rows = re.findall(r"^\| (`.*?) \|", table, re.M)
    fragments = [fragment for row in rows for fragment in re.findall(r"`(.*?)`", row)]
    assert len(fragments) > 15
    assert [fragment for fragment in fragments if fragment not in text] == []


def test_links_lead_somewhere():
    pages = [*PAGES, *(ROOT / "integration").rglob("*.md")]
    for page in pages:
        for link, heading in re.findall(
            r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)", without_blocks(page)
        ):
            to = page.parent / link if link else page
            assert to.exists(), f"{page.name}: {link}"
            if heading:
                headings = re.findall(r"^#+ (.+)$", to.read_text(), re.M)
                anchors = [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings]
                assert heading[1:] in anchors, f"{page.name}: {link}{heading}"


def test_files_of_the_repository_name_pages_that_exist():
    """Comments, docstrings and messages too."""
    files = [*SOURCES, ROOT / "CHANGELOG.md", ROOT / "Makefile", ROOT / "setup.py"]
    for folder in ("python", "tests", "include", "examples", "benchmarks", "integration"):
        files += [
            p
            for p in (ROOT / folder).rglob("*")
            if p.suffix in (".py", ".pyi", ".h", ".cpp", ".md")
        ]
    for path in files:
        for page in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text()):
            assert (ROOT / page).exists(), f"{path.relative_to(ROOT)}: {page}"
