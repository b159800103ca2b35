# ruff: noqa: E501
"""What a kernel sees besides its arguments, and what it draws."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mutant import Mutant

BACKENDS = "tests/accelerator/test_backends.py"
CONVOLUTIONS = "tests/accelerator/test_convolutions.py"
KERNEL_STATE = "tests/rules/test_kernel_state.py"
RANDOM_OPERATORS = "tests/accelerator/test_random_operators.py"
RULE07_RANDOMNESS = "tests/rules/test_rule07_randomness.py"
RULE12_THREADS_AND_STREAMS = "tests/rules/test_rule12_threads_and_streams.py"
VERIFY = "tests/region/test_verify.py"

TESTS = (
    "tests/rules/test_kernel_state.py",
    "tests/programs/test_regressions.py",
    "tests/rules/test_rule07_randomness.py",
    "tests/rules/test_rule12_threads_and_streams.py",
    "tests/region/test_verify.py",
    "tests/accelerator/test_random_operators.py",
    "tests/accelerator/test_backends.py",
    "tests/accelerator/test_convolutions.py",
)

EACH = {
    "src/kernel/*.cpp": r"\bcontext\.set(?!DeterministicAlgo)\w+\(|\bmutex\(\)(?=\);)|\bset_autocast_dtype\(",
}

# (tests, name, text, instead, within)
PLACES: dict[str, list[tuple[Any, ...]]] = {
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
            "*this == from",
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
            (KERNEL_STATE + "::test_the_dtype_of_autocast_stays",),
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
    "src/kernel/random_state.cpp": [
        (
            (
                RULE07_RANDOMNESS
                + "::test_a_replay_lends_cudas_generator_a_state_and_does_not_set_it",
            ),
            "random-lock-to-read",
            "const_cast<at::Generator&>(generator).mutex()",
            "*new std::mutex",
            "const_cast<at::Generator&>(generator).mutex());\n  return",
        ),
        (
            (RULE07_RANDOMNESS + "::test_another_devices_generator_is_set_and_put_back",),
            "random-lock-to-set",
            "generator.mutex()",
            "*new std::mutex",
            "generator.mutex());\n  generator.set_state",
        ),
        (
            (
                RULE07_RANDOMNESS,
                RULE12_THREADS_AND_STREAMS,
            ),
            "random-lock-for-a-digest",
            "const_cast<at::Generator&>(generator).mutex()",
            "*new std::mutex",
            "const_cast<at::Generator&>(generator).mutex());\n  const auto engine",
        ),
        (
            (
                RULE07_RANDOMNESS,
                RULE12_THREADS_AND_STREAMS,
            ),
            "random-lock-to-clone",
            "original.mutex()",
            "*new std::mutex",
            "original.mutex());\n  before_",
        ),
        (
            (
                RULE07_RANDOMNESS,
                RULE12_THREADS_AND_STREAMS,
            ),
            "random-lock-to-put-a-clone-back",
            "original.mutex()",
            "*new std::mutex",
            "original.mutex());\n  const auto engine",
        ),
        (
            (
                RULE07_RANDOMNESS
                + "::test_a_replay_lends_cudas_generator_a_state_and_does_not_set_it",
            ),
            "random-lock-to-lend",
            "generator_.mutex()",
            "*new std::mutex",
        ),
        (
            (
                RULE07_RANDOMNESS
                + "::test_a_replay_lends_cudas_generator_a_state_and_does_not_set_it",
            ),
            "random-lock-to-end-a-loan",
            "generator.mutex()",
            "*new std::mutex",
            "generator.mutex());\n    generator.graphsafe",
        ),
        ((RANDOM_OPERATORS,), "random-device-of-the-kernel", "device->type() != type", "false"),
        ((RANDOM_OPERATORS,), "random-device-without-an-index", "!device->has_index()", "false"),
        (
            (RANDOM_OPERATORS + "::test_gradients_and_generators_are_as_in_eager",),
            "random-device-without-a-generator",
            "return {};",
            "throw;",
            "c10::Error&) {\n    return {};",
        ),
        (
            (RULE07_RANDOMNESS + "::test_dropout_before_and_after_other_random_ops",),
            "random-state-of-64-bits",
            "full[i] >> 32 != 0",
            "false",
        ),
        (
            (
                RULE07_RANDOMNESS,
                RULE12_THREADS_AND_STREAMS,
            ),
            "random-no-dropout",
            "op.dropoutArgument >= 0",
            "false",
        ),
        (
            (
                RULE07_RANDOMNESS,
                RULE12_THREADS_AND_STREAMS,
            ),
            "random-not-recorded",
            "op.untrusted && !recorded",
            "false",
        ),
        (
            (
                RULE07_RANDOMNESS,
                RULE12_THREADS_AND_STREAMS,
            ),
            "random-forward-locks",
            "lock_ = std::unique_lock<std::mutex>(drawMutex());",
            "",
            "if (!given && !op.untrusted) {\n    lock_ = std::unique_lock<std::mutex>(drawMutex());",
        ),
        (
            (
                RULE07_RANDOMNESS,
                RULE12_THREADS_AND_STREAMS,
            ),
            "random-forward-of-python-locks-not",
            "!op.untrusted",
            "true",
            "!given && !op.untrusted) {",
        ),
        (
            (
                RULE07_RANDOMNESS,
                RULE12_THREADS_AND_STREAMS,
            ),
            "random-is-confirmed",
            "!op.random",
            "false",
        ),
        (
            (
                RULE12_THREADS_AND_STREAMS
                + "::test_a_thread_outside_of_regions_that_draws_meanwhile",
            ),
            "random-forward-draws-from-a-clone",
            "!op.untrusted && !onDevice",
            "false",
        ),
        (
            (
                RULE07_RANDOMNESS
                + "::test_in_a_capture_the_generator_is_set_and_other_captures_are_refused",
            ),
            "random-remembers-its-capture",
            "state_->capture = captureOf(state_->generator.device());",
        ),
        (
            (RANDOM_OPERATORS + "::test_gradients_and_generators_are_as_in_eager",),
            "random-watches-the-cpu",
            "cpuBefore_ = stateOf(cpuGenerator());",
        ),
        (
            (
                RULE07_RANDOMNESS,
                RULE12_THREADS_AND_STREAMS,
            ),
            "random-clone-of-one-that-moved",
            "engine.next_ == engineBefore_->next_ &&\n      engine.state_ == engineBefore_->state_",
            "true",
        ),
        (
            (RULE07_RANDOMNESS + "::test_dropout_before_and_after_other_random_ops",),
            "random-clone-back",
            "cpu(original).set_engine(cpu(clone_).engine());",
        ),
        (
            (
                RULE07_RANDOMNESS,
                RULE12_THREADS_AND_STREAMS,
            ),
            "random-clone-back-float",
            "cpu(original).set_next_float_normal_sample(cpu(clone_).next_float_normal_sample());",
        ),
        (
            (
                RULE07_RANDOMNESS,
                RULE12_THREADS_AND_STREAMS,
            ),
            "random-clone-back-double",
            "cpu(original).set_next_double_normal_sample(cpu(clone_).next_double_normal_sample());",
        ),
        (
            (RULE07_RANDOMNESS + "::test_an_operator_that_raises_after_it_has_drawn",),
            "random-clone-back-after-an-error",
            "putCloneBack();",
            "",
            "putCloneBack();  // the kernel",
        ),
        (
            (RULE07_RANDOMNESS + "::test_dropout_before_and_after_other_random_ops",),
            "random-digest-of-a-clone",
            "state_->digestAfter = digestOf(clone_);",
        ),
        (
            (
                RULE07_RANDOMNESS,
                RULE12_THREADS_AND_STREAMS,
            ),
            "random-unlocks-before-it-packs",
            "lock_ = {};",
        ),
        (
            (RANDOM_OPERATORS + "::test_what_was_drawn_from_one_generator_is_recomputed",),
            "random-of-the-cpu",
            "cpuMoved && !moved",
            "false",
        ),
        (
            (
                RULE07_RANDOMNESS
                + "::test_in_a_capture_the_generator_is_set_and_other_captures_are_refused",
            ),
            "random-of-the-cpu-is-of-no-capture",
            "state_->capture = 0;",
        ),
        (
            (RANDOM_OPERATORS + "::test_gradients_and_generators_are_as_in_eager",),
            "random-of-both",
            "cpuMoved",
            "false",
            "moved ? cpuMoved",
        ),
        (
            (RANDOM_OPERATORS + "::test_gradients_and_generators_are_as_in_eager",),
            "random-of-nobody",
            "!confirm_ && !shows",
            "false",
        ),
        (
            (
                RULE07_RANDOMNESS,
                RULE12_THREADS_AND_STREAMS,
            ),
            "random-did-not-draw",
            "!moved && confirm_",
            "false",
        ),
        (
            (RULE07_RANDOMNESS + "::test_dropout_before_and_after_other_random_ops",),
            "random-digest",
            "state_->digestAfter = digestOf(state_->generator);",
        ),
        (
            (
                RULE07_RANDOMNESS
                + "::test_in_a_capture_the_generator_is_set_and_other_captures_are_refused",
            ),
            "random-of-another-capture",
            "capture == captureOf(generator.device())",
            "true",
        ),
        (
            (
                RULE07_RANDOMNESS
                + "::test_in_a_capture_the_generator_is_set_and_other_captures_are_refused",
            ),
            "replay-sets-in-a-capture",
            "state->capture == 0",
            "true",
            "op.generatorArgument >= 0 && state->capture == 0",
        ),
        (
            (
                RULE07_RANDOMNESS,
                RULE12_THREADS_AND_STREAMS,
            ),
            "replay-draws-from-a-clone",
            "op.generatorArgument >= 0 && state->capture == 0",
            "false",
        ),
        (
            (RULE07_RANDOMNESS + "::test_dropout_before_and_after_other_random_ops",),
            "replay-clone-is-set",
            "setState(clone_, unpackState(state->packed));",
        ),
        (
            (
                RULE07_RANDOMNESS,
                RULE12_THREADS_AND_STREAMS,
            ),
            "replay-locks",
            "lock_ = std::unique_lock<std::mutex>(drawMutex());",
            "",
            "if (!op.untrusted) {\n    lock_ = std::unique_lock<std::mutex>(drawMutex());",
        ),
        (
            (
                RULE07_RANDOMNESS,
                RULE12_THREADS_AND_STREAMS,
            ),
            "replay-of-python-locks-not",
            "!op.untrusted",
            "true",
            "if (!op.untrusted) {",
        ),
        (
            (RULE07_RANDOMNESS + "::test_dropout_before_and_after_other_random_ops",),
            "replay-is-set",
            "setState(generator_, unpackState(state->packed));",
        ),
        (
            (
                RULE07_RANDOMNESS
                + "::test_a_replay_lends_cudas_generator_a_state_and_does_not_set_it",
            ),
            "replay-lends",
            "!generator_.device().is_cuda()",
            "true",
            "if (!generator_.device().is_cuda()",
        ),
        (
            (
                RULE07_RANDOMNESS
                + "::test_in_a_capture_the_generator_is_set_and_other_captures_are_refused",
            ),
            "replay-lends-nothing-in-a-capture",
            "state_->capture != 0",
            "false",
        ),
        (
            (
                RULE07_RANDOMNESS,
                RULE12_THREADS_AND_STREAMS,
            ),
            "replay-drew-the-same",
            "digestOf(clone_.defined() ? clone_ : generator_) == state_->digestAfter",
            "true",
        ),
        (
            (
                RULE07_RANDOMNESS
                + "::test_a_replay_lends_cudas_generator_a_state_and_does_not_set_it",
            ),
            "replay-ends-a-loan",
            "generator.graphsafe_set_state(lender_);",
        ),
        (
            (RULE07_RANDOMNESS + "::test_dropout_before_and_after_other_random_ops",),
            "replay-puts-back",
            "setState(generator, outer_);",
        ),
        (
            (
                RULE07_RANDOMNESS,
                RULE12_THREADS_AND_STREAMS,
            ),
            "replay-puts-back-after-an-error",
            "putBack();",
            "",
            "putBack();\n    } catch",
        ),
    ],
    "src/kernel/fingerprint.cpp": [
        ((VERIFY,), "fingerprint-of-a-device", "everything && !storage.device().is_cpu()", "false"),
        (
            (VERIFY,),
            "fingerprint-below-all",
            "belowEverything()",
            "c10::impl::ForceDispatchKeyGuard(c10::impl::tls_local_dispatch_key_set())",
        ),
        ((VERIFY,), "fingerprint-of-nothing", "nbytes == 0", "false"),
        (
            (VERIFY + "::test_a_write_into_an_input_names_the_op_and_the_argument",),
            "fingerprint-of-everything",
            "!everything && nbytes > kHashedWhole",
            "nbytes > kHashedWhole",
        ),
        (
            (VERIFY,),
            "fingerprint-of-the-rest",
            "std::memcpy(&rest, bytes + nbytes / kWord * kWord, nbytes % kWord);",
        ),
        (
            (VERIFY + "::test_a_write_into_an_input_names_the_op_and_the_argument",),
            "fingerprint-of-all-lanes",
            "mix(mix(mix(lanes[0], lanes[1]), lanes[2]), lanes[3])",
            "lanes[0]",
        ),
        ((VERIFY,), "fingerprint-of-the-length", "nbytes", "0", "kWord, nbytes);"),
    ],
}


def places() -> Iterator[Mutant]:
    for file, rows in PLACES.items():
        for tests, name, text, *more in rows:
            yield Mutant(name, file, text, tests, *more)


MUTANTS = tuple(places())
