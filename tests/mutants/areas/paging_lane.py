# ruff: noqa: E501
"""PAGE: the lane, and what it knows of streams and captures."""

from __future__ import annotations

from mutant import Places, mutants_at

PAGING_BESIDE_CAPTURES = "tests/accelerator/test_paging_beside_captures.py"
PAGING_CAPTURES = "tests/accelerator/test_paging_captures.py"
PAGING_COSTS = "tests/accelerator/test_paging_costs.py"
PAGING_FAILURES = "tests/accelerator/test_paging_failures.py"
PAGING_STREAMS = "tests/accelerator/test_paging_streams.py"
PAGING_WAITS = "tests/accelerator/test_paging_waits.py"

TESTS = (
    PAGING_STREAMS,
    PAGING_BESIDE_CAPTURES,
    PAGING_CAPTURES,
    PAGING_COSTS,
    PAGING_FAILURES,
    PAGING_STREAMS,
    PAGING_WAITS,
)

# What each of these must be in.
EACH = dict.fromkeys(
    (
        "src/paging/lane.cpp",
        "src/stream/stream.cpp",
    ),
    r"(?<!void )\b(noteUse|noteMade)\((?=stash|source|storage, user\);)|\bjoin(Lanes)?\(\);|joinAll\((?!bool)|\blane\(\)\.wait\(",
)

