# ruff: noqa: E501
"""PAGE: the engine, from a tensor that is sent to its last asker."""

from __future__ import annotations

from mutant import Places, mutants_at

PAGING_BESIDE_CAPTURES = "tests/accelerator/test_paging_beside_captures.py"
PAGING_CAPTURES = "tests/accelerator/test_paging_captures.py"
PAGING_FAILURES = "tests/accelerator/test_paging_failures.py"
PAGING_MODES = "tests/paging/test_paging_modes.py"
PAGING_OVERFLOW = "tests/paging/test_paging_overflow.py"
PAGING_POOLS = "tests/accelerator/test_paging_pools.py"
PAGING_REGRESSIONS = "tests/paging/test_paging_regressions.py"
PAGING_STEPS = "tests/paging/test_paging_steps.py"
PAGING_STREAMS = "tests/accelerator/test_paging_streams.py"
PAGING_THREADS = "tests/paging/test_paging_threads.py"
PAGING_WAITS = "tests/accelerator/test_paging_waits.py"

TESTS = (
    PAGING_STREAMS,
    PAGING_BESIDE_CAPTURES,
    PAGING_CAPTURES,
    PAGING_FAILURES,
    PAGING_MODES,
    PAGING_OVERFLOW,
    PAGING_POOLS,
    PAGING_REGRESSIONS,
    PAGING_STEPS,
    PAGING_STREAMS,
    PAGING_THREADS,
    PAGING_WAITS,
)

# What each of these must be in.
EACH = dict.fromkeys(
    (
        "src/paging/paging_engine.cpp",
        "src/paging/page_stash.cpp",
    ),
    r"(?<!void )\b(noteUse|noteMade)\((?=stash|source|storage, user\);)|\bjoin(Lanes)?\(\);|joinAll\((?!bool)|\blane\(\)\.wait\(",
)

