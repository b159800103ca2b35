"""Setters of torch's settings: each waits for the recipe that runs ahead, or need not."""

from __future__ import annotations

import re
import sys

import torch

from ebb._region import commotion

# Setters of torch._C that need not wait, and why.
HARMLESS = re.compile(
    r"_set_(autograd_fallback_mode|backcompat_\w+|cached_tensors_enabled|dispatch_mode"
    r"|check_sparse_tensor_invariants|conj|neg|default_mobile_cpu_allocator|fwd_grad_enabled"
    r"|fake_constant|storage_data_ptr_access_error_msg|storage_access_error_msg"
    r"|dtensor_allow_implicit_replication|generator_metaclass|grad_enabled|graph_exec\w*"
    r"|grad_layout_enforcement_enabled|graph_executor_optimize|meta_in_tls_dispatch_include"
    r"|multithreading_enabled|only_lift_cpu_tensors|override_stale_capture_stream|print_stack\w+"
    r"|should_use_format_with_string_table|skip_next_torch_function|tensor_metadata|thread_name"
    r"|throw_on_mutable_data_ptr|torch_function_state|tracing_state|value_trace"
    r"|view_replay_enabled|warn\w+|worker_pids|worker_signal_handlers)"
    r"|set_(anomaly_enabled|autocast_\w+|flush_denormal|num_interop_threads|vital)"
)


def test_every_setter_of_torch_waits_or_need_not():
    setters = {name for name in dir(torch._C) if re.match(r"_?set_", name)}
    assert {n for n in setters if not HARMLESS.fullmatch(n)} <= set(commotion.SETTERS)
    assert not [name for name in commotion.SETTERS if HARMLESS.fullmatch(name)]


def test_setters_wait_wherever_torch_has_them():
    commotion.install()
    waiting = {
        name: getattr(torch._C, name) for name in commotion.SETTERS if hasattr(torch._C, name)
    }
    assert len(waiting) > 20
    for name, setter in waiting.items():
        original = setter.args[0]  # of the partial
        for module in list(sys.modules.values()):
            if module.__name__.startswith("torch"):
                assert vars(module).get(name) is not original
