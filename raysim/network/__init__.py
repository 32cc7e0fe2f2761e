"""Schedules, networks, costs, and what a training step takes: arithmetic on numbers, without torch and without Ray.

`schedule` says who runs what in which order, `profile` what it costs, `network` what lies between, `simulate` how long the step
is then; `memory` says whether it fits, `trace` shows it.
"""
