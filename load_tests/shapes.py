"""Shapes of load, chosen with --shape: how many users there are at which time.

Locust asks once a second. `-u` is the number of users, `-r` how many start a second, and `-t` ends the run.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from locust import LoadTestShape
from locust.exception import LocustError

if TYPE_CHECKING:
    from argparse import ArgumentParser

SOAK_S, SOAK_RAMP_S = 3600, 60


def add_shape_arguments(parser: ArgumentParser, hidden: dict[str, Any]) -> None:
    for flag, default, text in (
        ("--step-users", 2, "steps: so many more users each step, up to -u"),
        ("--step-seconds", 10, "steps: the length of a step"),
        ("--spike-users", 16, "spikes: so many users come in addition to -u"),
        ("--spike-seconds", 5, "spikes: how long they stay"),
        ("--spike-every", 30, "spikes: the time from the start of one spike to the start of the next"),
    ):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} (default: {default})", **hidden)


class OptionShape(LoadTestShape):
    """A shape with Locust's own options of users, rate and time. Raises LocustError for options out of bounds."""

    abstract = True
    use_common_options = True

    def __init__(self, options: Any) -> None:
        super().__init__()
        self.options = options
        for name in ("step_users", "step_seconds", "spike_users", "spike_seconds", "spike_every"):
            if getattr(options, name) < 1:
                raise LocustError(f"--{name.replace('_', '-')} = {getattr(options, name)}: must be at least 1")

    @property
    def users(self) -> int:
        return int(self.options.num_users or 1)

    @property
    def rate(self) -> float:
        """Users that start or stop a second."""
        return float(self.options.spawn_rate or 1)

    @property
    def end_s(self) -> float:
        return float(self.options.run_time or math.inf)

    def tick(self) -> tuple[int, float] | None:
        """The number of users wanted, and how many to start a second; None ends the run."""
        run_time_s = self.get_run_time()
        return None if run_time_s >= self.end_s else (self.users_at(run_time_s), self.rate)

    @abstractmethod
    def users_at(self, run_time_s: float) -> int:
        """The number of users wanted so many seconds after the beginning."""


class Constant(OptionShape):
    """All users, from the beginning to the end."""

    def users_at(self, run_time_s: float) -> int:
        return self.users


class Steps(OptionShape):
    """Some more users each step. It ends with the step that has all of them."""

    @property
    def end_s(self) -> float:
        num_steps = math.ceil(self.users / self.options.step_users)
        return min(super().end_s, num_steps * self.options.step_seconds)

    def users_at(self, run_time_s: float) -> int:
        step = int(run_time_s / self.options.step_seconds)
        return int(min(self.users, (step + 1) * self.options.step_users))


class Spikes(OptionShape):
    """Constant users, and at the end of each period some more for a moment."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        if options.spike_seconds >= options.spike_every:
            raise LocustError(
                f"--spike-seconds = {options.spike_seconds}: must be below --spike-every = {options.spike_every}"
            )

    @property
    def rate(self) -> float:
        """All of a spike's users come at once."""
        return max(super().rate, float(self.options.spike_users))

    def users_at(self, run_time_s: float) -> int:
        options = self.options
        is_spike = run_time_s % options.spike_every >= options.spike_every - options.spike_seconds
        return self.users + (options.spike_users if is_spike else 0)


class Soak(OptionShape):
    """All users for an hour, or as long as -t says. They come within the first minute."""

    @property
    def rate(self) -> float:
        return max(self.users / SOAK_RAMP_S, 0.1)

    @property
    def end_s(self) -> float:
        return float(self.options.run_time or SOAK_S)

    def users_at(self, run_time_s: float) -> int:
        return self.users


SHAPES: dict[str, type[OptionShape]] = {"constant": Constant, "steps": Steps, "spikes": Spikes, "soak": Soak}
