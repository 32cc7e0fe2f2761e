"""Rows of the records: a run's row (configuration, software and results), and the rows of a step from workers' reports."""

from __future__ import annotations

import math
import platform
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raysim.codecs import Identity
from raysim.compressors import Compressor
from raysim.config import ConfigError, RunConfig, as_row
from raysim.engine.engine import Engine
from raysim.notation import InputError
from raysim.pipeline.plan import Plan
from raysim.pipeline.prepare import Workload
from raysim.pipeline.reports import StepReport
from raysim.quality import write_measures
from raysim.records import SCHEMA_VERSION, Run
from raysim.schedules.actions import rows_to_csv
from raysim.schedules.families import Custom
from raysim.values import UNNAMED
from raysim.workloads.splits import digest_of
from raysim.workloads.task import chance

BROKEN = 1.5
"""First loss of trained weights, over that of chance, from which compression is suspected."""


def first_row(config: RunConfig, run_id: str) -> dict[str, Any]:
    """Return the row of a run starting now on this machine."""
    return as_row(config) | {
        "schema_version": SCHEMA_VERSION,
        "run_id": run_id,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "cpu": _cpu(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),  # selects torch's kernels, which affects rounding
        "python": platform.python_version(),
        **{name: _version(name) for name in ("raysim", "torch", "ray", "numpy")},
        "status": "running",
        "restarts": 0,
        "resumed": 0,
        "diverged_step": None,
        "diverged_at": None,
        "warning": None,
        "error": None,
        "seconds": 0.0,
        "start_s": 0.0,  # the part of `seconds` before the first step of each start
    }


@cache
def _version(package: str) -> str | None:
    """Return the version of an installed package; None if it is missing, as Ray may be with the inline engine."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    """Return the name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def plan_columns(workload: Workload, parent: str | None) -> dict[str, Any]:
    """Return the columns on the plan of a run, and on its data and chance in them; `parent`: the run that a branch started from.

    Raises ConfigError if the data have no valid target.
    """
    plan, data = workload.plan, workload.data
    try:
        by_chance = chance(data, plan.task)
    except InputError as error:
        raise ConfigError(str(error)) from None
    custom = isinstance(plan.config.schedule, Custom)  # its file may change, or not be copied along
    names = ("first_step", "rate_steps", "model_seed", "memories_from")
    return {
        "cuts": list(plan.cuts),
        "num_stages": plan.num_stages,
        "num_parameters": workload.num_parameters,
        "parent": parent,
        **{name: getattr(plan, name) for name in names},
        "exchange_period": plan.config.exchange_period,
        "exchange_delay": plan.config.exchange_delay,
        "averages_by_bucket": all(method.by_bucket for method in plan.replica_methods),
        "data_digest": digest_of(data),
        "measures": write_measures(plan.task.measures),
        **{f"chance_{name}": value for name, value in by_chance.items()},
        "schedule_rows": rows_to_csv(plan.rows) if custom else None,
    }


def device_columns(engine: Engine) -> dict[str, Any]:
    """Return the columns on the GPU in use, none on a CPU; raises ConfigError if it is unsuitable for the run."""
    facts = engine.check_devices()
    if facts is None:
        return {}
    return {
        "device_name": facts.name,
        "device_capability": facts.capability,
        "driver": facts.driver,
        "cuda": facts.cuda,
        "device_forecast_bytes": engine.device_forecast_bytes(),
    }


def result_columns(run: Run, measures: Iterable[str]) -> dict[str, Any]:
    """Return a run's final columns: bytes, steps, the last training loss and the last evaluations."""
    steps, evals = run.steps, run.evals
    columns: dict[str, Any] = {
        "wire_bytes": int(steps["wire_bytes"].sum()),
        "dense_bytes": int(steps["dense_bytes"].sum()),
        "steps_done": len(steps),
    }
    if len(steps):
        columns["final_train_loss"] = float(steps["loss"].iloc[-1])
    end = int(run.row.get("first_step") or 0) + len(steps)
    for row in evals[evals["step"] == end].to_dict("records"):
        suffix = row["mode"] if row["batchnorm"] == "running" else f"{row['mode']}_estimated"
        columns |= {f"final_{name}_{suffix}": row[name] for name in measures}
    return columns


