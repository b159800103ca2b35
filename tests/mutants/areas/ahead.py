# ruff: noqa: E501
"""Replays ahead of backward: what they wait for and give way to, what they must not read or run, and
what is counted."""

from __future__ import annotations

from mutant import Places, mutants_at

EXACTNESS = "tests/ahead/test_ahead_exactness.py"
ORDER = "tests/ahead/test_ahead_order.py"
COMMOTIONS = "tests/ahead/test_ahead_commotions.py"
THREADS = "tests/ahead/test_ahead_threads.py"
PROCESSES = "tests/ahead/test_ahead_processes.py"
HELD = "tests/ahead/test_ahead_held.py"
WRITES = "tests/ahead/test_ahead_writes.py"
DEVICE = "tests/accelerator/test_replays_ahead.py"

TESTS = (
    "tests/ahead/test_ahead_order.py",
    "tests/ahead/test_ahead_writes.py",
    "tests/ahead/test_ahead_held.py",
    "tests/ahead/test_ahead_commotions.py",
    "tests/ahead/test_ahead_settings.py",
    "tests/ahead/test_ahead_threads.py",
    "tests/ahead/test_ahead_processes.py",
    "tests/accelerator/test_replays_ahead.py",
)

EACH: dict[str, str] = {}

PLACES: Places = {
    "src/ahead/graph_replay.cpp": [
        (
            (THREADS + "::test_backward_does_what_is_left",),
            "ahead-gives-way-between-values",
            "lookahead_.asked.load() || ends_.load()",
            "false",
            "bool GraphReplay::makeNext() {\n  if (lookahead_.asked.load() || ends_.load()) {",
            ("ahead-gives-way-between-operators",),
        ),
        (
            (THREADS + "::test_backward_does_what_is_left",),
            "ahead-gives-way-between-operators",
            "lookahead_.asked.load() || ends_.load()",
            "false",
            "const Recipe& recipe) {\n  if (lookahead_.asked.load() || ends_.load()) {",
        ),
        (
            (ORDER + "::test_what_no_handle_needs_is_not_made",),
            "ahead-what-nobody-waits-for-is-not-made",
            "value->uses.handles() == 0",
            "false",
            "!value || value->uses.handles() == 0",
        ),
        (
            (ORDER + "::test_what_no_handle_needs_is_not_made",),
            "ahead-redefined-is-not-made",
            "value->rare->redefined",
            "false",
            "|| value->rare->redefined",
        ),
        (
            (COMMOTIONS + "::test_nothing_runs_ahead_in_a_commotion",),
            "ahead-looks-in-stillness",
            "still_->holds()",
            "true",
            "isThere = still_->holds()",
            ("ahead-runs-in-stillness",),
        ),
        (
            (COMMOTIONS + "::test_nothing_runs_ahead_in_a_commotion",),
            "ahead-runs-in-stillness",
            "!still_->holds()",
            "false",
        ),
        (
            (ORDER, EXACTNESS + "::test_writes_in_place"),
            "ahead-private-bytes-may-be-read",
            "input.home.isPrivate()",
            "false",
        ),
        (
            (COMMOTIONS + "::test_a_storage_that_has_other_memory_is_not_read_ahead",),
            "ahead-moved-memory-is-not-read",
            "storage.data() == input.home.address()",
            "true",
        ),
        (
            (WRITES + "::test_to_a_value_that_can_be_made_again",),
            "ahead-what-can-be-made-again-is-not-read",
            "input.recipe()",
            "false",
            "input.recipe() || !sameMemory",
        ),
        (
            (WRITES + "::test_no_half_of_a_write_is_read",),
            "ahead-remembers-what-was-read",
            "lookahead_.onArrival.hasRead(input, by.op.name);",
            "",
            "",
            ("ahead-looks-at-inputs-again",),
        ),
        (
            (COMMOTIONS + "::test_operators_from_elsewhere_run_where_backward_does",),
            "ahead-from-elsewhere-is-not-run",
            "!recipe.op.limits.untrusted",
            "true",
        ),
        (
            (EXACTNESS + "::test_draws_without_a_generator_are_left_to_backward",),
            "ahead-sets-no-generator",
            "!sets",
            "true",
        ),
        (
            (COMMOTIONS + "::test_other_settings_than_in_the_forward_are_left_to_backward",),
            "ahead-under-other-settings-not",
            "settings.equalsForProcess(now)",
            "true",
        ),
        (
            (THREADS + "::test_the_number_of_threads_stays_as_it_was_set",),
            "ahead-with-other-threads-not",
            "settings.threads != now.threads",
            "false",
        ),
        (
            (THREADS + "::test_denormals_are_flushed_by_whom_they_were",),
            "ahead-with-flushed-denormals-not",
            "settings.flushDenormals && now.threads > 1",
            "false",
        ),
        (
            (WRITES + "::test_through_an_alias_while_a_kernel_reads",),
            "ahead-reads-what-nobody-has-a-hand-on",
            "reads_->isAllowed()",
            "true",
        ),
        (
            (ORDER + "::test_no_more_regions_are_ahead_than_are_asked_for",),
            "ahead-what-is-made-counts",
            "!lookahead_.take(value->home.nbytes())",
            "false",
        ),
        (
            (ORDER + "::test_bytes_that_pass_are_given_back",),
            "ahead-what-passed-is-given-back",
            "lookahead_.giveBack(each.nbytes);",
        ),
        (
            (COMMOTIONS + "::test_a_commotion_waits_for_the_recipe_that_runs_only",),
            "ahead-is-still-while-it-runs-only",
            "still_.reset();",
        ),
        (
            (WRITES + "::test_an_alias_does_not_wait_for_what_does_not_read_it",),
            "ahead-reads-while-it-runs-only",
            "reads_.reset();",
        ),
    ],
    "src/replay/rerun.cpp": [
        (
            (WRITES + "::test_no_half_of_a_write_is_read",),
            "ahead-looks-at-inputs-again",
            "asker_ == Asker::Nobody",
            "false",
            "if (asker_ == Asker::Nobody) {",
            ("ahead-remembers-what-was-read",),
        ),
    ],
    "src/replay/buffers.cpp": [
        (
            (COMMOTIONS + "::test_what_a_kernel_was_to_write_is_there_when_it_fails",),
            "ahead-takes-no-buffer",
            "mayTake_",
            "true",
        ),
    ],
    "src/replay/replay.cpp": [
        (
            (
                COMMOTIONS
                + "::test_other_settings_of_backwards_wait_for_the_kernel_that_runs_ahead",
            ),
            "ahead-waits-for-backwards-settings",
            "watch_ ? Changes::OfThread : Changes::OfProcess",
            "Changes::OfThread",
        ),
        (
            (WRITES + "::test_an_error_is_raised_each_time_and_leaves_no_bytes_in_the_budget",),
            "ahead-asks-what-it-may-read",
            "watch_ && !watch_->mayRead(value, storage, consumer)",
            "false",
        ),
    ],
    "src/ahead/worker.cpp": [
        (
            (ORDER + "::test_no_more_regions_are_ahead_than_are_asked_for",),
            "ahead-of-few-regions",
            "ahead_.size() >= most",
            "false",
        ),
        (
            (
                ORDER + "::test_the_later_of_two_branches_comes_first",
                ORDER + "::test_micro_batches_are_told_apart",
            ),
            "ahead-the-latest-first",
            "a.lock()->lookahead->number < b.lock()->lookahead->number",
            "a.lock()->lookahead->number > b.lock()->lookahead->number",
        ),
        (
            (ORDER, THREADS + "::test_a_thousand_steps_with_random_delays"),
            "ahead-is-no-more-when-backward-is-there",
            "!graph.lookahead->asked.load()",
            "true",
            "isAhead(const Graph& graph) {\n  return !graph.lookahead->asked.load();",
        ),
        (
            (THREADS + "::test_a_region_that_backward_waits_for_is_not_begun",),
            "ahead-not-where-backward-is",
            "!graph.lookahead->asked.load()",
            "true",
            "AheadState::Recorded &&\n         !graph.lookahead->asked.load();",
        ),
        (
            (ORDER + "::test_where_backward_went_elsewhere_nothing_is_waited_for",),
            "ahead-forgets-where-backward-went-elsewhere",
            "!expected",
            "false",
            "if (!expected)",
        ),
        (
            (PROCESSES + "::test_none_starts_when_the_interpreter_ends",),
            "ahead-starts-not-at-a-fork",
            "forks_.load() != 0",
            "false",
        ),
        (
            (THREADS + "::test_it_ends_when_told_and_starts_again",),
            "ahead-ends-when-told",
            "bell_.end();",
        ),
        (
            (THREADS + "::test_it_ends_when_told_and_starts_again",),
            "ahead-begins-again",
            "bell_.begin();",
        ),
        (
            (THREADS + "::test_denormals_are_not_flushed_because_who_starts_the_worker_does",),
            "ahead-is-born-as-threads-are",
            "at::globalContext().setFlushDenormal(false);",
        ),
        (
            (THREADS + "::test_warnings_of_the_forward_are_not_given_again",),
            "ahead-is-silent",
            "&silent",
            "c10::WarningUtils::get_warning_handler()",
        ),
        (
            (THREADS + "::test_it_has_the_number_of_threads_that_the_forward_had",),
            "ahead-another-thread-for-another-number",
            "last == AheadEnd::Threads",
            "false",
        ),
        (
            (COMMOTIONS,),
            "ahead-finds-its-stream-in-stillness",
            "!still.holds()",
            "false",
            "",
            (),
            "a capture would have to begin in the very moment in which it records an event",
        ),
        (
            (DEVICE + "::test_a_region_on_two_streams_is_left_to_backward",),
            "ahead-on-one-stream-only",
            "graph.streams.count() > 1",
            "false",
        ),
        (
            (DEVICE + "::test_streams_of_the_programs_own",),
            "ahead-on-the-graphs-stream",
            "guard.emplace(settings.sideStream ? side_.after(own, graph) : own);",
        ),
        (
            (DEVICE + "::test_each_wait_matters",),
            "ahead-beside-waits-for-compute",
            "orderAfter(*stream_, compute);",
        ),
        (
            (DEVICE + "::test_streams_of_the_programs_own",),
            "ahead-beside-waits-for-another-stream",
            "waited_ != compute",
            "!waited_",
            "if (waited_ != compute",
        ),
        (
            (DEVICE + "::test_a_chain", DEVICE + "::test_streams_run_late_at_random"),
            "ahead-beside-waits-again",
            "graph.lookahead->closed > waitedAfter_",
            "false",
        ),
        (
            (DEVICE + "::test_each_wait_matters",),
            "ahead-beside-is-known",
            "graph.lookahead->onArrival.side = *stream_;",
        ),
    ],
    "src/ahead/arrival.cpp": [
        (
            (WRITES + "::test_an_error_is_raised_each_time_and_leaves_no_bytes_in_the_budget",),
            "ahead-looks-at-versions-when-backward-is-there",
            "checkInputs(graph);",
            "",
            "checkInputs(graph);  // may throw",
        ),
        (
            (ORDER + "::test_who_looks_at_a_saved_tensor_is_not_backward",),
            "ahead-only-backward-arrives",
            "!isInBackward()",
            "false",
            "if (!isInBackward()) {",
        ),
        (
            (
                "tests/ahead/test_ahead_settings.py::test_without_an_idle_core_nothing_is_replayed_ahead_but_the_last_region_is_held",
            ),
            "ahead-on-idle-cores-only",
            "mayRunBeside(device, settings) && isNext",
            "isNext",
        ),
        (
            (DEVICE + "::test_each_wait_matters",),
            "ahead-backward-waits-for-the-side",
            "graph.streams.takeOver(*lookahead.onArrival.side, values);",
        ),
        (
            (DEVICE + "::test_nothing_runs_ahead_while_a_graph_is_captured",),
            "ahead-in-no-capture",
            "!isCapturing(device)",
            "true",
        ),
        (
            (WRITES + "::test_through_an_alias_while_a_kernel_reads",),
            "ahead-knows-of-hands",
            "noteHandOn(tensor.storage(), Lookahead::closings());",
        ),
        (
            (PROCESSES + "::test_a_graph_that_is_being_replayed_at_a_fork_is_whole_in_both",),
            "ahead-workers-end-before-a-fork",
            "get().stop();",
            "",
            "stop() would release the GIL in any case: see ahead.py\n      get().stop();",
        ),
        (
            (PROCESSES + "::test_children_of_fork_have_workers_of_their_own",),
            "ahead-a-child-begins-anew",
            "current.store(after);",
        ),
        (
            (THREADS + "::test_verify_mode_runs_nothing_ahead",),
            "ahead-not-in-verify-mode",
            "graph.verify != VerifyMode::Off",
            "false",
        ),
    ],
    "src/graph/lookahead.cpp": [
        (
            (ORDER + "::test_the_limit_holds",),
            "ahead-within-the-limit",
            "now > limit",
            "false",
        ),
        (
            (ORDER + "::test_what_the_program_drops_is_dropped",),
            "ahead-a-graph-that-dies-gives-back",
            "giveBack(taken);",
            "",
            "became(AheadFate::InVain);\n  }\n  giveBack(taken);",
        ),
        (
            (ORDER + "::test_what_was_taken_is_given_back_where_backward_arrives",),
            "ahead-a-graph-that-is-reached-gives-back",
            "giveBack(taken);",
            "",
            "holds.store(false);\n  giveBack(taken);",
        ),
        (
            (ORDER + "::test_what_was_held_is_given_up_when_another_region_is_entered",),
            "ahead-what-was-held-is-given-back",
            "giveBack(each.nbytes);",
        ),
        (
            (ORDER,),
            "ahead-what-was-held-is-dropped",
            "each.held = c10::Storage();",
        ),
        (
            (WRITES + "::test_an_error_is_raised_each_time_and_leaves_no_bytes_in_the_budget",),
            "ahead-versions-of-aliases",
            "leavesRead.push_back({stamp, &op});",
        ),
        (
            (WRITES + "::test_an_error_is_raised_each_time_and_leaves_no_bytes_in_the_budget",),
            "ahead-versions-of-leaves",
            "!read.stamp.holds()",
            "false",
        ),
        (
            (HELD + "::test_what_the_program_may_have_written_is_made_again",),
            "ahead-held-and-written-is-not-the-values",
            "value.versions.hold()",
            "true",
        ),
        (
            (HELD + "::test_what_the_program_may_have_written_is_made_again",),
            "ahead-held-by-others-is-not-the-values",
            "storage.use_count() == 1",
            "true",
        ),
        (
            (HELD + "::test_what_the_program_may_have_written_is_made_again",),
            "ahead-held-and-superseded-is-not-the-values",
            "!value.home.isSuperseded()",
            "true",
            "",
            ("ahead-held-and-written-is-not-the-values",),
        ),
        (
            (HELD + "::test_what_the_program_may_have_written_is_made_again",),
            "ahead-held-and-resized-is-not-the-values",
            "storage.nbytes() == value.home.nbytes()",
            "true",
            "",
            ("ahead-held-and-moved-is-not-the-values",),
        ),
        (
            (HELD + "::test_what_the_program_may_have_written_is_made_again",),
            "ahead-held-and-moved-is-not-the-values",
            "storage.data() == value.home.address()",
            "true",
        ),
    ],
}


MUTANTS = tuple(mutants_at(PLACES))
