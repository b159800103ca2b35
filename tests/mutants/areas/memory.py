# ruff: noqa: E501
"""Memory: the arena, bytes, what locks drop, events, shared storages."""

from __future__ import annotations

from mutant import Places, mutants_at

DEVICE_MEMORY = "tests/accelerator/test_memory.py"
HANDLES = "tests/region/test_handles.py"
DISPATCH_MODES = "tests/region/test_dispatch_modes.py"
ESCAPES = "tests/region/test_escapes.py"
LOCKS = "tests/region/test_locks.py"
MEMORY = "tests/region/test_memory.py"
OFFLOAD_STEADY = "tests/accelerator/test_offload_steady.py"
PLACEHOLDERS = "tests/region/test_placeholders.py"
SHARE_STORAGE = "tests/region/test_share_storage.py"
THREAD_LOCALS = "tests/region/test_thread_locals.py"
UNREAD_ARGUMENTS = "tests/rules/test_unread_arguments.py"

TESTS = (
    "tests/region/test_thread_locals.py",
    "tests/region/test_memory.py",
    "tests/region/test_dispatch_modes.py",
    "tests/region/test_share_storage.py",
    "tests/region/test_placeholders.py",
    "tests/region/test_locks.py",
    "tests/rules/test_unread_arguments.py",
    "tests/accelerator/test_memory.py",
    "tests/accelerator/test_offload_steady.py",
)

EACH = {
    "src/memory/arena.cpp": r"spares\(\)\.mutex",
    "src/stream/event.cpp": r"mutex_(?=\);)",
}

