"""The engine of OFFLOAD: what goes which way when, and where captures begin and end."""

from __future__ import annotations

from functools import partial

from mutant import Mutant

TESTS = (
    "tests/accelerator/test_streams.py",
    "tests/accelerator/test_order_of_streams.py",
    "tests/accelerator/test_offload_captures.py",
    "tests/accelerator/test_offload_failures.py",
    "tests/accelerator/test_offload_steady.py",
    "tests/accelerator/test_offload_waits.py::test_all_is_in_order",
    "tests/offload/test_offload_order.py",
    "tests/offload/test_offload_static.py",
    "tests/offload/test_offload_memory.py",
    "tests/offload/test_offload_lifetimes.py",
    "tests/offload/test_offload_disk.py",
    "tests/offload/test_offload_spilling.py",
)

EACH = {
    "src/offload/offload_engine.cpp": r"\bcheckPlace\(stash\);|\bnoticeCapture\(",
}

CAPTURES = "tests/accelerator/test_offload_captures.py"
FAILURES = "tests/accelerator/test_offload_failures.py"
STEADY = "tests/accelerator/test_offload_steady.py"
WAITS = "tests/accelerator/test_offload_waits.py"
SEVERAL_STREAMS = "tests/accelerator/test_order_of_streams.py"
DISK = "tests/offload/test_offload_disk.py"
SPILLING = "tests/offload/test_offload_spilling.py"
LIFETIMES = "tests/offload/test_offload_lifetimes.py"
MEMORY = "tests/offload/test_offload_memory.py"
ORDER = "tests/offload/test_offload_order.py"
STATIC = "tests/offload/test_offload_static.py"

offload = partial(Mutant, file="src/offload/offload_engine.cpp")

