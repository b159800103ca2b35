"""Comments and documents name their subjects: few pronouns, and few sentences that open with one.

The figures are a symptom of sentences that a reader has to read twice. CONTRIBUTING says what to do
instead.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRONOUNS = {
    *("it", "its", "they", "them", "their", "that", "this", "these", "those", "one", "ones"),
    *("what", "which", "who", "whose", "whom", "such"),
}
OPENINGS = PRONOUNS | {"whether", "of"}
COMMENTS = [p for folder in ("src", "include") for p in (ROOT / folder).rglob("*.*")]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
README_WORDS = 900


def paragraphs(path):
    """Of a Markdown file without code and tables; of a C++ file, its blocks of comments."""
    text = path.read_text()
    if path.suffix == ".md":
        text = re.sub(r"```.*?```", "", text, flags=re.S)
        return [part for part in text.split("\n\n") if not part.lstrip().startswith("|")]
    lines = (re.match(r"\s*//+ ?(.*)", line) for line in text.splitlines())
    return "\n".join(line[1] if line else "\0" for line in lines).split("\0")


def shares(paths):
    """Percent of words that are pronouns, and of sentences that open with one."""
    words = pronouns = sentences = openings = 0
    for path in paths:
        for paragraph in paragraphs(path):
            for sentence in re.split(r"(?<=[.:;?!])\s+", paragraph):
                found = re.findall(r"[a-z']+", sentence.lower())
                if found:
                    words += len(found)
                    sentences += 1
                    pronouns += sum(word in PRONOUNS for word in found)
                    openings += found[0] in OPENINGS
    return 100 * pronouns / words, 100 * openings / sentences


@pytest.mark.parametrize(
    ("paths", "pronouns", "openings"),
    [(COMMENTS, 6, 5), (DOCUMENTS, 6, 5)],
    ids=["comments", "documents"],
)
def test_few_pronouns(paths, pronouns, openings):
    found = shares(paths)

    assert found[0] <= pronouns
    assert found[1] <= openings


def test_the_measure_sees_a_riddle(tmp_path):
    path = tmp_path / "riddle.md"
    path.write_text("What it keeps is here. Of these one is it.\n\n| it | it |\n")

    assert shares([path]) == (50, 100)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= README_WORDS
