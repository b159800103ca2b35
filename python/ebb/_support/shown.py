"""Formats users' values for messages and for C++."""

from __future__ import annotations

import sys
from contextlib import suppress

MOST_CHARACTERS = 500  # of a name or a glob: matching a glob takes time quadratic in its length


def clipped(text: str, most: int = 80) -> str:
    """A text as one printable line; a long text becomes its beginning and its length."""
    begin = text[:most]
    if not begin.isprintable():
        begin = begin.encode("unicode_escape").decode()
    return begin if len(text) <= most else f"{begin}... ({len(text):,} characters)"


def shown(value: object) -> str:
    """The value's repr, shortened. Never raises."""
    if isinstance(value, str | bytes) and len(value) > 80:
        return f"{value[:80]!r}... ({len(value):,} characters)"
    try:
        return clipped(repr(value))
    except Exception:  # a number of more than 4,300 digits, a foreign __repr__
        return f"an object of type {type(value).__name__} (its repr failed)"


def as_utf8(text: str) -> str:
    """A name for C++: surrogates, which UTF-8 cannot encode, become escapes."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def checked_name(what: str, text: str) -> str:
    """A name or a glob for C++. Raises ValueError if it is too long."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(
            f"ebb: {what} must have at most {MOST_CHARACTERS} characters; got {shown(text)}"
        )
    return as_utf8(text).replace("\0", "\\0")  # a null byte would end a message of C++


def print_stderr(line: str) -> None:
    """Prints a line to stderr. Ignores a closed stderr and characters that it cannot encode."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(line, file=sys.stderr)
