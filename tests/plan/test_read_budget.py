"""Budgets as text and numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebb._plan.choose.memory_budget import allowed, in_all, read_budget


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (101, 101),
        ("24GB", 24 * 10**9),
        ("1.5 kB", 1500),
        (24 * 2**30, 24 * 2**30),
        ("24GiB", 24 * 2**30),
        (" 1.5 MiB ", 3 * 2**19),
        ("4096", 4096),
        ("101", 101),
        ("50B", 50),
        ("50 B", 50),
        (0.4, 0.4),
        (1.0, 1.0),
        ("40%", 0.4),
        (" 12.5 % ", 0.125),
        ("100%", 1.0),
        ("0.25", 0.25),
        ("1.0", 1.0),
    ],
)
def test_budgets_are_read(written, read):
    found = read_budget(written)

    assert (found, type(found)) == (read, type(read))


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (0, "more than 0 bytes"),
        (-1, "from 0 to"),
        (2**63, "from 0 to"),
        ("0", "more than 0 bytes"),
        ("0GiB", "more than 0 bytes"),
        (0.0, "a budget given as a share must be above 0 and at most 1"),
        (-0.5, "as a share must be"),
        (1.5, "For bytes, pass an int"),
        (24.0, "'24GiB'"),
        (math.nan, "as a share must be"),
        (math.inf, "as a share must be"),
        ("140%", "as a share must be"),
        ("0%", "as a share must be"),
        ("%", "'40%'"),
        ("half%", "'40%'"),
        ("nan%", "as a share must be"),
        ("1e400%", "as a share must be"),
        ("1.5", "as a share must be"),
        ("", "a share, such as '40%'"),
        ("much", "a share, such as '40%'"),
        ("-1GiB", "a share, such as '40%'"),
        ("4" * 5000, "a share, such as '40%'"),
        ("1", "did you mean '1%'"),
        ("50", "did you mean '50%'"),
        (" 100 ", "did you mean '100%'"),
    ],
)
def test_invalid_budget_raises(budget, message):
    with pytest.raises(ValueError, match=r"^ebb: ") as raised:
        read_budget(budget)

    assert message in str(raised.value)
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize("budget", [None, True, [1], b"1", 1j, object])
def test_budget_of_another_type_raises(budget):
    with pytest.raises(TypeError, match=r"ebb: a budget must be a number of bytes"):
        read_budget(budget)


texts = st.text(max_size=30) | st.from_regex(r"\s*[-+]?[0-9.eE_٣]*\s*(%|GiB|B)?\s*", fullmatch=True)


@given(texts | st.integers() | st.floats() | st.none() | st.booleans() | st.binary())
def test_any_input_is_read_or_raises_an_error_of_ebb(budget):
    try:
        found = read_budget(budget)
    except (TypeError, ValueError) as error:
        assert str(error).startswith("ebb: ")  # noqa: PT017
        return
    assert found > 0
    assert isinstance(found, int) or found <= 1


@given(st.integers(0, 2**50), st.integers(0, 2**50))
def test_minimum_in_bytes_allows_the_peak(base, peak):
    assert allowed(in_all(base, peak), base, 1) >= peak


def test_shares_are_of_the_peak_in_eager():
    assert allowed(0.5, 10**9, 2000) == 990
    assert allowed(1_000, 600, 10**9) == 396
