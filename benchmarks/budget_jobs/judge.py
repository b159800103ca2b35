"""The rules that a run under a budget must keep."""

from __future__ import annotations

from budget_jobs.job import Job
from budget_jobs.run import Run
from ebb._plan.choose.memory_budget import read_budget

OVER, SLACK = 1.02, 4096  # times a budget plus these bytes: a larger step exceeds the budget
SHARES = 0.1  # tolerance of a share's bytes, relative to this share of eager's peak
STEADY = 0.005  # relative difference up to which peaks of steps without ebb count as equal


def bits_that_differ(run: Run, eager: Run) -> str:
    if len(run.bits) != len(eager.bits):
        return f"{len(run.bits)} steps, not {len(eager.bits)}"
    for step, (one, other) in enumerate(zip(run.bits, eager.bits, strict=True)):
        different = [what for what in other if one.get(what) != other[what]]
        if different:
            return f"step {step}: {', '.join(different)}"
    return ""


def steps_in_words(run: Run, numbers: list[int]) -> str:
    shown = (f"{n} ({run.steps[n].most:,} in all, {run.steps[n].peak:,})" for n in numbers[:6])
    return ", ".join(shown) + (f" and {len(numbers) - 6} more" if len(numbers) > 6 else "")


def measured_too_large(run: Run, eager: Run, all_recomputed: Run, budget: int | float) -> list[int]:
    """Measured steps that exceed the budget and all other limits.

    A step may need as much as with all blocks recomputed, or as an earlier step. Steps with larger
    modules as regions may need as much as eager: ebb measures these only if memory allows it.
    """
    large, before = [], 0
    others = [after for after, line in run.lines if "profiles again with other modules" in line]
    for number, (step, other) in enumerate(zip(run.steps, all_recomputed.steps, strict=False)):
        limit = max(other.most, before)
        if others and number >= others[0]:
            limit = max(limit, eager.steps[number].most)
        if isinstance(budget, int):
            limit = max(limit, budget + max(run.held, run.beside or 0))
        if step.phase == "measured" and step.most > OVER * limit + SLACK:
            large.append(number)
        before = max(before, step.most)
    return large


def planned_too_large(run: Run, budget: int | float) -> list[int]:
    """Steps under a plan that exceed the budget and the bytes that ebb has announced for them."""
    large: list[int] = []
    for number, step in enumerate(run.steps):
        if step.phase != "planned" or step.peak <= step.accepted:
            continue
        if isinstance(budget, int):
            is_over = step.most - step.beside > OVER * budget + SLACK
        else:
            is_over = step.peak + step.freed > OVER * (step.share + step.freed) + SLACK
        if is_over:
            large.append(number)
    return large


def shares_of_eager(run: Run, eager: Run, budget: float) -> list[float]:
    """For each plan, the bytes of its budget over the same share of eager's peak, less SLACK.

    Eager's peak is that of the steps in which ebb measured for this plan.
    """
    found, most, share = [], 0, 0
    for number, (step, other) in enumerate(zip(run.steps, eager.steps, strict=False)):
        if step.phase == "measured":
            is_first = number == 0 or run.steps[number - 1].phase != "measured"
            most = 0 if is_first else max(most, other.peak)  # the first step allocates more
        elif step.phase == "planned" and step.share != share:
            share = step.share
            whole = budget * (most + step.freed)
            found.append((share + step.freed - SLACK) / whole if most else 1.0)
    return found


def prediction(run: Run, eager: Run) -> tuple[int, int] | None:
    """Predicted and measured peak under the first plan, of steps as large as those before it."""
    first = next((n for n, step in enumerate(run.steps) if step.phase == "planned"), None)
    if first is None:
        return None
    like = max(step.peak for step in eager.steps[max(0, first - 4) : first])
    found = []
    for step, other in zip(run.steps[first:], eager.steps[first:], strict=False):
        if step.phase != "planned" or step.planned != run.steps[first].planned:
            break
        if abs(other.peak - like) <= STEADY * like:
            found.append(step.peak)
    found = found[1:] or found  # the first step may differ
    return (run.steps[first].planned, max(found)) if found else None


def judge(job: type[Job] | Job, run: Run, eager: Run, all_recomputed: Run, text: str) -> list[str]:
    """Messages, one for each rule that the run breaks."""
    if run.error:
        return [f"raises: {run.error.strip().splitlines()[-1]}"]
    broken = []
    different = bits_that_differ(run, eager)
    if different:
        broken.append(f"bits differ: {different}")
    budget = read_budget(text)
    large = measured_too_large(run, eager, all_recomputed, budget)
    if large:
        broken.append(f"measured steps are too large: {steps_in_words(run, large)}")
    if isinstance(budget, float) and not job.saves_less_itself:
        shares = shares_of_eager(run, eager, budget)
        if any(share > 1 + SHARES for share in shares):
            words = ", ".join(f"{share:.1%}" for share in shares)
            broken.append(f"plans are for {words} of that share of what steps take without ebb")
    large = planned_too_large(run, budget)
    if any({n, n + 1, n + 2} <= set(large) for n in large):
        broken.append(f"over the budget for long: {steps_in_words(run, large)}")
    told = {after for after, line in run.lines if "a step allocated" in line}
    silent = [n for n in large if n + 1 not in told]
    if silent:
        broken.append(f"over the budget, and not told: {steps_in_words(run, silent)}")
    lines = [line for _, line in run.lines if line.startswith("ebb: EBB_BUDGET")]
    is_planned = any(step.phase == "planned" for step in run.steps)
    why_not = [line for line in lines if "no plan" in line]
    if not is_planned and job.expected != "silent" and len(why_not) != 1:
        broken.append(f"no plan, and {len(why_not)} lines say why")
    if job.expected == "plan" and not is_planned:
        broken.append("there should be a plan")
    others = [line for _, line in run.lines if not line.startswith("ebb: EBB_BUDGET")]
    if any("Traceback" in line or "Error" in line for line in others):
        broken.append(f"stderr: {others}")
    return broken
