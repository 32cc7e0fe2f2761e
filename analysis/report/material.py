"""Data of all sections, computed once: jobs, their settings over seeds, and step times on every network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from raysim.analysis.comparison.choice import is_promising
from raysim.analysis.comparison.objectives import frontier
from raysim.analysis.comparison.rule import SKILL, PairedSpread, seeds_needed
from raysim.analysis.data import ReplayError
from raysim.analysis.data.folders import USUAL_TRANSPORT
from raysim.analysis.runs.estimates import Estimate
from raysim.analysis.runs.prices import dense_partners
from raysim.analysis.runs.results import Results
from raysim.analysis.runs.step import Replay
from raysim.network.prices import WireSeconds
from raysim.network.topology import Network
from raysim.quality import Measure
from raysim.records import FINISHED

NETWORKS = ("100mbps", "1gbps", "10gbps", "100mbps+20ms", "two-universities", "four-regions", "worldwide", "free")
"""Presets of a report; `free` shows compute and codecs alone."""
MODES = ("on", "off")
WORTH = 1.05  # least speed-up that is worth a recommendation
MOST_NAMED = 6  # highlighted settings besides dense: more cannot be distinguished


class Spread(NamedTuple):
    """A mean over seeds, and the standard deviation over them: missing for one seed."""

    mean: float
    sd: float


class Price(NamedTuple):
    """The price of a step by network, of a run or the mean of a setting's runs; empty if none could be priced."""

    step_s: Mapping[str, Estimate]
    dense_step_s: Mapping[str, float]
    """The step of the dense run or setting of the same job and schedule; empty without one."""
    speedup: Mapping[str, Estimate]
    """`dense_step_s` over `step_s`; empty without a dense setting."""
    wire: Mapping[str, WireSeconds]
    """What bytes and latency add to the step."""

    @classmethod
    def mean(cls, prices: Sequence[Price]) -> Price:
        """Return the mean over the runs of a setting: these share all but their bytes, so the ends of intervals average too."""
        against = [price for price in prices if price.speedup]
        step_s = _mean_estimates([price.step_s for price in prices])
        speedup = _mean_estimates([price.speedup for price in against])
        dense_step_s = {name: float(np.mean([price.dense_step_s[name] for price in against])) for name in speedup}
        for name, dense_s in dense_step_s.items():  # of the mean steps themselves, as the rows show them
            speedup[name] = speedup[name].at(dense_s / step_s[name].value)
        names = prices[0].wire if prices else ()
        wire = {name: WireSeconds(*np.mean([price.wire[name] for price in prices], axis=0).tolist()) for name in names}
        return cls(step_s, dense_step_s, speedup, wire)


