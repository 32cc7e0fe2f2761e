"""Data of all sections, computed once: jobs, their settings over seeds, and step times on every network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd

from raysim.analysis.comparison.choice import is_promising
from raysim.analysis.comparison.choice import settings as judge_settings
from raysim.analysis.comparison.objectives import frontier
from raysim.analysis.comparison.rule import SKILL, PairedSpread, seeds_needed
from raysim.analysis.data import ReplayError
from raysim.analysis.data.folders import USUAL_TRANSPORT
from raysim.analysis.runs.estimates import Estimate
from raysim.analysis.runs.prices import dense_partners
from raysim.analysis.runs.results import Results
from raysim.analysis.runs.step import Replay
from raysim.network.costs import Expected, FleetCosts
from raysim.network.prices import PAYS, WireSeconds
from raysim.network.topology import Network
from raysim.quality import Measure
from raysim.records import FINISHED

NETWORKS = ("100mbps", "1gbps", "10gbps", "100mbps+20ms", "two-universities", "four-regions", "worldwide", "free")
"""Presets of a report; `free` shows compute and codecs alone."""
MODES = ("on", "off")
MOST_NAMED = 6  # highlighted settings besides dense: more cannot be distinguished

T = TypeVar("T")


class MeanQuality(NamedTuple):
    """A mean over seeds, and the standard deviation over them: missing for one seed."""

    mean: float
    sd: float


@dataclass(frozen=True, eq=False)
class SettingRuns:
    """Runs equal in all but their seed."""

    name: str
    """Name among the job's settings: forward / backward, and the other keys that differ."""
    forward: str
    backward: str
    dense: bool
    runs: tuple[str, ...]
    seeds: int
    diverged: int
    wire_bytes: float
    """Of a step."""
    dense_bytes: float
    quality: Mapping[str, MeanQuality]
    """By mode: with compression "on" and "off" in the last evaluation."""
    judged: Mapping[str, Any]
    """Its row of `raysim.analysis.settings`; empty without one."""
    skill: float = math.nan
    """Per cent of the way from chance to perfection, with compression on, mean over seeds; NaN if chance is unknown."""
    priced: str = ""
    """The first run with a price; empty without one."""
    step_s: Mapping[str, Estimate] = field(default_factory=dict)
    """The seconds of a step by network, mean over its runs; empty if none could be priced."""
    dense_step_s: Mapping[str, float] = field(default_factory=dict)
    """The step of the dense run or setting of the same job and schedule; empty without one."""
    speedup: Mapping[str, Estimate] = field(default_factory=dict)
    """`dense_step_s` over `step_s`; empty without a dense setting."""
    wire: Mapping[str, WireSeconds] = field(default_factory=dict)
    """Seconds of a step due to bytes and to latency."""

    @property
    def factor(self) -> float:
        """The compression factor."""
        return self.dense_bytes / self.wire_bytes if self.wire_bytes > 0 else math.nan

    @property
    def verdict(self) -> str:
        """ "safe", "harmful", "undecided", or nothing without a dense run."""
        return str(self.judged.get("verdict", ""))

    @property
    def promising(self) -> bool:
        """True if it is undecided, and more likely safe than not."""
        return bool(self.judged) and is_promising(self.judged)


