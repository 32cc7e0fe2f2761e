"""Machines on this machine: hosts with network, processes, home, /tmp, /dev/shm and an SSH server of their own.

They are namespaces, joined by a switch. The user `raysim` is root under another name, so that it may read the environment that
runs the tests; nothing of this machine is changed, and the folder of a host goes with it.
"""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from contextlib import contextmanager, suppress
from importlib.metadata import distribution
from pathlib import Path
from tempfile import mkdtemp

from raysim_benchmarks.hosts.namespaces import Hosts, check_machine

from raysim.config import ConfigError

ROOT = Path(__file__).parents[2]
HOME = "/home/raysim"
ENVIRONMENT = f"{HOME}/raysim-env"
SSHD = "/usr/sbin/sshd"
START_S = 20.0
BASHRC = "case $- in *i*) ;; *) return;; esac\n"  # as Debian's: only interactive shells read on

BOOT = """
set -e
hostname {name}
mount -t tmpfs -o mode=755 tmpfs /run && mkdir /run/sshd
mount -t tmpfs -o size=4g,mode=1777 tmpfs /dev/shm
mount --bind {folder}/home /home
mount --bind {folder}/tmp /tmp
mount --bind {folder}/etc /etc
exec {sshd} -D -e -f /dev/null -o HostKey={shared}/hostkey -o PidFile=none -o UsePAM=no -o StrictModes=no \
    -o Subsystem='sftp internal-sftp'
"""


def missing():
    """Return what this machine lacks for such hosts, None where it lacks nothing."""
    try:
        check_machine()
    except ConfigError as error:
        return str(error)
    for tool in ("unshare", "nsenter", "ssh", "ssh-keygen", "rsync", "pgrep"):
        if shutil.which(tool) is None:
            return f"hosts with SSH need `{tool}`, which is not installed"
    if not Path(SSHD).exists():
        return f"hosts with SSH need {SSHD}, which is not installed"
    probe = subprocess.run(["unshare", "--net", "--pid", "--fork", "--mount", "true"], capture_output=True, check=False)
    return f"namespaces cannot be made: {probe.stderr.decode().strip()}" if probe.returncode else None


class SshHosts:
    """`count` hosts that run an SSH server each, see the module; `shared` is a folder that all of them see."""

    def __init__(self, network, folder):
        self._network = network
        self._folder = folder
        self.shared = folder / "shared"
        self.shared.mkdir()
        self._servers = {}
        for key in ("hostkey", "key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.shared / key], check=True)

    @classmethod
    @contextmanager
    def made(cls, count):
        """Boot hosts; at the end power off every host that is still on, and remove the files of all."""
        folder = Path(mkdtemp(prefix="raysim-hosts-", dir="/var/tmp"))  # each host has a /tmp of its own
        try:
            with Hosts.made(count, "switch") as network:
                hosts = cls(network, folder)
                try:
                    for host in range(count):
                        hosts.boot(host)
                    yield hosts
                finally:
                    for host in list(hosts._servers):
                        hosts.power_off(host)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def address(self, host):
        return self._network.address(host)

    def boot(self, host):
        folder = self._folder / f"host-{host}"
        ssh = folder / "home" / "raysim" / ".ssh"
        ssh.mkdir(parents=True, mode=0o700)
        (folder / "tmp").mkdir()
        (folder / "tmp").chmod(0o1777)
        shutil.copy(self.shared / "key.pub", ssh / "authorized_keys")
        (ssh.parent / ".bashrc").write_text(BASHRC)
        # All of it: a file mounted on /etc/passwd is gone when anything replaces the one below.
        subprocess.run(["cp", "-a", "/etc", folder / "etc"], check=True)
        (folder / "etc" / "passwd").write_text(f"raysim:*:0:0::{HOME}:/bin/bash\n{Path('/etc/passwd').read_text()}")
        (folder / "etc" / "hosts").write_text(f"127.0.0.1 localhost\n{self.address(host)} host-{host}\n")
        script = BOOT.format(name=f"host-{host}", folder=folder, shared=self.shared, sshd=SSHD)
        apart = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "--uts", "--ipc")
        with (folder / "sshd.log").open("wb") as log:
            self._servers[host] = subprocess.Popen(
                self._network.inside(host, *apart, "bash", "-c", script),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        while b"Server listening" not in (folder / "sshd.log").read_bytes():
            if self._servers[host].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"host {host} did not boot: {(folder / 'sshd.log').read_text()}")
            time.sleep(0.1)

    def home(self, host):
        """Return the home of the user on a host, as this machine sees it."""
        return self._folder / f"host-{host}" / "home" / "raysim"

    def power_off(self, host):
        """Pull the cable, and end all that runs on a host: nobody hears of it."""
        with suppress(subprocess.CalledProcessError):
            subprocess.run(self._network.inside(host, "ip", "link", "set", "out", "down"), check=True)
        server = self._servers.pop(host)
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)  # of `unshare`, whose child goes with it
        server.wait()

    def words(self, host, command, **environment):
        """Return the command line by which the user runs a shell's command on a host."""
        first = Path(f"/proc/{self._servers[host].pid}/task/{self._servers[host].pid}/children").read_text().split()[0]
        values = {
            "HOME": HOME,
            "USER": "raysim",
            "PATH": f"{ENVIRONMENT}/bin:/usr/sbin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "COLUMNS": "200",
            "RAY_USAGE_STATS_ENABLED": "0",
            **environment,
        }
        clean = ("env", "-i", *(f"{name}={value}" for name, value in values.items()))
        return ["nsenter", "-t", first, "-a", *clean, "bash", "-c", f"cd ~; {command}"]

    def run(self, host, command, timeout=120, **environment):
        """Run a shell's command on a host as its user; returns the completed process, its output as text."""
        return subprocess.run(
            self.words(host, command, **environment), capture_output=True, text=True, timeout=timeout, check=False
        )

    def processes(self, host):
        """Return the command lines of a host, the SSH server's apart."""
        found = self.run(host, "ps -eo args --no-headers").stdout.splitlines()
        return [line for line in found if not line.startswith(("sshd:", SSHD, "ps ", "bash -c cd ~"))]

    def give_environment(self, host):
        """Give the user `~/raysim-env`, in which everything but raysim is installed: that of the tests."""
        made = self.run(host, f"{sys.executable} -m venv --without-pip {ENVIRONMENT}")
        assert made.returncode == 0, made.stderr
        place = self.home(host) / "raysim-env"
        site = next(place.glob("lib/python*/site-packages"))
        (site / "tests.pth").write_text(sysconfig.get_path("purelib"))
        for name, code in {
            "pip": "from pip._internal.cli.main import main",
            "ray": "from ray.scripts.scripts import main",
        }.items():
            (place / "bin" / name).write_text(f"#!{ENVIRONMENT}/bin/python\nimport sys\n{code}\nsys.exit(main())\n")
            (place / "bin" / name).chmod(0o755)


def make_wheel(folder):
    """Return a wheel of raysim that leads to this checkout."""
    version = distribution("raysim").version
    file = folder / f"raysim-{version}-py3-none-any.whl"
    info = f"raysim-{version}.dist-info"
    parts = {
        "raysim-checkout.pth": f"{ROOT}\n",
        f"{info}/METADATA": distribution("raysim").read_text("METADATA"),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\nraysim = raysim.cli:main\n",
    }
    parts[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*parts, f"{info}/RECORD"])
    with zipfile.ZipFile(file, "w") as wheel:
        for name, text in parts.items():
            wheel.writestr(name, text)
    return file
