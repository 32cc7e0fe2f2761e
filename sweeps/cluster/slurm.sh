#!/bin/bash
# Slurm: a Ray over the nodes of an allocation, and a sweep on it. `sbatch slurm.sh STUDY FOLDER [OPTIONS of raysim sweep]`.
# Change the nodes, their CPUs and the time, and the environment with raysim in it. All nodes must see the folder. Two minutes before
# its time is over the sweep is told to stop; `sbatch slurm.sh STUDY FOLDER --resume` goes on from the last checkpoints.
#SBATCH --job-name=raysim
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=08:00:00
#SBATCH --signal=B:TERM@120

source ~/raysim-env/bin/activate

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) # this script runs there
address=$(getent hosts "$head" | awk '{ print $1; exit }'):$((20000 + SLURM_JOB_ID % 10000))
export RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n') # of this job alone
export RAY_AUTH_TOKEN

start() { # a Ray node on each host of a step, which Slurm ends with the job
  srun --overlap --ntasks-per-node=1 "$@" --num-cpus="$SLURM_CPUS_PER_TASK" --block > /dev/null &
}
start --nodes=1 --ntasks=1 --nodelist="$head" ray start --head --node-ip-address="${address%:*}" --port="${address##*:}" \
  --include-dashboard=false --system-config='{"max_direct_call_object_size":4194304}'
timeout 120 sh -c 'until ray health-check --address "$0" > /dev/null 2>&1; do sleep 1; done' "$address" || exit 1
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
  start --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --exclude="$head" ray start --address="$address"
fi

study=$1 folder=$2
shift 2
raysim sweep "$study" --out "$folder" --address "$address" --wait 300 "$@" & # `--wait`: the other nodes join in the meantime
sweep=$!
trap 'kill -TERM $sweep' TERM
wait $sweep || wait $sweep # again, if it was told to stop
