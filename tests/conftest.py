"""Shared by all tests."""

from __future__ import annotations

import contextlib
import gc
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

import ebb
from ebb_tests import device as late
from ebb_tests import dry_cuda, fork_server, on_device
from ebb_tests.engines import PLAIN, engines_of
from ebb_tests.replays import wait_for_replays
from ebb_tests.stand_ins import fake_accelerator

# How long it takes to draw an example, and to run it, depends on what else the machine does.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from ebb_tests import work_units  # only where pytest-xdist is installed

    config.option.loadscopereorder = False
    return work_units.Scheduling(config, log)


if dry_cuda.gives_values():
    dry_cuda.give_values()


def pytest_addoption(parser):
    on_device.add_options(parser)


def pytest_configure(config):
    """Names a failed test at once: a whole run takes many minutes."""
    on_device.configure(config)

    class Failures:
        @staticmethod
        def pytest_runtest_logreport(report):
            terminal = config.pluginmanager.get_plugin("terminalreporter")
            if report.failed and terminal is not None:
                terminal.write_line(f"\nFAILED {report.nodeid}")

    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Failures())


def pytest_generate_tests(metafunc):
    """A test for each engine, and for each of its policies if the test asks for them."""
    engines = engines_of(metafunc.definition)
    if metafunc.definition.get_closest_marker("each_policy"):
        pairs = [
            engine.parameter(policy, ids=[name])
            for engine in engines
            for name, policy in engine.policies.items()
        ]
        metafunc.parametrize(("engine", "policy"), pairs, indirect=["engine"])
    elif engines != [PLAIN]:
        metafunc.parametrize("engine", [one.parameter() for one in engines], indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_device.deselect(config, items)
    if "PYTEST_XDIST_WORKER" in os.environ:
        from ebb_tests import work_units

        work_units.longest_first(items)


def pytest_collection_finish() -> None:
    """Tests collect garbage hundreds of times, which takes a second when it looks at all that the
    test modules have imported: what exists now is never garbage.

    Frameworks that these modules import may have set environment variables. Programs of tests do
    not need new processes because of them.
    """
    fork_server.ENVIRONMENT.update(os.environ)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def engine(request):
    """The engine under which the test runs."""
    engine = getattr(request, "param", PLAIN)
    with engine.active():
        yield engine


@pytest.fixture(autouse=True)
def _same_start_and_no_leak(engine):
    """Every test starts from one seed, on one intra-op thread, without page pools and with the
    settings that there are at first, and leaves no region open.

    One thread, because the tensors here are tiny and spinning workers on a busy machine are not.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    ebb.reset_stats()
    if "paging" in ebb._C.plugins:
        ebb.experimental.paging.reset()
    before = ebb.config.to_dict()
    yield
    now = ebb.config.to_dict()
    ebb.config.update({name: value for name, value in before.items() if now[name] != value})
    assert ebb.stats()["open_regions"] == 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if dry_cuda.is_loaded() and (marker := item.get_closest_marker("not_dry")):
        pytest.skip(marker.args[0])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    engine = on_device.engine_of(item)
    if not engine.is_on_device:
        return (yield)
    marker = item.get_closest_marker("on_cpu")
    # Verify mode finds more writes there, so more tests pass.
    if marker and (engine.verifies or not marker.kwargs.get("run", True)):
        pytest.skip(marker.args[0])
    late.findings()
    try:
        result = yield
        late.synchronize()
        assert [one for one in late.findings() if not engine.is_harmless(one)] == []
    except pytest.skip.Exception:
        raise
    except (Exception, pytest.fail.Exception):
        if not marker:
            raise
        with contextlib.suppress(RuntimeError):
            late.synchronize()
        late.findings()
        pytest.skip(marker.args[0])
    assert not marker, f"passes on the test device, so the mark on_cpu is wrong: {marker.args[0]}"
    return result


@pytest.fixture
def fresh_dynamo():
    """Dynamo without compiled functions, and the settings of AOTAutograd that ebb changes."""
    import torch._dynamo
    from torch._functorch import config

    torch._dynamo.reset()
    before = config.joint_custom_pass, config.enable_autograd_cache
    yield
    config.joint_custom_pass, config.enable_autograd_cache = before
    torch._dynamo.reset()


@pytest.fixture
def no_objects_left():
    """The test must free every recipe and handle that it made."""
    gc.collect()
    wait_for_replays()  # while one runs ahead it holds the graph
    before = ebb.stats()
    yield
    gc.collect()
    wait_for_replays()
    after = ebb.stats()
    for count in ("live_recipes", "live_handles"):
        assert after[count] <= before[count], count


@pytest.fixture
def accelerator():
    """A fake one, to which values of any size go."""
    with fake_accelerator() as fake:
        yield fake
