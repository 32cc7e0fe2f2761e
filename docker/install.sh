#!/bin/sh
# What the image holds, on Debian 12: Python, raysim from the wheels beside this script, and what clusters need of a node.
# `sh install.sh` as root; EXTRAS=hub adds transformers and datasets; the user `ray` runs everything.
set -eu
here=$(dirname "$0")
apt-get update
# KubeRay's probes call wget; `ray up` copies files by rsync and looks for processes by pgrep; numba's kernels need no compiler.
apt-get install -y --no-install-recommends ca-certificates procps python3 python3-venv rsync wget
rm -rf /var/lib/apt/lists/*
python3 -m venv /opt/raysim
wheel=$(ls "$here"/raysim-[0-9]*.whl)
/opt/raysim/bin/pip install --no-cache-dir -c "$here/constraints.txt" "$wheel${EXTRAS:+[$EXTRAS]}"
id ray > /dev/null 2>&1 || useradd --create-home --uid 1000 ray
/opt/raysim/bin/raysim --version
