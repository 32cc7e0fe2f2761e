"""Networks, costs, and the time of a training step: arithmetic on numbers, without torch and without Ray.

`profile` holds the costs of a step, `topology` the hosts and the wires between them, and `simulate` computes how long the
step takes; `memory` says whether it fits, `timeline_views` shows it.
"""
