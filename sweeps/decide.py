"""From a question to a decision: prices on a network, a screen on the model's own weights, and a race within a budget.

Each part does the work of its own command. All files lie in one folder, and `decision.json` in it says what has been decided so far.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

import tomli_w
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    InstanceOf,
    ValidationError,
    model_validator,
)

from raysim.config import ConfigError, RunConfig, make_config
from raysim.config.identity import IDENTITY, Setting
from raysim.config.reading import first_error
from raysim.forecast.compute import datasheet_profile, record_profile
from raysim.forecast.forecast import Forecast, forecast
from raysim.forecast.gains import Alternative, coded, limit, other_ways, priced
from raysim.network.costs import FleetCosts
from raysim.network.prices import PAYS, times
from raysim.network.timed_step import Parts
from raysim.network.topology import Network
from raysim.notation import InputError
from raysim.pipeline.plan import Plan
from raysim.pipeline.prepare import prepare
from raysim.screening.candidates import check_parts, every
from raysim.screening.outputs import study_of, write_records
from raysim.screening.screen import Screen, dense_of, screen, words
from raysim.screening.verdicts import NO_GAIN, knowledge
from raysim.storage.files import read_text, write_whole
from raysim.storage.texts import parse_json
from raysim.sweeps.budget import Budget, duration
from raysim.sweeps.contenders import Candidate, by_promise, choose, fastest_pair, nested
from raysim.sweeps.store import Store
from raysim.sweeps.study import STUDY, Study, as_toml, check_same
from raysim.sweeps.study_file import read_study

FILE, SCREEN, RACE, COMPUTE = "decision.json", "screen", "race", "compute.json"
RECORDED_STEPS = 1
EVALUATED = 128
"""Test samples of an evaluation in a race by the loss at least, which then counts some thousand tokens."""
Ended: TypeAlias = Literal["", "priced", "screened", "raced"]
"""The last part that ended."""
MOST_WAYS = 6
SENT = ("links", "averaging")
"""Causes of a step's time that compression shortens."""


@dataclass(frozen=True)
class Question:
    """A run, its network, and how it is priced there."""

    base: Mapping[str, Any]
    """Nested values of the run, with its name."""
    network: Network
    transport: str = "ray"
    device: str | None = None
    """A GPU by its datasheet; without it and `profile`, compute is measured on this machine."""
    profile: str | None = None
    """A file written by `raysim profile`."""
    tried: tuple[Setting, ...] = ()
    """Settings in addition to the defaults."""
    costs: FleetCosts | None = None
    """Costs and churn of hosts, to price a step with them."""

    @property
    def config(self) -> RunConfig:
        """The run, without compression."""
        return dense_of(make_config(self.base))

    def as_mapping(self) -> dict[str, Any]:
        """Return the question in the types of TOML and JSON."""
        own = {"base": as_toml(self.base), "network": repr(self.network), "transport": self.transport}
        own |= {"device": self.device, "profile": self.profile, "tried": [[*each] for each in self.tried]}
        own |= {"costs": self.costs and self.costs.as_mapping()}
        return {key: value for key, value in own.items() if value not in (None, [])}


