#!/bin/bash

#SBATCH --job-name=owt-0123456789-1
#SBATCH --comment="train-litgpt/run=owt-0123456789 train-litgpt/attempt=1 litgpt-demo.dev/flow-run-id=none kept=/scratch/me/pretraining/runs/owt-0123456789/attempts/1"
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --signal=B:TERM@120
#SBATCH --no-requeue
#SBATCH --chdir=/scratch/me/pretraining/runs/owt-0123456789/attempts/1
#SBATCH --output=/scratch/me/pretraining/runs/owt-0123456789/attempts/1/node-0.log
#SBATCH --open-mode=append
#SBATCH --export=NONE

# Steps get this script's environment; sbatch is given no more than HOME, USER, LOGNAME and PATH.
export SLURM_EXPORT_ENV=ALL LITGPT_RESTART="${SLURM_RESTART_COUNT:-0}"
export LITGPT_ATTEMPT="owt-0123456789-1-$LITGPT_RESTART"
# An attempt has one job: where an answer of sbatch was lost, there may be a second one.
job="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}"
(set -o noclobber; echo "$job" > slurm-job) 2> /dev/null
if [ "$(cat slurm-job)" != "$job" ]; then
  echo "job $(cat slurm-job) is this attempt already; job $job leaves it alone"
  exit 53
fi
rm -f exit-*
trap 'echo $? > exit-job' EXIT

export LITGPT_NETWORK='{"shm_bytes":1073741824,"gpus":8}'
export PYTHONUNBUFFERED=1

srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 --open-mode=append --output=/scratch/me/pretraining/runs/owt-0123456789/attempts/1/node-%n.log '--container-image=registry.example.com#lab/litgpt:sha256:1111111111111111111111111111111111111111111111111111111111111111' --container-mounts=/scratch/me/pretraining:/scratch/me/pretraining --no-container-mount-home \
  sh -c 'export LITGPT_HOST="$SLURMD_NODENAME" LITGPT_MASTER="$SLURM_LAUNCH_NODE_IPADDR:$((20000 + SLURM_JOB_ID % 10000))"
trap : TERM  # the node is told to leave, and this shell waits for it
"$@"; code=$?
echo "$code" > "/scratch/me/pretraining/runs/owt-0123456789/attempts/1/exit-$SLURM_NODEID"
[ "$code" = 0 ] || sleep 5  # its peers tell what they saw before srun ends them
exit "$code"
' node \
  env 'LITGPT_NETWORK={"shm_bytes":1073741824,"gpus":8}' PYTHONUNBUFFERED=1 python -m litgpt_demo node --nodes 2 --node-rank env:SLURM_NODEID --processes 8 --master env:LITGPT_MASTER --run-id env:LITGPT_ATTEMPT --directory /scratch/me/pretraining/runs/owt-0123456789/attempts/1 --grace 30 --stage /scratch/me/pretraining/datasets/owt-9876543210 -- -m litgpt_demo train --run /scratch/me/pretraining/runs/owt-0123456789 &

step=$! cancelled=
# srun would kill its tasks at once if it was asked itself.
leave() { scancel --signal=TERM "$job" 2> /dev/null; }
trap leave TERM                       # the time limit is near
trap 'cancelled=1; leave' USR1
wait "$step"; code=$?
while kill -0 "$step" 2> /dev/null; do wait "$step"; code=$?; done
wait "$step" 2> /dev/null; again=$?
[ "$again" = 127 ] || code=$again     # it ended when a signal had just ended the wait for it
[ -z "$cancelled" ] || code=53
exit "$code"