def rows_of_step(
    plan: Plan, step: int, reports: Sequence[StepReport], seconds: float, shifts_s: Sequence[float]
) -> dict[str, list[dict[str, Any]]]:
    """Return a step's rows of the records, by table.

    `seconds` is the time of the step, `shifts_s` the time to subtract from each worker's clock.
    """
    links, transfers = link_rows(plan, step, reports), []
    if plan.keeps_transfers(step):  # in order of rounds and members
        transfers = sorted(each for report in reports for group in report.groups for each in group.transfers)
    return {
        "steps": [step_row(plan, step, reports, links, seconds)],
        "links": links,
        "collectives": [{"step": step, **transfer._asdict()} for transfer in transfers],
        "decisions": list(decision_rows(plan, step, reports)),
        "actions": list(action_rows(step, reports, shifts_s)),
    }


def step_row(
    plan: Plan, step: int, reports: Sequence[StepReport], links: Sequence[dict[str, Any]], seconds: float
) -> dict[str, Any]:
    """Return the row of `steps`; `links` are the step's rows of `links`."""
    losses = [loss for report in reports for loss in report.losses]
    return {
        "step": step,
        "epoch": step // plan.steps_per_epoch,
        "loss": math.fsum(losses) / len(losses),
        "learning_rate": plan.learning_rate(step),
        "gradient_norm": reports[0].gradient_norm,
        "seconds": seconds,
        "update_s": max(report.update_s for report in reports),
        "wire_bytes": sum(link["wire_bytes"] for link in links),
        "dense_bytes": sum(link["dense_bytes"] for link in links),
    }


def link_rows(plan: Plan, step: int, reports: Sequence[StepReport]) -> list[dict[str, Any]]:
    """Return the rows of `links`: one per tensor of a link, from the accounts of both ends, and one per group of a stage."""
    rows = []
    for replica in range(plan.num_replicas):
        of_replica = [report for report in reports if report.replica == replica]
        own = (*_links(plan, replica, step, of_replica), *_groups(plan, step, of_replica))
        rows += [{"step": step, "replica": replica, **row} for row in own]
    return rows


def _links(plan: Plan, replica: int, step: int, reports: Sequence[StepReport]) -> Iterator[dict[str, Any]]:
    ends = sorted(
        (account for report in reports for account in report.links),
        key=lambda account: (account.direction != "forward", account.boundary, account.exact, account.tensor),
    )
    for _, pair in groupby(ends, key=lambda account: (account.direction, account.boundary, account.tensor)):
        sender, receiver = sorted(pair, key=lambda account: not account.sender)
        link = sender.boundary, sender.direction, sender.tensor
        method = None if sender.exact or step < plan.config.compress_from else plan.compressor(replica, *link)
        exact = not sender.exact and (method is None or method.exact) and plan.measures(step)
        sent, received, error = sender.sent_norm2, sender.received_norm2, sender.error_norm2
        yield {
            "boundary": sender.boundary,
            "direction": sender.direction,
            "tensor": sender.tensor or None,
            "codec": repr(method or Identity()),
            "packets": sender.packets,
            "wire_bytes": sender.wire_bytes,
            "dense_bytes": sender.dense_bytes,
            "gain": 1.0 if exact else received / sent if sent and received is not None else None,
            "fidelity": 1.0 if exact else 1 - error / sent if sent and error is not None else None,
            "peak": sender.peak,
            "residual_norm": None if sender.memory_norm2 is None else math.sqrt(sender.memory_norm2),
            "encode_s": sender.codec_s,
            "decode_s": receiver.codec_s,
        }


def _groups(plan: Plan, step: int, reports: Sequence[StepReport]) -> Iterator[dict[str, Any]]:
    """Yield one row for each stage's messages to its replicas, and one for those to the owners of tied parameters."""
    accounts = sorted(
        (account for report in reports for account in report.groups), key=lambda account: (account.tied, account.stage)
    )
    for (tied, stage), group in groupby(accounts, key=lambda account: (account.tied, account.stage)):
        parts = list(group)
        yield {
            "stage": stage,
            "direction": "tied" if tied else "replica_gradient",
            "codec": repr(plan.tied_method(step) if tied else plan.replica_method(stage, step)),
            "rounds": max(account.num_rounds for account in parts),
            "packets": sum(account.packets for account in parts),
            "wire_bytes": sum(account.wire_bytes for account in parts),
            "dense_bytes": sum(account.dense_bytes for account in parts),
            "encode_s": math.fsum(account.codec_s for account in parts),
        }