PLACES: Places = {
    "src/paging/lane.cpp": [
        (
            (PAGING_WAITS + "::test_the_host_neither_waits_nor_asks_in_a_steady_step",),
            "lane-waits-for-compute",
            "after == After::Compute",
            "after == After::Compute && captures_.current() != 0",
            "if (after == After::Compute",
        ),
        (
            (PAGING_CAPTURES + "::test_a_capture_after_steps_with_an_optimizer",),
            "lane-joins-capture",
            "!captures_.areTogether()",
            "false",
            "After::Compute || !captures_.areTogether())",
        ),
        (
            (PAGING_CAPTURES + "::test_a_capture_after_steps_with_an_optimizer",),
            "lane-on-its-stream",
            "*stream_",
            "currentStream(device_)",
            "on(*stream_);\n  work",
        ),
        (
            (PAGING_CAPTURES + "::test_a_capture_after_steps_with_an_optimizer",),
            "lane-holds-storages",
            "held_.hold(call, currentStream(device_), std::move(held));",
        ),
        (
            (PAGING_STREAMS + "::test_layers_on_two_streams",),
            "lane-holds-what-came-back",
            "call.number == 0",
            "true",
            "if (call.number == 0) {\n    drops_",
        ),
        (
            (PAGING_CAPTURES + "::test_a_capture_after_steps_with_an_optimizer",),
            "lane-compute-waits",
            "call.end->block(compute);",
        ),
        (
            (PAGING_STREAMS + "::test_memory_of_one_stream_does_not_wait_for_another",),
            "lane-lets-go-of-own-only",
            "held.stream == compute",
            "true",
            "return held.stream == compute && isOverWith",
        ),
        (
            (PAGING_COSTS + "::test_memory_of_what_has_left_after_what_is_written",),
            "lane-lets-go-of-past-only",
            "call.number <= last.number",
            "true",
        ),
        (
            (PAGING_CAPTURES + "::test_a_write_in_a_capture_to_what_has_left_before",),
            "lane-waits-for-no-other-capture",
            "call.capture != capture()",
            "false",
        ),
        (
            (PAGING_COSTS + "::test_a_layer_waits_for_what_its_own_stream_has_paged",),
            "lane-joins-own-only",
            "held.stream == compute",
            "true",
            "if (held.stream == compute",
        ),
        (
            (PAGING_COSTS + "::test_the_last_of_what_has_left_is_waited_for",),
            "lane-joins-last",
            "held.until.number > last.number",
            "true",
        ),
        (
            (PAGING_BESIDE_CAPTURES + "::test_another_stream_pages_while_a_graph_is_captured",),
            "lane-join-all-of-now-only",
            "held.until.capture == now",
            "true",
            "{ return held.until.capture == now; }",
        ),
        (
            (PAGING_STREAMS + "::test_what_never_had_to_come_back_is_let_go_behind_the_lane",),
            "lane-must-wait",
            "isHeld",
            "false",
            "if (isHeld",
        ),
        (
            (PAGING_CAPTURES + "::test_replays_and_eager_steps_without_a_wait_between",),
            "lane-always-waits",
            "always",
            "false",
            "|| always)",
        ),
        (
            (PAGING_COSTS + "::test_what_has_left_is_free_when_the_step_ends_on_another_stream",),
            "lane-join-all-lets-go",
            "release(isOfNow, currentStream(device_));",
        ),
        (
            (PAGING_FAILURES + "::test_pools_that_go_while_something_is_on_its_way_back",),
            "lane-finishes",
            "stream_ && capture() == 0",
            "false",
        ),
        (
            (PAGING_BESIDE_CAPTURES + "::test_pools_that_go_while_a_graph_is_captured",),
            "lane-finishes-outside-captures",
            "capture() == 0",
            "true",
            "stream_ && capture() == 0",
        ),
        (
            (PAGING_FAILURES + "::test_pools_that_go_while_something_is_on_its_way_back",),
            "lane-finishes-what-is-not-over",
            "over_ < last_",
            "false",
        ),
        (
            (PAGING_COSTS + "::test_pools_that_go_are_waited_for_once",),
            "lane-finishes-once",
            "over_ < last_",
            "true",
        ),
        (
            (PAGING_COSTS + "::test_what_has_left_is_free_when_somebody_has_asked",),
            "lane-over-lets-go",
            "release(isOver, std::nullopt);",
        ),
        (
            (PAGING_COSTS + "::test_pools_that_go_are_waited_for_once",),
            "lane-over-is-known",
            "over_ = call.number;",
        ),
        (
            (PAGING_STREAMS + "::test_memory_of_another_stream_than_the_one_that_pages",),
            "lane-tells-allocator",
            "noteUse(storage, *user);",
        ),
        (
            (PAGING_STREAMS + "::test_what_dies_when_a_stream_has_waited_may_ask",),
            "lane-drops-behind-lock",
            "drops_.drop(storage);",
            "storage = c10::Storage();",
        ),
        (
            (PAGING_CAPTURES + "::test_a_capture_after_steps_with_an_optimizer",),
            "lane-has-joined",
            "captures_.join();",
        ),
        (
            (PAGING_CAPTURES + "::test_memory_of_a_capture_that_failed_is_given_up",),
            "lane-lets-go-of-old-captures",
            "release([&](const Held& held) { return held.until.capture == over; }, std::nullopt);",
        ),
        (
            (PAGING_BESIDE_CAPTURES + "::test_another_stream_pages_while_a_graph_is_captured",),
            "lane-lets-go-of-captures-only",
            "held.until.capture == over",
            "true",
        ),
    ],
    "src/stream/capture.h": [
        (
            (PAGING_CAPTURES + "::test_two_graphs_on_two_streams",),
            "capture-goes-on-without-compute",
            "joined_ ? own : compute",
            "compute",
        ),
        (
            (PAGING_CAPTURES + "::test_a_capture_that_failed",),
            "capture-numbers",
            "++count_",
            "1",
        ),
        (
            (PAGING_CAPTURES + "::test_a_capture_after_steps_with_an_optimizer",),
            "capture-keeps-its-number",
            "current_ == 0 && isCapturing(compute)",
            "isCapturing(compute)",
        ),
    ],
    "src/stream/stream.cpp": [
        (
            (PAGING_STREAMS + "::test_what_leaves_when_the_region_ends",),
            "streams-take-over-waits",
            "orderAfter(user, maker);",
        ),
        (
            (
                PAGING_BESIDE_CAPTURES
                + "::test_what_another_stream_has_copied_comes_back_in_a_capture",
            ),
            "streams-take-over-not-in-a-capture",
            "!isCapturing(user)",
            "true",
        ),
        (
            (PAGING_STREAMS + "::test_what_leaves_when_the_region_ends",),
            "streams-take-over-tells",
            "noteUse(storage, user);",
        ),
        (
            (PAGING_COSTS + "::test_the_stream_that_has_copied_rows_waits_for_nothing",),
            "streams-take-over-of-its-own",
            "later != earlier",
            "true",
        ),
    ],
}


MUTANTS = tuple(mutants_at(PLACES))