class DecisionState(BaseModel):
    """A decision and its folder; `decision.json` holds the fields."""

    model_config = ConfigDict(populate_by_name=True)

    question: InstanceOf[Question] = Field(exclude=True)
    store: InstanceOf[Store] = Field(exclude=True)
    ended: Ended = ""
    sentences: list[str] = Field(default=[], alias="decision")
    """The decision; empty before it."""
    code: str = ""
    """Lines for another training loop; empty for dense."""
    dense_s: FiniteFloat = Field(default=0.0, ge=0, alias="dense_step_s")
    """Dense's step on the network, as priced."""
    limit: FiniteFloat = Field(default=1.0, gt=0, alias="most_speedup")
    """The speed-up if messages of links weighed nothing."""
    parts: Parts | None = None
    """Dense's step by cause."""
    money: str = ""
    """Dense's step with churn and money, in a sentence; empty without `--costs`."""
    ways: list[Alternative] = []
    """Other ways to run the training, best first."""
    findings: list[str] = []
    """Of the screen, in sentences."""
    candidates: list[Annotated[Candidate, BeforeValidator(nested)]] = []
    settled: bool = False
    """True if the race has nothing left to decide."""
    spent_s: FiniteFloat = Field(default=0.0, ge=0)
    """Before the race."""

    @model_validator(mode="after")
    def _has_a_step(self) -> Self:
        if self.ended and (self.parts is None or not self.dense_s):
            raise ValueError("`dense_step_s` and `parts` must be given once prices are done.")
        return self

    @classmethod
    def begin(cls, question: Question, out: str, *, resume: bool) -> DecisionState:
        """Return the decision of a new folder or bucket, or with `resume` the begun one; raises ConfigError."""
        config = question.config
        if config.stages == config.num_replicas == 1:
            raise ConfigError(
                "A run of one stage and one replica sends nothing to compress: set `num_stages` or `num_replicas`."
            )
        for setting in question.tried:
            check_parts(setting, config.stages, config.num_replicas)
        store = Store.checked(out)
        if resume and not store.is_unbegun():
            if not store.fetch_file(FILE):
                raise ConfigError(f"Nothing to resume: there is no decision in {store.out}.")
            return cls._read(question, store)
        if not (store.is_empty() or store.is_unbegun()):
            raise ConfigError(
                f"The folder {store.out} is not empty. Give another `--out`, or `--resume` the decision in it."
            )
        return cls(question=question, store=store)

    @property
    def compute(self) -> Path | None:
        """The profile that prices use; None for seconds recorded on this machine."""
        given = self.question.device is not None or self.question.profile is not None
        return self.store.local / COMPUTE if given else None

    @property
    def raced(self) -> bool:
        """True if the race has begun."""
        return Store(f"{self.store.out.rstrip('/')}/{RACE}").fetch_file("study.toml")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for one decision at a time; bad input leaves no folder behind."""
        with self.store.locked():
            if not self.ended:
                self.write()
            try:
                yield
            except InputError:
                if not self.ended:
                    self.store.clear()
                raise

    @property
    def left(self) -> list[Candidate]:
        """The candidates that nothing has ruled out."""
        return [each for each in self.candidates if each.open]

    @contextmanager
    def part(self, name: Ended) -> Iterator[None]:
        """Store the results of a part, and its seconds."""
        began_s = time.monotonic()
        yield
        self.ended, self.spent_s = name, self.spent_s + time.monotonic() - began_s
        self.write()

    def price(self, say: Callable[[str], None]) -> None:
        """Price dense, all candidates, and other ways to run the training, without training; raises ConfigError."""
        question, config = self.question, self.question.config
        with self.part("priced"):
            say(f"{config.name}: dense and its settings are priced on {question.network!r}, without training.")
            dense = self._dense(config)
            if not dense.tied and any(each.tied_gradient != IDENTITY for each in question.tried):
                raise ConfigError(
                    "`--try`: `tied_gradient` needs parameters that are tied between stages, and this run has none."
                )
            settings = every(config.stages, config.num_replicas, config.steps, question.tried, tied=bool(dense.tied))
            self.dense_s, self.limit = dense.step_s(question.network), limit(dense, question.network)
            self.parts = dense.timed().parts(question.network)
            if question.costs is not None:
                self.money = question.costs.sentence(dense.expected(question.costs, question.network))
            self.candidates = self._priced(settings, dense)
            if not self.left or max(self.parts._asdict().items(), key=lambda each: each[1])[0] not in SENT:
                self.ways = other_ways(dense, question.network, device=question.device)[:MOST_WAYS]

    def _dense(self, config: RunConfig) -> Forecast:
        """Return dense's forecast, with the compute kept in the folder."""
        question, file = self.question, self.store.local / COMPUTE
        self.store.local.mkdir(parents=True, exist_ok=True)
        if question.device is not None:
            dense = forecast(config, device=question.device, transport=question.transport)
            datasheet_profile(config, question.device, dense.flops_forward, ()).save(file)
            return dense
        measured = question.profile or record_profile(config, num_steps=RECORDED_STEPS)
        dense = forecast(config, profile=measured, transport=question.transport)
        if isinstance(measured, str):
            write_whole(file, read_text(measured).encode())
        else:
            measured.save(file)
        return dense

    def _priced(self, settings: Sequence[Setting], dense: Forecast) -> list[Candidate]:
        """Return all candidates with their prices.

        If a method for the sums of tied parameters pays, all defaults for links and replicas use the fastest one too.
        """
        own = [each for each in settings if each.tied_gradient != IDENTITY or each in self.question.tried]
        candidates = self._beside(dense, Setting(), own)
        sums = [each for each in candidates if each.open and each.screened == Setting()]
        base, plan = Setting(), dense
        if sums:
            base = max(sums, key=lambda each: each.speedup or 0.0).setting
            plan = coded(base, dense)
        others = [each._replace(tied_gradient=base.tied_gradient) for each in settings if each not in own]
        return [*self._beside(plan, base, others), *candidates]

    def _beside(self, plan: Forecast, base: Setting, settings: Sequence[Setting]) -> list[Candidate]:
        """Return settings with their prices; the forecast `plan` of `base` must be slower by 5 %, or they do not pay.

        A setting whose links alone cannot gain enough is not priced itself.
        """
        network = self.question.network
        base_s, most = plan.step_s(network), limit(plan, network)
        beside = "" if base == Setting() else f" as {words(base)} alone"
        bounded = [
            each for each in settings if most < PAYS and each._replace(forward=IDENTITY, backward=IDENTITY) == base
        ]
        own = (each for each in settings if each not in bounded)
        prices = {each.setting: each for each in priced(own, plan, network, self.question.costs)}
        candidates = []
        for setting in settings:
            price = prices.get(setting)
            if price is None and setting not in bounded:
                continue  # the run cannot have it
            gain = most if price is None else price.speedup
            faster = gain * self.dense_s / base_s
            each = Candidate(setting, faster, price and price.step_s, price and price.expected)
            if gain < PAYS:
                each.outcome, each.reason = NO_GAIN, f"{'' if price else 'at most '}{times(gain)} times as fast{beside}"
            candidates.append(each)
        return candidates

    def screen(self, say: Callable[[str], None]) -> None:
        """Measure the remaining candidates on the model's weights, drop hopeless ones, and write the study."""
        question = self.question
        with self.part("screened"):
            tried = [each for each in dict.fromkeys(each.screened for each in self.left) if each != Setting()]
            config, plan, loss = question.config, None, math.nan
            if tried:
                done = screen(
                    config,
                    [question.network],
                    tried=tried,
                    only_tried=True,
                    profile=str(self.store.local / COMPUTE) if question.device is None else None,
                    device=question.device,
                    transport=question.transport,
                    say=say,
                )
                self._take(done)
                plan, loss = done.plan, done.dense.result.measures["loss"].value
            self.candidates += fastest_pair(self.left)
            settings = [each.setting for each in by_promise(self.left, loss)]
            if settings:
                plan = plan or prepare(config).plan
                values = study_of(plan, [question.network], settings, question.base, question.transport)
                del values["seeds"]  # the budget plans them
                values["screen"] = False  # this was it
                if self.compute is not None:
                    values["profile"] = COMPUTE
                values["base"].setdefault("checkpoint_every_steps", 0)  # and so none of a run that has ended
                if (samples := evaluated(plan)) < plan.num_test_samples:
                    values["base"]["evaluate_samples"] = samples
                    whole = plan.num_test_samples
                    say(
                        f"Evaluations of the race read the first {samples:,} of {whole:,} test samples: `evaluate_samples`."
                    )
                name = f"{config.name}-decision"
                write_whole(self.store.local / STUDY, tomli_w.dumps({"name": name, **values}).encode())
                self.store.send(STUDY)

    def _take(self, done: Screen) -> None:
        """Take over the verdicts of a screen, and write its records; raises ConfigError if harm is undefined."""
        from raysim.screening.findings import findings

        dense, measure = done.dense.result.measures, done.plan.task.measures[0]
        if measure.name in dense and (why := measure.undefined(dense[measure.name].value)):
            raise ConfigError(f"No setting can be compared with dense before training: {why}.")
        write_records(done, self.store.local / SCREEN)
        self.store.send(SCREEN)
        self.findings = findings(done)
        found = {each.setting: each for each in done.settings}
        for candidate in self.left:
            if candidate.screened in found and candidate.screened != Setting():
                candidate.take(found[candidate.screened], repr(self.question.network))
        knows = math.isfinite(knowledge(done.dense.result.measures["loss"].value, done.chance["loss"]))
        if not knows:
            self.findings.append(
                "At initial weights a screen says little about training: it finds what overflows, and the error of one gradient."
            )
        choose(self.candidates, by_loss=knows, kept=self.question.tried)

    def study(self, budget: Budget) -> Study:
        """Return the study of the remaining candidates and budget; raises ConfigError."""
        left_s = budget.seconds - (0.0 if budget.of_gpus else self.spent_s)
        if left_s <= 0:
            raise ConfigError(
                f"`--budget` {budget.text} is spent: prices and screen took {duration(self.spent_s)}. Give more, and --resume."
            )
        for name in (STUDY, COMPUTE):
            self.store.fetch_file(name)
        return read_study(self.store.local / STUDY, budget=budget.text if budget.of_gpus else duration(left_s))

    def end(self, sentences: list[str]) -> None:
        """Keep the decision."""
        self.sentences = sentences
        self.write()

    def write(self) -> None:
        """Write `decision.json` atomically."""
        write_whole(self.store.local / FILE, json.dumps(self.as_mapping(), indent=1).encode())
        for name in (FILE, COMPUTE):
            self.store.send(name)

    def as_mapping(self) -> dict[str, Any]:
        """Return the decision for JSON."""
        own = {
            "parts": self.parts and self.parts._asdict(),
            "ways": [each._asdict() for each in self.ways],
            "candidates": [each.as_mapping() for each in self.candidates],
        }
        return {"question": self.question.as_mapping(), **self.model_dump(by_alias=True), **own}

    @classmethod
    def _read(cls, question: Question, store: Store) -> Self:
        """Return the decision that a folder holds; raises ConfigError if it is damaged, or of another question."""
        file = store.local / FILE
        try:
            values = parse_json(read_text(file))
            if not isinstance(values, dict):
                raise ValueError("it holds no object")
            if missing := sorted({each.alias or name for name, each in cls.model_fields.items()} - {"store", *values}):
                raise ValueError(f"it lacks `{missing[0]}`")
            old, asked = values["question"], question.as_mapping()
            if not isinstance(old, dict):
                raise ValueError(f"`question` must be a valid dictionary, but got {old!r}")
            decision = cls.model_validate(values | {"question": question, "store": store})
        except (OSError, ValueError) as error:
            reason = first_error(error) if isinstance(error, ValidationError) else f"{error}."
            raise ConfigError(f"Nothing to resume: {file} cannot be read: {reason}") from None
        for key in sorted(old.keys() | asked.keys()):
            check_same(key, old.get(key), asked.get(key))
        return decision


def evaluated(plan: Plan) -> int:
    """Return the number of test samples of an evaluation in a race.

    All of them, unless settings are judged by the loss: then half as many as a training reads, which takes a third of its time.
    """
    config = plan.config
    if config.evaluate_samples or plan.task.measures[0].name != "loss":
        return plan.num_test_samples
    return min(plan.num_test_samples, max(EVALUATED, plan.num_steps * config.batch_size // 2))