@dataclass(frozen=True, eq=False)
class JobRuns:
    """Runs of the same computation, see `raysim.analysis.data.settings`. Runs of different jobs are never compared."""

    key: str
    title: str
    measure: Measure
    """The measure of quality."""
    settings: Sequence[SettingRuns]
    runs: pd.DataFrame
    networks: Sequence[str]
    compute: str = ""
    """The method by which its compute seconds are estimated, a sentence."""
    source: str = ""
    """The source of the compute seconds, in a few words."""
    transport: str = USUAL_TRANSPORT
    """The transport of all its prices except `home`."""
    home: Mapping[str, Mapping[str, Mapping[str, Estimate]]] = field(default_factory=dict)
    """By the name of a setting to take home, transport of other training code, and network: its speed-up there."""
    costs: FleetCosts | None = None
    """Costs and churn of hosts, to price a step with them."""
    expected: Mapping[tuple[str, str], Expected] = field(default_factory=dict)
    """By the names of a network and of dense or the setting to use there: its step with `costs`; empty without them."""

    @cached_property
    def dense(self) -> SettingRuns | None:
        """The dense setting, or the one with most seeds of several."""
        return max(
            (setting for setting in self.settings if setting.dense), key=lambda setting: len(setting.runs), default=None
        )

    @cached_property
    def priced(self) -> list[SettingRuns]:
        """The settings with a price on every network."""
        return [setting for setting in self.settings if setting.step_s]

    @cached_property
    def trained(self) -> list[SettingRuns]:
        """The priced settings whose models learned at least half as much as dense models; all if that is unknown."""
        least = self.dense.skill / 2 if self.dense is not None and self.dense.skill > SKILL else -math.inf
        return [setting for setting in self.priced if not setting.skill < least]

    @cached_property
    def fronts(self) -> Mapping[str, Mapping[str, list[SettingRuns]]]:
        """By network and mode: the frontier of the trained settings in time and quality, fastest first."""
        trained, direction = self.trained, "maximize" if self.measure.higher else "minimize"
        fronts: dict[str, dict[str, list[SettingRuns]]] = {}
        for network in self.networks:
            frame = pd.DataFrame(
                {"step_s": [setting.step_s[network].value for setting in trained]}
                | {mode: [setting.quality[mode].mean for setting in trained] for mode in MODES}
            )
            fronts[network] = {}
            for mode in MODES:
                rows = frontier(frame, {"step_s": "minimize", mode: direction}) if len(frame) else frame
                fronts[network][mode] = [trained[i] for i in rows.index]
        return fronts

    def fastest_dense(self, network: str) -> SettingRuns | None:
        """Return the fastest dense setting on `network`, with most seeds of equally fast ones; None without a price."""

        def order(setting: SettingRuns) -> tuple[float, int]:
            return float(f"{setting.step_s[network].value:.6g}"), -len(setting.runs)

        return min((setting for setting in self.priced if setting.dense), key=order, default=None)

    def recommended(self, network: str) -> SettingRuns | None:
        """Return the fastest setting on `network` shown to be safe, or the fastest dense one if none gains `PAYS`."""
        dense = self.fastest_dense(network)
        safe = [setting for setting in self.faster(network) if setting.verdict == "safe"]
        return min(safe, key=lambda setting: setting.step_s[network].value, default=dense)

    def fastest(self, network: str) -> SettingRuns:
        """Return the fastest setting on a network, safe or not."""
        return min(self.priced, key=lambda setting: setting.step_s[network].value)

    def faster(self, network: str) -> list[SettingRuns]:
        """Return the compressed settings, safe or not, that surely beat dense and gain at least `PAYS`.

        Of several schedules they beat dense in their own, and gain over the fastest dense setting too.
        """
        if (dense := self.fastest_dense(network)) is None:
            return []
        others = [setting for setting in self.priced if not setting.dense and setting.speedup]
        surely = [each for each in others if each.speedup[network].low > 1 and each.speedup[network].value >= PAYS]
        return [each for each in surely if PAYS * each.step_s[network].value <= dense.step_s[network].value]

    def promising(self, network: str) -> SettingRuns | None:
        """Return the fastest promising setting; None without one."""
        near = [setting for setting in self.faster(network) if setting.promising]
        return min(near, key=lambda setting: setting.step_s[network].value, default=None)

    def taken_home(self, network: str) -> SettingRuns | None:
        """Return the compressed setting to try in other training code: the recommended one, or the most promising one."""
        recommended = self.recommended(network)
        return recommended if recommended is not None and not recommended.dense else self.promising(network)

    def on_some_network(self, choose: Callable[[str], SettingRuns | None]) -> list[SettingRuns]:
        """Return the settings chosen on some network, each once."""
        chosen = [setting for network in self.networks if (setting := choose(network)) is not None]
        return list(dict.fromkeys(chosen))

    def least_harmful(self, network: str) -> SettingRuns | None:
        """Return, of the settings faster than dense, the one with the least mean harm; None if no harm is known."""
        known = [setting for setting in self.faster(network) if not math.isnan(setting.judged.get("harm", math.nan))]
        return min(known, key=lambda setting: float(setting.judged["harm"]), default=None)

    def seeds_for(self, setting: SettingRuns) -> int | None:
        """Return the number of seeds that would decide about a setting; None if it is unknown or too large."""
        judged = setting.judged
        spread = PairedSpread(judged["deviation"], 0.0, judged["within"], judged["unit"], judged["borrowed"])
        return seeds_needed(spread, settings=judged["family"], harm=judged["harm"])

    def cost_s(self, seeds: int) -> float:
        """Return the seconds of a study that trains every setting on that many seeds, by the recorded runs."""
        each = float(self.runs["seconds"].astype(float).mean()) if "seconds" in self.runs else math.nan
        return each * seeds * len(self.settings)

    @cached_property
    def named(self) -> list[SettingRuns]:
        """The settings highlighted in figures: dense, the recommended settings, then the fronts."""
        chosen = [self.dense] if self.dense is not None else []
        chosen += self.on_some_network(self.recommended)
        fronts = [front for modes in self.fronts.values() for front in modes.values()]
        for i in range(max(map(len, fronts), default=0)):
            chosen += [front[i] for front in fronts if i < len(front)]
        chosen += [*self.trained, *self.settings]
        return list(dict.fromkeys(chosen))[: MOST_NAMED + (self.dense is not None)]


