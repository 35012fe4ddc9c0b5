#!/bin/bash
#SBATCH --job-name=owt-1a2b-1-000000
#SBATCH --comment='train-litgpt/run=owt-1a2b train-litgpt/attempt=1 train-litgpt/job=owt-1a2b-1-000000'
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:TERM@120
#SBATCH --output=/dev/null
#SBATCH --export=NONE
#SBATCH --no-requeue

fail() {
  echo "error [slurm.$1] $2"
  scontrol update "jobid=$SLURM_JOB_ID" "comment=error [slurm.$1] $2 (on ${SLURMD_NODENAME:-its first node})"
  exit 40
}

: >> /shared/runs/owt/attempts/1/node-0.log || fail root 'the run'"'"'s folder /shared/runs/owt/attempts/1 does not exist on this node, or cannot be written'
exec >> /shared/runs/owt/attempts/1/node-0.log 2>&1
export LITGPT_NETWORK='{"name":"tcp","test_seconds":0}'
export PYTHONUNBUFFERED=1
export PATH=/shared/venv/bin:$PATH
/shared/venv/bin/python -c 'import litgpt_demo' || fail venv 'platform.venv=/shared/venv has no python with train-litgpt'
litgpt_first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
litgpt_address=$(scontrol show node -o "$litgpt_first" | sed -n 's/.* NodeAddr=\([^ ]*\) .*/\1/p')
export LITGPT_MASTER="${litgpt_address:-$litgpt_first}:$((20000 + SLURM_JOB_ID % 6000 * 2))"
export LITGPT_RESTART="${SLURM_RESTART_COUNT:-0}"
litgpt_cpus=$(echo "$SLURM_JOB_CPUS_PER_NODE" | tr , '\n' | sort -n | head -n 1)
[ -n "$SLURM_CPUS_PER_GPU" ] || export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-${litgpt_cpus%%(*}}"
trap 'scancel --signal=TERM "$SLURM_JOB_ID"' TERM
srun --export=ALL --kill-on-bad-exit=0 --wait=120 --output=/shared/runs/owt/attempts/1/node-%n.log --open-mode=append \
  bash -c 'export LITGPT_HOST="$SLURMD_NODENAME"; exec "$@"' node python -m litgpt_demo node --nodes 2 --node-rank env:SLURM_NODEID --processes 1 --master env:LITGPT_MASTER --run-id owt-1a2b-1-000000 --directory /shared/runs/owt/attempts/1 --grace 120 -- -m litgpt_demo train &
litgpt_step=$!
while kill -0 "$litgpt_step" 2> /dev/null; do wait "$litgpt_step"; done
wait "$litgpt_step"
exit $?
