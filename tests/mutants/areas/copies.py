"""OFFLOAD's copies between a device and the host, and the memory they use."""

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
    "src/offload/copies.cpp": r"\bvia_\.(wait|finish)\(|\bnoteUse\(|\bisDone\(\*(?!stash)",
}

CAPTURES = "tests/accelerator/test_offload_captures.py"
FAILURES = "tests/accelerator/test_offload_failures.py"
STEADY = "tests/accelerator/test_offload_steady.py"
WAITS = "tests/accelerator/test_offload_waits.py"
SEVERAL_STREAMS = "tests/accelerator/test_order_of_streams.py"
STREAMS = "tests/accelerator/test_streams.py"
DISK = "tests/offload/test_offload_disk.py"
SPILLING = "tests/offload/test_offload_spilling.py"
LIFETIMES = "tests/offload/test_offload_lifetimes.py"
MEMORY = "tests/offload/test_offload_memory.py"
ORDER = "tests/offload/test_offload_order.py"
STATIC = "tests/offload/test_offload_static.py"

copies = partial(Mutant, file="src/offload/copies.cpp")
capture = partial(Mutant, file="src/stream/capture.h")

MUTANTS = (
    copies(
        "a-capture-is-over",
        text="endCapture();",
        tests=(f"{CAPTURES}::test_an_eager_step_between_replays_keeps_its_bytes",),
    ),
    capture(
        "a-capture-has-copied-nothing",
        text="joined_ = false;",
        within="++count_;\n      joined_ = false;",
        tests=(f"{CAPTURES}::test_a_graph_gives_what_eager_gives",),
    ),
    copies(
        "outside-is-put-aside",
        text="outside_ = std::exchange(now_, {});",
        tests=(f"{CAPTURES}::test_statistics_when_a_capture_has_just_begun",),
    ),
    copies(
        "host-memory-of-a-capture-stays",
        text="context_.host.captureIsOver();",
        tests=(f"{CAPTURES}::test_two_graphs_on_two_streams",),
    ),
    copies(
        "leaving-of-a-capture-is-its-graphs",
        text="give(leaving.memory, leaving.device, over);",
        tests=(f"{CAPTURES}::test_host_memory_that_is_in_use_when_a_capture_ends",),
    ),
    copies(
        "held-of-a-capture-is-its-graphs",
        text="releaseHeld(over, [](const HeldMemory::Held&) { return true; });",
        tests=(f"{CAPTURES}::test_host_memory_that_is_in_use_when_a_capture_ends",),
    ),
    copies(
        "outside-comes-back",
        text="now_ = std::exchange(outside_, {});",
        tests=(f"{CAPTURES}::test_a_capture_that_failed",),
    ),
    copies(
        "host-memory-of-a-capture-is-no-pools",
        text="capture == 0",
        instead="true",
        within=("if (capture == 0) {\n    context_.host.give("),
        tests=(f"{CAPTURES}::test_an_eager_step_between_replays_keeps_its_bytes",),
    ),
    copies(
        "host-memory-in-a-capture-again",
        text="capture == this->capture()",
        instead="false",
        within="} else if (capture == this->capture()) {",
        tests=(f"{CAPTURES}::test_several_steps_in_one_capture_use_the_same_host_memory",),
    ),
    copies(
        "host-memory-of-another-capture",
        text="capture == this->capture()",
        instead="true",
        within="} else if (capture == this->capture()) {",
        tests=(f"{CAPTURES}::test_host_memory_of_what_its_capture_never_fetched",),
    ),
    copies(
        "a-stash-is-of-a-capture",
        text="stash.sent.capture = capture();",
        tests=(f"{CAPTURES}::test_a_graph_gives_what_eager_gives",),
    ),
    copies(
        "packed-on-uses-what-leaves",
        text="noteUse(stash.onDevice, stash.sent.stream);",
        tests=(f"{STREAMS}::test_what_leaves_when_the_region_ends_was_made_on_another_stream",),
    ),
    copies(
        "in-flight-limit",
        text=(
            "while (now_.leavingBytes > context_.settings.inFlightBytes) {\n"
            "    waitForFirst();\n"
            "  }"
        ),
        tests=(f"{STATIC}::test_device_memory_is_released_when_the_limit_is_reached",),
    ),
    copies(
        "devices-that-were-left",
        text="devices_.push_back(stash.device());",
        tests=(f"{STEADY}::test_host_memory_of_static_mode_is_freed_after_its_copies",),
    ),
    copies(
        "out-waits-packed-on",
        text="via_.wait(out, via_.record(stash.sent.stream));",
        tests=(f"{STREAMS}::test_a_kept_tensor_leaves_behind_the_stream_on_which_it_was_packed",),
    ),
    copies(
        "a-capture-has-copied",
        text="captures_.join();",
        tests=(f"{CAPTURES}::test_two_graphs_on_two_streams",),
    ),
    copies(
        "packed-on-waits-left",
        text="via_.wait(first.packedOn, first.left);",
        tests=(f"{STREAMS}::test_a_kept_tensor_leaves_behind_the_stream_on_which_it_was_packed",),
    ),
    copies(
        "host-waits-left",
        text="via_.finish(*first.left);",
        tests=(f"{MEMORY}::test_no_more_than_the_limit_is_in_flight",),
    ),
    copies(
        "fetched-while-leaving",
        text="stash.state() != State::Leaving",
        instead="false",
        tests=(f"{CAPTURES}::test_a_graph_gives_what_eager_gives",),
    ),
    copies(
        "lost-while-leaving",
        text="stash.lost = !stash.hasWhatWasSent();",
        tests=(f"{ORDER}::test_storage_that_is_freed_while_it_is_copied",),
    ),
    copies(
        "failed-to-leave",
        text="!first.left->error().empty()",
        instead="false",
        tests=(f"{DISK}::test_a_write_that_fails_keeps_the_tensor",),
    ),
    copies(
        "kept-before-a-write",
        text=("takeOut(now_.kept, stash);\n    startLeaving(stash);"),
        tests=(f"{ORDER}::test_recipes_read_what_was_there_before_a_write",),
    ),
    copies(
        "kept-before-a-write-is-in-no-list",
        text="takeOut(now_.kept, stash);",
        tests=(f"{ORDER}::test_what_left_before_a_write_is_not_sent_again",),
    ),
    copies(
        "leaving-before-a-write",
        text="finishLeaving(stash);",
        within=("if (stash.state() == State::Leaving) {\n    finishLeaving(stash);"),
        tests=(f"{ORDER}::test_recipes_read_what_was_there_before_a_write",),
    ),
    copies(
        "writer-waits-left",
        text="via_.wait(via_.computeStream(stash.device()), stash.left);",
        tests=(f"{STREAMS}::test_a_write_on_another_stream_comes_after_the_copy",),
    ),
    copies(
        "failed-to-leave-before-a-write",
        text="!stash.left->error().empty()",
        instead="false",
        tests=(f"{DISK}::test_a_write_that_fails_before_the_tensor_is_written",),
    ),
    copies(
        "failed-to-leave-has-a-copy",
        text="moveToCopy(stash);",
        tests=(f"{DISK}::test_a_write_that_fails_before_the_tensor_is_written",),
    ),
    copies(
        "in-waits-compute",
        text="via_.wait(in, via_.record(*stash.back.stream));",
        tests=(f"{CAPTURES}::test_a_graph_gives_what_eager_gives",),
    ),
    copies(
        "in-waits-left",
        text="via_.wait(in, stash.left);",
        tests=(f"{STREAMS}::test_a_write_on_another_stream_comes_after_the_copy",),
    ),
    copies(
        "returning-is-not-away",
        text="StashesInOrder::takeOut(stash);",
        tests=(f"{MEMORY}::test_what_was_sent_before_is_fetched_ahead",),
    ),
    copies(
        "elsewhere-uses-what-came-ahead",
        text="noteUse(stash.onDevice, compute);",
        within="if (*stash.back.stream != compute) {\n    noteUse(stash.onDevice, compute);",
        tests=(f"{SEVERAL_STREAMS}::test_memory_that_came_ahead_for_another_stream",),
    ),
    copies(
        "compute-waits-returned",
        text="via_.wait(compute, stash.back.end);",
        tests=(f"{STREAMS}::test_a_kept_tensor_leaves_behind_the_stream_on_which_it_was_packed",),
    ),
    copies(
        "failed-to-come-back",
        text="stash.checkCameBack(*stash.back.end);",
        tests=(f"{DISK}::test_a_file_that_was_cut_short_is_an_error",),
    ),
    copies(
        "known-done-when-taken",
        text=("if (!takeOut(now_.returning, stash)) {\n    return;\n  }"),
        instead="takeOut(now_.returning, stash);",
        tests=(f"{STATIC}::test_the_mode_may_change_between_forward_and_backward",),
    ),
    copies(
        "out-waits-returned",
        text="via_.wait(via_.outStream(stash.device()), stash.back.end);",
        tests=(f"{WAITS}::test_all_is_in_order",),
    ),
    copies(
        "held-until-returned",
        text="now_.held.hold(stash.back.end, compute, {{}, std::move(stash.onHost)});",
        instead="give(stash.onHost, stash.device(), capture());",
        tests=(f"{WAITS}::test_all_is_in_order",),
    ),
    copies(
        "second-waits-taken-on",
        text="via_.wait(compute, via_.record(*stash.back.stream));",
        tests=(f"{SEVERAL_STREAMS}::test_fetched_on_one_stream_and_asked_for_again_on_another",),
    ),
    copies(
        "second-uses-what-was-fetched",
        text="noteUse(stash.onDevice, compute);",
        within=(
            "via_.wait(compute, via_.record(*stash.back.stream));\n"
            "    noteUse(stash.onDevice, compute);"
        ),
        tests=(f"{SEVERAL_STREAMS}::test_fetched_on_one_stream_and_asked_for_again_on_another",),
    ),
    copies(
        "held-until-returned-for-nobody",
        text=(
            "place->held.hold(\n"
            "        stash.back.end, *stash.back.stream, "
            "{std::move(stash.onDevice), std::move(stash.onHost)});"
        ),
        tests=(f"{SEVERAL_STREAMS}::test_what_is_dropped_on_its_way_back",),
    ),
    copies(
        "nobody-asks-in-static-mode",
        text="!context_.settings.isStatic && capture() == 0 && via_.isDone(event)",
        instead="via_.isDone(event)",
        tests=(f"{STEADY}::test_static_mode_asks_nothing_of_what_is_never_fetched",),
    ),
    copies(
        "held-until-left",
        text="!isKnownDone(*stash.left)",
        instead="false",
        tests=(f"{STEADY}::test_host_memory_is_freed_after_a_copy_that_nobody_needs",),
    ),
    copies(
        "fetched-is-not-kept",
        text="takeOut(place->kept, stash);",
        within=("--place->unfetched;\n    takeOut(place->kept, stash);"),
        tests=(f"{SEVERAL_STREAMS}::test_what_was_fetched_is_not_sent_any_more",),
    ),
    copies(
        "forgotten-is-not-kept",
        text="takeOut(place->kept, stash);",
        within=("stash.state() != State::Back;\n    takeOut(place->kept, stash);"),
        tests=(f"{LIFETIMES}::test_what_was_dropped_is_in_no_list",),
    ),
    copies(
        "forgotten-while-leaving",
        text="stash.onHost && leaving.stash == &stash",
        instead="false",
        tests=(f"{FAILURES}::test_a_device_that_has_failed_is_an_exception",),
    ),
    copies(
        "forgotten-while-returning",
        text="giveDeviceMemory(stash);",
        within=("if (stash.state() == State::Returning) {\n      giveDeviceMemory(stash);"),
        tests=(f"{SEVERAL_STREAMS}::test_what_is_dropped_on_its_way_back",),
    ),
    copies(
        "asks-whether-it-left",
        text="via_.isDone(*now_.leaving.front().left)",
        instead="true",
        tests=(f"{WAITS}::test_all_is_in_order",),
    ),
    copies(
        "asks-whether-it-returned",
        text="via_.isDone(*now_.returning.front()->back.end)",
        instead="true",
        tests=(f"{WAITS}::test_all_is_in_order",),
    ),
    copies(
        "asks-whether-it-is-held",
        text="via_.isDone(*held.until)",
        instead="true",
        tests=(f"{ORDER}::test_backward_on_another_stream",),
    ),
    copies(
        "static-waits-for-unused",
        text=(
            "while (!now_.leaving.empty() && now_.leaving.front().stash == nullptr) {\n"
            "    waitForFirst();\n"
            "  }"
        ),
        tests=(f"{STEADY}::test_in_static_mode_what_is_dropped_is_freed_though_others_are_away",),
    ),
    copies(
        "static-joins-when-none-is-away",
        text="joinAll();",
        tests=(f"{CAPTURES}::test_what_is_never_fetched_before_a_capture",),
    ),
    copies(
        "joins-what-leaves",
        text="via_.wait(leaving->packedOn, leaving->left);",
        tests=(f"{CAPTURES}::test_what_is_never_fetched_before_a_capture",),
    ),
    copies(
        "joins-what-leaves-first",
        text="joinLeaving();",
        within=("void Copies::joinAll() {\n  joinLeaving();"),
        tests=(f"{STEADY}::test_static_mode_waits_once_for_all_that_is_leaving",),
    ),
    copies(
        "joins-what-is-held",
        text="via_.wait(held.stream, held.until);",
        tests=(f"{SEVERAL_STREAMS}::test_what_is_dropped_on_its_way_back",),
    ),
    copies(
        "out-waits-held",
        text="via_.wait(via_.outStream(held.stream.device()), held.until);",
        tests=(f"{SEVERAL_STREAMS}::test_what_is_dropped_on_its_way_back",),
    ),
    copies(
        "makes-room-in-static-mode",
        text="joinLeaving();",
        within=("isStatic) {\n    joinLeaving();"),
        tests=(f"{FAILURES}::test_a_fetch_that_finds_no_memory_waits_for_what_is_leaving",),
    ),
    copies(
        "host-waits-to-make-room",
        text="via_.finish(*now_.leaving.back().left);",
        tests=(f"{FAILURES}::test_a_fetch_that_finds_no_memory_waits_for_what_is_leaving",),
    ),
    copies(
        "host-waits-for-out-streams",
        text="via_.finish(*via_.record(via_.outStream(device)));",
        tests=(f"{STEADY}::test_host_memory_of_static_mode_is_freed_after_its_copies",),
    ),
    copies(
        "host-waits-for-in-streams",
        text="via_.finish(*via_.record(via_.inStream(device)));",
        tests=(f"{STEADY}::test_a_drain_waits_for_what_is_on_its_way_back",),
    ),
    copies(
        "host-waits-for-host-memory",
        text="via_.finish(*next);",
        tests=(f"{SPILLING}::test_what_finds_no_room_in_pinned_memory_goes_to_disk",),
    ),
)
