"""A Ray cluster of this machine with an autoscaler: a head without CPUs, and workers that come when they are asked for.

Ray's `AutoscalingCluster` is not used: it begins and ends with `ray stop --force`, which ends every Ray of the machine, and reads a
file that the wheel lacks. Its provider of nodes is Ray's own for tests.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

import psutil

PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
HEAD = "f" * 51 + "00000"  # the provider's name of the head
STORE = 80_000_000
START_S = 90.0
UNUSED = {
    "auth": {},
    "docker": {},
    "file_mounts": {},
    "cluster_synced_files": [],
    "file_mounts_sync_continuously": False,
} | {
    f"{kind}_commands": []
    for kind in ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
}  # keys that the first autoscaler reads all the same


@contextmanager
def autoscaled(cpus=2, workers=2, idle_minutes=1.0, second=True):
    """Yield the address of a cluster that starts up to `workers` nodes of `cpus` CPUs. `second`: Ray's second autoscaler."""
    host = socket.gethostbyname(socket.gethostname())
    with socket.socket() as free:
        free.bind(("", 0))
        address = f"{host}:{free.getsockname()[1]}"
    folder = Path(mkdtemp(prefix="as-", dir="/tmp"))  # Ray's sockets need short names
    provider = {"type": "external", "module": PROVIDER, "gcs_address": address, "disable_node_updaters": True}
    environment = os.environ | {
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_TMPDIR": str(folder),
    }
    if second:
        provider |= {"launch_multiple": True, "head_node_id": HEAD}
        environment |= {
            "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": HEAD,
            "RAY_NODE_TYPE_NAME": "ray.head.default",  # as `ray up` and KubeRay set it
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD,
        }
    config = UNUSED | {
        "cluster_name": "test",
        "max_workers": workers,
        "idle_timeout_minutes": idle_minutes,
        "provider": provider | {"use_node_id_as_ip": True, "disable_launch_config_check": True},
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {
                "resources": {"CPU": cpus, "object_store_memory": STORE},
                "node_config": {},
                "min_workers": 0,
                "max_workers": workers,
            },
        },
    }
    (folder / "cluster.json").write_text(json.dumps(config))
    command = [
        str(Path(sys.executable).with_name("ray")),
        "start",
        "--head",
        "--num-cpus=0",
        f"--object-store-memory={STORE}",
    ]
    command += [f"--node-ip-address={host}", f"--port={address.rpartition(':')[2]}", "--include-dashboard=false"]
    command += [f"--autoscaling-config={folder / 'cluster.json'}"]
    log = folder / "start.log"
    try:
        with log.open("w") as output:
            subprocess.run(command, env=environment, stdout=output, stderr=output, timeout=START_S, check=True)
        asked, deadline = [command[0], "status", f"--address={address}"], time.monotonic() + START_S
        while (
            " 1 ray.head"
            not in subprocess.run(asked, env=environment, capture_output=True, text=True, check=False).stdout
        ):
            assert time.monotonic() < deadline, log.read_text()
        yield address
    finally:
        _end(folder)


def _end(folder):
    """End the processes of a cluster, which have its folder among their words, and remove the folder."""
    deadline = time.monotonic() + 30
    while left := [process for process in psutil.process_iter() if _belongs(process, folder)]:
        assert time.monotonic() < deadline, left
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.2)
    shutil.rmtree(folder, ignore_errors=True)


def _belongs(process, folder):
    with suppress(psutil.Error):
        if str(folder) in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
            return True
        return process.environ().get("RAY_TMPDIR") == str(folder) and process.status() != psutil.STATUS_ZOMBIE
    return False
