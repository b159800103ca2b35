"""A rank of a job of which some ranks fail. test_failing_ranks.py runs this program on each rank.

The argument describes the job in JSON:

    strategy, policy: names; policy null: plain eager.
    fault: of FAULTS.
    phase, step: when. The step's "start"; "forward": in an operator of a region; "loss": between
        forward and backward; "backward": in a replay, in eager in backward; "offer": when the rank
        has told the others its measurements for a budget.
    ranks: the ranks that fail.
    folder: where checkpoints are, or null.
    steps: how many steps the job has.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import ebb
from ebb import _C
from ebb._launch.agreeing import Ranks
from ebb_tests.ranks import model_strategies  # noqa: F401
from ebb_tests.ranks.comparing import POLICIES
from ebb_tests.ranks.entries import Way
from ebb_tests.ranks.strategies import STRATEGIES
from ebb_tests.stand_ins import kernel

JOB = json.loads(sys.argv[1])
IS_PLAIN = JOB["policy"] is None
now = -1  # the step
is_terminated = False


def kill():
    time.sleep(0.2)  # so that other ranks wait for this one
    os.kill(os.getpid(), signal.SIGKILL)


def error():
    raise KeyError("an error of the program")


def memory():
    torch.empty(1 << 50, dtype=torch.uint8)


def budget():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU()), torch.ones(64, 64)
    ebb.plan(model, lambda: model(x).sum().backward(), budget="2KiB", modules="")


def terminate():
    """The program's own handler ends it."""
    os.kill(os.getpid(), signal.SIGTERM)


def mismatch():
    """ebb refuses what a replay computed."""
    if IS_PLAIN:
        raise RuntimeError("an error of the program")
    return 2.0


FAULTS = {fault.__name__: fault for fault in (kill, error, memory, budget, terminate, mismatch)}


def handle_signal(*_):
    """With checkpoints, the job ends after this step."""
    global is_terminated
    is_terminated = True
    if not JOB["folder"]:
        sys.exit(7)


has_failed = False


def fail_if_due(phase):
    global has_failed
    if (phase, now) != (JOB["phase"], JOB["step"]) or dist.get_rank() not in JOB["ranks"]:
        return None
    is_first, has_failed = not has_failed, True
    if is_first:
        print("fault", time.monotonic(), flush=True)
    return FAULTS[JOB["fault"]]() if is_first or JOB["fault"] != "terminate" else None


def gelu(x, **_):
    is_replay = not IS_PLAIN and not _C.in_region()
    factor = fail_if_due("backward" if is_replay else "forward") or 1.0
    return x * torch.sigmoid(1.702 * x) * factor


def gelu_backward(gradient, x, **_):
    if IS_PLAIN:
        fail_if_due("backward")
    return gradient * torch.sigmoid(1.702 * x)


def square(x, _exponent):
    """The last operator of each forward, outside of regions."""
    fail_if_due("loss")
    return x * x


def fail_after_the_offer():
    """A rank that fails when it has told the others its measurements, before there is a plan."""
    give = Ranks._give

    def give_and_fail(ranks, offer):
        global now
        give(ranks, offer)
        now = JOB["step"]
        fail_if_due("offer")

    Ranks._give = give_and_fail


def state_of(model, optimizer, step):
    parts = get_state_dict(model, optimizer)
    return {"model": parts[0], "optimizer": parts[1], "step": step}


def restored(model, optimizer):
    """The step at which the job goes on."""
    saved = [int(path.parent.name) for path in Path(JOB["folder"]).glob("*/.metadata")]
    if not saved:
        return 0
    state = state_of(model, optimizer, 0)
    dcp.load(state, checkpoint_id=f"{JOB['folder']}/{max(saved)}")
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return state["step"]


def train():
    global now
    torch.manual_seed(5)
    model, step_of, _ = STRATEGIES[JOB["strategy"]](Way(POLICIES.get(JOB["policy"])))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = restored(model, optimizer) if JOB["folder"] else 0
    for step in range(first, JOB["steps"]):
        now = step
        fail_if_due("start")
        torch.manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        loss = step_of(model, step)
        optimizer.step()
        print("loss", step, loss.sum().item().hex(), flush=True)
        if JOB["folder"] and (is_terminated or step % 2):
            state = state_of(model, optimizer, step + 1)
            dcp.save(state, checkpoint_id=f"{JOB['folder']}/{step + 1}")
        if is_terminated:
            break


def main():
    signal.signal(signal.SIGTERM, handle_signal)
    if JOB["policy"] == "recompute_all":
        ebb.config.ahead.regions = 2
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    if JOB["phase"] == "offer":
        fail_after_the_offer()
    with contextlib.ExitStack() as stack:
        kernels = {"gelu": gelu, "gelu_backward": gelu_backward, "pow.Tensor_Scalar": square}
        for name, function in kernels.items():
            stack.enter_context(kernel(name, function))
        if JOB["fault"] == "mismatch" and not IS_PLAIN:
            stack.enter_context(ebb.verify())
        train()
    # torch aborts if gloo's thread frees the tensor of the last collective while Python ends.
    time.sleep(0.2)
    dist.destroy_process_group()


main()