@dataclass(frozen=True, eq=False)
class Material:
    """The data of a report."""

    results: Results
    networks: Mapping[str, Network]
    """By name, in the order of the page's control."""
    network: str
    """The network chosen at first."""
    options: Mapping[str, Any]
    """The keyword arguments of `Results.replay`."""
    costs: FleetCosts | None = None
    jobs: Sequence[JobRuns] = ()
    """The jobs of trained runs."""
    probes: Sequence[JobRuns] = ()
    """The jobs of candidates of a probe, which have no quality and a section of their own."""

    @cached_property
    def finished(self) -> Results:
        """The finished runs."""
        return self.results.select(self.results.runs["status"].isin(FINISHED))

    @cached_property
    def judged(self) -> dict[str, dict[str, Any]]:
        """The row of `raysim.analysis.settings` to which each finished run contributes, in the family of all that have begun."""
        rows = judge_settings(self.results).to_dict("records")
        return {run: {str(key): value for key, value in row.items()} for row in rows for run in row["runs"]}

    @cached_property
    def partners(self) -> dict[str, str]:
        """For each finished run, the dense run with a price to compare it with."""
        return dense_partners(self.finished, without=self.results.unpriced(self.options["compute"]))

    def replay(self, run: str, **options: Any) -> Replay:
        """Return a run ready to be priced; `options`: arguments of `Results.replay` in place of the report's."""
        return self.results.replay(run, **{**self.options, **options})

    def steps_s(self, runs: Iterable[str], networks: Sequence[Network]) -> list[float]:
        """Return the mean seconds of a step of priced runs on each network, without intervals."""
        seconds = self.priced(runs, lambda replay: replay.step_seconds(networks).mean(axis=1))
        means: list[float] = np.mean(seconds, axis=0).tolist()
        return means

    def priced(self, runs: Iterable[str], of: Callable[[Replay], T]) -> list[T]:
        """Return a figure for each run that can be priced, and skip the others."""
        figures = []
        for run in runs:
            with suppress(ReplayError):
                figures.append(of(self.replay(run)))
        return figures

    def price(self, runs: Iterable[str], **options: Any) -> dict[str, Any]:
        """Return the fields of `SettingRuns` from `priced` on, means over the runs of a setting; `options`: as for `replay`.

        The runs share all but their bytes, so the ends of intervals average too. A run that cannot be priced is left out, and
        named in the problems.
        """
        networks = list(self.networks.values())
        prices, comparisons = list[tuple[Any, ...]](), list[tuple[Any, ...]]()
        for run in runs:
            try:
                replay = self.replay(run, **options)
                dense = self.replay(self.partners[run], **options) if run in self.partners else None
                wire = replay.wire_seconds(networks)  # first, since it prices all that the others ask for
                price = run, replay.step_s(networks), wire
                if dense is not None:
                    comparisons.append((replay.speedup(dense, networks), dense.step_seconds(networks).mean(axis=1)))
            except ReplayError as error:
                self.results.complain(str(error))
            else:
                prices.append(price)
        if not prices:
            return {}
        priced, steps, wires = zip(*prices, strict=True)
        step_s = self._means(Estimate, steps)
        fields = {"priced": priced[0], "step_s": step_s, "wire": self._means(WireSeconds, wires)}
        if not comparisons:
            return fields
        speedups, dense_steps = zip(*comparisons, strict=True)
        dense_step_s = dict(zip(self.networks, np.mean(dense_steps, axis=0).tolist(), strict=True))
        # of the mean steps themselves, as the rows show them
        speedup = {
            name: mean.at(dense_step_s[name] / step_s[name].value)
            for name, mean in self._means(Estimate, speedups).items()
        }
        return fields | {"dense_step_s": dense_step_s, "speedup": speedup}

    def _means(self, kind: Callable[..., T], by_run: Sequence[Any]) -> dict[str, T]:
        """Return the means over runs by network."""
        means = np.mean(by_run, axis=0).tolist()
        return {name: kind(*values) for name, values in zip(self.networks, means, strict=True)}
