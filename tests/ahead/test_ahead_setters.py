"""Setters of torch's settings: each waits for the recipe that runs ahead, or need not."""

from __future__ import annotations

import re

import pytest
import torch

import ebb
from ebb._region import global_state_guard
from ebb_tests import fork_server

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
    waiting = {name for name in setters if global_state_guard.SETTERS.fullmatch(name)}
    assert setters - waiting == {name for name in setters if HARMLESS.fullmatch(name)}


@pytest.mark.sweep
def test_functions_that_replays_ahead_watch_stay_the_objects_that_they_were():
    """A table of a __torch_function__ finds them, and so does who has imported one."""
    program = """
import pickle, torch
from torch.overrides import get_testing_overrides, resolve_name

class Seen(torch.Tensor):
    functions = []
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.functions.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})

def known():
    return [(id(function), resolve_name(function)) for function in get_testing_overrides()]

data, setter, before = torch.Tensor.data.__get__, torch._C._set_mkldnn_enabled, known()
import ebb
for regions in (1, 0):
    ebb.config.ahead.regions = regions
    assert known() == before
    Seen.functions.clear()
    t = torch.rand(3).as_subclass(Seen)
    t.data, t.numpy(), t.untyped_storage(), t.resize_(3), t.apply_(abs)
    expected = [torch.Tensor.numpy, torch.Tensor.untyped_storage, torch.Tensor.resize_]
    assert Seen.functions == [data, *expected, torch.Tensor.apply_]
    assert pickle.loads(pickle.dumps(setter)) is setter is torch._C._set_mkldnn_enabled
    try:
        del torch.rand(1).data
    except RuntimeError as error:
        assert "Deleting tensor data" in str(error)
    else:
        raise AssertionError
"""
    fork_server.run(["-c", program], check=True)


def test_every_function_that_is_to_be_watched_is():
    global_state_guard.install()
    found = [
        (owner, name) for owner, name, _ in global_state_guard.watched() if hasattr(owner, name)
    ]
    assert len(found) > 40
    for owner, name in found:
        assert ebb._C.watch(getattr(owner, name), ebb._C.Watch.WAITS), name
