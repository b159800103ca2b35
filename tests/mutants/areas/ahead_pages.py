"""What comes back ahead of backward, from pages and from the host: what is counted, and what waits
until backward arrives."""

from __future__ import annotations

from mutant import Places, mutants_at

PAGES = "tests/ahead/test_ahead_pages.py"
DEVICE = "tests/accelerator/test_pages_ahead.py"
REPLAYS = "tests/accelerator/test_replays_ahead.py"

TESTS = (PAGES, DEVICE, REPLAYS)

EACH: dict[str, str] = {}

PLACES: Places = {
    "src/ahead/graph_replay.cpp": [
        (
            (
                REPLAYS + "::test_offloaded_inputs_come_back_within_the_limit",
                PAGES + "::test_the_limit_holds_and_what_has_been_read_is_given_back",
            ),
            "ahead-what-is-fetched-counts",
            "!lookahead_.take(input.home.nbytes())",
            "false",
        ),
        (
            (PAGES + "::test_the_limit_holds_and_what_has_been_read_is_given_back",),
            "ahead-what-was-fetched-passes",
            "intermediates_.push_back(\n"
            "        {c10::weak_intrusive_ptr<Value>::reclaim_copy(&input), input.home.nbytes()});",
        ),
        (
            (PAGES + "::test_what_has_been_read_makes_room_for_what_is_fetched_next",),
            "ahead-what-passed-is-given-back-before-a-fetch",
            "forgetFreed();",
            "",
            "forgetFreed();\n  if (!lookahead_.take(input.home.nbytes()))",
        ),
        (
            (PAGES + "::test_backward_begins_where_it_does_and_nothing_is_back_before",),
            "ahead-keeps-what-awaits-backward",
            "lookahead_.onArrival.cameBack.push_back(input.stash());",
        ),
        (
            (REPLAYS + "::test_what_was_offloaded_and_has_been_read_is_gone",),
            "ahead-keeps-what-awaits-backward-only",
            "input.stash()->awaitsBackward()",
            "true",
        ),
    ],
    "src/ahead/arrival.cpp": [
        (
            (PAGES + "::test_all_but_the_last_layer_are_there_in_time",),
            "ahead-pages-hear-of-backward",
            "Paging::get().backwardArrives(*graph.pages, lookahead.onArrival.cameBack);",
        ),
    ],
    "src/paging/page_stash.cpp": [
        (
            (DEVICE + "::test_what_a_graph_has_is_left_to_backward",),
            "ahead-not-what-a-graph-has",
            "!pool->isCaptured()",
            "true",
        ),
        (
            (PAGES + "::test_what_has_no_nan_raises_where_it_is_asked_for",),
            "ahead-not-after-an-error",
            "pool->errorsInSight() == 0",
            "true",
        ),
    ],
    "src/paging/paging_engine.cpp": [
        (
            (DEVICE + "::test_what_came_back_and_has_been_read_is_gone",),
            "ahead-bytes-are-handed-out",
            "std::exchange(stash.bytes, c10::Storage())",
            "stash.bytes",
        ),
        (
            (PAGES + "::test_a_step_ends_when_all_has_come_back_ahead",),
            "ahead-it-has-come-back",
            "step_.noteComeback(stash);",
            "",
            "step_.noteComeback(stash);\n      checkErrors(stash);",
        ),
        (
            (PAGES + "::test_what_goes_wrong_meanwhile_is_told_when_backward_arrives",),
            "ahead-errors-are-told-when-backward-is-there",
            "checkErrors(stash);",
            "",
            "checkErrors(stash);\n      cameBack",
        ),
        (
            (PAGES + "::test_a_step_that_cannot_end_where_backward_arrives",),
            "ahead-it-comes-back-once",
            "cameBack.pop_back();\n      isBack(stash);",
            "isBack(stash);\n      cameBack.pop_back();",
        ),
        (
            (PAGES + "::test_where_backward_arrives_no_mode_sees_anything",),
            "engine-below-arrival",
            "belowEverything()",
            "c10::impl::ForceDispatchKeyGuard(c10::impl::tls_local_dispatch_key_set())",
            "const auto below = belowEverything();\n    if (!group",
        ),
        (
            (PAGES + "::test_all_but_the_last_layer_are_there_in_time",),
            "ahead-backward-begins-where-it-arrives",
            "backwardBegins(group);",
            "",
            "if (!group.stashes.empty()) {\n      backwardBegins(group);",
        ),
        (
            (PAGES + "::test_what_has_died_has_no_backward",),
            "ahead-what-has-died-has-no-backward",
            "!group.stashes.empty()",
            "true",
        ),
        (
            (PAGES + "::test_who_holds_a_mask_hears_nothing_of_its_pool",),
            "engine-living-has-no-pool",
            "stash.pool.reset();",
            "",
            "stash.pool.reset();\n    stash.bytes = living;",
        ),
    ],
}


MUTANTS = tuple(mutants_at(PLACES))
