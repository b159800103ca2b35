"""What the README and the pages in docs say is true, as far as a machine can tell."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ebb

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), namespace)


def test_policy_files_in_the_pages_are_policies(tmp_path):
    found = [block for page in PAGES for block in blocks(page, "toml")]
    assert found
    for block in found:
        (tmp_path / "policy.toml").write_text(block)
        ebb.Policy.load(tmp_path / "policy.toml")


def test_every_note_that_is_cited_exists():
    sources = [p.read_text() for p in (ROOT / "src").rglob("*.[ch]*")]
    sources += [p.read_text() for p in (ROOT / "include").rglob("*.h")]
    text = "\n".join(re.sub(r"\n\s*// ?", " ", s) for s in sources)
    defined = {m for s in sources for m in re.findall(r"^\s*// Note \[(.+?)\]$", s, re.M)}
    cited = set(re.findall(r"[Ss]ee Note \[(.+?)\]", text))
    assert cited - defined == set()
    in_docs = re.findall(r"^\| \d+ \|.*\| (.+) \|$", (ROOT / "docs/design.md").read_text(), re.M)
    for titles in in_docs:
        for title in titles.split("; "):
            assert title.startswith("(") or title in defined, title


def test_named_policies_are_documented():
    text = (ROOT / "docs/policies.md").read_text()
    for name in ebb.policies.__all__:
        assert f"`{name}" in text
    for field in ebb.Rule.__dataclass_fields__:
        assert field in text


def test_decisions_of_reports_are_documented():
    text = (ROOT / "docs/reports.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.M)) == set(ebb.Report.DECISIONS)


def test_messages_in_the_troubleshooting_page_are_ours():
    sources = [*(ROOT / "src").rglob("*.cpp"), *(ROOT / "python").rglob("*.py")]
    # Strings that the sources break into pieces are joined, and what they insert is cut out.
    text = " ".join(re.sub(r'"\s*f?"', "", path.read_text()) for path in sources)
    text = re.sub(r"\s+", " ", text)
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/troubleshooting.md").read_text(), re.M)
    fragments = [fragment for row in rows for fragment in re.findall(r"`(.*?)`", row)]
    assert len(fragments) > 15
    assert [fragment for fragment in fragments if fragment not in text] == []


def test_links_lead_somewhere():
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
