"""Carries out plans of `folder_orders`: `python folder_worker.py FOLDER`, plans in JSON a line; so are their verdicts.

A line `"count"` asks for the operations of each process instead. Every process is forked from this one, which has done each work
once: nothing is imported or compiled any more, and a plan takes a second of a CPU. Plans in one line are carried out in parallel.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import pyarrow as pa
import torch
from file_calls import Process, kind_of
from folder_judge import judge
from folder_orders import ALONE, POWER, Plan, Verdict
from folder_works import KILLED_IN, STARTS, WORKS, write_study_file
from power_loss import Held, lay_out

BLOCKED_S = 10.0  # after which a process is taken to wait for the one that is held
HANGS: dict[str, Any] = {"error": "it hangs", "system": False}


class Worker:
    """Makes the starts, and carries out plans from copies of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept = folder / "kept"
        self._held: dict[tuple[str, str], list[Held]] = {}
        write_study_file(folder)

    def warm(self) -> None:
        """Make the whole run and study, with which all is compared, and read them: all is imported and compiled then."""
        for whole, work, more in (("whole", "train", []), ("whole-study", "sweep", ["confirm"])):
            (self.folder / whole).mkdir()
            os.chdir(self.folder / whole)
            done = [WORKS[work]()]
            os.chdir(self._copy(whole))
            judged = judge(done, [work], POWER, study=work == "sweep")
            done += [WORKS[name]() for name in [*more, "load", "pack", "report"]]
            os.chdir(self.folder)
            assert not [one for one in done if "refused" in one], done
            assert judged == {"harm": None}, judged

    def make(self, starts: Iterable[str]) -> None:
        """Make the starts."""
        for name in sorted(starts):
            home = self.folder / name
            if home.exists():
                continue
            home.mkdir()
            if (work := STARTS[name]) is None:
                continue
            at = None
            if name == "half-study":
                said = Process(work, home, mode="list").wait() or HANGS
                at = next(at for at, place in enumerate(said["places"], 1) if place.endswith(KILLED_IN))
                shutil.rmtree(home)
                home.mkdir()
            said = Process(work, home, at, "kill").wait() or HANGS
            assert "error" not in said, said

    def held(self, start: str, first: str) -> list[Held]:
        """Return the folders that a loss of power during a work may leave."""
        if (start, first) not in self._held:
            home = self._copy(start)
            said = Process(WORKS[first], home, mode="log", kept=self.kept).wait() or HANGS
            assert "error" not in said, said
            self._held[start, first] = [Held(*one) for one in said["held"]]
        return self._held[start, first]

    def count(self, start: str, first: str) -> dict[str, Any]:
        """Return the operations of a work, and the number of folders that a loss of power may leave."""
        said = Process(WORKS[first], self._copy(start), mode="list").wait() or HANGS
        assert "error" not in said, said
        lost = [kind_of(f"{one.moment} {one.over}") for one in self.held(start, first)]
        return {"of": [start, first], "operations": said["operations"], "kinds": said["kinds"], "held": lost}

    def touches(self, start: str, first: str) -> dict[str, Any]:
        """Return the operations of a work as in `count`, and what each touches."""
        said = Process(WORKS[first], self._copy(start), mode="list").wait() or HANGS
        assert "error" not in said, said
        return {"operations": said["operations"], "touched": said["touched"]}

    def _copy(self, start: str) -> Path:
        shutil.rmtree(self._home, ignore_errors=True)
        return Path(shutil.copytree(self.folder / start, self._home))

    @property
    def _home(self) -> Path:
        return self.folder / f"case-{os.getpid()}"

    def carry_out(self, plan: Plan) -> Verdict:
        """Carry out a plan in a copy of its start, and judge what came of it."""
        if plan.mode == POWER:
            return self._lose_power(plan)
        home = self._copy(plan.start)
        first = Process(WORKS[plan.first], home, plan.at, plan.mode)
        said = first.wait() or HANGS
        held, killed = "held" in said, "killed" in said
        outcomes = [] if held or killed else [said]
        touched: Any = None
        if plan.second is not None:
            second = Process(WORKS[plan.second], home, plan.then)
            answer = second.wait(BLOCKED_S if held else 120)
            touched = answer and answer.get("touched")
            if held:
                first.go_on()
                outcomes.append(first.wait() or HANGS)
            if answer is not None and "held" in answer:
                second.go_on()
                answer = None
            outcomes.append(answer or second.wait() or HANGS)
        calls = next((one["calls"] for one in outcomes if "calls" in one), 0)
        where = said.get("held") or said.get("killed") or "".join(said.get("failed", []))
        return self._judged(plan, outcomes, where, calls)._replace(touched=touched)

    def _lose_power(self, plan: Plan) -> Verdict:
        folders = self.held(plan.start, plan.first)
        if plan.at >= len(folders):
            return Verdict(0, False, None, [])
        held = folders[plan.at]
        shutil.rmtree(self._home, ignore_errors=True)
        lay_out(held.tree, self.kept, self._home)
        return self._judged(plan, [{"status": "finished"}] if held.over else [], held.moment, 0)

    def _judged(self, plan: Plan, outcomes: list[dict[str, Any]], where: str, calls: int) -> Verdict:
        works = [plan.first, plan.second]
        study = any("sweep" in work or work == "confirm" for work in works if work)
        judged = Process(lambda: judge(outcomes, works, plan.mode, study=study), self._home).wait() or HANGS
        harm = judged.get("harm", judged.get("error"))
        return Verdict(calls, bool(where), harm and f"{harm} ({where})", outcomes)


def carry_out(worker: Worker, plans: Sequence[Plan]) -> list[Verdict]:
    """Carry out plans in parallel, each in a process that is forked from this one once their starts are made."""
    for plan in plans:
        worker.make([plan.start])
        if plan.mode == POWER:
            worker.held(plan.start, plan.first)
    with ProcessPoolExecutor(os.cpu_count(), get_context("fork")) as pool:
        verdicts = list(pool.map(worker.carry_out, plans))
    for home in worker.folder.glob("case-*"):
        shutil.rmtree(home)
    return verdicts


def main() -> None:
    """Carry out plans as they come, and make the start that each needs."""
    folder = Path(sys.argv[1]).resolve()
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    worker = Worker(folder)
    worker.warm()
    for line in sys.stdin:
        asked = json.loads(line)
        if asked == "count":
            worker.make(STARTS)
            print(json.dumps([worker.count(*pair) for pair in sorted(ALONE)]), flush=True)
        elif asked[0] == "touches":
            worker.make([asked[1]])
            print(json.dumps(worker.touches(*asked[1:])), flush=True)
        else:
            verdicts = carry_out(worker, [Plan(*plan) for plan in asked])
            print(json.dumps([verdict._asdict() for verdict in verdicts]), flush=True)


if __name__ == "__main__":
    main()
