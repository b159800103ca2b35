# ruff: noqa: E501
"""Memory: the arena, bytes, pinned memory, captures, shared storages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mutant import Mutant

BACKENDS = "tests/accelerator/test_backends.py"
HANDLES = "tests/region/test_handles.py"
LOCKS = "tests/region/test_locks.py"
MEMORY = "tests/region/test_memory.py"
OFFLOAD_STEADY = "tests/accelerator/test_offload_steady.py"
PAGING_CAPTURES = "tests/accelerator/test_paging_captures.py"
PAGING_THREADS = "tests/paging/test_paging_threads.py"
PINNED_MEMORY = "tests/offload/test_pinned_memory.py"
PLACEHOLDERS = "tests/region/test_placeholders.py"
REGRESSIONS = "tests/programs/test_regressions.py"
RULE07_RANDOMNESS = "tests/rules/test_rule07_randomness.py"
SHARE_STORAGE = "tests/region/test_share_storage.py"
SUBCLASSES = "tests/region/test_subclasses.py"
THREAD_LOCALS = "tests/region/test_thread_locals.py"

TESTS = (
    "tests/region/test_thread_locals.py",
    "tests/region/test_memory.py",
    "tests/region/test_share_storage.py",
    "tests/region/test_placeholders.py",
    "tests/region/test_locks.py",
    "tests/offload/test_pinned_memory.py",
    "tests/rules/test_rule07_randomness.py",
    "tests/accelerator/test_offload_steady.py",
)

EACH = {
    "src/memory/*.cpp": r"\bmadvise\(|\bforgetError\(\);",
}

# (tests, name, text, instead, within)
PLACES: dict[str, list[tuple[Any, ...]]] = {
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
                THREAD_LOCALS,
                MEMORY,
                HANDLES,
            ),
            "arena-begins-anew-after-the-end",
            "std::exchange(tlsChunk, nullptr)",
            "tlsChunk",
        ),
        (
            (
                THREAD_LOCALS,
                MEMORY,
                HANDLES,
            ),
            "arena-alignment",
            "bytes = (bytes + 15) & ~size_t{15};",
        ),
        (
            (THREAD_LOCALS,),
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
        ),
        (
            (
                THREAD_LOCALS,
                MEMORY,
                HANDLES,
            ),
            "arena-spares-are-few",
            "spares().chunks.size() < kSpareChunks",
            "true",
        ),
        (
            (
                THREAD_LOCALS,
                MEMORY,
                HANDLES,
            ),
            "arena-spares-are-of-one-size",
            "chunk->used <= kChunkBytes",
            "true",
        ),
        (
            (
                THREAD_LOCALS,
                MEMORY,
                HANDLES,
            ),
            "arena-lock-to-take",
            "spares().mutex",
            "*new std::mutex",
            "lock(spares().mutex);\n    if (!spares",
        ),
        (
            (
                THREAD_LOCALS,
                MEMORY,
                HANDLES,
            ),
            "arena-lock-to-give",
            "spares().mutex",
            "*new std::mutex",
            "lock(spares().mutex);\n    if (spares",
        ),
    ],
    "src/memory/bytes.cpp": [
        (
            (
                MEMORY,
                REGRESSIONS,
                SUBCLASSES,
            ),
            "bytes-below-all",
            "belowEverything()",
            "c10::impl::ForceDispatchKeyGuard(c10::impl::tls_local_dispatch_key_set())",
            "belowEverything();\n  return at::empty",
        ),
        (
            (
                MEMORY,
                REGRESSIONS,
                SUBCLASSES,
            ),
            "bytes-of-zeros-below-all",
            "belowEverything()",
            "c10::impl::ForceDispatchKeyGuard(c10::impl::tls_local_dispatch_key_set())",
            "belowEverything();\n  c10::Storage storage",
        ),
        (
            (
                MEMORY,
                REGRESSIONS,
                SUBCLASSES,
            ),
            "bytes-of-zeros",
            "bytesOf(storage).zero_();",
        ),
        (
            (
                MEMORY,
                REGRESSIONS,
                SUBCLASSES,
            ),
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
    "src/memory/capturing.cpp": [
        (
            (
                BACKENDS,
                PAGING_CAPTURES + "::test_a_capture_after_steps_with_an_optimizer",
            ),
            "capturing-another",
            "isAboutCaptures(error.get_error_code())",
            "false",
        ),
        (
            (
                BACKENDS,
                PAGING_CAPTURES + "::test_a_capture_after_steps_with_an_optimizer",
            ),
            "capturing-other-errors",
            "isAboutCaptures(error.get_error_code())",
            "true",
        ),
        (
            (
                BACKENDS,
                PAGING_CAPTURES + "::test_a_capture_after_steps_with_an_optimizer",
            ),
            "capturing-cannot-be-asked",
            "return false;",
            "throw;",
            "(const c10::Error&) {\n    return false;",
        ),
        (
            (
                BACKENDS,
                PAGING_CAPTURES + "::test_a_capture_after_steps_with_an_optimizer",
            ),
            "capturing-without-a-guard",
            "c10::impl::hasDeviceGuardImpl(device.type())",
            "true",
        ),
        (
            (
                BACKENDS,
                PAGING_CAPTURES + "::test_a_capture_after_steps_with_an_optimizer",
            ),
            "capturing-on-the-cpu",
            "device.is_cpu()",
            "false",
            "if (device.is_cpu()",
        ),
        (
            (
                RULE07_RANDOMNESS
                + "::test_in_a_capture_the_generator_is_set_and_other_captures_are_refused",
            ),
            "capturing-none",
            "!isCapturing(device)",
            "false",
        ),
        (
            (
                RULE07_RANDOMNESS
                + "::test_in_a_capture_the_generator_is_set_and_other_captures_are_refused",
            ),
            "capturing-which",
            "device.is_cuda()",
            "false",
        ),
        (
            (
                BACKENDS,
                PAGING_CAPTURES + "::test_a_capture_after_steps_with_an_optimizer",
            ),
            "capturing-forgets-the-error",
            "cudaRuntime().forgetError();",
            "",
            "if (error != 0) {\n    cudaRuntime().forgetError();",
        ),
        (
            (
                BACKENDS,
                PAGING_CAPTURES + "::test_a_capture_after_steps_with_an_optimizer",
            ),
            "capturing-which-forgets-the-error",
            "cudaRuntime().forgetError();",
            "",
            "!= 0) {\n    cudaRuntime().forgetError();\n  }\n  return id",
        ),
        (
            (
                BACKENDS,
                PAGING_CAPTURES + "::test_a_capture_after_steps_with_an_optimizer",
            ),
            "capturing-another-of-cudas",
            "isAboutCaptures(error)",
            "false",
            ": isAboutCaptures(error)",
        ),
        (
            (
                BACKENDS,
                PAGING_CAPTURES + "::test_a_capture_after_steps_with_an_optimizer",
            ),
            "capturing-has-a-number",
            "id == 0 ? 1 : id",
            "id",
        ),
    ],
    "src/memory/cuda_runtime.cpp": [
        (
            (PINNED_MEMORY,),
            "runtime-of-archives",
            "isGlobal ? RTLD_DEFAULT : loadedRuntime()",
            "RTLD_DEFAULT",
        ),
        (
            (PINNED_MEMORY,),
            "runtime-for-all-to-see",
            "isGlobal ? RTLD_DEFAULT : loadedRuntime()",
            "loadedRuntime()",
        ),
    ],
    "src/memory/dropping_mutex.h": [
        (
            (
                LOCKS,
                PAGING_THREADS,
            ),
            "dropping-behind-the-lock",
            "dropped_.push_back(std::exchange(storage, c10::Storage()));",
            "storage = c10::Storage();",
        ),
        (
            (
                LOCKS,
                PAGING_THREADS,
            ),
            "dropping-at-the-outermost",
            "--depth_ == 0",
            "--depth_ >= 0",
        ),
        (
            (
                LOCKS,
                PAGING_THREADS,
            ),
            "dropping-after-unlocking",
            "mutex_.unlock();",
            "dropped.clear(); mutex_.unlock();",
        ),
    ],
    "src/memory/events.cpp": [
        ((OFFLOAD_STEADY,), "events-are-used-again", "free.empty()", "true", "if (free.empty())"),
        (
            (OFFLOAD_STEADY,),
            "events-lock-to-take",
            "mutex_",
            "*new std::mutex",
            "lock(mutex_);\n    std::vector",
        ),
        (
            (OFFLOAD_STEADY,),
            "events-lock-to-give",
            "mutex_",
            "*new std::mutex",
            "lock(mutex_);\n    free_",
        ),
    ],
    "src/memory/pinned.cpp": [
        ((PINNED_MEMORY,), "pinned-node-is-asked-for-once", "isNew", "true", "if (isNew &&"),
        (
            (PINNED_MEMORY,),
            "pinned-node-by-device",
            "known.emplace(device.index(), -1)",
            "known.emplace(0, -1)",
        ),
        (
            (PINNED_MEMORY,),
            "pinned-node-lock",
            "mutex",
            "*new std::mutex",
            "lock(mutex);\n  const auto [place",
        ),
        ((PINNED_MEMORY,), "pinned-node-forgets-the-error", "runtime.forgetError();"),
        ((PINNED_MEMORY,), "pinned-unregisters", "cudaRuntime().drop(memory);"),
        (
            (PINNED_MEMORY,),
            "pinned-unregisters-what-is-registered",
            "isRegistered && process == ::getpid()",
            "process == ::getpid()",
        ),
        (
            (PINNED_MEMORY,),
            "pinned-unregisters-in-its-process",
            "process == ::getpid()",
            "true",
            "isRegistered && process == ::getpid()",
        ),
        ((PINNED_MEMORY,), "pinned-unmaps", "::munmap(memory, nbytes);"),
        ((PINNED_MEMORY,), "pinned-touches", "touchAll(pages);"),
        ((PINNED_MEMORY,), "pinned-joins-threads", "thread.join();", "thread.detach();"),
        (
            (PINNED_MEMORY,),
            "pinned-prefers-its-node",
            "preferNode(pages.memory, pages.nbytes, node);",
        ),
        (
            (PINNED_MEMORY,),
            "pinned-is-wiped-by-a-fork",
            "::madvise(pages.memory, pages.nbytes, MADV_WIPEONFORK);",
        ),
        (
            (PINNED_MEMORY,),
            "pinned-huge-pages",
            "::madvise(pages.memory, pages.nbytes, MADV_HUGEPAGE);",
        ),
        ((PINNED_MEMORY,), "pinned-on-its-device", "guard.emplace(device);"),
        (
            (PINNED_MEMORY,),
            "pinned-without-a-guard",
            "c10::impl::hasDeviceGuardImpl(device.type())",
            "true",
        ),
        ((PINNED_MEMORY,), "pinned-forgets-the-error", "cudaRuntime().forgetError();"),
        ((PINNED_MEMORY,), "pinned-whole-pages", "(nbytes + kPage - 1) / kPage * kPage", "nbytes"),
        (
            (PINNED_MEMORY,),
            "pinned-is-registered",
            "pages->isRegistered",
            "true",
            "if (pages->isRegistered)",
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
            (
                SHARE_STORAGE,
                PLACEHOLDERS,
            ),
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
            "std::max(to.nbytes(), shownBytes(dst))",
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
            (
                SHARE_STORAGE,
                PLACEHOLDERS,
            ),
            "fill-allows-access",
            "allowAccess(storage);",
        ),
    ],
    "src/memory/numa_node.cpp": [
        (
            (PINNED_MEMORY,),
            "numa-names-in-lower-case",
            "static_cast<char>(std::tolower(letter))",
            "static_cast<char>(letter)",
        ),
        ((PINNED_MEMORY,), "numa-none", "node >= 0 && node < kNodes", "true"),
    ],
}


def places() -> Iterator[Mutant]:
    for file, rows in PLACES.items():
        for tests, name, text, *more in rows:
            yield Mutant(name, file, text, tests, *more)


MUTANTS = tuple(places())
