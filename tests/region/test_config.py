"""ebb.config, the settings of the process."""

from __future__ import annotations

import threading

import pytest

import ebb

config = ebb.config


def test_settings_are_read_as_numbers_and_assigned_as_text():
    config.offload.in_flight_bytes = "1.5GiB"
    assert config.offload.in_flight_bytes == 3 << 29
    config.ahead.limit = 5
    assert config.to_dict()["ahead.limit"] == 5


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24G", 24 * 10**9),
        ("24Gi", 24 << 30),
        ("512M", 512 * 10**6),
        ("512mi", 512 << 20),
        ("1.5K", 1500),
        ("2 Ti", 2 << 40),
        ("3kb", 3000),
        ("7B", 7),
        ("7", 7),
    ],
)
def test_sizes_as_schedulers_write_them(text, size):
    config.offload.min_bytes = text
    assert config.offload.min_bytes == size


@pytest.mark.parametrize("text", ["24Gb/s", "G", "1e9", "-1G", "1 G i", "1GG", ""])
def test_no_sizes(text):
    with pytest.raises(ValueError, match="min_bytes must be a number of bytes"):
        config.offload.min_bytes = text


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (lambda: config.offlaod, "ebb.config has no 'offlaod'; did you mean offload"),
        (lambda: config.offload.min_byte, "no 'offload.min_byte'; did you mean offload.min_bytes"),
        (lambda: setattr(config.offload, "min_byte", 1), "did you mean offload.min_bytes"),
        (lambda: setattr(config, "offload", {}), "has settings; assign one of min_bytes"),
        (lambda: setattr(config, "speed", 1), "no 'speed'; valid names: ahead, offload, paging"),
        (lambda: config.update(regions=1), "no 'regions'"),
        (lambda: config.update(ahead_region=1), "did you mean ahead.regions"),
        (lambda: config.patch({"ahead.region": 1}), "did you mean ahead.regions"),
        (lambda: config.update({"ahead": 1}), "no 'ahead.'"),
    ],
)
def test_unknown_names(change, hint):
    before = config.to_dict()
    with pytest.raises(AttributeError, match=hint):
        change()
    assert config.to_dict() == before


def test_nothing_changes_if_a_setting_is_invalid():
    before = config.to_dict()
    with pytest.raises(TypeError, match="regions must be an int"):
        config.update(offload_min_bytes=1, ahead_limit=2, ahead_regions="3")
    with pytest.raises(ValueError, match="disk"):  # C++ finds that no file can be made
        config.update(ahead_limit=2, offload_disk="/dev/null/no")
    assert config.to_dict() == before


def test_patch_restores_what_it_changed_and_nothing_else():
    config.offload.keep_last = 4
    with config.patch({"ahead.limit": "1KiB"}, offload_keep_last=1) as entered:
        assert entered is None
        assert (config.ahead.limit, config.offload.keep_last) == (1024, 1)
        config.offload.min_bytes = 77
    assert (config.ahead.limit, config.offload.keep_last) == (1 << 30, 4)
    assert config.offload.min_bytes == 77


def test_patch_is_checked_at_the_call_and_restores_after_an_exception():
    with pytest.raises(ValueError, match="keep_last"):
        config.patch(offload_keep_last=-1)
    with pytest.raises(KeyError), config.patch(offload_keep_last=3):
        raise KeyError
    assert config.offload.keep_last == 0


def test_patch_as_a_decorator_may_recurse():
    @config.patch(offload_keep_last=3)
    def function(depth):
        assert config.offload.keep_last == 3
        return depth and function(depth - 1)

    function(2)
    assert config.offload.keep_last == 0


@pytest.mark.parametrize("setting", ["paging_device_limit", "paging_overflow", "paging_dead_rows"])
def test_every_value_can_be_restored(setting):
    before = config.to_dict()
    value = {"paging_device_limit": 1, "paging_overflow": "assert", "paging_dead_rows": "nan"}
    with config.patch(**{setting: value[setting]}):
        assert config.to_dict() != before
    assert config.to_dict() == before
    config.paging.device_limit = None
    assert config.paging.device_limit is None


def overlap(first, second):
    """Two blocks of which the first to be entered is the first to be left."""
    entered, left = threading.Event(), threading.Event()

    def other():
        with second():
            entered.set()
            left.wait(60)

    thread = threading.Thread(target=other)
    with first():
        thread.start()
        entered.wait(60)
    left.set()
    thread.join()


def test_blocks_of_threads_may_overlap():
    overlap(
        lambda: config.patch(offload_keep_last=1, ahead_limit=1),
        lambda: config.patch(offload_keep_last=2),
    )
    assert (config.offload.keep_last, config.ahead.limit) == (0, 1 << 30)

    overlap(ebb.verify, lambda: ebb.verify("demote"))
    assert ebb._C.verify_mode() == 0

    overlap(ebb.record_reports, lambda: ebb.record_reports(3))
    assert not ebb._C.is_reporting()


def test_representations_show_the_values():
    assert "min_bytes=1048576" in repr(config.offload)
    assert "'ahead.regions': 0" in repr(config)
