# ruff: noqa: E501
"""What keeps still under a replay ahead: commotions, and hands on storages."""

from __future__ import annotations

from mutant import Places, mutants_at

COMMOTIONS = "tests/ahead/test_ahead_commotions.py"
THREADS = "tests/ahead/test_ahead_threads.py"
WRITES = "tests/ahead/test_ahead_writes.py"

TESTS = (
    "tests/ahead/test_ahead_order.py",
    "tests/ahead/test_ahead_writes.py",
    "tests/ahead/test_ahead_held.py",
    "tests/ahead/test_ahead_commotions.py",
    "tests/ahead/test_ahead_settings.py",
    "tests/ahead/test_ahead_threads.py",
    "tests/accelerator/test_replays_ahead.py",
)

EACH = {
    "src/memory/stillness.cpp": r"hands\.mutex(?=\);)|mutex_(?=\);)",
}

PLACES: Places = {
    "src/memory/stillness.cpp": [
        (
            (COMMOTIONS + "::test_nothing_begins_ahead_in_a_commotion",),
            "ahead-none-in-a-commotion",
            "commotions.load() == 0",
            "true",
        ),
        (
            (COMMOTIONS + "::test_setters_do_not_wait_for_who_waits_for_them",),
            "ahead-a-commotion-ends",
            "commotions.fetch_sub(1);",
        ),
        (
            (COMMOTIONS + "::test_a_commotion_waits_for_the_recipe_that_runs_only",),
            "ahead-a-commotion-waits",
            "while (running != 0) {\n      replaysAhead.wait(running);\n      running = replaysAhead.load();\n    }",
        ),
        (
            (COMMOTIONS + "::test_setters_do_not_wait_for_who_waits_for_them",),
            "ahead-a-commotion-waits-without-the-gil",
            "const WithoutGil withoutGil;\n    while (running != 0) {\n      replaysAhead.wait(running);\n      running = replaysAhead.load();\n    }",
            "while (running != 0) {\n      replaysAhead.wait(running);\n      running = replaysAhead.load();\n    }",
        ),
        (
            (COMMOTIONS + "::test_setters_do_not_wait_for_who_waits_for_them",),
            "ahead-a-recipe-waits-not-for-itself",
            "!StillThreads::get().hasThis()",
            "true",
        ),
        (
            (COMMOTIONS + "::test_nothing_runs_ahead_in_a_commotion",),
            "ahead-the-last-recipe-tells",
            "replaysAhead.notify_all();",
        ),
        (
            (THREADS + "::test_many_threads_read_and_have_hands_on_storages",),
            "ahead-lock-to-be-still",
            "mutex_",
            "*new std::mutex",
            "lock(mutex_);\n    all_.push_back",
        ),
        (
            (THREADS + "::test_many_threads_read_and_have_hands_on_storages",),
            "ahead-lock-to-end-being-still",
            "mutex_",
            "*new std::mutex",
            "lock(mutex_);\n    all_.erase",
        ),
        (
            (THREADS + "::test_who_runs_ahead_is_known_while_others_begin_and_end",),
            "ahead-lock-to-ask-who-is-still",
            "mutex_",
            "*new std::mutex",
            "lock(mutex_);\n    return std::find",
        ),
        (
            (THREADS + "::test_many_threads_read_and_have_hands_on_storages",),
            "ahead-lock-of-a-hand",
            "hands.mutex",
            "*new std::mutex",
            "lock(hands.mutex);\n    if",
        ),
        (
            (THREADS + "::test_references_are_counted_while_another_thread_has_hands_on_storages",),
            "ahead-lock-to-count",
            "hands.mutex",
            "*new std::mutex",
            "lock(hands.mutex);\n  const auto weak",
        ),
        (
            (THREADS + "::test_many_threads_read_and_have_hands_on_storages",),
            "ahead-lock-to-read",
            "hands.mutex",
            "*new std::mutex",
            "lock(hands.mutex);\n  allowed_",
        ),
        (
            (THREADS + "::test_many_threads_read_and_have_hands_on_storages",),
            "ahead-lock-to-end-reading",
            "hands.mutex",
            "*new std::mutex",
            "lock(hands.mutex);\n  for (const c10::Storage& storage : storages_) {\n    hands.read.erase",
        ),
        (
            (THREADS + "::test_what_is_remembered_of_storages_goes_with_them",),
            "ahead-forgets-hands",
            "hands.on.size() >= hands.sweepAt",
            "false",
        ),
        (
            (COMMOTIONS + "::test_a_storage_that_was_ever_resized_by_hand_is_not_read_ahead",),
            "ahead-a-hand-for-ever-stays",
            "std::max(before, until)",
            "until",
        ),
        (
            (WRITES + "::test_through_an_alias_while_a_kernel_reads",),
            "ahead-a-hand-waits-for-who-reads",
            "isRead",
            "false",
            "if (isRead) {",
        ),
        (
            (WRITES + "::test_through_an_alias_while_a_kernel_reads",),
            "ahead-in-hand-is-not-read",
            "hand->second.until >= closed",
            "false",
        ),
        (
            (THREADS + "::test_many_threads_read_and_have_hands_on_storages",),
            "ahead-in-hand-is-read-for-later-graphs",
            "hand->second.until >= closed",
            "true",
        ),
        (
            (WRITES + "::test_opaque_writes_know_nothing_of_ahead",),
            "ahead-its-own-references-do-not-count",
            "(ours ? 2 : 1)",
            "1",
        ),
    ],
}


MUTANTS = tuple(mutants_at(PLACES))