PLACES: Places = {
    "src/paging/paging_engine.cpp": [
        (
            (PAGING_CAPTURES + "::test_a_forward_that_nobody_wants_inside_a_capture",),
            "engine-forget-settles-in-a-capture",
            "pool->settleFreed();",
        ),
        (
            (PAGING_CAPTURES + "::test_a_forward_that_nobody_wants_inside_a_capture",),
            "engine-forget-joins-in-a-capture",
            "pool->lane().joinAll(true);",
        ),
        (
            (
                PAGING_BESIDE_CAPTURES
                + "::test_what_a_capture_that_failed_has_paged_is_dropped_without_asking",
            ),
            "engine-forget-asks-which-capture",
            "capture == pool->lane().capture()",
            "true",
        ),
        (
            (PAGING_STREAMS + "::test_a_pipeline_on_two_streams",),
            "engine-restored-tells",
            "noteUse(stash.bytes);",
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
            "takeOver(stash);\n  if (isCapturing",
        ),
        (
            (
                PAGING_BESIDE_CAPTURES
                + "::test_what_another_stream_has_copied_comes_back_in_a_capture",
            ),
            "engine-copied-stays-for-a-graph",
            "ofGraphs_.push_back(stash.bytes);",
        ),
        (
            (PAGING_STREAMS + "::test_another_stream_asks_again_where_the_step_could_not_end",),
            "engine-back-taken-over",
            "takeOver(stash);",
            "",
            "State::Back) {\n      takeOver(stash);",
        ),
        (
            (PAGING_STREAMS + "::test_a_write_on_another_stream_to_what_stays",),
            "engine-resident-taken-over",
            "takeOver(stash);",
            "",
            "State::Resident) {\n    takeOver(stash);",
        ),
        (
            (PAGING_STREAMS + "::test_another_stream_asks_again_where_the_step_could_not_end",),
            "engine-fetched-made",
            "noteMade(stash);",
            "",
            "noteMade(stash);  // if isBack",
        ),
        (
            (PAGING_WAITS + "::test_each_wait_that_is_left_out_shows",),
            "engine-write-waits",
            "stash.pool->lane().wait(stash.slot->stashed);",
        ),
        (
            (PAGING_STEPS + "::test_a_layer_that_stays_may_be_written",),
            "engine-write-copies-resident",
            "stash.state == State::Resident",
            "false",
            "if (stash.state == State::Resident) {\n    stash.bytes",
        ),
        (
            (PAGING_STREAMS + "::test_a_write_on_another_stream_to_what_stays",),
            "engine-write-made",
            "noteMade(stash);",
            "",
            "stash.nbytes);\n    noteMade(stash);\n  } else",
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
            (PAGING_FAILURES + "::test_a_graph_that_is_dropped_after_the_device_failed",),
            "engine-restoring-made",
            "noteMade(stash);",
            "",
            "noteMade(stash);\n    stash.pool",
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
            "lane.wait(stash.slot->restored);",
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
            " rows.\n    pool->lane().wait(stash.slot->stashed);",
        ),
        (
            (PAGING_BESIDE_CAPTURES + "::test_a_replay_between_a_forward_and_its_backward",),
            "engine-sent-before-graphs",
            "pool->letGraphsWait();",
            "",
            "stash);\n  pool->letGraphsWait();",
        ),
        (
            (PAGING_BESIDE_CAPTURES + "::test_a_replay_while_something_comes_back_ahead",),
            "engine-restored-before-graphs",
            "stash.pool->letGraphsWait();",
        ),
        (
            (PAGING_FAILURES + "::test_a_graph_that_is_dropped_after_the_device_failed",),
            "engine-give-up-holds",
            "stash.pool->lane().hold(stash.slot->restored, *stash.made, stash.bytes);",
        ),
        (
            (PAGING_CAPTURES + "::test_a_forward_that_nobody_wants_before_a_capture",),
            "engine-give-up-frees-slot",
            "stash.pool->free(stash.slot);",
        ),
        (
            (PAGING_THREADS + "::test_what_dies_with_a_graph_may_ask",),
            "engine-give-up-drops-behind-lock",
            "mutex_.drop(stash.bytes);",
            "stash.bytes = c10::Storage();",
        ),
        (
            (PAGING_CAPTURES + "::test_a_capture_before_any_step",),
            "engine-copy-refuses-captures",
            "!isCapturing(stash.kind.device)",
            "true",
            "      !isCapturing(stash.kind.device),",
        ),
        (
            (PAGING_BESIDE_CAPTURES + "::test_a_step_that_is_to_be_recorded_begins_in_no_capture",),
            "engine-record-refuses-captures",
            "!pools_.isCapturing()",
            "true",
            '!pools_.isCapturing(),\n        "ebb: a step',
        ),
        (
            (
                PAGING_BESIDE_CAPTURES
                + "::test_what_another_stream_has_copied_comes_back_in_a_capture",
            ),
            "engine-ends-no-recorded-step-in-a-capture",
            "pools_.isCapturing()",
            "false",
            "|| pools_.isCapturing())",
        ),
        (
            (PAGING_CAPTURES + "::test_asking_while_a_graph_is_captured",),
            "engine-step-ok-refuses-captures",
            "!pools_.isCapturing()",
            "true",
            '!pools_.isCapturing(),\n      "ebb: step_ok',
        ),
        (
            (PAGING_CAPTURES + "::test_a_capture_after_steps_with_an_optimizer",),
            "engine-settles",
            "pools_.settle();",
        ),
        (
            (PAGING_REGRESSIONS + "::test_errors_are_told_though_the_pools_have_gone",),
            "engine-error-of-pools-that-go",
            "unreportedErrors_ |= pools_.drop() & ~reportedErrors_;",
            "pools_.drop();",
            "unreportedErrors_ |= pools_.drop() & ~reportedErrors_;\n  }",
        ),
        (
            (PAGING_REGRESSIONS + "::test_errors_are_told_though_the_pools_have_gone",),
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
            "!stash.pool ? 0 : stash.pool->errorsInSight()",
        ),
        (
            (PAGING_POOLS + "::test_pools_are_made_where_tensors_are",),
            "engine-below-send",
            "belowEverything()",
            "c10::impl::ForceDispatchKeyGuard(c10::impl::tls_local_dispatch_key_set())",
            "PageGroupPtr& group) {\n  return telling([&] {\n"
            "    const Lock lock(mutex_);\n    const auto below = belowEverything();",
        ),
        (
            (PAGING_MODES + "::test_what_comes_back",),
            "engine-below-fetch",
            "belowEverything()",
            "c10::impl::ForceDispatchKeyGuard(c10::impl::tls_local_dispatch_key_set())",
            "c10::Storage& living) {\n  return telling([&] {\n"
            "    const Lock lock(mutex_);\n    const auto below = belowEverything();",
        ),
        (
            (PAGING_MODES + "::test_a_step_that_begins_makes_pools",),
            "engine-below-begin",
            "belowEverything()",
            "c10::impl::ForceDispatchKeyGuard(c10::impl::tls_local_dispatch_key_set())",
            "beginStep(bool fixedOrder, bool raisesLate) {\n  const Lock lock(mutex_);\n  const auto below = belowEverything();",
        ),
        (
            (PAGING_MODES + "::test_a_step_that_ends_makes_pools",),
            "engine-below-end",
            "belowEverything()",
            "c10::impl::ForceDispatchKeyGuard(c10::impl::tls_local_dispatch_key_set())",
            "endStep() {\n  const Lock lock(mutex_);\n  const auto below = belowEverything();",
        ),
        (
            (PAGING_MODES + "::test_asking",),
            "engine-below-ok",
            "belowEverything()",
            "c10::impl::ForceDispatchKeyGuard(c10::impl::tls_local_dispatch_key_set())",
            "stepOk() {\n  const Lock lock(mutex_);\n  const auto below = belowEverything();",
        ),
        (
            (PAGING_MODES + "::test_asking",),
            "engine-below-errors",
            "belowEverything()",
            "c10::impl::ForceDispatchKeyGuard(c10::impl::tls_local_dispatch_key_set())",
            "Paging::errors() {\n  const Lock lock(mutex_);\n  const auto below = belowEverything();",
        ),
        (
            (PAGING_MODES + "::test_asking",),
            "engine-below-told",
            "belowEverything()",
            "c10::impl::ForceDispatchKeyGuard(c10::impl::tls_local_dispatch_key_set())",
            "wasTold() {\n  const Lock lock(mutex_);\n  const auto below = belowEverything();",
        ),
        (
            (PAGING_MODES + "::test_asking",),
            "engine-below-flag",
            "belowEverything()",
            "c10::impl::ForceDispatchKeyGuard(c10::impl::tls_local_dispatch_key_set())",
            "foundInf(c10::Device device) {\n  const Lock lock(mutex_);\n  const auto below = belowEverything();",
        ),
        (
            (PAGING_MODES + "::test_asking",),
            "engine-below-reset",
            "belowEverything()",
            "c10::impl::ForceDispatchKeyGuard(c10::impl::tls_local_dispatch_key_set())",
            'inside a step of ebb.paging.");\n  const auto below = belowEverything();',
        ),
    ],
    "src/paging/page_stash.cpp": [
        (
            (PAGING_REGRESSIONS + "::test_what_a_dropped_pool_cannot_give_back_raises",),
            "engine-condemned-refused",
            "errors == 0",
            "true",
        ),
        (
            (PAGING_FAILURES + "::test_a_graph_that_is_dropped_after_the_device_failed",),
            "stash-destructor-forgets",
            "Paging::get().forget(*this);",
        ),
    ],
}


MUTANTS = tuple(mutants_at(PLACES))