PLACES: Places = {
    "src/memory/arena.cpp": [
        (
            (THREAD_LOCALS + "::test_threads_that_come_and_go_leave_no_memory_behind",),
            "arena-retires-what-is-cut",
            "kCutting - chunk->cut",
            "kCutting - chunk->cut + 1",
        ),
        (
            (THREAD_LOCALS + "::test_regions_one_after_the_other_leave_no_memory_behind",),
            "arena-retires",
            "retire(tlsChunk);",
        ),
        (
            (THREAD_LOCALS + "::test_threads_that_come_and_go_leave_no_memory_behind",),
            "arena-ends-with-the-thread",
            "atThreadExit(&retireOwn, nullptr);",
        ),
        (
            (
                THREAD_LOCALS
                + "::test_a_thread_that_enters_a_region_when_its_thread_locals_are_gone",
            ),
            "arena-begins-anew-after-the-end",
            "std::exchange(tlsChunk, nullptr)",
            "tlsChunk",
        ),
        (
            (THREAD_LOCALS + "::test_many_threads_make_and_drop_what_regions_consist_of",),
            "arena-alignment",
            "bytes = (bytes + kArenaAlignment - 1) & ~(kArenaAlignment - 1);",
        ),
        (
            (THREAD_LOCALS + "::test_regions_one_after_the_other_leave_no_memory_behind",),
            "arena-room",
            "chunk->used + bytes > kChunkBytes",
            "chunk->used > kChunkBytes",
        ),
        (
            (THREAD_LOCALS + "::test_regions_one_after_the_other_leave_no_memory_behind",),
            "arena-large-alone",
            "own->live.store(1, std::memory_order_relaxed);",
        ),
        (
            (
                THREAD_LOCALS,
                MEMORY,
                HANDLES,
            ),
            "arena-spares-are-used",
            "!spares().chunks.empty()",
            "false",
            "",
            (),
            "without it each chunk comes from malloc, which takes longer and gives the same",
        ),
        (
            (THREAD_LOCALS + "::test_a_large_graph_leaves_no_memory_behind",),
            "arena-spares-are-few",
            "spares().chunks.size() < kSpareChunks",
            "true",
        ),
        (
            (THREAD_LOCALS + "::test_operators_with_many_arguments_leave_no_memory_behind",),
            "arena-spares-are-of-one-size",
            "chunk->used <= kChunkBytes",
            "true",
        ),
        (
            (THREAD_LOCALS + "::test_many_threads_make_and_drop_what_regions_consist_of",),
            "arena-lock-to-take",
            "spares().mutex",
            "*new std::mutex",
            "lock(spares().mutex);\n    if (!spares",
        ),
        (
            (THREAD_LOCALS + "::test_many_threads_make_and_drop_what_regions_consist_of",),
            "arena-lock-to-give",
            "spares().mutex",
            "*new std::mutex",
            "lock(spares().mutex);\n    if (spares",
        ),
    ],
    "src/memory/bytes.cpp": [
        (
            (DISPATCH_MODES + "::test_no_mode_sees_what_is_allocated_and_copied_for_backward",),
            "bytes-below-all",
            "belowEverything()",
            "c10::impl::ForceDispatchKeyGuard(c10::impl::tls_local_dispatch_key_set())",
            "belowEverything();\n  return at::empty",
        ),
        (
            (UNREAD_ARGUMENTS + "::test_a_kernel_that_multiplies_by_zero_what_it_should_not_read",),
            "bytes-of-zeros",
            "bytesOf(storage).zero_();",
        ),
        (
            (DISPATCH_MODES + "::test_no_mode_sees_what_is_allocated_and_copied_for_backward",),
            "bytes-copied-below-all",
            "belowEverything()",
            "c10::impl::ForceDispatchKeyGuard(c10::impl::tls_local_dispatch_key_set())",
            "belowEverything();\n  constexpr size_t kAlignment",
        ),
        (
            (MEMORY + "::test_copy_of_memory_that_is_not_aligned_as_torch_aligns",),
            "bytes-copied-with-their-alignment",
            "shift != 0",
            "false",
        ),
    ],
    "src/memory/dropping_mutex.h": [
        (
            (LOCKS + "::test_no_storage_dies_under_the_lock_of_the_offload_engines",),
            "dropping-behind-the-lock",
            "dropped_.push_back(std::exchange(storage, c10::Storage()));",
            "storage = c10::Storage();",
        ),
        (
            (LOCKS + "::test_no_storage_dies_under_the_lock_of_the_offload_engines",),
            "dropping-at-the-outermost",
            "--depth_ == 0",
            "--depth_ >= 0",
        ),
        (
            (LOCKS + "::test_no_storage_dies_under_the_lock_of_the_offload_engines",),
            "dropping-after-unlocking",
            "mutex_.unlock();",
            "dropped.clear(); mutex_.unlock();",
        ),
    ],
    "src/stream/event.cpp": [
        (
            (OFFLOAD_STEADY + "::test_the_host_waits_for_nothing_and_asks_little",),
            "events-are-used-again",
            "free.empty()",
            "true",
            "if (free.empty())",
        ),
        (
            (DEVICE_MEMORY + "::test_events_that_many_threads_record",),
            "events-lock-to-take",
            "mutex_",
            "*new std::mutex",
            "lock(mutex_);\n    std::vector",
        ),
        (
            (DEVICE_MEMORY + "::test_events_that_many_threads_record",),
            "events-lock-to-give",
            "mutex_",
            "*new std::mutex",
            "lock(mutex_);\n    free_",
        ),
    ],
    "src/memory/share_storage.cpp": [
        (
            (
                SHARE_STORAGE,
                PLACEHOLDERS,
            ),
            "share-of-the-owner",
            "pointer.get_deleter() == &dropOwner",
            "false",
        ),
        (
            (
                SHARE_STORAGE,
                PLACEHOLDERS,
            ),
            "share-keeps-its-size",
            "from.unsafeGetStorageImpl()->set_resizable(false);",
        ),
        (
            (
                SHARE_STORAGE,
                PLACEHOLDERS,
            ),
            "share-sets-its-size",
            "to.set_nbytes(nbytes);",
        ),
        (
            (
                SHARE_STORAGE,
                PLACEHOLDERS,
            ),
            "share-plain-tensors",
            "impl->layout() == c10::kStrided && impl->has_storage()",
            "true",
        ),
        (
            (SHARE_STORAGE + "::test_tensors_of_other_kinds",),
            "share-no-subclasses",
            "impl->key_set().has_any(\n              c10::DispatchKeySet(\n                  {c10::DispatchKey::Python,\n                   c10::DispatchKey::NestedTensor,\n                   c10::DispatchKey::Quantized,\n                   c10::DispatchKey::Functionalize}))",
            "false",
        ),
        (
            (
                SHARE_STORAGE,
                PLACEHOLDERS,
            ),
            "share-no-meta",
            "tensor.is_meta()",
            "false",
        ),
        (
            (
                SHARE_STORAGE,
                PLACEHOLDERS,
            ),
            "share-alike",
            "dst == src",
            "true",
            "dst == src,",
        ),
        (
            (
                SHARE_STORAGE,
                PLACEHOLDERS,
            ),
            "share-large-enough",
            "src.storage().nbytes() >= needed",
            "true",
        ),
        (
            (
                SHARE_STORAGE,
                PLACEHOLDERS,
            ),
            "share-as-large-as-is-shown",
            "std::max(to.nbytes(), shown)",
            "to.nbytes()",
        ),
        (
            (
                SHARE_STORAGE,
                PLACEHOLDERS,
            ),
            "share-already",
            "ownerOf(to).is_alias_of(from)",
            "false",
        ),
        (
            (
                SHARE_STORAGE,
                PLACEHOLDERS,
            ),
            "share-own-memory",
            "to.resizable()",
            "true",
        ),
        (
            (
                SHARE_STORAGE,
                PLACEHOLDERS,
            ),
            "empty-says-why",
            "impl->release_data_and_set_meta_custom_data_ptr_error_msg_(message);",
        ),
        (
            (
                SHARE_STORAGE,
                PLACEHOLDERS,
            ),
            "empty-has-no-bytes",
            "impl->set_nbytes(0);",
        ),
        (
            (ESCAPES,),
            "fill-allows-access",
            "allowAccess(storage);",
        ),
    ],
}


MUTANTS = tuple(mutants_at(PLACES))
