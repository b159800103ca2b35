"""What the README says is true, as far as a machine can tell."""

from __future__ import annotations

import re
from pathlib import Path

import ebb

ROOT = Path(__file__).resolve().parents[2]


def test_python_blocks_of_the_readme_run():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) >= 2
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)


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
    readme = (ROOT / "README.md").read_text()
    for name in ebb.policies.__all__:
        assert name in readme
