# ruff: noqa: E501
"""What a kernel sees besides its arguments, and fingerprints of what it reads and gives."""

from __future__ import annotations

from mutant import Places, mutants_at

BACKENDS = "tests/accelerator/test_backends.py"
CONVOLUTIONS = "tests/accelerator/test_convolutions.py"
DEVICE_VERIFY = "tests/accelerator/test_verify.py"
KERNEL_STATE = "tests/rules/test_kernel_state.py"
VERIFY = "tests/region/test_verify.py"

TESTS = (
    "tests/rules/test_kernel_state.py",
    "tests/programs/test_regressions.py",
    "tests/region/test_verify.py",
    "tests/accelerator/test_backends.py",
    "tests/accelerator/test_convolutions.py",
)

EACH = {
    "src/kernel/*.cpp": r"\bcontext\.set(?!DeterministicAlgo)\w+\(|\bset_autocast_dtype\(",
}

PLACES: Places = {
    "src/kernel/kernel_state.cpp": [
        (
            (
                KERNEL_STATE
                + "::test_a_replay_sees_the_setting_of_its_forward_and_puts_back_the_others",
            ),
            "settings-dtype",
            "c10::set_default_dtype(c10::scalarTypeToTypeMeta(defaultDtype));",
        ),
        (
            (
                KERNEL_STATE
                + "::test_a_replay_sees_the_setting_of_its_forward_and_puts_back_the_others",
            ),
            "settings-threads",
            "at::set_num_threads(threads);",
        ),
        (
            (
                KERNEL_STATE
                + "::test_a_replay_sees_the_setting_of_its_forward_and_puts_back_the_others",
            ),
            "settings-denormals",
            "at::Context::setFlushDenormal(flushDenormals);",
        ),
        (
            (
                KERNEL_STATE
                + "::test_a_replay_sees_the_setting_of_its_forward_and_puts_back_the_others",
            ),
            "settings-onednn",
            "context.setUserEnabledMkldnn(mkldnn);",
        ),
        (
            (
                KERNEL_STATE
                + "::test_a_replay_sees_the_setting_of_its_forward_and_puts_back_the_others",
            ),
            "settings-onednn-deterministic",
            "context.setDeterministicMkldnn(mkldnnDeterministic);",
        ),
        (
            (
                KERNEL_STATE
                + "::test_a_replay_sees_the_setting_of_its_forward_and_puts_back_the_others",
            ),
            "settings-nnpack",
            "context.setUserEnabledNNPACK(nnpack);",
        ),
        (
            (
                KERNEL_STATE
                + "::test_a_replay_sees_the_setting_of_its_forward_and_puts_back_the_others",
            ),
            "settings-cudnn",
            "context.setUserEnabledCuDNN(cudnn);",
        ),
        (
            (
                KERNEL_STATE
                + "::test_a_replay_sees_the_setting_of_its_forward_and_puts_back_the_others",
            ),
            "settings-cudnn-by-timing",
            "context.setBenchmarkCuDNN(cudnnBenchmark);",
        ),
        (
            (
                KERNEL_STATE
                + "::test_a_replay_sees_the_setting_of_its_forward_and_puts_back_the_others",
            ),
            "settings-cudnn-deterministic",
            "context.setDeterministicCuDNN(cudnnDeterministic);",
        ),
        (
            (
                KERNEL_STATE
                + "::test_a_replay_sees_the_setting_of_its_forward_and_puts_back_the_others",
            ),
            "settings-deterministic",
            "deterministic",
            "from.deterministic",
            "Algorithms(deterministic, ",
        ),
        (
            (
                KERNEL_STATE
                + "::test_a_replay_sees_the_setting_of_its_forward_and_puts_back_the_others",
            ),
            "settings-deterministic-or-a-warning",
            "deterministicWarnOnly",
            "from.deterministicWarnOnly",
            "(deterministic, deterministicWarnOnly)",
        ),
        (
            (KERNEL_STATE + "::test_a_setting_that_is_the_same_is_left_to_others",),
            "settings-nothing-to-do",
            "equalsForProcess(from)",
            "false",
        ),
        (
            (KERNEL_STATE + "::test_products_within_a_kernel_are_cast_as_in_the_forward",),
            "state-autocast",
            "state.autocast = c10::autocast_dispatch_keyset - c10::impl::raw_local_dispatch_key_set.excluded();",
        ),
        (
            (KERNEL_STATE + "::test_products_within_a_kernel_are_cast_as_in_the_forward",),
            "state-autocast-dtypes",
            "state.autocastDtypes = currentAutocastDtypes();",
        ),
        (
            (KERNEL_STATE + "::test_products_are_cast_to_the_dtype_of_each_forward",),
            "state-is-of-this-autocast",
            "autocast != c10::autocast_dispatch_keyset - thread.excluded()",
            "false",
        ),
        (
            (KERNEL_STATE + "::test_each_replay_sees_the_setting_of_its_own_forward",),
            "state-is-of-these-settings",
            "settings != NumericSettings::current()",
            "false",
        ),
        (
            (KERNEL_STATE + "::test_products_are_cast_to_the_dtype_of_each_forward",),
            "state-is-of-these-dtypes",
            "autocastDtypes == currentAutocastDtypes()",
            "true",
        ),
        (
            (KERNEL_STATE + "::test_each_replay_sees_the_setting_of_its_own_forward",),
            "state-is-the-last-one",
            "last_->isCurrent()",
            "true",
        ),
        (
            (KERNEL_STATE + "::test_states_that_come_again_take_no_memory",),
            "states-are-few",
            "known != all_.end()",
            "false",
        ),
        (
            (KERNEL_STATE + "::test_only_the_precision_that_a_kernel_reads_is_asked_for",),
            "precision-is-not-read",
            "read == PrecisionRead::None",
            "false",
        ),
        (
            (KERNEL_STATE + "::test_only_the_precision_that_a_kernel_reads_is_asked_for",),
            "precision-of-the-cpu-alone",
            "onCpu",
            "false",
            "if (onCpu)",
        ),
        (
            (KERNEL_STATE + "::test_only_the_precision_that_a_kernel_reads_is_asked_for",),
            "precision-of-the-cpus-library",
            "static_cast<uint32_t>(value)",
            "backend == at::Float32Backend::MKLDNN ? 0 : static_cast<uint32_t>(value)",
        ),
        (
            (
                BACKENDS
                + "::test_precision_of_products_changed_between_forward_and_backward_is_refused",
            ),
            "precision-of-cuda",
            "static_cast<uint32_t>(value)",
            "backend == at::Float32Backend::CUDA ? 0 : static_cast<uint32_t>(value)",
        ),
        (
            (KERNEL_STATE + "::test_only_the_precision_that_a_kernel_reads_is_asked_for",),
            "precision-of-products-alone",
            "read == PrecisionRead::Products",
            "false",
        ),
        (
            (KERNEL_STATE + "::test_only_the_precision_that_a_kernel_reads_is_asked_for",),
            "precision-of-convolutions",
            "read == PrecisionRead::Products",
            "true",
        ),
        (
            (
                BACKENDS
                + "::test_precision_of_products_changed_between_forward_and_backward_is_refused",
            ),
            "precision-of-accumulation",
            "(number(context.allowFP16AccumulationCuBLAS()) & 1)",
            "0",
        ),
        (
            (
                BACKENDS
                + "::test_precision_of_products_changed_between_forward_and_backward_is_refused",
            ),
            "precision-of-bf16-sums",
            "(number(context.allowBF16ReductionCuBLAS()) & 3)",
            "0",
        ),
        (
            (
                BACKENDS
                + "::test_precision_of_products_changed_between_forward_and_backward_is_refused",
            ),
            "precision-of-fp16-sums",
            "(number(context.allowFP16ReductionCuBLAS()) & 3)",
            "0",
        ),
        (
            (
                KERNEL_STATE
                + "::test_a_replay_sees_the_setting_of_its_forward_and_puts_back_the_others",
            ),
            "guard-settings",
            "state_.settings.apply(outer_);",
        ),
        (
            (KERNEL_STATE + "::test_products_within_a_kernel_are_cast_as_in_the_forward",),
            "guard-autocast-dtypes",
            "at::autocast::set_autocast_dtype(type, dtype);",
            "",
            "at::autocast::set_autocast_dtype(type, dtype);\n  }\n  auto& tls",
        ),
        (
            (KERNEL_STATE + "::test_what_the_thread_includes_and_excludes_is_not_seen_and_stays",),
            "guard-includes",
            "tls.set_included(DispatchKeySet(DispatchKey::BackendSelect));",
        ),
        (
            (KERNEL_STATE + "::test_products_within_a_kernel_are_cast_as_in_the_forward",),
            "guard-excludes",
            "tls.set_excluded(keysAboveKernels() - state_.autocast);",
        ),
        (
            (KERNEL_STATE + "::test_products_within_a_kernel_are_cast_as_in_the_forward",),
            "guard-keeps-autocast",
            "keysAboveKernels() - state_.autocast",
            "keysAboveKernels()",
        ),
        (
            (KERNEL_STATE + "::test_what_the_thread_includes_and_excludes_is_not_seen_and_stays",),
            "guard-keys-back",
            "c10::impl::raw_local_dispatch_key_set = saved_;",
        ),
        (
            (
                KERNEL_STATE
                + "::test_a_replay_sees_the_setting_of_its_forward_and_puts_back_the_others",
            ),
            "guard-settings-back",
            "outer_.apply(state_.settings);",
        ),
        (
            (KERNEL_STATE + "::test_the_dtype_of_autocast_stays",),
            "guard-autocast-dtypes-back",
            "at::autocast::set_autocast_dtype(type, dtype);",
            "",
            "outerDtypes_) {\n    at::autocast::set_autocast_dtype(type, dtype);",
        ),
    ],
    "src/kernel/convolutions.cpp": [
        (
            (CONVOLUTIONS + "::test_what_is_chosen_by_timing_is_kept",),
            "timed-where-it-is-asked-for",
            "context.benchmarkCuDNN()",
            "true",
            "return context.benchmarkCuDNN()",
        ),
        (
            (CONVOLUTIONS + "::test_without_cudnn_nothing_is_timed",),
            "timed-by-cudnn",
            "context.userEnabledCuDNN()",
            "true",
            "context.benchmarkCuDNN() && context.userEnabledCuDNN()",
        ),
    ],
    "src/kernel/fingerprint.cpp": [
        (
            (DEVICE_VERIFY + "::test_a_write_to_an_input_that_torch_does_not_see_is_found",),
            "fingerprint-of-a-device",
            "everything && !storage.device().is_cpu()",
            "false",
        ),
        (
            (DEVICE_VERIFY + "::test_no_mode_sees_what_is_read_to_compare",),
            "fingerprint-below-all",
            "belowEverything()",
            "c10::impl::ForceDispatchKeyGuard(c10::impl::tls_local_dispatch_key_set())",
        ),
        (
            (VERIFY + "::test_a_write_into_an_input_names_the_op_and_the_argument",),
            "fingerprint-of-everything",
            "!everything && nbytes > kHashedWhole",
            "nbytes > kHashedWhole",
        ),
        (
            (VERIFY + "::test_a_write_into_an_input_names_the_op_and_the_argument",),
            "fingerprint-of-the-rest",
            "std::memcpy(&rest, bytes + nbytes / kWord * kWord, nbytes % kWord);",
        ),
        (
            (VERIFY + "::test_a_write_into_an_input_names_the_op_and_the_argument",),
            "fingerprint-of-all-lanes",
            "mix(mix(mix(lanes[0], lanes[1]), lanes[2]), lanes[3])",
            "lanes[0]",
        ),
    ],
}


MUTANTS = tuple(mutants_at(PLACES))
