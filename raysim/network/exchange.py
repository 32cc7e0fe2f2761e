"""What it takes when a few hosts send to one another at once, as replicas and owners of tied parameters do at a step's end."""

from __future__ import annotations

from collections.abc import Sequence

from raysim.network.network import Network


def exchange_s(network: Network, hosts: Sequence[int], wire_bytes: float) -> float:
    """Return the seconds until each of `hosts` has sent `wire_bytes` to every other one, all at once, the wires being idle.

    Ports that are shared carry all that a host sends, and "half" ones what it receives too. Jitter and bursts are left out.

    >>> from raysim.network.presets import parse_network
    >>> exchange_s(parse_network("8mbps"), [0, 3], 1_000_000), exchange_s(parse_network("8mbps/half"), [0, 3], 1_000_000)
    (1.0, 2.0)
    """
    pairs = [(a, b) for i, a in enumerate(hosts) for b in hosts[i + 1 :] if a != b]
    slowest = max((network.p2p_s(*ends, wire_bytes) for a, b in pairs for ends in ((a, b), (b, a))), default=0.0)
    if not pairs:
        return 0.0
    ports = network.ports_bps(max(hosts) + 1)
    ways = 2 if network.sharing == "half" else 1
    for host in hosts:
        others = sum(host in pair for pair in pairs)
        latency = max((float(network.latencies_s(*pair)) for pair in pairs if host in pair), default=0.0)
        slowest = max(slowest, latency + 8 * network.framing * wire_bytes * others * ways / float(ports[host]))
    return slowest


def rounds_s(network: Network, hosts: Sequence[int], sent_bytes: float, num_rounds: float) -> float:
    """Return the seconds of a collective in which each of `hosts` sends `sent_bytes` in all, to the others alike.

    It waits for the others once a round. An all-reduce by reduce-scatter and all-gather has two.

    >>> from raysim.network.presets import parse_network
    >>> rounds_s(parse_network("8mbps+10ms"), [0, 1], 1_000_000, 2)
    1.02
    """
    if len(hosts) < 2 or not num_rounds:
        return 0.0
    first = exchange_s(network, hosts, sent_bytes / (len(hosts) - 1))
    return first + (num_rounds - 1) * exchange_s(network, hosts, 0.0)


def tied_s(
    network: Network,
    hosts: Sequence[int],
    num_replicas: int,
    owners: Sequence[int],
    sent_bytes: float,
    num_rounds: float,
    *,
    fused: bool,
) -> float:
    """Return the seconds in which the owners of a tied parameter sum its gradients at a step's end.

    `hosts` are those of all workers, replica by replica; `owners` are workers of one. Every replica's owners sum on their own,
    or, `fused`, all together; each sends `sent_bytes` in all.
    """
    per = len(hosts) // num_replicas
    groups = [[hosts[replica * per + worker] for worker in owners] for replica in range(num_replicas)]
    if fused:
        groups = [[host for group in groups for host in group]]
    return max(rounds_s(network, group, sent_bytes, num_rounds) for group in groups)
