"""The programs of tests/paging once more, on each of two devices, of which the first is current.

What they make is on the default device, and so is what their files have made.
"""

from __future__ import annotations

import sys

import pytest
import torch

from ebb_tests import device as late
from ebb_tests.programs.paged import fresh, programs_of

FILES = [
    "test_paging",
    "test_paging_overflow",
    "test_paging_regressions",
    "test_paging_rows",
    "test_paging_steps",
    "test_paging_threads",
]

# What differs where the host does not see the device, or does not wait for it.
LEFT_OUT = {
    "CPU memory is measured": ["test_memory_is_freed_between_forward_and_backward"],
    "the host knows the count": [
        "test_a_count_that_cannot_be_right_is_refused_on_the_cpu",
        "test_a_count_that_is_written_unseen",
        "test_counts_on_the_cpu_are_read_where_they_are",
        "test_counts_of_one_storage",
        "test_one_number_in_two_tensors",
    ],
    "the host sees errors": [
        "test_an_error_that_was_raised_is_dealt_with",
        "test_assert_mode",
        "test_found_inf_knows_of_pools_that_have_gone",
        "test_tensors_without_a_nan_raise_instead",
    ],
    "what has not left yet comes back whole, so gradients are right though there was no room": [
        "test_a_reset_does_not_make_gradients_good",
        "test_found_inf",
        "test_optimizers_that_have_nothing_to_do_with_it",
    ],
    "verify mode keeps storages alive": ["test_verify_mode_shows_programs_that_read_dead_rows"],
    "parameters have tensors": ["test_counts", "test_marks_that_make_no_sense"],
    "there are no kernels for sparse tensors": ["test_embeddings"],
    "nothing in it is about devices": [
        "test_a_graph_that_is_kept_does_not_keep_recording_on",
        "test_all_ranks_run_a_step_again",
        "test_no_deadlock_between_the_lock_and_the_gil",
        "test_settings_that_make_no_sense",
        "test_the_environment",
    ],
}
NOT_HERE = {name for names in LEFT_OUT.values() for name in names}


def is_fixture(value):
    return type(value).__name__ == "FixtureFunctionDefinition"


for file in FILES:
    for name, value in vars(programs_of(file)).items():
        if name.startswith("test_") and name not in NOT_HERE:
            globals()[f"{name}__{file.removeprefix('test_')}"] = value
        elif is_fixture(value):
            globals()[name] = value


def on(value, device):
    if isinstance(value, torch.Tensor):
        return value.detach().to(device).requires_grad_(value.requires_grad)
    return value


def devices_of(function):
    """The second one while the first is current; some on the first one as well."""
    return [0, 1] if function.__module__ == "programs_test_paging" else [1]


def pytest_generate_tests(metafunc):
    metafunc.parametrize("default_device", devices_of(metafunc.function), indirect=True)


@pytest.fixture(autouse=True)
def default_device(request, device, monkeypatch):
    late.have_pages()
    here = torch.device(device.type, request.param)
    module = sys.modules[request.function.__module__]
    for name, value in vars(module).items():
        if isinstance(value, torch.Tensor):
            monkeypatch.setattr(module, name, on(value, here))
    late.synchronize()
    torch.set_default_device(here)
    try:
        with fresh():
            yield
    finally:
        torch.set_default_device(None)
        late.synchronize()
