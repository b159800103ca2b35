# ruff: noqa: E501
"""PAGE: the lane, pools and what they know of streams and captures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mutant import Mutant

PAGING_CAPTURES = "tests/accelerator/test_paging_captures.py"
PAGING_FAILURES = "tests/accelerator/test_paging_failures.py"
PAGING_OVERFLOW = "tests/paging/test_paging_overflow.py"
PAGING_POOLS = "tests/accelerator/test_paging_pools.py"
PAGING_STEPS = "tests/paging/test_paging_steps.py"
PAGING_STREAMS = "tests/accelerator/test_paging_streams.py"
PAGING_THREADS = "tests/paging/test_paging_threads.py"
PAGING_WAITS = "tests/accelerator/test_paging_waits.py"

TESTS = (
    "tests/accelerator/test_paging_captures.py",
    "tests/accelerator/test_paging_streams.py",
    "tests/accelerator/test_paging_waits.py",
    "tests/accelerator/test_paging_pools.py",
    "tests/accelerator/test_paging_failures.py",
    "tests/paging/test_paging_overflow.py",
    "tests/paging/test_paging_steps.py",
    "tests/paging/test_paging_threads.py",
)

EACH = {
    "src/paging/*.cpp": r"(?<!void )\b(noteUse|noteMade)\((?=stash|source|storage, user\);)|\bjoin(Lanes|All)?\(\);|\blane\(\)\.wait\(",
}

# (tests, name, text, instead, within)
PLACES: dict[str, list[tuple[Any, ...]]] = {
    "src/paging/lane.cpp": [
        (
            (PAGING_WAITS + "::test_the_host_neither_waits_nor_asks_in_a_steady_step",),
            "lane-waits-for-compute",
            "after == After::Compute",
            "after == After::Compute && capture_ != 0",
            "if (after == After::Compute",
        ),
        (
            (PAGING_CAPTURES + "::test_a_capture_after_steps_with_an_optimizer",),
            "lane-joins-capture",
            "joinsCapture",
            "false",
            "|| joinsCapture)",
        ),
        (
            (PAGING_CAPTURES + "::test_a_capture_after_steps_with_an_optimizer",),
            "lane-on-its-stream",
            "*stream_",
            "currentStream(device_)",
            "on(*stream_);\n  goesOn_",
        ),
        (
            (
                PAGING_FAILURES + "::test_pools_that_go_while_something_is_on_its_way_back",
                PAGING_WAITS + "::test_a_bracketed_step_is_asked_about_before_its_end",
                PAGING_FAILURES + "::test_asking_a_device_that_failed_raises",
                PAGING_CAPTURES + "::test_replays_and_eager_steps_without_a_wait_between",
            ),
            "lane-goes-on",
            "goesOn_ = true;",
        ),
        (
            (
                PAGING_WAITS + "::test_the_host_neither_waits_nor_asks_in_a_steady_step",
                PAGING_WAITS + "::test_asking_waits_for_one_event_of_each_device",
            ),
            "lane-went-on",
            "goesOn_ = false;",
        ),
        (
            (PAGING_CAPTURES + "::test_a_capture_after_steps_with_an_optimizer",),
            "lane-holds-storages",
            "held_.push_back({call, currentStream(device_), std::move(held)});",
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
            (
                PAGING_STREAMS + "::test_one_stream_costs_nothing_more",
                PAGING_WAITS + "::test_the_host_neither_waits_nor_asks_in_a_steady_step",
            ),
            "lane-remembers-who-waited",
            "waited_ = {compute, call};",
        ),
        (
            (PAGING_STREAMS + "::test_memory_of_one_stream_does_not_wait_for_another",),
            "lane-lets-go-of-own-only",
            "held.compute == compute",
            "true",
            "return held.compute == compute && held.until.capture == call.capture",
        ),
        (
            (PAGING_CAPTURES + "::test_memory_of_a_capture_that_failed_is_given_up",),
            "lane-lets-go-of-this-capture-only",
            "held.until.capture == call.capture",
            "true",
            "return held.compute == compute && held.until.capture == call.capture",
        ),
        (
            (
                PAGING_STREAMS + "::test_two_streams_take_turns",
                PAGING_STREAMS + "::test_memory_of_another_stream_than_the_one_that_pages",
                PAGING_STREAMS + "::test_layers_on_two_streams",
                PAGING_STREAMS + "::test_a_pipeline_on_two_streams",
            ),
            "lane-lets-go-of-past-only",
            "held.until.number <= call.number",
            "true",
            "           held.until.number <= call.number",
        ),
        (
            (PAGING_CAPTURES + "::test_a_write_in_a_capture_to_what_has_left_before",),
            "lane-waits-for-no-other-capture",
            "call.capture != capture()",
            "false",
        ),
        (
            (
                PAGING_STREAMS + "::test_memory_of_one_stream_does_not_wait_for_another",
                PAGING_STREAMS + "::test_two_streams_take_turns",
                PAGING_STREAMS + "::test_a_pipeline_on_two_streams",
                PAGING_STREAMS + "::test_layers_on_two_streams",
                PAGING_STREAMS + "::test_one_stream_costs_nothing_more",
            ),
            "lane-joins-own-only",
            "held.compute == compute",
            "true",
            "if (held.compute == compute",
        ),
        (
            (
                PAGING_CAPTURES + "::test_a_capture_that_failed",
                PAGING_CAPTURES + "::test_a_capture_right_after_one_that_failed",
                PAGING_CAPTURES + "::test_eager_steps_between_replays",
                PAGING_CAPTURES + "::test_a_write_in_a_capture_to_what_has_left_before",
                PAGING_CAPTURES + "::test_a_forward_that_nobody_wants_before_a_capture",
            ),
            "lane-joins-capture-only",
            "held.until.capture == now",
            "true",
            "held.until.capture == now && held.until.number > last.number",
        ),
        (
            (
                PAGING_STREAMS + "::test_memory_of_another_stream_than_the_one_that_pages",
                PAGING_STREAMS + "::test_layers_on_two_streams",
                PAGING_POOLS + "::test_padded_memory_is_free_between_forward_and_backward",
                PAGING_STREAMS + "::test_one_stream_costs_nothing_more",
            ),
            "lane-joins-last",
            "held.until.number > last.number",
            "true",
        ),
        (
            (
                PAGING_CAPTURES + "::test_a_capture_right_after_one_that_failed",
                PAGING_CAPTURES + "::test_a_capture_that_failed",
                PAGING_CAPTURES + "::test_a_forward_that_nobody_wants_inside_a_capture",
                PAGING_CAPTURES + "::test_a_forward_that_nobody_wants_before_a_capture",
                PAGING_CAPTURES + "::test_replays_and_eager_steps_without_a_wait_between",
            ),
            "lane-join-all-of-now-only",
            "held.until.capture == now",
            "true",
            "{ return held.until.capture == now; }",
        ),
        (
            (
                PAGING_STREAMS + "::test_two_streams_take_turns",
                PAGING_STREAMS + "::test_what_never_had_to_come_back_is_let_go_behind_the_lane",
                PAGING_STREAMS + "::test_a_pipeline_on_two_streams",
                PAGING_STREAMS + "::test_layers_on_two_streams",
            ),
            "lane-has-waited-by-stream",
            "waited_->first == compute",
            "true",
        ),
        (
            (
                PAGING_CAPTURES + "::test_a_capture_right_after_one_that_failed",
                PAGING_CAPTURES + "::test_a_capture_that_failed",
                PAGING_CAPTURES + "::test_replays_and_eager_steps_without_a_wait_between",
                PAGING_CAPTURES + "::test_eager_steps_between_replays",
            ),
            "lane-has-waited-by-capture",
            "waited_->second.capture == now",
            "true",
        ),
        (
            (PAGING_STREAMS + "::test_what_never_had_to_come_back_is_let_go_behind_the_lane",),
            "lane-has-waited-long-enough",
            "waited_->second.number >= held.until.number",
            "true",
        ),
        (
            (PAGING_STREAMS + "::test_what_never_had_to_come_back_is_let_go_behind_the_lane",),
            "lane-must-wait",
            "mustWait",
            "false",
            "if (mustWait",
        ),
        (
            (PAGING_CAPTURES + "::test_replays_and_eager_steps_without_a_wait_between",),
            "lane-simply-waits",
            "simply",
            "false",
            ": simply)) {",
        ),
        (
            (PAGING_CAPTURES + "::test_a_capture_after_steps_with_an_optimizer",),
            "lane-capture-joins-all",
            "isCaptured()",
            "false",
            "now != 0 ? isCaptured()",
        ),
        (
            (
                PAGING_CAPTURES + "::test_a_forward_that_nobody_wants_inside_a_capture",
                PAGING_CAPTURES + "::test_a_capture_right_after_one_that_failed",
                PAGING_CAPTURES + "::test_a_capture_that_failed",
            ),
            "lane-joins-all-when-captured-only",
            "isCaptured()",
            "true",
            "now != 0 ? isCaptured()",
        ),
        (
            (PAGING_CAPTURES + "::test_memory_of_a_capture_that_failed_is_given_up",),
            "lane-join-all-lets-go",
            "letGo(isOfNow, compute);",
        ),
        (
            (PAGING_FAILURES + "::test_pools_that_go_while_something_is_on_its_way_back",),
            "lane-finishes",
            "stream_ && capture() == 0",
            "false",
        ),
        (
            (
                PAGING_CAPTURES + "::test_a_capture_after_steps_with_an_optimizer",
                PAGING_CAPTURES + "::test_a_captured_step_that_finds_no_room",
                PAGING_CAPTURES + "::test_a_capture_right_after_one_that_failed",
                PAGING_CAPTURES + "::test_two_graphs_on_two_streams",
                PAGING_CAPTURES + "::test_a_backward_in_a_capture_of_a_forward_before_it",
            ),
            "lane-finishes-outside-captures",
            "capture() == 0",
            "true",
            "stream_ && capture() == 0",
        ),
        (
            (
                PAGING_FAILURES + "::test_pools_that_go_while_something_is_on_its_way_back",
                PAGING_FAILURES + "::test_asking_a_device_that_failed_raises",
                PAGING_WAITS + "::test_a_bracketed_step_is_asked_about_before_its_end",
            ),
            "lane-finishes-what-goes-on",
            "goesOn_",
            "false",
            "(goesOn_ ||",
        ),
        (
            (PAGING_FAILURES + "::test_pools_that_go_while_something_is_on_its_way_back",),
            "lane-finishes-what-is-not-over",
            "over_ < last_",
            "false",
        ),
        (
            (
                PAGING_WAITS + "::test_the_host_neither_waits_nor_asks_in_a_steady_step",
                PAGING_WAITS + "::test_asking_waits_for_one_event_of_each_device",
                PAGING_WAITS + "::test_dropped_graphs_wait_for_nothing_either",
            ),
            "lane-finishes-once",
            "over_ < last_",
            "true",
        ),
        (
            (PAGING_CAPTURES + "::test_memory_of_a_capture_that_failed_is_given_up",),
            "lane-over-of-this-capture",
            "held.until.capture == call.capture",
            "true",
            "held.until.capture == call.capture && held.until.number <= call.number;",
        ),
        (
            (
                PAGING_WAITS + "::test_a_bracketed_step_is_asked_about_before_its_end",
                PAGING_STREAMS + "::test_what_never_had_to_come_back_is_let_go_behind_the_lane",
                PAGING_STREAMS + "::test_two_streams_take_turns",
            ),
            "lane-over-of-the-past",
            "held.until.number <= call.number",
            "true",
            "held.until.capture == call.capture && held.until.number <= call.number;",
        ),
        (
            (
                PAGING_CAPTURES + "::test_memory_of_a_capture_that_failed_is_given_up",
                PAGING_WAITS + "::test_dropped_graphs_wait_for_nothing_either",
                PAGING_WAITS + "::test_a_bracketed_step_is_asked_about_before_its_end",
                PAGING_STREAMS + "::test_what_never_had_to_come_back_is_let_go_behind_the_lane",
            ),
            "lane-over-lets-go",
            "letGo(isOver, std::nullopt);",
            "",
            "letGo(isOver, std::nullopt);\n  over_",
        ),
        (
            (
                PAGING_WAITS + "::test_the_host_neither_waits_nor_asks_in_a_steady_step",
                PAGING_WAITS + "::test_asking_waits_for_one_event_of_each_device",
                PAGING_WAITS + "::test_dropped_graphs_wait_for_nothing_either",
            ),
            "lane-over-is-known",
            "over_ = call.number;",
        ),
        (
            (PAGING_STREAMS + "::test_memory_of_another_stream_than_the_one_that_pages",),
            "lane-tells-allocator",
            "noteUse(storage, *user);",
        ),
        (
            (
                PAGING_FAILURES + "::test_a_graph_that_is_dropped_after_the_device_failed",
                PAGING_STREAMS + "::test_threads_of_two_devices",
            ),
            "lane-drops-behind-lock",
            "drops_.drop(storage);",
            "storage = c10::Storage();",
        ),
        (
            (PAGING_CAPTURES + "::test_a_capture_after_steps_with_an_optimizer",),
            "lane-asks-itself-whether-captured",
            "*stream_",
            "currentStream(device_)",
            "on(*stream_);\n  return",
        ),
        (
            (PAGING_CAPTURES + "::test_a_capture_that_failed",),
            "lane-capture-goes-on-without-compute",
            "!computes && capture_ == 0",
            "!computes",
        ),
        (
            (PAGING_CAPTURES + "::test_a_capture_right_after_one_that_failed",),
            "lane-numbers-captures",
            "++captures_",
            "1",
        ),
        (
            (PAGING_CAPTURES + "::test_a_capture_after_steps_with_an_optimizer",),
            "lane-keeps-its-capture",
            "!itself",
            "true",
        ),
        (
            (PAGING_CAPTURES + "::test_memory_of_a_capture_that_failed_is_given_up",),
            "lane-lets-go-of-old-captures",
            "letGo(isOver, std::nullopt);",
            "",
            "letGo(isOver, std::nullopt);\n  return capture_;",
        ),
        (
            (
                PAGING_CAPTURES + "::test_a_capture_after_steps_with_an_optimizer",
                PAGING_CAPTURES + "::test_a_capture_right_after_one_that_failed",
            ),
            "lane-lets-go-of-captures-only",
            "held.until.capture != 0",
            "true",
        ),
    ],
    "src/paging/streams.cpp": [
        (
            (PAGING_STREAMS + "::test_what_leaves_when_the_region_ends",),
            "streams-take-over-waits",
            "recordEvent(made)->block(user);",
        ),
        (
            (
                PAGING_CAPTURES + "::test_a_bracketed_step_with_what_comes_back_ahead",
                PAGING_CAPTURES + "::test_a_backward_in_a_capture_of_a_forward_before_it",
                PAGING_CAPTURES + "::test_two_graphs_on_two_streams",
                PAGING_CAPTURES + "::test_a_capture_before_any_step",
            ),
            "streams-take-over-not-in-a-capture",
            "!isCapturing(made.device())",
            "true",
        ),
        (
            (PAGING_STREAMS + "::test_what_leaves_when_the_region_ends",),
            "streams-take-over-tells",
            "noteUse(storage, user);",
            "",
            "noteUse(storage, user);\n}\n\n}",
        ),
        (
            (
                PAGING_STREAMS + "::test_one_stream_costs_nothing_more",
                PAGING_WAITS + "::test_the_host_neither_waits_nor_asks_in_a_steady_step",
            ),
            "streams-take-over-of-its-own",
            "user == made",
            "false",
        ),
    ],
    "src/paging/tracked_pool.cpp": [
        (
            (
                PAGING_STREAMS
                + "::test_pools_serve_a_stream_that_has_not_waited_for_the_one_that_made_them",
            ),
            "pool-made-on-the-lane",
            "lane.give([&] { pages_.emplace(options); });",
            "pages_.emplace(options);",
        ),
        (
            (PAGING_FAILURES + "::test_pools_that_go_while_something_is_on_its_way_back",),
            "pool-finishes-before-it-goes",
            "lane_.finish();",
        ),
        (
            (PAGING_CAPTURES + "::test_asking_right_after_a_replay",),
            "pool-of-graphs-behind-compute",
            "captured_",
            "false",
            "return captured_ ? PageLane",
        ),
        (
            (PAGING_STREAMS + "::test_two_streams_take_turns",),
            "pool-ticket-on-the-lane",
            "lane_.give([&] { slot->ticket = pages_->makeTicket(whole.count); });",
            "slot->ticket = pages_->makeTicket(whole.count);",
        ),
        (
            (PAGING_CAPTURES + "::test_a_forward_that_nobody_wants_before_a_capture",),
            "pool-stash-settles-freed",
            "settleFreed();",
            "",
            "settleFreed();\n  auto slot",
        ),
        (
            (
                PAGING_CAPTURES + "::test_a_capture_after_steps_with_an_optimizer",
                PAGING_CAPTURES + "::test_asking_right_after_a_replay",
                PAGING_CAPTURES + "::test_a_backward_inside_a_capture_that_is_not_whole",
                PAGING_CAPTURES + "::test_replays_and_eager_steps_without_a_wait_between",
                PAGING_CAPTURES + "::test_a_forward_that_nobody_wants_inside_a_capture",
            ),
            "pool-stash-knows-captures",
            "captured_ |= lane_.capture() != 0;",
        ),
        (
            (PAGING_WAITS + "::test_a_bracketed_step_is_asked_about_before_its_end",),
            "pool-stash-uses",
            "used_ = true;",
            "",
            "used_ = true;\n  if (options().isStack)",
        ),
        (
            (PAGING_CAPTURES + "::test_a_capture_after_steps_with_an_optimizer",),
            "pool-stash-holds-source",
            "storage",
            "c10::Storage()",
            "{storage, count",
        ),
        (
            (PAGING_CAPTURES + "::test_a_capture_after_steps_with_an_optimizer",),
            "pool-stash-holds-count",
            "count.storage()",
            "c10::Storage()",
            "{storage, count.storage()}",
        ),
        (
            (
                PAGING_FAILURES + "::test_a_backward_on_a_device_that_failed",
                PAGING_FAILURES + "::test_asking_a_device_that_failed_raises",
            ),
            "pool-stash-frees-after-an-error",
            "free(slot);",
            "",
            "free(slot);  // it may",
        ),
        (
            (
                PAGING_CAPTURES + "::test_a_forward_that_nobody_wants_inside_a_capture",
                PAGING_CAPTURES + "::test_a_forward_that_nobody_wants_before_a_capture",
                PAGING_CAPTURES + "::test_a_backward_inside_a_capture_that_is_not_whole",
                PAGING_STREAMS + "::test_a_graph_that_is_dropped_on_another_stream",
            ),
            "pool-restore-settles-freed",
            "settleFreed();",
            "",
            "settleFreed();\n  const bool onTop",
        ),
        (
            (
                PAGING_POOLS + "::test_counts_that_cannot_be_show_in_the_end",
                PAGING_POOLS + "::test_the_flag_of_a_device",
                PAGING_WAITS + "::test_a_bracketed_step_is_asked_about_before_its_end",
            ),
            "pool-restore-uses",
            "used_ = true;",
            "",
            "used_ = true;\n  const PageLane::Call call",
        ),
        (
            (PAGING_STREAMS + "::test_a_pipeline_on_two_streams",),
            "pool-restore-keeps-pages-below-top",
            "options().isStack && !onTop",
            "false",
        ),
        (
            (PAGING_CAPTURES + "::test_a_backward_in_a_capture_of_a_forward_before_it",),
            "pool-restore-knows-captures",
            "captured_ |= call.capture != 0;",
        ),
        (
            (PAGING_CAPTURES + "::test_a_backward_in_a_capture_of_a_forward_before_it",),
            "pool-restore-keeps-tickets-of-others",
            "kept_.push_back(slot);",
            "",
            "kept_.push_back(slot);\n    slot->stashed",
        ),
        (
            (PAGING_CAPTURES + "::test_a_backward_in_a_capture_of_a_forward_before_it",),
            "pool-restore-is-the-graphs",
            "slot->stashed.capture = call.capture;",
        ),
        (
            (PAGING_STREAMS + "::test_two_streams_take_turns",),
            "pool-restore-frees-slot",
            "slot->free = true;",
        ),
        (
            (
                PAGING_CAPTURES + "::test_a_forward_that_nobody_wants_before_a_capture",
                PAGING_WAITS + "::test_dropped_graphs_wait_for_nothing_either",
                PAGING_STREAMS + "::test_a_graph_that_is_dropped_on_another_stream",
                PAGING_STREAMS + "::test_what_never_had_to_come_back_is_let_go_behind_the_lane",
            ),
            "pool-frees-once",
            "!std::exchange(slot->free, true)",
            "std::exchange(slot->free, true) || true",
        ),
        (
            (PAGING_CAPTURES + "::test_a_capture_right_after_one_that_failed",),
            "pool-gives-back-what-is-of-now",
            "(of == 0 || of == now)",
            "true",
        ),
        (
            (PAGING_CAPTURES + "::test_a_forward_that_nobody_wants_before_a_capture",),
            "pool-gives-back-for-a-graph",
            "(of == 0 || of == now)",
            "of == now",
        ),
        (
            (PAGING_CAPTURES + "::test_pages_that_a_graph_gives_back_once",),
            "pool-gives-back-once-in-a-graph",
            "(now == 0 || slot->givenBackIn != now)",
            "true",
        ),
        (
            (
                PAGING_CAPTURES + "::test_a_forward_that_nobody_wants_before_a_capture",
                PAGING_CAPTURES + "::test_replays_and_eager_steps_without_a_wait_between",
                PAGING_CAPTURES + "::test_eager_steps_between_replays",
            ),
            "pool-give-back-behind-graphs",
            "afterGraphs()",
            "PageLane::After::Nothing",
            "giveBack(slot->ticket); }, afterGraphs()",
        ),
        (
            (PAGING_CAPTURES + "::test_a_graph_that_only_gives_back_pages_of_a_pool",),
            "pool-give-back-knows-captures",
            "captured_ = true;",
        ),
        (
            (PAGING_CAPTURES + "::test_a_forward_that_nobody_wants_before_a_capture",),
            "pool-give-back-keeps-ticket",
            "kept_.push_back(slot);",
            "",
            "captured_ = true;\n      kept_.push_back(slot);",
        ),
        (
            (PAGING_CAPTURES + "::test_a_forward_that_nobody_wants_before_a_capture",),
            "pool-give-back-again-outside",
            "stays.push_back(slot);",
        ),
        (
            (
                PAGING_POOLS + "::test_an_assertion_on_the_device",
                PAGING_CAPTURES + "::test_replays_and_eager_steps_without_a_wait_between",
            ),
            "pool-assert-behind-graphs",
            "afterGraphs()",
            "PageLane::After::Nothing",
            "assertOnDevice, afterGraphs()",
        ),
        (
            (PAGING_CAPTURES + "::test_asking_right_after_a_replay",),
            "pool-flags-behind-graphs",
            "afterGraphs()",
            "PageLane::After::Nothing",
            "true); }, afterGraphs()",
        ),
        (
            (PAGING_WAITS + "::test_asking_between_forward_and_backward_waits_for_pools_alone",),
            "pool-flags-behind-nothing-else",
            "afterGraphs()",
            "PageLane::After::Compute",
            "true); }, afterGraphs()",
        ),
        (
            (PAGING_WAITS + "::test_the_host_neither_waits_nor_asks_in_a_steady_step",),
            "pool-flags-do-not-block",
            "true",
            "false",
            "pages_->flags(), true)",
        ),
        (
            (PAGING_WAITS + "::test_asking_waits_for_one_event_of_each_device",),
            "pool-reading-resets-used",
            "used_ = false;",
            "",
            "reading_ = std::move(copied);\n  used_ = false;",
        ),
        (
            (PAGING_WAITS + "::test_asking_waits_for_one_event_of_each_device",),
            "pool-reads-once",
            "reading_.reset();",
        ),
        (
            (
                PAGING_POOLS + "::test_the_flag_of_a_device",
                PAGING_CAPTURES + "::test_a_captured_step_that_finds_no_room",
                PAGING_POOLS + "::test_counts_that_cannot_be_show_in_the_end",
            ),
            "pool-errors-are-read-again",
            "used_ |= flags[0] != 0;",
        ),
        (
            (
                PAGING_CAPTURES + "::test_a_captured_step_that_finds_no_room",
                PAGING_CAPTURES + "::test_eager_steps_between_replays",
                PAGING_CAPTURES + "::test_replays_and_eager_steps_without_a_wait_between",
            ),
            "pool-reset-behind-graphs",
            "afterGraphs()",
            "PageLane::After::Nothing",
            "reset(); }, afterGraphs()",
        ),
        (
            (
                PAGING_CAPTURES + "::test_a_captured_step_that_finds_no_room",
                PAGING_CAPTURES + "::test_eager_steps_between_replays",
            ),
            "pool-reset-before-graphs",
            "lane_.joinAll(captured_);",
        ),
        (
            (
                PAGING_CAPTURES + "::test_a_captured_step_that_finds_no_room",
                PAGING_WAITS + "::test_asking_waits_for_one_event_of_each_device",
            ),
            "pool-reset-resets-used",
            "used_ = false;",
            "",
            "joinAll(captured_);\n  used_ = false;",
        ),
    ],
    "src/paging/tracked_pool.h": [
        (
            (PAGING_CAPTURES + "::test_a_backward_in_a_capture_of_a_forward_before_it",),
            "pool-graphs-may-have-changed",
            "used_ || captured_",
            "used_",
        ),
    ],
    "src/paging/pool_set.cpp": [
        (
            (PAGING_WAITS + "::test_asking_waits_for_one_event_of_each_device",),
            "set-waits-for-flags",
            "end->synchronize();",
        ),
        (
            (
                PAGING_WAITS + "::test_the_host_neither_waits_nor_asks_in_a_steady_step",
                PAGING_WAITS + "::test_asking_waits_for_one_event_of_each_device",
                PAGING_WAITS + "::test_dropped_graphs_wait_for_nothing_either",
                PAGING_FAILURES + "::test_pools_that_go_while_something_is_on_its_way_back",
            ),
            "set-notes-over",
            "pool.lane().noteOver(*pool.reading());",
        ),
        (
            (PAGING_WAITS + "::test_asking_waits_for_one_event_of_each_device",),
            "set-waits-once-for-a-device",
            "end != over",
            "true",
        ),
        (
            (PAGING_CAPTURES + "::test_replays_and_eager_steps_without_a_wait_between",),
            "set-reads-flags-of-graphs-when-asked",
            "!pool.isCaptured()",
            "true",
        ),
        (
            (PAGING_WAITS + "::test_asking_waits_for_one_event_of_each_device",),
            "set-reads-what-changed-only",
            "pool.mayHaveChanged()",
            "true",
            "{ return pool.mayHaveChanged(); }",
        ),
        (
            (
                PAGING_STREAMS + "::test_one_stream_costs_nothing_more",
                PAGING_WAITS + "::test_the_host_neither_waits_nor_asks_in_a_steady_step",
                PAGING_WAITS + "::test_a_steady_step_makes_no_events",
            ),
            "set-settle-reads-what-changed-only",
            "pool.mayHaveChanged()",
            "true",
            "!pool.isCaptured() && pool.mayHaveChanged()",
        ),
        (
            (PAGING_FAILURES + "::test_kernels_that_cannot_run_show_in_the_first_forward",),
            "set-tries-kernels-out",
            "tryOut(device);",
        ),
        (
            (PAGING_CAPTURES + "::test_a_capture_before_any_step",),
            "set-tries-nothing-in-a-capture",
            "!ebb::isCapturing(device)",
            "true",
        ),
        (
            (PAGING_FAILURES + "::test_no_pinned_memory_for_the_second_tier",),
            "set-without-second-tier",
            "options.hostPages > 0",
            "false",
        ),
        (
            (PAGING_CAPTURES + "::test_replays_and_eager_steps_without_a_wait_between",),
            "set-joins-behind-graphs",
            "ofGraphs.insert(&pool.lane());",
        ),
        (
            (PAGING_CAPTURES + "::test_a_forward_that_nobody_wants_before_a_capture",),
            "set-settles-freed",
            "pool.settleFreed();",
        ),
        (
            (PAGING_CAPTURES + "::test_a_capture_after_steps_with_an_optimizer",),
            "set-joins-all",
            "lane.joinAll(ofGraphs.count(&lane) > 0);",
        ),
        (
            (
                PAGING_WAITS + "::test_asking_waits_for_pools_alone",
                PAGING_WAITS + "::test_asking_waits_for_one_event_of_each_device",
            ),
            "set-reads-ahead",
            "!isCapturing()",
            "false",
        ),
        (
            (PAGING_CAPTURES + "::test_a_capture_after_steps_with_an_optimizer",),
            "set-reads-nothing-in-a-capture",
            "!isCapturing()",
            "true",
        ),
        (
            (PAGING_POOLS + "::test_padded_memory_is_free_between_forward_and_backward",),
            "set-joins-lanes",
            "lane.join();",
        ),
        (
            (PAGING_CAPTURES + "::test_asking_while_a_graph_is_captured",),
            "set-asks-nothing-in-a-capture",
            "isCapturing()",
            "false",
            "if (isCapturing()) {",
        ),
        (
            (PAGING_CAPTURES + "::test_a_captured_step_that_finds_no_room",),
            "set-retires-pools-of-graphs",
            "pool->isCaptured()",
            "false",
        ),
        (
            (PAGING_FAILURES + "::test_pools_that_go_while_something_is_on_its_way_back",),
            "set-condemns",
            "pool->condemn();",
        ),
        (
            (PAGING_CAPTURES + "::test_a_captured_step_that_finds_no_room",),
            "set-resets-retired",
            "pool->reset();",
        ),
        (
            (PAGING_CAPTURES + "::test_a_captured_step_that_finds_no_room",),
            "set-visits-retired",
            "visit(*pool);",
            "",
            "retired_) {\n    visit(*pool);",
        ),
        (
            (PAGING_WAITS + "::test_each_wait_that_is_left_out_shows",),
            "set-reads-before-pools-go",
            "readErrors()",
            "int64_t{0}",
            "int64_t errors = readErrors();\n  for",
        ),
        (
            (PAGING_POOLS + "::test_the_flag_of_a_device",),
            "set-flag-of-its-device",
            "pool.options().device == errors.device()",
            "true",
        ),
        (
            (PAGING_WAITS + "::test_each_wait_that_is_left_out_shows",),
            "set-flag-waits",
            "lane.wait(lane.run(add, {errors.storage()}));",
            "lane.run(add, {errors.storage()});",
        ),
        (
            (PAGING_WAITS + "::test_each_wait_that_is_left_out_shows",),
            "set-flag-behind-compute",
            "lane.wait(lane.run(add, {errors.storage()}));",
            "lane.give(add); lane.wait(lane.mark());",
        ),
    ],
    "src/paging/paging.cpp": [
        (
            (PAGING_CAPTURES + "::test_a_forward_that_nobody_wants_inside_a_capture",),
            "engine-forget-settles-in-a-capture",
            "pool->settleFreed();",
        ),
        (
            (PAGING_CAPTURES + "::test_a_forward_that_nobody_wants_inside_a_capture",),
            "engine-forget-joins-in-a-capture",
            "pool->lane().joinAll();",
        ),
        (
            (
                PAGING_WAITS + "::test_dropped_graphs_wait_for_nothing_either",
                PAGING_FAILURES + "::test_a_graph_that_is_dropped_after_the_device_failed",
                PAGING_CAPTURES + "::test_what_a_capture_has_paged_does_not_come_back_outside",
            ),
            "engine-forget-asks-which-capture",
            "capture == pool->lane().capture()",
            "true",
        ),
        (
            (PAGING_STREAMS + "::test_a_pipeline_on_two_streams",),
            "engine-restored-tells",
            "noteUse(stash.bytes);",
            "",
            "noteUse(stash.bytes);\n  noteMade",
        ),
        (
            (
                PAGING_STREAMS + "::test_another_stream_asks_again",
                PAGING_STREAMS + "::test_another_stream_asks",
            ),
            "engine-restored-made",
            "noteMade(stash);",
            "",
            "noteUse(stash.bytes);\n  noteMade(stash);",
        ),
        (
            (PAGING_STREAMS + "::test_what_leaves_when_the_region_ends",),
            "engine-copy-tells-source",
            "noteUse(source.storage);",
        ),
        (
            (PAGING_STREAMS + "::test_what_leaves_when_the_region_ends",),
            "engine-copy-made",
            "noteMade(stash);",
            "",
            "noteMade(stash);\n  if (live > 0)",
        ),
        (
            (PAGING_STREAMS + "::test_another_stream_asks",),
            "engine-copied-taken-over",
            "takeOver(stash);",
            "",
            "takeOver(stash);\n  stash.bytes",
        ),
        (
            (
                PAGING_STREAMS + "::test_another_stream_asks_again",
                PAGING_STREAMS + "::test_another_stream_asks",
                PAGING_STREAMS + "::test_what_leaves_when_the_region_ends",
            ),
            "engine-copied-back-made",
            "noteMade(stash);",
            "",
            "deadRows));\n  noteMade(stash);",
        ),
        (
            (PAGING_STREAMS + "::test_another_stream_asks_again",),
            "engine-back-taken-over",
            "takeOver(stash);",
            "",
            "State::Back) {\n    takeOver(stash);",
        ),
        (
            (
                PAGING_STREAMS + "::test_what_came_back_ahead_for_another_stream",
                PAGING_WAITS + "::test_each_wait_that_is_left_out_shows",
            ),
            "engine-resident-taken-over",
            "takeOver(stash);",
            "",
            "State::Resident) {\n    takeOver(stash);",
        ),
        (
            (PAGING_WAITS + "::test_each_wait_that_is_left_out_shows",),
            "engine-write-waits",
            "stash.pool->lane().wait(stash.slot->stashed);",
        ),
        (
            (PAGING_STEPS,),
            "engine-write-copies-resident",
            "stash.state == State::Resident",
            "false",
            "if (stash.state == State::Resident) {\n    c10::Storage copy",
        ),
        (
            (PAGING_STREAMS + "::test_what_leaves_when_the_region_ends",),
            "engine-write-tells",
            "noteUse(stash.bytes);",
            "",
            "noteUse(stash.bytes);\n    mutex_",
        ),
        (
            (PAGING_STREAMS + "::test_what_leaves_when_the_region_ends",),
            "engine-write-made",
            "noteMade(stash);",
            "",
            "std::move(copy);\n    noteMade(stash);",
        ),
        (
            (PAGING_THREADS,),
            "engine-write-drops-behind-lock",
            "mutex_.drop(stash.bytes);",
            "",
            "mutex_.drop(stash.bytes);\n    stash.bytes",
        ),
        (
            (PAGING_FAILURES + "::test_no_memory_for_what_comes_back_ahead",),
            "engine-ahead-without-memory",
            "outOfMemoryIn_ = step_.number();",
            "throw;",
        ),
        (
            (PAGING_FAILURES + "::test_no_memory_for_what_comes_back_ahead",),
            "engine-ahead-no-more-this-step",
            "outOfMemoryIn_ == step_.number()",
            "false",
        ),
        (
            (
                PAGING_STREAMS + "::test_a_graph_that_is_dropped_on_another_stream",
                PAGING_STREAMS + "::test_what_came_back_ahead_for_another_stream",
            ),
            "engine-restoring-made",
            "noteMade(stash);",
            "",
            "noteMade(stash);\n    stash.restoring",
        ),
        (
            (PAGING_CAPTURES + "::test_what_a_capture_has_paged_does_not_come_back_outside",),
            "engine-restores-in-its-capture",
            "capture == 0 || lane.capture() != 0",
            "true",
        ),
        (
            (PAGING_CAPTURES + "::test_a_capture_after_steps_with_an_optimizer",),
            "engine-waits-for-restored",
            "lane.wait(stash.restoring);",
        ),
        (
            (PAGING_POOLS + "::test_padded_memory_is_free_between_forward_and_backward",),
            "engine-layer-joins",
            "pools_.joinLanes();",
        ),
        (
            (PAGING_POOLS + "::test_dead_rows_that_are_to_show",),
            "engine-filled-dead-rows-wait",
            "pool->lane().wait(stash.slot->stashed);",
            "",
            "pool->lane().wait(stash.slot->stashed);  // what",
        ),
        (
            (PAGING_FAILURES + "::test_a_graph_that_is_dropped_after_the_device_failed",),
            "engine-give-up-holds",
            "stash.pool->lane().hold(stash.restoring, *stash.made, stash.bytes);",
        ),
        (
            (PAGING_CAPTURES + "::test_a_forward_that_nobody_wants_before_a_capture",),
            "engine-give-up-frees-slot",
            "stash.pool->free(stash.slot);",
        ),
        (
            (
                PAGING_STREAMS + "::test_what_never_had_to_come_back_is_let_go_behind_the_lane",
                PAGING_STREAMS + "::test_another_stream_asks",
            ),
            "engine-give-up-forgets-stream",
            "stash.made.reset();",
        ),
        (
            (PAGING_THREADS,),
            "engine-give-up-drops-behind-lock",
            "mutex_.drop(stash.bytes);",
            "stash.bytes = c10::Storage();",
            "mutex_.drop(stash.bytes);\n  stash.made",
        ),
        (
            (PAGING_CAPTURES + "::test_a_capture_before_any_step",),
            "engine-copy-refuses-captures",
            "!isCapturing(stash.device)",
            "true",
            "      !isCapturing(stash.device),",
        ),
        (
            (PAGING_OVERFLOW,),
            "engine-blocking-outside-captures",
            "!isCapturing(stash.device)",
            "true",
            "Blocking && !isCapturing(stash.device)",
        ),
        (
            (PAGING_CAPTURES + "::test_a_capture_before_any_step",),
            "engine-record-refuses-captures",
            "!pools_.isCapturing()",
            "true",
            '!pools_.isCapturing(),\n        "ebb: a step',
        ),
        (
            (PAGING_CAPTURES + "::test_asking_while_a_graph_is_captured",),
            "engine-step-ok-refuses-captures",
            "!pools_.isCapturing()",
            "true",
            '!pools_.isCapturing(),\n      "ebb: step_ok',
        ),
        (
            (PAGING_FAILURES + "::test_pools_that_go_while_something_is_on_its_way_back",),
            "engine-condemned-refused",
            "condemned == 0",
            "true",
            "condemned == 0,",
        ),
        (
            (PAGING_CAPTURES + "::test_a_capture_after_steps_with_an_optimizer",),
            "engine-settles",
            "pools_.settle();",
        ),
        (
            (PAGING_OVERFLOW,),
            "engine-error-of-pools-that-go",
            "unreportedErrors_ |= pools_.drop() & ~reportedErrors_;",
            "pools_.drop();",
            "unreportedErrors_ |= pools_.drop() & ~reportedErrors_;\n  }",
        ),
        (
            (PAGING_WAITS + "::test_each_wait_that_is_left_out_shows",),
            "engine-error-of-a-reset",
            "unreportedErrors_ |= pools_.drop() & ~reportedErrors_;",
            "pools_.drop();",
            "unreportedErrors_ |= pools_.drop() & ~reportedErrors_;\n  pools_.clear",
        ),
        (
            (PAGING_OVERFLOW + "::test_tensors_without_a_nan_raise_instead",),
            "engine-integers-show-errors",
            "stash.pool->errorsInSight()",
            "0",
            "stash.hasNan() ? 0 : stash.pool->errorsInSight()",
        ),
        (
            (PAGING_POOLS + "::test_pools_are_made_where_tensors_are",),
            "engine-below-send",
            "belowEverything()",
            "c10::impl::ForceDispatchKeyGuard(c10::impl::tls_local_dispatch_key_set())",
            "PageGroupPtr& group) {\n  const Lock lock(mutex_);\n  const auto below = belowEverything();",
        ),
        (
            (
                PAGING_POOLS + "::test_pools_are_made_where_tensors_are",
                PAGING_FAILURES + "::test_a_backward_on_a_device_that_failed",
            ),
            "engine-below-fetch",
            "belowEverything()",
            "c10::impl::ForceDispatchKeyGuard(c10::impl::tls_local_dispatch_key_set())",
            "c10::Storage& living) {\n  const Lock lock(mutex_);\n  const auto below = belowEverything();",
        ),
        (
            (
                PAGING_POOLS + "::test_pools_are_made_where_tensors_are",
                PAGING_FAILURES + "::test_a_backward_on_a_device_that_failed",
            ),
            "engine-below-write",
            "belowEverything()",
            "c10::impl::ForceDispatchKeyGuard(c10::impl::tls_local_dispatch_key_set())",
            "beforeWrite(PageStash& stash) {\n  const Lock lock(mutex_);\n  const auto below = belowEverything();",
        ),
        (
            (
                PAGING_POOLS + "::test_pools_are_made_where_tensors_are",
                PAGING_FAILURES + "::test_a_backward_on_a_device_that_failed",
            ),
            "engine-below-begin",
            "belowEverything()",
            "c10::impl::ForceDispatchKeyGuard(c10::impl::tls_local_dispatch_key_set())",
            "beginStep(bool fixedOrder) {\n  const Lock lock(mutex_);\n  const auto below = belowEverything();",
        ),
        (
            (
                PAGING_POOLS + "::test_pools_are_made_where_tensors_are",
                PAGING_FAILURES + "::test_a_backward_on_a_device_that_failed",
            ),
            "engine-below-end",
            "belowEverything()",
            "c10::impl::ForceDispatchKeyGuard(c10::impl::tls_local_dispatch_key_set())",
            "endStep() {\n  const Lock lock(mutex_);\n  const auto below = belowEverything();",
        ),
        (
            (
                PAGING_POOLS + "::test_pools_are_made_where_tensors_are",
                PAGING_FAILURES + "::test_a_backward_on_a_device_that_failed",
            ),
            "engine-below-ok",
            "belowEverything()",
            "c10::impl::ForceDispatchKeyGuard(c10::impl::tls_local_dispatch_key_set())",
            "stepOk() {\n  const Lock lock(mutex_);\n  const auto below = belowEverything();",
        ),
        (
            (
                PAGING_POOLS + "::test_pools_are_made_where_tensors_are",
                PAGING_FAILURES + "::test_a_backward_on_a_device_that_failed",
            ),
            "engine-below-errors",
            "belowEverything()",
            "c10::impl::ForceDispatchKeyGuard(c10::impl::tls_local_dispatch_key_set())",
            "Paging::errors() {\n  const Lock lock(mutex_);\n  const auto below = belowEverything();",
        ),
        (
            (
                PAGING_POOLS + "::test_pools_are_made_where_tensors_are",
                PAGING_FAILURES + "::test_a_backward_on_a_device_that_failed",
            ),
            "engine-below-told",
            "belowEverything()",
            "c10::impl::ForceDispatchKeyGuard(c10::impl::tls_local_dispatch_key_set())",
            "wasTold() {\n  const Lock lock(mutex_);\n  const auto below = belowEverything();",
        ),
        (
            (
                PAGING_POOLS + "::test_pools_are_made_where_tensors_are",
                PAGING_FAILURES + "::test_a_backward_on_a_device_that_failed",
            ),
            "engine-below-flag",
            "belowEverything()",
            "c10::impl::ForceDispatchKeyGuard(c10::impl::tls_local_dispatch_key_set())",
            "foundInf(c10::Device device) {\n  const Lock lock(mutex_);\n  const auto below = belowEverything();",
        ),
        (
            (
                PAGING_POOLS + "::test_pools_are_made_where_tensors_are",
                PAGING_FAILURES + "::test_a_backward_on_a_device_that_failed",
            ),
            "engine-below-reset",
            "belowEverything()",
            "c10::impl::ForceDispatchKeyGuard(c10::impl::tls_local_dispatch_key_set())",
            'reset after it.");\n  const auto below = belowEverything();',
        ),
    ],
    "src/paging/pool/pool.cpp": [
        (
            (PAGING_POOLS + "::test_rows_go_and_come_back",),
            "pool-guard-stash",
            "options_.device",
            "c10::impl::VirtualGuardImpl(options_.device.type()).getDevice()",
            "const at::Tensor& rows) {\n  const c10::DeviceGuard here(options_.device);",
        ),
        (
            (PAGING_POOLS + "::test_rows_go_and_come_back",),
            "pool-guard-restore",
            "options_.device",
            "c10::impl::VirtualGuardImpl(options_.device.type()).getDevice()",
            "PageFill fill) {\n  const c10::DeviceGuard here(options_.device);",
        ),
        (
            (PAGING_POOLS + "::test_a_kernel_is_launched_on_the_device_of_the_pool_on_any_stream",),
            "pool-guard-give-back",
            "options_.device",
            "c10::impl::VirtualGuardImpl(options_.device.type()).getDevice()",
            "giveBack(PageTicket& ticket) {\n  const c10::DeviceGuard here(options_.device);",
        ),
        (
            (PAGING_POOLS + "::test_a_kernel_is_launched_on_the_device_of_the_pool_on_any_stream",),
            "pool-guard-reset",
            "options_.device",
            "c10::impl::VirtualGuardImpl(options_.device.type()).getDevice()",
            "PagePool::reset() {\n  const c10::DeviceGuard here(options_.device);",
        ),
        (
            (
                PAGING_FAILURES + "::test_kernels_that_cannot_run_show_in_the_first_forward",
                PAGING_POOLS + "::test_rows_go_and_come_back",
            ),
            "pool-warms-up",
            "warmUp();",
            "",
            "reset();\n  warmUp();",
        ),
        (
            (PAGING_POOLS + "::test_rows_go_and_come_back",),
            "pool-names-its-device",
            "!options.device.has_index()",
            "false",
        ),
        (
            (
                PAGING_POOLS + "::test_rows_go_and_come_back",
                PAGING_POOLS
                + "::test_a_kernel_is_launched_on_the_device_of_the_pool_on_any_stream",
            ),
            "pool-stream-of-its-device",
            "options_.device",
            "guard.getDevice()",
            "guard.getStream(options_.device)",
        ),
    ],
    "src/paging/page_stash.cpp": [
        (
            (
                PAGING_WAITS + "::test_dropped_graphs_wait_for_nothing_either",
                PAGING_STREAMS + "::test_what_never_had_to_come_back_is_let_go_behind_the_lane",
            ),
            "stash-destructor-forgets",
            "Paging::get().forget(*this);",
        ),
    ],
}


def places() -> Iterator[Mutant]:
    for file, rows in PLACES.items():
        for tests, name, text, *more in rows:
            yield Mutant(name, file, text, tests, *more)


MUTANTS = tuple(places())
