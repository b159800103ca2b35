"""OFFLOAD: copies, the memory they use, and the streams of a graph."""

from __future__ import annotations

from mutant import Mutant

COPIES = "src/offload/copies.cpp"
STREAMS = "tests/accelerator/test_streams.py"

TESTS = (STREAMS,)

EACH: dict[str, str] = {}

MUTANTS = (
    Mutant(
        "out-waits-packed-on",
        COPIES,
        "via_.wait(out, via_.record(stash.packedOn));",
        (f"{STREAMS}::test_a_kept_tensor_leaves_behind_the_stream_on_which_it_was_packed",),
    ),
)
