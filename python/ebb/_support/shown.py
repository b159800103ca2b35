"""What users give, in messages and on its way to C++."""

from __future__ import annotations

import sys
from contextlib import suppress

MOST_CHARACTERS = 500  # of a name or a glob: globs take time in proportion to its square


def clipped(text: str, most: int = 80) -> str:
    """A text on one line that any stream can take: as it is, or its beginning and its length."""
    begin = text[:most]
    if not begin.isprintable():
        begin = begin.encode("unicode_escape").decode()
    return begin if len(text) <= most else f"{begin}... ({len(text):,} characters)"


def shown(value: object) -> str:
    """The value as Python writes it, shortened; whatever it is, this does not raise."""
    if isinstance(value, str | bytes) and len(value) > 80:
        return f"{value[:80]!r}... ({len(value):,} characters)"
    try:
        return clipped(repr(value))
    except Exception:  # a number of more than 4,300 digits, a foreign __repr__
        return f"what cannot be shown, of type {type(value).__name__}"


def as_utf8(text: str) -> str:
    """A name as C++ can take it: surrogates, which UTF-8 has not, become escapes."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def checked_name(what: str, text: str) -> str:
    """A name or a glob for C++.

    Raises:
        ValueError: it is too long.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(
            f"ebb: {what} must have at most {MOST_CHARACTERS} characters; got {shown(text)}"
        )
    return as_utf8(text).replace("\0", "\\0")  # which ends a message of C++


def tell(line: str) -> None:
    """A line on stderr, which may be closed, or unable to write a character."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(line, file=sys.stderr)
