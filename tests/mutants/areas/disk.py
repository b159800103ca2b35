"""OFFLOAD to disk, and host memory."""

from __future__ import annotations

from functools import partial

from mutant import Mutant

TESTS = (
    "tests/offload/test_offload_disk.py",
    "tests/offload/test_offload_spilling.py",
    "tests/accelerator/test_offload_captures.py",
    "tests/accelerator/test_offload_failures.py",
)

EACH = {
    "src/offload/spill.cpp": r"\basDiskEvent\(|\bisDone\(\*",
    "src/transfer/*.cpp": r"\bfinish\(\*|\.wait\(\)",
}

CAPTURES = "tests/accelerator/test_offload_captures.py"
DEVICE = "tests/accelerator/test_offload_failures.py"
DISK = "tests/offload/test_offload_disk.py"
SPILLING = "tests/offload/test_offload_spilling.py"

spill = partial(Mutant, file="src/offload/spill.cpp")
disk_transfer = partial(Mutant, file="src/transfer/disk_transfer.cpp")
disk = partial(Mutant, file="src/transfer/disk.cpp")
host_memory = partial(Mutant, file="src/transfer/host_memory.cpp")

MUTANTS = (
    spill(
        "memory-of-a-capture-is-not-allocated",
        text=(
            "if (copies_.capture() != 0) {\n    return hostMemoryOfCapture(nbytes, device);\n  }"
        ),
        tests=(f"{CAPTURES}::test_without_a_step_before_it_says_so",),
    ),
    spill(
        "host-waits-for-the-disk",
        text="asDiskEvent(*first.disk.written).wait();",
        tests=(f"{SPILLING}::test_several_are_written_at_once_and_the_first_is_waited_for",),
    ),
    spill(
        "host-waits-for-a-copy",
        text="!copies_.finishOne()",
        instead="false",
        tests=(f"{SPILLING}::test_what_finds_no_room_in_pinned_memory_goes_to_disk",),
    ),
    spill(
        "dying-and-captured-is-not-written",
        text="!alive || first->sent.capture != 0",
        instead="!alive",
        tests=(f"{CAPTURES}::test_what_a_capture_has_left_does_not_go_to_disk",),
    ),
    spill(
        "written-after-it-left",
        text="context_.via.isDone(*first->left)",
        instead="true",
        tests=(f"{DEVICE}::test_what_a_write_made_leave_goes_to_disk_after_its_copy",),
    ),
    spill(
        "written-is-not-away",
        text="StashesInOrder::takeOut(stash);",
        within=("StashesInOrder::takeOut(stash);\n  spilling_"),
        tests=(f"{SPILLING}::test_several_are_written_at_once_and_the_first_is_waited_for",),
    ),
    spill(
        "read-is-not-on-disk",
        text="StashesInOrder::takeOut(stash);",
        within=("StashesInOrder::takeOut(stash);\n  reading_"),
        tests=(f"{SPILLING}::test_what_finds_no_room_in_pinned_memory_goes_to_disk",),
    ),
    spill(
        "needed-while-written",
        text="asDiskEvent(*stash.disk.written).wait();",
        tests=(f"{SPILLING}::test_what_is_needed_while_it_is_written_is_waited_for",),
    ),
    spill(
        "needed-while-written-is-not-spilled",
        text="takeOut(spilling_, stash);",
        tests=(
            f"{SPILLING}::test_a_tensor_that_lives_while_it_is_spilled",
            f"{SPILLING}::test_what_finds_no_room_in_pinned_memory_goes_to_disk",
            f"{SPILLING}::test_random_schedules_that_spill",
        ),
    ),
    spill(
        "host-waits-for-a-read",
        text="asDiskEvent(*stash.disk.read).wait();",
        tests=(f"{SPILLING}::test_what_finds_no_room_in_pinned_memory_goes_to_disk",),
    ),
    spill(
        "failed-to-be-read",
        text="stash.checkCameBack(*stash.disk.read);",
        tests=(f"{DISK}::test_a_file_that_was_cut_short_is_an_error",),
    ),
    spill(
        "failed-to-be-read-stays-on-disk",
        text="stash.disk.read->error().empty()",
        instead="true",
        tests=(f"{DISK}::test_a_file_that_was_cut_short_is_an_error",),
    ),
    spill(
        "failed-to-be-written-stays",
        text="!error.empty()",
        instead="false",
        tests=(f"{SPILLING}::test_a_write_that_fails_keeps_the_tensor_in_pinned_memory",),
    ),
    spill(
        "asks-whether-it-was-written",
        text="asDiskEvent(*spilling_.front()->disk.written).isDone()",
        instead="true",
        tests=(
            f"{SPILLING}::test_what_finds_no_room_in_pinned_memory_goes_to_disk",
            f"{SPILLING}::test_a_write_that_fails_keeps_the_tensor_in_pinned_memory",
            f"{SPILLING}::test_random_schedules_that_spill",
        ),
    ),
    spill(
        "asks-whether-it-was-read",
        text="asDiskEvent(*reading_.front()->disk.read).isDone()",
        instead="true",
        tests=(
            f"{SPILLING}::test_what_finds_no_room_in_pinned_memory_goes_to_disk",
            f"{SPILLING}::test_random_schedules_that_spill",
        ),
    ),
    spill(
        "a-drain-waits-for-writes",
        text="asDiskEvent(*stash->disk.written).wait();",
        tests=(f"{SPILLING}::test_several_are_written_at_once_and_the_first_is_waited_for",),
    ),
    spill(
        "a-drain-waits-for-reads",
        text="asDiskEvent(*stash->disk.read).wait();",
        tests=(f"{SPILLING}::test_a_drain_waits_for_what_is_read_ahead",),
    ),
    disk_transfer(
        "compute-waits-for-the-disk",
        text="finish(*event);",
        tests=(f"{DISK}::test_cpu_tensors_go_to_disk_and_come_back",),
    ),
    disk_transfer(
        "host-waits-for-a-job",
        text="asDiskEvent(event).wait();",
        tests=(f"{DISK}::test_cpu_tensors_go_to_disk_and_come_back",),
    ),
    disk(
        "a-job-of-the-parents-fails",
        text=("if (!job.refused.empty()) {\n      return job.refused;\n    }"),
        tests=(f"{DISK}::test_a_forked_child_has_a_file_of_its_own",),
    ),
    disk(
        "a-child-has-queues-of-its-own",
        text=("writes_ = std::make_shared<Queue>();\n  reads_ = std::make_shared<Queue>();"),
        tests=(f"{DISK}::test_a_forked_child_has_a_file_of_its_own",),
    ),
    disk(
        "room-of-a-parent-is-not-given-back",
        text="room->process == ::getpid()",
        instead="true",
        tests=(DISK,),
        no_test="for a fork while another thread has the file's lock, for less than a microsecond",
    ),
    disk(
        "an-event-of-the-parents-is-over",
        text=("if (!isOfThisProcess()) {\n    return true;\n  }"),
        tests=(f"{DISK}::test_a_fork_while_something_is_written",),
    ),
    disk(
        "an-event-of-the-parents-is-not-waited-for",
        text="isOfThisProcess()",
        instead="true",
        within="if (isOfThisProcess()) {",
        tests=(f"{DISK}::test_a_fork_while_something_is_written",),
    ),
    disk(
        "an-event-of-the-parents-failed",
        text="isOfThisProcess() || done_",
        instead="true",
        tests=(f"{DISK}::test_a_fork_while_something_is_written",),
    ),
    host_memory(
        "only-what-is-reusable-is-given-back",
        text="via_.isDisk()",
        instead="false",
        tests=(
            f"{DISK}::test_the_folder_may_change_while_values_are_away",
            f"{DISK}::test_another_folder_is_used_at_once",
        ),
    ),
)
