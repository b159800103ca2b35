# ruff: noqa: E501
"""PAGE: pools, what is read of them, and when they go."""

from __future__ import annotations

from mutant import Places, mutants_at

PAGING_BESIDE_CAPTURES = "tests/accelerator/test_paging_beside_captures.py"
PAGING_CAPTURES = "tests/accelerator/test_paging_captures.py"
PAGING_COSTS = "tests/accelerator/test_paging_costs.py"
PAGING_FAILURES = "tests/accelerator/test_paging_failures.py"
PAGING_OVERFLOW = "tests/paging/test_paging_overflow.py"
PAGING_POOLS = "tests/accelerator/test_paging_pools.py"
PAGING_REGRESSIONS = "tests/paging/test_paging_regressions.py"
PAGING_STEPS = "tests/paging/test_paging_steps.py"
PAGING_STREAMS = "tests/accelerator/test_paging_streams.py"
PAGING_WAITS = "tests/accelerator/test_paging_waits.py"

TESTS = (
    PAGING_BESIDE_CAPTURES,
    PAGING_CAPTURES,
    PAGING_COSTS,
    PAGING_FAILURES,
    PAGING_OVERFLOW,
    PAGING_POOLS,
    PAGING_REGRESSIONS,
    PAGING_STEPS,
    PAGING_STREAMS,
    PAGING_WAITS,
)

# What each of these must be in.
EACH = dict.fromkeys(
    (
        "src/paging/tracked_pool.cpp",
        "src/paging/pool_set.cpp",
        "src/paging/pool/pool.cpp",
    ),
    r"(?<!void )\b(noteUse|noteMade)\((?=stash|source|storage, user\);)|\bjoin(Lanes)?\(\);|joinAll\((?!bool)|\blane\(\)\.wait\(",
)

