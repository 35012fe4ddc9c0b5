#!/bin/bash
#SBATCH --job-name=owt-1a2b-1-000000
#SBATCH --comment='train-litgpt/run=owt-1a2b train-litgpt/attempt=1 train-litgpt/job=owt-1a2b-1-000000'
#SBATCH --account=lab
#SBATCH --partition=gpu
#SBATCH --qos=long
#SBATCH --constraint='h100&ib'
#SBATCH --exclude=n7,n3
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=h100:8
#SBATCH --cpus-per-task=96
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --output=/dev/null
#SBATCH --export=NONE
#SBATCH --no-requeue
#SBATCH --exclusive
#SBATCH --licenses=lustre

fail() {
  echo "error [slurm.$1] $2"
  scontrol update "jobid=$SLURM_JOB_ID" "comment=error [slurm.$1] $2 (on ${SLURMD_NODENAME:-its first node})"
  exit 40
}

export LITGPT_NETWORK='{"name":"ib","nccl_net":"IB","hca":"mlx5","infiniband":true,"shm_bytes":1073741824,"gpus":8}'
export PYTHONUNBUFFERED=1
export NCCL_DEBUG=INFO
export NCCL_DEBUG_SUBSYS=INIT,NET
WANDB_API_KEY=$(cat "$HOME"/.wandb) || fail secret 'the file ~/.wandb of platform.secrets.WANDB_API_KEY cannot be read'
export WANDB_API_KEY
module load cuda/12.8 || fail module 'platform.modules: cuda/12.8 cannot be loaded'
python -c 'import litgpt_demo' || fail venv 'platform.venv is not set, and PATH has no python with train-litgpt'
litgpt_first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
litgpt_address=$(scontrol show node -o "$litgpt_first" | sed -n 's/.* NodeAddr=\([^ ]*\) .*/\1/p')
export LITGPT_MASTER="${litgpt_address:-$litgpt_first}:$((20000 + SLURM_JOB_ID % 6000 * 2))"
export LITGPT_RESTART="${SLURM_RESTART_COUNT:-0}"
litgpt_cpus=$(echo "$SLURM_JOB_CPUS_PER_NODE" | tr , '\n' | sort -n | head -n 1)
[ -n "$SLURM_CPUS_PER_GPU" ] || export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-${litgpt_cpus%%(*}}"
trap 'scancel --signal=TERM "$SLURM_JOB_ID"' TERM
srun --export=ALL --kill-on-bad-exit=0 --wait=120 \
  bash -c 'export LITGPT_HOST="$SLURMD_NODENAME"; trap : TERM; litgpt_own=$(mktemp -d "${TMPDIR:-/tmp}/train-litgpt.XXXXXX") || exit 43; "${@//@OWN@/$litgpt_own}"; litgpt_code=$?; rm -rf "$litgpt_own"; exit "$litgpt_code"' node python -m litgpt_demo node --nodes 2 --node-rank env:SLURM_NODEID --processes 8 --master env:LITGPT_MASTER --run-id owt-1a2b-1-000000 --directory @OWN@ --log-uri gs://bucket/runs/owt/attempts/1 --log-every 10 --grace 120 -- -m litgpt_demo train &
litgpt_step=$!
while kill -0 "$litgpt_step" 2> /dev/null; do wait "$litgpt_step"; done
wait "$litgpt_step"
exit $?
