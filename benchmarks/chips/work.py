"""Chooses the steps that are left, and runs them one after the other within the time budget."""

import fnmatch
import time
from collections.abc import Sequence
from pathlib import Path

from chips import page, process, rows
from chips.process import Device
from chips.steps import Step

END_S = 10  # allowance for killing a step and writing its row


def work(
    todo: list[Step], device: Device, out: Path, *, until: float, redo: Sequence[str] = (), chip: str | None = None
) -> None:
    """Runs pending steps whose time limit ends before `until`, and writes each row as soon as it is known.

    Args:
      until: deadline on `time.monotonic`'s clock.
      redo: as of `pending`.
      chip: as of `train.measure`.
    """
    known = rows.read(out)
    wanted = {step.name: rows.identity(step, device.kind) for step in todo}
    mine = {row["step"]: row for row in known if row["device"] == device.kind}
    left = pending(todo, mine, wanted, redo)
    there = {step.name for step in todo} - {step.name for step in left}
    print(f"{device.kind}: {len(there)} of {len(todo)} steps are done", flush=True)
    late, beyond = [], 0
    for step in left:
        if step.after in there and "failed" in mine[step.after]:
            beyond += 1
            continue
        if time.monotonic() + step.limit_s + END_S > until:
            late.append(step)
            continue
        print(f"[{todo.index(step) + 1}/{len(todo)}] {step.name}, at most {step.limit_s} s", flush=True)
        row, tail = process.run(step, device, chip)
        row = wanted[step.name] | row | {"date": time.strftime("%Y-%m-%d")}
        known, mine[step.name] = rows.place(known, row), row
        rows.write(out, known, page.page(known))
        there.add(step.name)
        print("".join(f"    | {line}\n" for line in tail) + f"    {row['seconds']} s: {page.line(row)}", flush=True)
    print(f"{len(there)} of {len(todo)} steps are done, in {out}", flush=True)
    if beyond:
        print(f"{beyond} skipped: a shorter row failed", flush=True)
    if late:
        most = max(step.limit_s for step in late) + 2 * END_S
        print(f"{len(late)} left for the next call, with a budget of {most} s or more", flush=True)


def pending(todo: list[Step], mine: dict[str, dict], wanted: dict[str, dict], redo: Sequence[str]) -> list[Step]:
    """The steps without an up-to-date row, in the order to run them: `redo`, missing or failed, outdated.

    Args:
      mine: rows of this device by step name.
      wanted: `rows.identity` of each step by name.
      redo: patterns of names to run even if their rows are up to date.
    """
    again = {step.name for step in todo if any(fnmatch.fnmatch(step.name, pattern) for pattern in redo)}
    holds = lambda name: name in mine and rows.holds(mine[name], wanted[name])
    measured = {name for name, row in mine.items() if "failed" not in row}
    left = [step for step in todo if step.name in again or not holds(step.name)]
    return sorted(left, key=lambda step: (step.name not in again, step.name in measured))
