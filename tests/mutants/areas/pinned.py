"""What is asked of CUDA's runtime: captures and pinned memory, and where it is."""

from __future__ import annotations

from mutant import Places, mutants_at

DEVICE_MEMORY = "tests/accelerator/test_memory.py"
PINNED_MEMORY = "tests/offload/test_pinned_memory.py"
RULE07_RANDOMNESS = "tests/rules/test_rule07_randomness.py"

TESTS = (
    "tests/offload/test_pinned_memory.py",
    "tests/rules/test_rule07_randomness.py",
    "tests/accelerator/test_memory.py",
    "tests/accelerator/test_backends.py",
)

EACH = {
    "src/memory/*.cpp": r"\bmadvise\(|\bforgetError\(\);",
    "src/stream/*.cpp": r"\bforgetError\(\);",
}

PLACES: Places = {
    "src/stream/capture.cpp": [
        (
            (DEVICE_MEMORY + "::test_whether_a_stream_is_captured",),
            "capturing-another",
            "isAboutCaptures(error.get_error_code())",
            "false",
        ),
        (
            (DEVICE_MEMORY + "::test_whether_a_stream_is_captured",),
            "capturing-other-errors",
            "isAboutCaptures(error.get_error_code())",
            "true",
        ),
        (
            (DEVICE_MEMORY + "::test_whether_a_stream_is_captured",),
            "capturing-cannot-be-asked",
            "return false;",
            "throw;",
            "(const c10::Error&) {\n    return false;",
        ),
        (
            (DEVICE_MEMORY + "::test_whether_a_stream_is_captured",),
            "capturing-on-the-cpu",
            "stream.device_type() == c10::kCPU",
            "false",
            "",
            (),
            "the CPU's guard says the same, and takes longer",
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
            (PINNED_MEMORY + "::test_what_the_runtime_says_of_captures",),
            "capturing-forgets-the-error",
            "cudaRuntime().forgetError();",
            "",
            "if (error != 0) {\n    cudaRuntime().forgetError();",
        ),
        (
            (PINNED_MEMORY + "::test_what_the_runtime_says_of_captures",),
            "capturing-which-forgets-the-error",
            "cudaRuntime().forgetError();",
            "",
            "!= 0) {\n    cudaRuntime().forgetError();\n  }\n  return id",
        ),
        (
            (PINNED_MEMORY + "::test_what_the_runtime_says_of_captures",),
            "capturing-another-of-cudas",
            "isAboutCaptures(error)",
            "false",
            ": isAboutCaptures(error)",
        ),
        (
            (PINNED_MEMORY + "::test_what_the_runtime_says_of_captures",),
            "capturing-has-a-number",
            "id == 0 ? 1 : id",
            "id",
        ),
    ],
    "src/memory/cuda_runtime.cpp": [
        (
            (PINNED_MEMORY + "::test_it_is_registered_on_its_own_device_whichever_is_current",),
            "runtime-of-archives",
            "isGlobal ? RTLD_DEFAULT : loadedRuntime()",
            "RTLD_DEFAULT",
        ),
        (
            (PINNED_MEMORY + "::test_a_runtime_that_is_part_of_torch_comes_before_that_of_others",),
            "runtime-for-all-to-see",
            "isGlobal ? RTLD_DEFAULT : loadedRuntime()",
            "loadedRuntime()",
        ),
    ],
    "src/memory/pinned.cpp": [
        (
            (PINNED_MEMORY + "::test_pinned_memory_is_of_whole_pages_near_the_device",),
            "pinned-node-is-asked-for-once",
            "isNew",
            "true",
            "if (isNew &&",
        ),
        (
            (PINNED_MEMORY + "::test_pinned_memory_is_of_whole_pages_near_the_device",),
            "pinned-node-by-device",
            "known.emplace(device.index(), -1)",
            "known.emplace(0, -1)",
        ),
        (
            (PINNED_MEMORY + "::test_one_thread_at_a_time_asks_where_devices_are",),
            "pinned-node-lock",
            "mutex",
            "*new std::mutex",
            "lock(mutex);\n  const auto [place",
        ),
        (
            (PINNED_MEMORY + "::test_a_device_that_cannot_say_where_it_is_leaves_no_error_behind",),
            "pinned-node-forgets-the-error",
            "runtime.forgetError();",
        ),
        (
            (PINNED_MEMORY + "::test_pinned_memory_is_of_whole_pages_near_the_device",),
            "pinned-unregisters",
            "cudaRuntime().drop(memory);",
        ),
        (
            (PINNED_MEMORY + "::test_what_cuda_refuses_to_pin_leaves_no_error_behind",),
            "pinned-unregisters-what-is-registered",
            "isRegistered && process == ::getpid()",
            "process == ::getpid()",
        ),
        (
            (PINNED_MEMORY + "::test_the_child_of_a_fork_has_none_of_it_and_unregisters_nothing",),
            "pinned-unregisters-in-its-process",
            "process == ::getpid()",
            "true",
            "isRegistered && process == ::getpid()",
        ),
        (
            (PINNED_MEMORY + "::test_what_is_freed_is_not_mapped_any_more",),
            "pinned-unmaps",
            "::munmap(memory, nbytes);",
        ),
        (
            (
                PINNED_MEMORY
                + "::test_large_memory_is_of_huge_pages_and_there_before_it_is_registered",
            ),
            "pinned-touches",
            "touchAll(pages);",
        ),
        (
            (
                PINNED_MEMORY
                + "::test_large_memory_is_of_huge_pages_and_there_before_it_is_registered",
            ),
            "pinned-joins-threads",
            "thread.join();",
            "thread.detach();",
        ),
        (
            (PINNED_MEMORY + "::test_pinned_memory_is_of_whole_pages_near_the_device",),
            "pinned-prefers-its-node",
            "preferNode(pages.memory, pages.nbytes, node);",
        ),
        (
            (PINNED_MEMORY + "::test_the_child_of_a_fork_has_none_of_it_and_unregisters_nothing",),
            "pinned-is-wiped-by-a-fork",
            "::madvise(pages.memory, pages.nbytes, MADV_WIPEONFORK);",
        ),
        (
            (
                PINNED_MEMORY
                + "::test_large_memory_is_of_huge_pages_and_there_before_it_is_registered",
            ),
            "pinned-huge-pages",
            "::madvise(pages.memory, pages.nbytes, MADV_HUGEPAGE);",
        ),
        (
            (PINNED_MEMORY + "::test_it_is_registered_on_its_own_device_whichever_is_current",),
            "pinned-on-its-device",
            "guard.emplace(device);",
        ),
        (
            (PINNED_MEMORY + "::test_pinned_memory_is_of_whole_pages_near_the_device",),
            "pinned-without-a-guard",
            "c10::impl::hasDeviceGuardImpl(device.type())",
            "true",
        ),
        (
            (PINNED_MEMORY + "::test_what_cuda_refuses_to_pin_leaves_no_error_behind",),
            "pinned-forgets-the-error",
            "cudaRuntime().forgetError();",
        ),
        (
            (PINNED_MEMORY + "::test_pinned_memory_is_of_whole_pages_near_the_device",),
            "pinned-whole-pages",
            "(nbytes + kPage - 1) / kPage * kPage",
            "nbytes",
        ),
        (
            (PINNED_MEMORY + "::test_what_cuda_refuses_to_pin_leaves_no_error_behind",),
            "pinned-is-registered",
            "pages->isRegistered",
            "true",
            "if (pages->isRegistered)",
        ),
        (
            (PINNED_MEMORY + "::test_the_preferred_node_is_the_one_that_the_system_names",),
            "numa-names-in-lower-case",
            "static_cast<char>(std::tolower(letter))",
            "static_cast<char>(letter)",
        ),
        (
            (PINNED_MEMORY + "::test_the_preferred_node_is_the_one_that_the_system_names",),
            "numa-none",
            "node >= 0 && node < kNodes",
            "true",
        ),
    ],
}


MUTANTS = tuple(mutants_at(PLACES))