MUTANTS = (
    offload(
        "beside-a-capture-it-stays",
        text="copies_.capture() == 0 || isCapturing(via_.computeStream(device))",
        instead="true",
        tests=(f"{CAPTURES}::test_what_runs_beside_a_capture_stays_on_the_device",),
    ),
    offload(
        "ahead-again-after-a-forward",
        text="triesAhead_ = true;",
        tests=(f"{FAILURES}::test_no_memory_to_fetch_ahead",),
    ),
    offload(
        "handed-over-to-another-stream",
        text="copies_.handOver(stash, compute);",
        tests=(f"{SEVERAL_STREAMS}::test_fetched_on_one_stream_and_asked_for_again_on_another",),
    ),
    offload(
        "of-a-capture-is-not-fetched-outside",
        text="checkPlace(stash);",
        within=("if (stash.sent.capture != 0) {\n    checkPlace(stash);"),
        tests=(f"{CAPTURES}::test_a_capture_that_failed",),
    ),
    offload(
        "living-while-on-disk",
        text="spill_.settle(stash);",
        tests=(f"{SPILLING}::test_a_tensor_that_lives_while_it_is_written",),
    ),
    offload(
        "living-while-returning",
        text="copies_.giveDeviceMemory(stash);",
        tests=(f"{STATIC}::test_a_saved_value_that_is_still_alive",),
    ),
    offload(
        "of-outside-is-not-fetched-in-a-capture",
        text="checkPlace(stash);",
        within=("if (!onDevice) {\n    checkPlace(stash);"),
        tests=(f"{CAPTURES}::test_what_left_before_a_capture_cannot_come_back_in_it",),
    ),
    offload(
        "static-joins-after-the-last-fetch",
        text="copies_.reapUnused();",
        within="copies_.reapUnused();  // one wait",
        tests=(f"{STEADY}::test_static_mode_waits_once_for_all_that_is_leaving",),
    ),
    offload(
        "lost-is-told",
        text="onDevice ? stash.hasWhatWasSent() : !stash.lost",
        instead="true",
        tests=(f"{ORDER}::test_storage_that_is_freed_while_it_is_copied",),
    ),
    offload(
        "taken-is-not-away",
        text="StashesInOrder::takeOut(stash);",
        within=(
            "notAheadAnyMore(stash);\n  StashesInOrder::takeOut(stash);\n  copies_.fetched(stash);"
        ),
        tests=(f"{FAILURES}::test_what_was_taken_is_not_fetched_ahead_though_the_device_failed",),
    ),
    offload(
        "remembers-for-whom-it-was-taken",
        text="stash.back.stream = compute;",
        tests=(f"{SEVERAL_STREAMS}::test_fetched_on_one_stream_and_asked_for_again_on_another",),
    ),
    offload(
        "a-write-notices-a-capture",
        text="copies_.noticeCapture(stash.device());",
        within=("copies_.noticeCapture(stash.device());\n    checkPlace"),
        tests=(f"{CAPTURES}::test_a_write_in_a_capture_to_what_is_leaving",),
    ),
    offload(
        "a-write-in-a-capture-is-told",
        text="checkPlace(stash);",
        within=("checkPlace(stash);\n    copies_.beforeWrite"),
        tests=(f"{CAPTURES}::test_a_write_in_a_capture_to_what_is_leaving",),
    ),
    offload(
        "ahead-of-the-living-and-the-here",
        text="!alive || !copies_.isHere(*next)",
        instead="!alive",
        tests=(f"{CAPTURES}::test_a_forward_before_a_capture_whose_backward_comes_after",),
    ),
    offload(
        "ahead-on-the-stream-it-was-packed-on",
        text="next->sent.stream == stash.sent.stream && !next->lost",
        instead="!next->lost",
        tests=(f"{WAITS}::test_all_is_in_order",),
    ),
    offload(
        "lost-is-not-fetched-ahead",
        text="next->sent.stream == stash.sent.stream && !next->lost",
        instead="next->sent.stream == stash.sent.stream",
        tests=(f"{ORDER}::test_what_was_lost_is_not_fetched_ahead",),
    ),
    offload(
        "not-ahead-without-memory",
        text="triesAhead_ = false;",
        tests=(f"{FAILURES}::test_no_memory_to_fetch_ahead",),
    ),
    offload(
        "forgotten-is-in-no-list",
        text="StashesInOrder::takeOut(stash);",
        within=("StashesInOrder::takeOut(stash);\n  context_.drop(stash.disk.room);"),
        tests=(f"{LIFETIMES}::test_what_was_dropped_is_in_no_list",),
    ),
    offload(
        "a-death-notices-a-capture",
        text="copies_.noticeCapture(stash.device());",
        within=("copies_.noticeCapture(stash.device());\n  copies_.forget"),
        tests=(f"{CAPTURES}::test_what_dies_in_a_capture",),
    ),
    offload(
        "static-joins-after-the-last-death",
        text="copies_.reapUnused();",
        within=("if (context_.settings.isStatic) {\n      copies_.reapUnused();"),
        tests=(f"{CAPTURES}::test_what_is_never_fetched_before_a_capture",),
    ),
    offload(
        "nothing-is-asked-in-a-capture-by-a-death",
        text="copies_.capture() == 0",
        instead="true",
        within="} else if (copies_.capture() == 0) {",
        tests=(f"{CAPTURES}::test_the_mode_may_change_in_a_capture",),
    ),
    offload(
        "each-call-notices-a-capture",
        text="copies_.noticeCapture(device);",
        tests=(f"{CAPTURES}::test_a_graph_gives_what_eager_gives",),
    ),
    offload(
        "captures-are-static-only",
        text="copies_.capture() == 0 || context_.settings.isStatic",
        instead="true",
        tests=(f"{CAPTURES}::test_not_in_static_mode_it_says_so",),
    ),
    offload(
        "a-change-of-mode-waits",
        text="!captures && std::exchange(wasStatic_, isStatic) != isStatic",
        instead="false",
        tests=(f"{STEADY}::test_host_memory_of_static_mode_is_freed_after_its_copies",),
    ),
    offload(
        "a-change-of-mode-outside-of-captures",
        text="!captures && std::exchange(wasStatic_, isStatic) != isStatic",
        instead="std::exchange(wasStatic_, isStatic) != isStatic",
        tests=(CAPTURES,),
    ),
    offload(
        "static-forgets-what-is-unused",
        text="copies_.reapUnused();",
        within="copies_.reapUnused();  // see",
        tests=(f"{CAPTURES}::test_what_dies_in_a_capture",),
    ),
    offload(
        "nothing-is-asked-in-a-capture",
        text="!captures",
        instead="true",
        within="} else if (!captures) {",
        tests=(f"{CAPTURES}::test_the_mode_may_change_in_a_capture",),
    ),
    offload(
        "a-drain-waits",
        text="copies_.finishAll();",
        within=("const Lock lock(context_.shared.mutex);\n  copies_.finishAll();"),
        tests=(f"{STEADY}::test_host_memory_of_static_mode_is_freed_after_its_copies",),
    ),
    offload(
        "a-drain-waits-for-the-disk",
        text="spill_.finishAll();",
        tests=(f"{SPILLING}::test_several_are_written_at_once_and_the_first_is_waited_for",),
    ),
    offload(
        "statistics-notice-a-capture",
        text="copies_.noticeCapture();",
        tests=(f"{CAPTURES}::test_statistics_when_a_capture_has_just_begun",),
    ),
)