def _mean_estimates(values: Sequence[Mapping[str, Estimate]]) -> dict[str, Estimate]:
    networks = values[0] if values else ()
    return {name: Estimate(*np.mean([each[name] for each in values], axis=0).tolist()) for name in networks}


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
    quality: Mapping[str, Spread]
    """By mode: with compression "on" and "off" in the last evaluation."""
    priced: str
    """The first run with a price; empty without one."""
    price: Price
    judged: Mapping[str, Any]
    """Its row of `raysim.analysis.settings`; empty without one."""
    skill: float = math.nan
    """Per cent of the way from chance to perfection, with compression on, mean over seeds; NaN if chance is unknown."""

    @property
    def step_s(self) -> Mapping[str, Estimate]:
        """The seconds of a step by network; empty if no run could be priced."""
        return self.price.step_s

    def wire_shares(self, network: str) -> tuple[float, float]:
        """Return what bytes and latency add to a step on `network`, each as a share of the step."""
        wire, step_s = self.price.wire[network], self.step_s[network].value
        return wire.bytes_s / step_s, wire.latency_s / step_s

    @property
    def speedup(self) -> Mapping[str, Estimate]:
        """The speed-up over dense by network; empty without a dense setting."""
        return self.price.speedup

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
class Job:
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

    def recommended(self, network: str) -> SettingRuns | None:
        """Return the fastest setting on `network` shown to be safe, or dense if none gains `WORTH`; None without dense."""
        if self.dense is None or not self.dense.step_s:
            return None
        safe = [setting for setting in self.faster(network) if setting.verdict == "safe"]
        return max(safe, key=lambda setting: setting.speedup[network].value, default=self.dense)

    def faster(self, network: str) -> list[SettingRuns]:
        """Return the compressed settings, safe or not, faster than dense beyond their interval and by `WORTH`."""
        others = [setting for setting in self.priced if not setting.dense and setting.speedup]
        return [
            setting
            for setting in others
            if setting.speedup[network].low > 1 and setting.speedup[network].value >= WORTH
        ]

    def promising(self, network: str) -> SettingRuns | None:
        """Return the fastest promising setting; None without one."""
        near = [setting for setting in self.faster(network) if setting.promising]
        return max(near, key=lambda setting: setting.speedup[network].value, default=None)

    def taken_home(self, network: str) -> SettingRuns | None:
        """Return the compressed setting to try in other training code: the recommended one, or the most promising one."""
        recommended = self.recommended(network)
        return recommended if recommended is not None and not recommended.dense else self.promising(network)

    def on_some_network(self, choose: Callable[[str], SettingRuns | None]) -> list[SettingRuns]:
        """Return the settings chosen on some network, each once."""
        chosen = [setting for network in self.networks if (setting := choose(network)) is not None]
        return list(dict.fromkeys(chosen))

    def least_harmful(self, network: str) -> SettingRuns | None:
        """Return the faster setting of the least mean harm; None if none was compared with dense."""
        known = [setting for setting in self.faster(network) if not math.isnan(setting.judged.get("harm", math.nan))]
        return min(known, key=lambda setting: float(setting.judged["harm"]), default=None)

    def seeds_for(self, setting: SettingRuns) -> int | None:
        """Return the number of seeds that would decide about a setting; None if it is unknown or too large."""
        judged = setting.judged
        spread = PairedSpread(judged["deviation"], 0.0, judged["within"], judged["unit"], judged["borrowed"])
        return seeds_needed(spread, settings=judged["family"], harm=judged["harm"])

    def cost_s(self, seeds: int) -> float:
        """Return the seconds of training to give every setting that many seeds, by the recorded runs."""
        each = float(self.runs["seconds"].astype(float).mean()) if "seconds" in self.runs else math.nan
        return each * sum(max(0, seeds - setting.seeds) for setting in self.settings)

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
    compute: str = "auto"
    """The pooled seconds of compute, as for `Recording`."""
    profile: Path | str | None = None
    """A file of `raysim profile` with the compute to use instead."""
    transport: str = USUAL_TRANSPORT
    """The transport of packets in prices."""
    jobs: Sequence[Job] = ()
    """The jobs of trained runs."""
    probes: Sequence[Job] = ()
    """The jobs of candidates of a probe, which have no quality and a section of their own."""

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `Results.replay`."""
        return {"compute": self.compute, "profile": self.profile, "transport": self.transport}

    @cached_property
    def finished(self) -> Results:
        """The finished runs."""
        return self.results.select(self.results.runs["status"].isin(FINISHED))

    @cached_property
    def partners(self) -> dict[str, str]:
        """The dense run to compare each finished run with."""
        return dense_partners(self.finished)

    def replay(self, run: str, **options: Any) -> Replay:
        """Return a run ready to be priced; `options`: arguments of `Results.replay` in place of the report's."""
        return self.results.replay(run, **(self.options | options))

    def steps_s(self, runs: Iterable[str], networks: Sequence[Network]) -> list[float]:
        """Return the mean seconds of a step of priced runs on each network, without intervals."""
        seconds = []
        for run in runs:
            with suppress(ReplayError):  # named in the problems, by `prices`
                seconds.append(self.replay(run).step_seconds(networks).mean(axis=1))
        means: list[float] = np.mean(seconds, axis=0).tolist()
        return means

    def prices(self, runs: Iterable[str], networks: Mapping[str, Network], **options: Any) -> dict[str, Price]:
        """Return the price of each run's step on networks; `options`: as for `replay`.

        A run that cannot be priced is left out, and named in the problems.
        """
        chosen, prices = list(networks.values()), dict[str, Price]()
        for run in runs:
            try:
                replay = self.replay(run, **options)
                dense = self.replay(self.partners[run], **options) if run in self.partners else None
                steps, wires = replay.step_s(chosen), replay.wire_seconds(chosen)
                speedups = replay.speedup(dense, chosen) if dense is not None else []
                dense_s = dense.step_seconds(chosen).mean(axis=1).tolist() if dense is not None else []
            except ReplayError as error:
                self.results.complain(str(error))
                continue
            prices[run] = Price(
                dict(zip(networks, steps, strict=True)),
                dict(zip(networks, dense_s, strict=False)),
                dict(zip(networks, speedups, strict=False)),
                dict(zip(networks, wires, strict=True)),
            )
        return prices