PLACES: Places = {
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
                PAGING_BESIDE_CAPTURES
                + "::test_a_graph_of_a_forward_that_nobody_wants_keeps_its_pools",
            ),
            "pool-stash-knows-captures",
            "captured_ |= lane_.capture() != 0;",
        ),
        (
            (PAGING_WAITS + "::test_a_bracketed_step_is_asked_about_before_its_end",),
            "pool-stash-uses",
            "flags_.mayHaveChanged = true;",
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
            (PAGING_FAILURES + "::test_a_kernel_that_fails_in_forward",),
            "pool-stash-frees-after-an-error",
            "free(slot);",
            "",
            "free(slot);  // the failed",
        ),
        (
            (PAGING_STREAMS + "::test_a_pipeline_on_two_streams",),
            "pool-restore-keeps-pages-below-top",
            "options().isStack && !onTop",
            "false",
        ),
        (
            (PAGING_WAITS + "::test_each_wait_that_is_left_out_shows",),
            "pool-restore-after-compute",
            "PageLane::After::Compute",
            "PageLane::After::Nothing",
            "give(copyBack, PageLane::After::Compute)",
        ),
        (
            (PAGING_BESIDE_CAPTURES + "::test_a_graph_of_a_backward_keeps_its_pools",),
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
            "",
            "slot->free = true;\n  if (onTop)",
        ),
        (
            (PAGING_CAPTURES + "::test_a_forward_that_nobody_wants_before_a_capture",),
            "pool-free-marks-slot",
            "slot->free = true;",
            "",
            "slot->free = true;\n  freed_",
        ),
        (
            (PAGING_STEPS + "::test_unneeded_graphs_give_their_pages_back",),
            "pool-free-lists-slot",
            "freed_.push_back(slot);",
        ),
        (
            (PAGING_CAPTURES + "::test_a_capture_that_failed",),
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
            (PAGING_BESIDE_CAPTURES + "::test_pages_are_given_back_behind_a_replay",),
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
            (PAGING_BESIDE_CAPTURES + "::test_a_replay_between_a_forward_and_its_backward",),
            "pool-graphs-wait",
            "captured_",
            "false",
            "if (captured_ && lane_",
        ),
        (
            (PAGING_BESIDE_CAPTURES + "::test_a_captured_step_waits_no_more_than_an_eager_one",),
            "pool-graphs-wait-outside-captures",
            "lane_.capture() == 0",
            "true",
            "captured_ && lane_.capture() == 0",
        ),
        (
            (PAGING_CAPTURES + "::test_asking_right_after_a_replay",),
            "pool-flags-behind-graphs",
            "afterGraphs()",
            "PageLane::After::Nothing",
            "pages_->flags(), true); }, afterGraphs()",
        ),
        (
            (PAGING_WAITS + "::test_asking_between_forward_and_backward_waits_for_pools_alone",),
            "pool-flags-behind-nothing-else",
            "afterGraphs()",
            "PageLane::After::Compute",
            "pages_->flags(), true); }, afterGraphs()",
        ),
        (
            (PAGING_WAITS + "::test_the_host_neither_waits_nor_asks_in_a_steady_step",),
            "pool-flags-do-not-block",
            "true",
            "false",
            "copy_(pages_->flags(), true)",
        ),
        (
            (PAGING_BESIDE_CAPTURES + "::test_a_replay_right_after_its_pools_were_reset",),
            "pool-reset-before-graphs",
            "lane_.joinAll(captured_);",
        ),
    ],
    "src/paging/tracked_pool.h": [
        (
            (PAGING_CAPTURES + "::test_a_backward_in_a_capture_of_a_forward_before_it",),
            "pool-graphs-may-have-changed",
            "flags_.mayHaveChanged || captured_",
            "flags_.mayHaveChanged",
        ),
    ],
    "src/paging/pool_set.cpp": [
        (
            (PAGING_WAITS + "::test_asking_waits_for_one_event_of_each_device",),
            "pool-reading-resets-used",
            "pool->flags().mayHaveChanged = false;",
        ),
        (
            (PAGING_WAITS + "::test_asking_waits_for_one_event_of_each_device",),
            "pool-reads-once",
            "flags.reading.reset();",
        ),
        (
            (PAGING_OVERFLOW + "::test_optimizers_refuse_gradients_that_are_of_no_use",),
            "pool-errors-are-read-again",
            "flags.mayHaveChanged |= flags.errors() != 0;",
        ),
        (
            (PAGING_WAITS + "::test_asking_waits_for_one_event_of_each_device",),
            "set-waits-for-flags",
            "end->synchronize();",
        ),
        (
            (PAGING_COSTS + "::test_pools_that_go_are_waited_for_once",),
            "set-notes-over",
            "pool.lane().noteOver(*flags.reading);",
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
            (PAGING_COSTS + "::test_a_device_that_had_nothing_to_do_is_not_waited_for",),
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
            (PAGING_COSTS + "::test_asking_after_a_step_gives_the_device_nothing_to_do",),
            "set-reads-ahead",
            "!isCapturing()",
            "false",
        ),
        (
            (PAGING_BESIDE_CAPTURES + "::test_flags_that_nobody_has_read_before_a_capture",),
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
            (PAGING_REGRESSIONS + "::test_what_a_dropped_pool_cannot_give_back_raises",),
            "set-condemns",
            "pool->flags().condemned = pool->flags().errors();",
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
    "src/paging/pool/pool.cpp": [
        (
            (PAGING_POOLS + "::test_rows_go_and_come_back",),
            "pool-guard-stash",
            "options_.device",
            "currentDevice(options_.device.type())",
            "const at::Tensor& rows) {\n  const c10::DeviceGuard here(options_.device);",
        ),
        (
            (PAGING_POOLS + "::test_rows_go_and_come_back",),
            "pool-guard-restore",
            "options_.device",
            "currentDevice(options_.device.type())",
            "PageFill fill) {\n  const c10::DeviceGuard here(options_.device);",
        ),
        (
            (PAGING_POOLS + "::test_a_kernel_is_launched_on_the_device_of_the_pool_on_any_stream",),
            "pool-guard-give-back",
            "options_.device",
            "currentDevice(options_.device.type())",
            "giveBack(PageTicket& ticket) {\n  const c10::DeviceGuard here(options_.device);",
        ),
        (
            (PAGING_POOLS + "::test_a_kernel_is_launched_on_the_device_of_the_pool_on_any_stream",),
            "pool-guard-reset",
            "options_.device",
            "currentDevice(options_.device.type())",
            "PagePool::reset() {\n  const c10::DeviceGuard here(options_.device);",
        ),
        (
            (PAGING_BESIDE_CAPTURES + "::test_a_capture_right_after_the_step_that_was_recorded",),
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
    ],
}


MUTANTS = tuple(mutants_at(PLACES))
