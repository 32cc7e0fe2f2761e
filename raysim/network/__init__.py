"""Networks, costs, and the time of a training step: arithmetic on numbers, without torch and without Ray.

`profile` holds the costs of a step, `topology` the hosts and wires; `simulate` computes the step time, `memory` checks that
the step fits, and `timeline_views` displays it.
"""
