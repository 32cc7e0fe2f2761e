"""Attacks at random moments and with random inputs."""

from __future__ import annotations

from asking import PHASES, in_phase
from by_input import inputs, packets
from commands import Attack
from on_hosts import mixed_faults
from on_runs import damage, driver_kills, full_disk, stage_kills
from on_sweeps import full_disk_of_sweep, sweep_kills, sweep_signals

ATTACKS: dict[str, tuple[Attack, int, int]] = {
    "driver killed": (driver_kills, 50, 5),
    "stage killed": (stage_kills, 100, 10),
    "sweep killed": (sweep_kills, 20, 5),
    **{f"SIGTERM {phase}": (in_phase(phase), 5, 5) for phase in PHASES},
    "sweep asked to end": (sweep_signals, 15, 3),
    "files damaged": (damage, 500, 50),
    "mixed faults over 2 to 8 hosts": (mixed_faults, 300, 30),
    "disk full": (full_disk, 20, 2),
    "disk full under a sweep": (full_disk_of_sweep, 10, 1),
    "inputs": (inputs, 5000, 250),
    "packets damaged": (packets, 100_000, 10_000),
}
"""Attacks by name, how often a whole campaign tries each, and how often at once."""
