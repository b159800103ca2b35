# ruff: noqa: E501
"""What a kernel draws."""

from __future__ import annotations

from mutant import Places, mutants_at

DRAWS_FROM_ELSEWHERE = "tests/rules/test_draws_from_elsewhere.py"
RANDOM_OPERATORS = "tests/accelerator/test_random_operators.py"
RULE07_RANDOMNESS = "tests/rules/test_rule07_randomness.py"
SHARED_GENERATORS = "tests/rules/test_shared_generators.py"

TESTS = (
    "tests/rules/test_rule07_randomness.py",
    "tests/rules/test_rule12_threads_and_streams.py",
    "tests/rules/test_draws_from_elsewhere.py",
    "tests/rules/test_shared_generators.py",
    "tests/accelerator/test_random_operators.py",
)

EACH = {
    "src/kernel/*.cpp": r"\bmutex\(\)(?=\);)",
}

PLACES: Places = {
    "src/kernel/random_state.cpp": [
        (
            (RULE07_RANDOMNESS + "::test_a_replay_leaves_a_devices_generator_as_it_was",),
            "random-lock-to-read",
            "const_cast<at::Generator&>(generator).mutex()",
            "*new std::mutex",
            "const_cast<at::Generator&>(generator).mutex());\n  return generator.get_state",
        ),
        (
            (RULE07_RANDOMNESS + "::test_a_replay_leaves_a_devices_generator_as_it_was",),
            "random-lock-to-clone-for-a-replay",
            "const_cast<at::Generator&>(generator).mutex()",
            "*new std::mutex",
            "const_cast<at::Generator&>(generator).mutex());\n  return generator.clone",
            (),
            "CUDA alone frees a state that another thread clones",
        ),
        (
            (RULE07_RANDOMNESS + "::test_a_replay_leaves_a_devices_generator_as_it_was",),
            "random-lock-to-set",
            "generator.mutex()",
            "*new std::mutex",
            "generator.mutex());\n  generator.set_state",
        ),
        (
            (
                SHARED_GENERATORS
                + "::test_a_generator_is_not_looked_at_while_another_thread_has_its_lock",
            ),
            "random-lock-for-a-digest",
            "const_cast<at::Generator&>(generator).mutex()",
            "*new std::mutex",
            "const_cast<at::Generator&>(generator).mutex());\n  const auto engine",
        ),
        (
            (
                SHARED_GENERATORS
                + "::test_a_generator_is_not_looked_at_while_another_thread_has_its_lock",
            ),
            "random-lock-to-clone",
            "original.mutex()",
            "*new std::mutex",
            "original.mutex());\n  before_",
        ),
        (
            (
                SHARED_GENERATORS
                + "::test_a_generator_is_not_looked_at_while_another_thread_has_its_lock",
            ),
            "random-lock-to-put-a-clone-back",
            "original.mutex()",
            "*new std::mutex",
            "original.mutex());\n  const auto engine",
        ),
        (
            (RULE07_RANDOMNESS + "::test_a_replay_leaves_a_devices_generator_as_it_was",),
            "random-lock-to-lend",
            "generator_.mutex()",
            "*new std::mutex",
        ),
        (
            (RULE07_RANDOMNESS + "::test_a_replay_leaves_a_devices_generator_as_it_was",),
            "random-lock-to-end-a-loan",
            "generator.mutex()",
            "*new std::mutex",
            "generator.mutex());\n    generator.graphsafe",
        ),
        (
            (RANDOM_OPERATORS + "::test_a_tensor_of_the_cpu_comes_first",),
            "random-device-of-the-kernel",
            "device->type() != *type",
            "false",
        ),
        (
            (RANDOM_OPERATORS + "::test_an_operator_that_is_given_a_device_alone",),
            "random-device-without-an-index",
            "!device->has_index()",
            "false",
        ),
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
                SHARED_GENERATORS
                + "::test_no_number_that_another_thread_draws_meanwhile_is_drawn_again",
            ),
            "random-no-dropout",
            "op.random.dropoutArgument >= 0",
            "false",
        ),
        (
            (
                SHARED_GENERATORS
                + "::test_what_a_region_draws_while_another_thread_replays_is_as_in_eager",
            ),
            "random-forward-locks",
            "lock_ = std::unique_lock<std::mutex>(drawMutex());",
            "",
            "if (!given && !op.limits.untrusted) {\n    lock_ = std::unique_lock<std::mutex>(drawMutex());",
        ),
        (
            (SHARED_GENERATORS + "::test_a_kernel_in_python_may_wait_for_a_thread_that_draws",),
            "random-forward-of-python-locks-not",
            "!op.limits.untrusted",
            "true",
            "!given && !op.limits.untrusted) {",
        ),
        (
            (
                SHARED_GENERATORS
                + "::test_an_operator_that_draws_nothing_leaves_the_generator_to_others",
            ),
            "random-is-confirmed",
            "!op.random.draws",
            "false",
        ),
        (
            (
                SHARED_GENERATORS
                + "::test_no_number_that_another_thread_draws_meanwhile_is_drawn_again",
            ),
            "random-forward-draws-from-a-clone",
            "!op.limits.untrusted && !onDevice",
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
                SHARED_GENERATORS
                + "::test_no_number_that_another_thread_draws_meanwhile_is_drawn_again",
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
                SHARED_GENERATORS,
            ),
            "random-clone-back-float",
            "cpu(original).set_next_float_normal_sample(cpu(clone_).next_float_normal_sample());",
            "",
            "",
            (),
            "no kernel of torch's keeps a second number of that kind: all draw normal numbers as doubles",
        ),
        (
            (RULE07_RANDOMNESS + "::test_normal_numbers_that_are_drawn_two_at_a_time",),
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
                SHARED_GENERATORS,
            ),
            "random-unlocks-before-it-packs",
            "lock_ = {};",
            "",
            "",
            (),
            "those who wait to draw wait less: the lock is given back soon afterwards without it too",
        ),
        (
            (RANDOM_OPERATORS + "::test_what_was_drawn_from_one_generator_is_recomputed",),
            "random-of-the-cpu",
            "cpuMoved && !moved",
            "false",
        ),
        (
            (RANDOM_OPERATORS + "::test_in_a_capture_the_cpus_numbers_are_those_of_the_forward",),
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
                SHARED_GENERATORS
                + "::test_an_operator_that_draws_nothing_leaves_the_generator_to_others",
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
            "op.random.generatorArgument >= 0 && state->capture == 0",
        ),
        (
            (
                SHARED_GENERATORS
                + "::test_no_number_that_another_thread_draws_meanwhile_is_drawn_again",
            ),
            "replay-draws-from-a-clone",
            "op.random.generatorArgument >= 0 && state->capture == 0",
            "false",
        ),
        (
            (RULE07_RANDOMNESS + "::test_dropout_before_and_after_other_random_ops",),
            "replay-clone-is-set",
            "setState(clone_, unpackState(state->packed));",
        ),
        (
            (SHARED_GENERATORS + "::test_two_threads_replay_draws_at_once",),
            "replay-locks",
            "lock_ = std::unique_lock<std::mutex>(drawMutex());",
            "",
            "if (!op.limits.untrusted) {\n    lock_ = std::unique_lock<std::mutex>(drawMutex());",
        ),
        (
            (SHARED_GENERATORS + "::test_a_kernel_in_python_may_wait_for_a_thread_that_draws",),
            "replay-of-python-locks-not",
            "!op.limits.untrusted",
            "true",
            "if (!op.limits.untrusted) {",
        ),
        (
            (RULE07_RANDOMNESS + "::test_dropout_before_and_after_other_random_ops",),
            "replay-is-set",
            "setState(generator_, unpackState(state->packed));",
        ),
        (
            (RULE07_RANDOMNESS + "::test_a_replay_leaves_a_devices_generator_as_it_was",),
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
                DRAWS_FROM_ELSEWHERE
                + "::test_other_draws_are_refused_though_the_first_result_is_the_same",
            ),
            "replay-drew-the-same",
            "digestOf(clone_.defined() ? clone_ : generator_) == state_->digestAfter",
            "true",
        ),
        (
            (RULE07_RANDOMNESS + "::test_a_replay_leaves_a_devices_generator_as_it_was",),
            "replay-ends-a-loan",
            "generator.graphsafe_set_state(lender_);",
        ),
        (
            (RULE07_RANDOMNESS + "::test_dropout_before_and_after_other_random_ops",),
            "replay-puts-back",
            "setState(generator, outer_);",
        ),
        (
            (DRAWS_FROM_ELSEWHERE + "::test_an_error_of_a_replay_leaves_the_generator_as_it_is",),
            "replay-puts-back-after-an-error",
            "putBack();",
            "",
            "putBack();\n    } catch",
        ),
        (
            (DRAWS_FROM_ELSEWHERE + "::test_an_operator_from_elsewhere_without_tensors",),
            "random-device-without-a-tensor",
            "key != c10::DispatchKey::Undefined",
            "true",
        ),
        (
            (RANDOM_OPERATORS + "::test_an_operator_that_is_given_a_device_alone",),
            "random-device-of-an-argument",
            "!type && !device",
            "!type",
        ),
        (
            (RANDOM_OPERATORS + "::test_an_operator_that_says_that_it_draws_but_not_where",),
            "random-device-unknown",
            "return {};",
            "return c10::Device(c10::kCPU);",
            "if (!type && !device) {\n    return {};",
        ),
    ],
    "src/intercept/op_traits.cpp": [
        (
            (
                DRAWS_FROM_ELSEWHERE
                + "::test_an_operator_from_elsewhere_that_draws_though_its_dropout_is_none",
            ),
            "dropout-of-torchs-own",
            "!traits.limits.untrusted",
            "true",
            '== "dropout_p" && !traits.limits.untrusted',
        )
    ],
}


MUTANTS = tuple(mutants_at(PLACES))
