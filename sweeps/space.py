"""The space of a study: a grammar of configuration keys and placeholders in notations, from which Optuna draws trials.

A key has one value, a list or a named table of choices, a range, or a text with placeholders: `"TopK({density})"`. A
placeholder is replaced by the value of a symbol, written in the same way, so notations nest: `"ErrorFeedback({codec},
key='{key}')"`. A placeholder with a dot, `{.density}`, has the same value in every key. Only symbols in use are drawn,
so the space is conditional, and new methods need no code here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import islice
from typing import Any

import optuna
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.trial import BaseTrial, FixedTrial

from raysim.config import ConfigError

Choice = bool | int | float | str
SpaceFunction = Callable[[BaseTrial], Mapping[str, Any]]

PLACEHOLDER = re.compile(r"\{(\.?)(\w+)\}")
RANGE = {"low", "high", "log", "step"}
VARIANTS = "variants"
DIGITS = 3  # of a drawn number in a notation
FIRST = ("num_stages", "cuts")  # drawn first: they decide how many boundaries there are
MOST_POINTS = 10_000  # of a grid
NEVER = 5  # invalid draws after which a value without a valid one counts as never valid


@dataclass(frozen=True)
class Space:
    """Keys and symbols in the format of `sweeps/studies/*.toml`; call it with a trial to draw overrides.

    Parameters are named after their key, or `<key>.<symbol>`, or `<symbol>` for a placeholder with a dot. A table `each` draws
    for every boundary separately: `<key>.<boundary>.<symbol>`. `variants` are sets of keys, one of which is chosen. Raises
    ConfigError, by parameter and rule, if a table is wrong.

    >>> space = Space({"forward": ["Identity", "TopK({density})"]}, {"density": {"low": 0.01, "high": 0.5, "log": True}})
    >>> space(FixedTrial({"forward": "TopK({density})", "forward.density": 0.123456}))
    {'forward': 'TopK(0.123)'}
    """

    keys: Mapping[str, Any]
    symbols: Mapping[str, Any] = field(default_factory=dict)
    stages: int = 4
    """Of the base, if no key decides it."""

    def __post_init__(self) -> None:
        variants = self.keys.get(VARIANTS, {})
        if not isinstance(variants, Mapping) or not all(isinstance(keys, Mapping) for keys in variants.values()):
            raise ConfigError(f"`space.{VARIANTS}` must be a table of tables of keys, but got {variants!r}.")
        for name, spec in self.symbols.items():
            self._check(f"symbols.{name}", spec, (name,))
        for keys in (self.keys, *variants.values()):
            for key, spec in keys.items():
                if key != VARIANTS:
                    self._check(f"space.{key}", spec, ())

    def __call__(self, trial: BaseTrial) -> dict[str, Any]:
        """Return the overrides drawn by `trial`, by key."""
        keys = {key: spec for key, spec in self.keys.items() if key != VARIANTS}
        if VARIANTS in self.keys:
            variants = self.keys[VARIANTS]
            chosen = (
                str(trial.suggest_categorical("variant", list(variants))) if len(variants) > 1 else next(iter(variants))
            )
            keys |= variants[chosen]
        drawn: dict[str, Any] = {}
        for key in sorted(keys, key=lambda key: key not in FIRST):
            spec = keys[key]
            if isinstance(spec, Mapping) and spec.keys() == {"each"}:
                count = len(drawn["cuts"]) if "cuts" in drawn else int(drawn.get("num_stages", self.stages)) - 1
                drawn[key] = [self._draw(trial, f"{key}.{b}", spec["each"], f"{key}.{b}") for b in range(count)]
            else:
                drawn[key] = self._draw(trial, key, spec, key)
        return {key: drawn[key] for key in keys}

    def _draw(self, trial: BaseTrial, name: str, spec: Any, prefix: str) -> Any:
        """Draw the parameter `name` from `spec`; the parameters of its placeholders begin with `prefix`."""
        if isinstance(spec, str):
            return PLACEHOLDER.sub(lambda match: self._text(trial, match[2], "" if match[1] else prefix), spec)
        if isinstance(spec, Mapping) and spec.keys() <= RANGE:
            return _draw_range(trial, name, spec)
        if isinstance(spec, Mapping):
            chosen = trial.suggest_categorical(name, list(spec)) if len(spec) > 1 else next(iter(spec))
            return self._draw(trial, f"{name}.{chosen}", spec[chosen], prefix)
        if isinstance(spec, Sequence):
            chosen = trial.suggest_categorical(name, list(spec)) if len(spec) > 1 else spec[0]
            return self._draw(trial, name, chosen, prefix) if isinstance(chosen, str) else chosen
        return spec

    def _text(self, trial: BaseTrial, symbol: str, prefix: str) -> str:
        spec = self.symbols[symbol]
        value = self._draw(trial, f"{prefix}.{symbol}".lstrip("."), spec, prefix)
        from_range = isinstance(spec, Mapping) and spec.keys() <= RANGE
        return f"{value:.{DIGITS}g}" if isinstance(value, float) and from_range else str(value)

    def _check(self, where: str, spec: Any, inside: tuple[str, ...]) -> None:
        if isinstance(spec, str):
            for _, name in PLACEHOLDER.findall(spec):
                if name not in self.symbols:
                    known = ", ".join(self.symbols) or "none"
                    raise ConfigError(
                        f"`{where}` has the placeholder {{{name}}}, which `symbols` must define. Known: {known}."
                    )
                if name in inside:
                    raise ConfigError(f"`{where}` must not form a cycle, but {{{name}}} does.")
                self._check(where, self.symbols[name], (*inside, name))
        elif isinstance(spec, Mapping) and spec.keys() & RANGE:
            _check_range(where, spec)
        elif isinstance(spec, (Mapping, list, tuple)):
            if not spec:
                raise ConfigError(f"`{where}` must have at least one choice, but got none.")
            choices = list(spec.values()) if isinstance(spec, Mapping) else list(spec)
            if not isinstance(spec, Mapping):
                if len({(type(choice), repr(choice)) for choice in choices}) < len(choices):
                    raise ConfigError(f"`{where}` must have different choices, but got {choices!r}.")
                if other := [choice for choice in choices if not isinstance(choice, Choice)]:
                    raise ConfigError(
                        f"`{where}` must list numbers, strings or booleans, but got {other[0]!r}. Name other choices in a table."
                    )
            for choice in choices:
                self._check(where, choice, inside)
        elif not isinstance(spec, Choice):
            raise ConfigError(f"`{where}` must be a value, a list or table of choices, or a range, but got {spec!r}.")


def _check_range(where: str, spec: Mapping[str, Any]) -> None:
    for name in ("low", "high"):
        value = spec.get(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ConfigError(f"`{where}.{name}` must be a number, but got {value!r}.")
    unknown = sorted(spec.keys() - RANGE)
    if unknown:
        raise ConfigError(f"Unknown key `{where}.{unknown[0]}` of a range. Known: low, high, log, step.")
    low, high, log, step = spec["low"], spec["high"], spec.get("log", False), spec.get("step")
    if not low < high:
        raise ConfigError(f"`{where}` must have `low` below `high`, but got {low!r} and {high!r}.")
    if not isinstance(log, bool):
        raise ConfigError(f"`{where}.log` must be true or false, but got {log!r}.")
    if log and low <= 0:
        raise ConfigError(f"`{where}.low` must be more than 0 with `log`, but got {low!r}.")
    if step is not None and (log or isinstance(step, bool) or not isinstance(step, (int, float)) or step <= 0):
        raise ConfigError(f"`{where}.step` must be a positive number, without `log`, but got {step!r}.")


def _draw_range(trial: BaseTrial, name: str, spec: Mapping[str, Any]) -> int | float:
    low, high, log, step = spec["low"], spec["high"], spec.get("log", False), spec.get("step")
    if isinstance(low, int) and isinstance(high, int) and not isinstance(step, float):
        return trial.suggest_int(name, low, high, step=step or 1, log=log)
    return trial.suggest_float(name, low, high, step=step, log=log)


class _Walk(FixedTrial):
    """A trial that takes the choices of `path`, then always the first; counts the options at each."""

    def __init__(self, path: Sequence[int]) -> None:
        super().__init__({})
        self.path, self.counts, self.taken = list(path), list[int](), dict[str, Choice]()

    def _take(self, name: str, options: Sequence[Any]) -> Any:
        if name not in self.taken:
            if len(self.counts) == len(self.path):
                self.path.append(0)
            self.taken[name] = options[self.path[len(self.counts)]]
            self.counts.append(len(options))
        return self.taken[name]

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        return self._take(name, choices)

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        return int(self._take(name, range(low, high + 1, step)))

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        if step is None:
            raise ConfigError(f"A grid needs a `step` or a list of choices for `{name}`, but got a range.")
        start, end, by = (Decimal(repr(value)) for value in (low, high, step))  # 0.1 + 2 * 0.1 is 0.3, within `high`
        return float(self._take(name, [float(start + i * by) for i in range(int((end - start) / by) + 1)]))


def grid_points(space: SpaceFunction) -> list[dict[str, Choice]]:
    """Return the parameters of every point of a grid, in the order of the space.

    Raises ConfigError if a range has no step, or if there are too many points.

    >>> grid_points(Space({"forward": ["Identity", "TopK({density})"]}, {"density": [0.5, 0.1]}))[1:]
    [{'forward': 'TopK({density})', 'forward.density': 0.5}, {'forward': 'TopK({density})', 'forward.density': 0.1}]
    """
    grid = list(islice(_walks(space), MOST_POINTS + 1))
    if len(grid) > MOST_POINTS:
        raise ConfigError(f"A grid must have at most {MOST_POINTS:,} points, but this one has more.")
    return grid


def _walks(space: SpaceFunction) -> Iterator[dict[str, Choice]]:
    path: list[int] | None = []
    while path is not None:
        walk = _Walk(path)
        space(walk)
        yield walk.taken
        path = next(
            (
                [*walk.path[:d], walk.path[d] + 1]
                for d in reversed(range(len(walk.counts)))
                if walk.path[d] + 1 < walk.counts[d]
            ),
            None,
        )


def random_points(space: SpaceFunction, count: int) -> Iterator[tuple[dict[str, Choice], Mapping[str, Any]]]:
    """Yield the parameters and the overrides of `count` random points, the same every time.

    Some points are repeated, `NEVER` times each, with a number set to either end of its range.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # silences the message about a new study
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    tried: Counter[str] = Counter()
    for _ in range(count):
        trial = study.ask()
        overrides = space(trial)
        yield dict(trial.params), overrides
        for name, distribution in trial.distributions.items():
            if not isinstance(distribution, (FloatDistribution, IntDistribution)) or tried[name] == NEVER:
                continue
            tried[name] += 1
            for end in (distribution.low, distribution.high):
                params = trial.params | {name: end}
                with suppress(ValueError):  # another value may ask for other parameters
                    yield params, space(FixedTrial(params))
