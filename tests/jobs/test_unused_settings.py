"""Settings without effect are reported at exit, and end a strict job."""

from __future__ import annotations

import pytest

from ebb_tests.programs_apart import run_program

JOB = """
import torch
layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(STEPS):
    model(torch.randn(8, 128, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
TOO_SMALL = (
    "the largest tensor that the policy offloads takes 256.0 KiB, and OFFLOAD leaves tensors of "
    "less than 1.0 MiB in place. To offload it, set ebb.config.offload.min_bytes, or "
    "EBB_CONFIG=offload.min_bytes=262144"
)


def job(tmp_path, steps=4, program=JOB, **environment):
    program = program.replace("STEPS", str(steps))
    done = run_program("-c", program, cwd=tmp_path, check=False, **environment)
    lines = [line for line in done.stderr.splitlines() if " has no effect: " in line]
    return done.returncode, lines


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({"EBB": "offload_inputs"}, f"ebb: the decision OFFLOAD has no effect: {TOO_SMALL}"),
        (
            {"EBB": "offload_inputs", "EBB_CONFIG": "offload.disk=."},
            f"ebb: [offload] of EBB_CONFIG=offload.disk=. has no effect: {TOO_SMALL}",
        ),
        (
            {"EBB": "1", "EBB_CONFIG": "offload.disk=.,offload.pinned_limit=1GiB"},
            "ebb: [offload] of EBB_CONFIG=offload.disk=.,offload.pinned_limit=1GiB has no effect: "
            "no policy offloads a tensor that backward needs",
        ),
        (
            {"EBB": "1", "EBB_CONFIG": "ebb.toml"},
            "ebb: [paging] of EBB_CONFIG=ebb.toml has no effect: no policy pages a tensor",
        ),
    ],
)
def test_setting_without_effect_is_reported_at_exit(tmp_path, environment, line):
    (tmp_path / "ebb.toml").write_text("[paging]\nheadroom = 1.5\n")

    assert job(tmp_path, **environment) == (0, [line])


USED = {"EBB": "offload_inputs", "EBB_CONFIG": "offload.disk=.,offload.min_bytes=1KiB"}


@pytest.mark.parametrize(
    "environment",
    [
        {"EBB": "1"},
        {"EBB": "1", "EBB_STRICT": "1"},
        {"EBB": "1", "EBB_STRICT": "1", "EBB_AHEAD": "0"},
        {**USED},
        {**USED, "EBB_STRICT": "1"},
        # one setting of the section is ignored
        {"EBB": "1", "EBB_CONFIG": "offload.disk=/nope,offload.disk_limit=1GiB"},
        # a plan may use the setting later
        {"EBB_BUDGET": "90%", "EBB_CONFIG": "offload.disk=.", "EBB_STRICT": "1"},
    ],
)
def test_settings_that_have_an_effect_are_not_reported(tmp_path, environment):
    status, lines = job(tmp_path, **environment)

    assert status == 0
    assert lines == [] or "EBB_BUDGET" in environment  # there one reports it at exit


DISK = {"EBB": "offload_inputs", "EBB_CONFIG": "offload.disk=.", "EBB_STRICT": "1"}


@pytest.mark.parametrize("steps", [4, 1])
def test_setting_without_effect_ends_a_strict_job_unless_the_job_has_ended(tmp_path, steps):
    line = f"ebb: [offload] of EBB_CONFIG=offload.disk=. has no effect: {TOO_SMALL}"
    ends = f"ValueError: {line} (the job ends, because EBB_STRICT is set)"

    assert job(tmp_path, steps, **DISK) == ((1, [ends]) if steps == 4 else (0, [line]))


ALONE = {
    "EBB_VERIFY": "1",
    "EBB_REPORT": "r.txt",
    "EBB_AHEAD": "1",
    "EBB_CONFIG": "ahead.limit=1MiB",
}
NO_REGION = (
    "no region has run in this process. Set EBB=1 (or EBB_BUDGET) to make regions without a change "
    "of the program"
)


@pytest.mark.parametrize("name", ALONE)
def test_setting_alone_ends_a_strict_job_without_regions(tmp_path, name):
    status, lines = job(tmp_path, EBB_STRICT="1", **{name: ALONE[name]})

    assert status == 1
    assert lines == [
        f"ValueError: ebb: {name} has no effect: {NO_REGION} (the job ends, because EBB_STRICT is "
        "set)"
    ]


def test_settings_alone_are_reported_at_the_exit_of_a_short_strict_job(tmp_path):
    status, lines = job(tmp_path, steps=1, EBB_STRICT="1", **ALONE)

    assert (status, lines) == (0, [f"ebb: {', '.join(sorted(ALONE))} has no effect: {NO_REGION}"])


@pytest.mark.parametrize("how", ["", "; model = torch.compile(model, backend='aot_eager')"])
def test_strict_job_that_makes_regions_itself_may_have_settings_alone(tmp_path, how):
    program = JOB.replace("optimizer =", f"import ebb; ebb.apply(model){how}\noptimizer =")

    assert job(tmp_path, program=program, EBB_STRICT="1", EBB_VERIFY="1") == (0, [])