def decision_rows(plan: Plan, step: int, reports: Sequence[StepReport]) -> Iterator[dict[str, Any]]:
    """Yield a row of `decisions` per decision of a method; replicas of a stage decide alike, so only one is written."""
    for report in reports:
        for link in report.links:
            where = {"step": step, "replica": report.replica, "where": link.direction, "boundary": link.boundary}
            where["tensor"] = link.tensor or None
            for decision in link.decisions:
                method = plan.compressor(report.replica, link.boundary, link.direction, link.tensor)
                yield where | {"method": repr(method)} | decision._asdict()
        for account in report.groups if report.replica == 0 else ():
            kind = "tied" if account.tied else "replica_gradient"
            named = repr(plan.config.tied_gradient if account.tied else plan.replica_methods[account.stage])
            where = {"step": step, "where": kind, "stage": account.stage, "method": named}
            yield from (where | decision._asdict() for decision in account.decisions)


def action_rows(step: int, reports: Sequence[StepReport], shifts_s: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Yield a row of `actions` per action of a profiled step; `shifts_s` as in `rows_of_step`."""
    for report, shift in zip(reports, shifts_s, strict=True):
        for action in report.actions:
            times = {"start_s": action.start_s - shift, "end_s": action.end_s - shift}
            yield action._asdict() | times | {"step": step, "replica": report.replica}


def gradient_warning(step: int, reports: Sequence[StepReport], modules: Sequence[nn.Module]) -> str | None:
    """Return a sentence on parameters without a gradient in the run's first step; None if there are none, or in later steps.

    `modules`: the stages' modules. Stages before one that sends no gradient to its input receive only zeros.
    """
    unreached = {stage: each for report in reports for stage, each in report.unreached.items() if report.replica == 0}
    ends = max((stage for stage, each in unreached.items() if each.input), default=0)
    trained = [[name for name, x in module.named_parameters() if x.requires_grad] for module in modules]
    names = [
        name
        for stage, own in enumerate(trained)
        for name in own
        if stage < ends or (stage in unreached and name in unreached[stage].parameters)
    ]
    if not names:
        return None
    shown = ", ".join(f"`{name}`" for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"Step {step}: {len(names)} of {sum(map(len, trained))} parameters get no gradient: {shown}{more}. A "
        "layer after them detaches its input or turns gradients off, or none uses them; set `requires_grad` = False if that is meant."
    )


def fidelity_warning(plan: Plan, step: int, links: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a sentence on the link with the lowest fidelity in a step, and a remedy; None if no fidelity is below zero.

    `links`: the step's rows of that table. Below zero, the squared error exceeds the squared norm of the message.
    """
    measured = [row for row in links if row.get("fidelity") is not None]
    worst = min(measured, key=lambda row: row["fidelity"], default=None)
    if worst is None or worst["fidelity"] >= 0:
        return None
    boundary, forward = worst["boundary"], worst["direction"] == "forward"
    method = _method(plan, worst)
    tensor = f", `{worst['tensor']}`," if worst.get("tensor") else ""
    below = sum(row["fidelity"] < 0 for row in measured)
    arrow = "->" if forward else "<-"
    others = f" (and {below - 1} more)" if below > 1 else ""
    return (
        f"Step {step}: link {boundary} {arrow} {boundary + 1}{tensor}{others} with {worst['codec']} has a fidelity of "
        f"{worst['fidelity']:.2f}: the decoded tensor is further from the message than zeros would be. "
        f"{method.remedy(worst['direction'])}"
    )


def _method(plan: Plan, link: Mapping[str, Any]) -> Compressor:
    """Return the compressor of a row of `links`."""
    return plan.compressor(link["replica"], link["boundary"], link["direction"], link.get("tensor") or UNNAMED)


def breaks(plan: Plan, step: int, loss: float, chance: float | None, links: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the first step of trained weights shows that compression breaks the model.

    Either the loss is far above `chance`, or a link has a fidelity below zero. The error of a random codec may have a mean of zero,
    so its fidelity does not count.
    """
    if step > plan.first_step or not plan.trained:
        return False
    below = [row for row in links if row.get("fidelity") is not None and row["fidelity"] < 0]
    return loss_warning(plan, step, loss, chance) is not None or any(
        not _method(plan, row).codec.random for row in below
    )


def loss_warning(plan: Plan, step: int, loss: float, chance: float | None) -> str | None:
    """Return a sentence if compression breaks trained weights in the first step; None otherwise, and for weights from scratch.

    `chance`: the loss of predicting by the frequencies of the training targets. A trained model is better than that.
    """
    if (
        step > plan.first_step
        or not plan.trained
        or not plan.compresses
        or chance is None
        or not loss > BROKEN * chance
    ):
        return None
    return (
        f"Step {step}: the loss is {loss:.4g}, though the weights are trained: predicting by the frequencies of the targets alone has "
        f"{chance:.4g}. Compression may break this model at once: see `raysim screen`."
    )
