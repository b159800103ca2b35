"""OFFLOAD to disk, and host memory."""

from __future__ import annotations

from functools import partial

from mutant import Mutant

TESTS = ("tests/offload/test_offload_disk.py", "tests/accelerator/test_offload_captures.py")

EACH = {
    "src/offload/spill.cpp": r"\basDiskEvent\(|\bisDone\(\*",
    "src/transfer/*.cpp": r"\bfinish\(\*|\.wait\(\)",
}

CAPTURES = "tests/accelerator/test_offload_captures.py"
DISK = "tests/offload/test_offload_disk.py"

spill = partial(Mutant, file="src/offload/spill.cpp")
disk_transfer = partial(Mutant, file="src/transfer/disk_transfer.cpp")
disk = partial(Mutant, file="src/transfer/disk.cpp")
host_pool = partial(Mutant, file="src/transfer/host_pool.cpp")

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
        text="asDiskEvent(*first.written).wait();",
        tests=(
            f"{DISK}::test_what_finds_no_room_in_pinned_memory_goes_to_disk",
            f"{DISK}::test_a_tensor_that_lives_while_it_is_spilled",
        ),
    ),
    spill(
        "host-waits-for-a-copy",
        text="!copies_.finishOne()",
        instead="false",
        tests=(f"{DISK}::test_what_finds_no_room_in_pinned_memory_goes_to_disk",),
    ),
    spill(
        "dying-and-captured-is-not-written",
        text="!alive || first->capture != 0",
        instead="!alive",
        tests=(CAPTURES,),
    ),
    spill(
        "written-after-it-left",
        text="context_.via.isDone(*first->left)",
        instead="true",
        tests=(
            f"{DISK}::test_what_finds_no_room_in_pinned_memory_goes_to_disk",
            f"{DISK}::test_random_schedules_that_spill",
        ),
    ),
    spill(
        "written-is-not-away",
        text="StashesInOrder::takeOut(stash);",
        within=("StashesInOrder::takeOut(stash);\n  spilling_"),
        tests=(f"{DISK}::test_what_finds_no_room_in_pinned_memory_goes_to_disk",),
    ),
    spill(
        "read-is-not-on-disk",
        text="StashesInOrder::takeOut(stash);",
        within=("StashesInOrder::takeOut(stash);\n  reading_"),
        tests=(f"{DISK}::test_what_finds_no_room_in_pinned_memory_goes_to_disk",),
    ),
    spill(
        "needed-while-written",
        text="asDiskEvent(*stash.written).wait();",
        tests=(
            f"{DISK}::test_a_tensor_that_lives_while_it_is_spilled",
            f"{DISK}::test_what_finds_no_room_in_pinned_memory_goes_to_disk",
            f"{DISK}::test_random_schedules_that_spill",
        ),
    ),
    spill(
        "needed-while-written-is-not-spilled",
        text="takeOut(spilling_, stash);",
        tests=(
            f"{DISK}::test_a_tensor_that_lives_while_it_is_spilled",
            f"{DISK}::test_what_finds_no_room_in_pinned_memory_goes_to_disk",
            f"{DISK}::test_random_schedules_that_spill",
        ),
    ),
    spill(
        "host-waits-for-a-read",
        text="asDiskEvent(*stash.read).wait();",
        tests=(f"{DISK}::test_what_finds_no_room_in_pinned_memory_goes_to_disk",),
    ),
    spill(
        "failed-to-be-read",
        text="stash.checkCameBack(*stash.read);",
        tests=(f"{DISK}::test_a_file_that_was_cut_short_is_an_error",),
    ),
    spill(
        "failed-to-be-read-stays-on-disk",
        text="stash.read->error().empty()",
        instead="true",
        tests=(f"{DISK}::test_a_file_that_was_cut_short_is_an_error",),
    ),
    spill(
        "failed-to-be-written-stays",
        text="!error.empty()",
        instead="false",
        tests=(f"{DISK}::test_a_write_that_fails_keeps_the_tensor_in_pinned_memory",),
    ),
    spill(
        "asks-whether-it-was-written",
        text="asDiskEvent(*spilling_.front()->written).isDone()",
        instead="true",
        tests=(
            f"{DISK}::test_what_finds_no_room_in_pinned_memory_goes_to_disk",
            f"{DISK}::test_a_write_that_fails_keeps_the_tensor_in_pinned_memory",
            f"{DISK}::test_random_schedules_that_spill",
        ),
    ),
    spill(
        "asks-whether-it-was-read",
        text="asDiskEvent(*reading_.front()->read).isDone()",
        instead="true",
        tests=(
            f"{DISK}::test_what_finds_no_room_in_pinned_memory_goes_to_disk",
            f"{DISK}::test_random_schedules_that_spill",
        ),
    ),
    spill(
        "a-drain-waits-for-writes",
        text="asDiskEvent(*stash->written).wait();",
        tests=(f"{DISK}::test_what_finds_no_room_in_pinned_memory_goes_to_disk",),
    ),
    spill(
        "a-drain-waits-for-reads",
        text="asDiskEvent(*stash->read).wait();",
        tests=(f"{DISK}::test_what_finds_no_room_in_pinned_memory_goes_to_disk",),
    ),
    disk_transfer(
        "compute-waits-for-the-disk",
        text="finish(*event);",
        tests=(f"{DISK}::test_cpu_tensors_go_to_disk_and_come_back",),
    ),
    disk_transfer(
        "a-job-waits-for-another",
        text="before_[stream.id()].push_back(event);",
        tests=(
            f"{DISK}::test_cpu_tensors_go_to_disk_and_come_back",
            f"{DISK}::test_a_write_waits_for_the_disk",
            f"{DISK}::test_random_schedules_on_disk",
        ),
    ),
    disk_transfer(
        "a-job-that-is-done-and-failed",
        text="!isDone(*event) || !event->error().empty()",
        instead="!isDone(*event)",
        tests=(
            f"{DISK}::test_a_write_that_fails_keeps_the_tensor",
            f"{DISK}::test_a_write_that_fails_before_the_tensor_is_written",
        ),
    ),
    disk_transfer(
        "room-of-another-file-is-not-used",
        text="Disk::get().isCurrent(host)",
        instead="true",
        tests=(
            f"{DISK}::test_the_folder_may_change_while_values_are_away",
            f"{DISK}::test_another_folder_is_used_at_once",
        ),
    ),
    disk_transfer(
        "host-waits-for-a-job",
        text="asDiskEvent(event).wait();",
        tests=(f"{DISK}::test_cpu_tensors_go_to_disk_and_come_back",),
    ),
    disk(
        "a-job-waits",
        text="earlier.wait();",
        tests=(
            f"{DISK}::test_cpu_tensors_go_to_disk_and_come_back",
            f"{DISK}::test_random_schedules_on_disk",
        ),
    ),
    disk(
        "a-job-after-one-that-failed",
        text=("if (!earlier.error().empty()) {\n        return earlier.error();\n      }"),
        tests=(
            f"{DISK}::test_a_write_that_fails_keeps_the_tensor",
            f"{DISK}::test_a_write_that_fails_before_the_tensor_is_written",
        ),
    ),
    disk(
        "a-job-of-the-parents-fails",
        text=("if (!job.refused.empty()) {\n      return job.refused;\n    }"),
        tests=(f"{DISK}::test_a_forked_child_has_a_file_of_its_own",),
    ),
    disk(
        "a-file-lives-until-its-jobs-are-done",
        text="job.file.reset();",
        tests=(
            f"{DISK}::test_another_folder_is_used_at_once",
            f"{DISK}::test_the_folder_may_change_while_values_are_away",
        ),
    ),
    disk(
        "a-child-has-queues-of-its-own",
        text=("writes_ = std::make_shared<Queue>();\n  reads_ = std::make_shared<Queue>();"),
        tests=(f"{DISK}::test_a_forked_child_has_a_file_of_its_own",),
    ),
    disk(
        "room-of-another-file",
        text="roomOf(room).process == ::getpid() && roomOf(room).file == file_",
        instead="roomOf(room).process == ::getpid()",
        tests=(
            f"{DISK}::test_the_folder_may_change_while_values_are_away",
            f"{DISK}::test_another_folder_is_used_at_once",
        ),
    ),
    disk(
        "room-of-another-process",
        text="roomOf(room).process == ::getpid() && roomOf(room).file == file_",
        instead="roomOf(room).file == file_",
        tests=(f"{DISK}::test_a_forked_child_has_a_file_of_its_own",),
    ),
    disk(
        "room-is-given-back-where-it-was-taken",
        text="room->process == ::getpid()",
        instead="true",
        tests=(f"{DISK}::test_a_forked_child_has_a_file_of_its_own",),
    ),
    disk(
        "an-event-of-the-parents-is-over",
        text=("if (!isOfThisProcess()) {\n    return true;\n  }"),
        tests=(f"{DISK}::test_a_forked_child_has_a_file_of_its_own",),
    ),
    disk(
        "an-event-of-the-parents-is-not-waited-for",
        text="isOfThisProcess()",
        instead="true",
        within="if (isOfThisProcess()) {",
        tests=(f"{DISK}::test_a_forked_child_has_a_file_of_its_own",),
    ),
    disk(
        "an-event-of-the-parents-failed",
        text="isOfThisProcess() || done_",
        instead="true",
        tests=(f"{DISK}::test_a_forked_child_has_a_file_of_its_own",),
    ),
    host_pool(
        "only-what-is-reusable-is-given-back",
        text="!via_.isReusable(memory)",
        instead="false",
        tests=(
            f"{DISK}::test_the_folder_may_change_while_values_are_away",
            f"{DISK}::test_another_folder_is_used_at_once",
        ),
    ),
)
