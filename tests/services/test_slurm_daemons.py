"""The Slurm that tests run on is Slurm as a cluster has it: several nodes, GPUs, accounts, limits and preemption."""

from __future__ import annotations

from waiting import until

from services.slurm_cluster import STRANGER, SlurmCluster


def test_a_job_runs_on_all_nodes_with_the_gpus_it_asked_for(slurm: SlurmCluster) -> None:
    said = slurm.run(
        "srun", "--nodes=3", "--gpus-per-node=2", "sh", "-c", "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"
    )
    assert sorted(line for line in said.splitlines() if line.startswith("n")) == ["n0 0,1", "n1 0,1", "n2 0,1"]


def test_a_node_without_power_takes_its_job_along_and_comes_back(slurm: SlurmCluster) -> None:
    job = slurm.run("sbatch", "--parsable", "--no-requeue", "--nodelist=n1", "--wrap=sleep 300")
    until(lambda: slurm.state(job) == "RUNNING")
    slurm.stop_node("n1")
    until(lambda: slurm.state(job) == "NODE_FAIL", seconds=90)
    slurm.start_node("n1")
    assert slurm.run("srun", "--nodelist=n1", "printenv", "SLURMD_NODENAME").splitlines()[-1] == "n1"


def test_a_job_goes_on_while_the_controller_is_away(slurm: SlurmCluster) -> None:
    job = slurm.run("sbatch", "--parsable", "--wrap=sleep 300")
    until(lambda: slurm.state(job) == "RUNNING")
    slurm.stop_controller()
    assert "Unable to contact slurm controller" in slurm.run("squeue", check=False)
    slurm.start_controller()
    assert slurm.state(job) == "RUNNING"


def test_an_account_may_only_use_what_is_its_own(slurm: SlurmCluster) -> None:
    assert "Invalid account" in slurm.run("sbatch", "--wrap=true", user=STRANGER, check=False)
    assert "Invalid account" in slurm.run("sbatch", "--partition=staff", "--wrap=true", check=False)
    assert slurm.run("sbatch", "--parsable", "--partition=staff", "--account=staff", "--wrap=true")


def test_an_account_s_limit_holds_a_job_back(slurm: SlurmCluster) -> None:
    words = ["sbatch", "--parsable", "--account=narrow", "--gpus-per-node=2", "--wrap=sleep 300"]
    first, second = slurm.run(*words), slurm.run(*words)
    until(lambda: slurm.state(first) == "RUNNING")
    reason = ["squeue", "--noheader", f"--jobs={second}", "--format=%r"]
    until(lambda: slurm.run(*reason) == "AssocGrpGRES")


def test_a_more_urgent_partition_takes_the_nodes(slurm: SlurmCluster) -> None:
    ended = slurm.run("sbatch", "--parsable", "--partition=spare", "--exclusive", "--nodes=3", "--wrap=sleep 300")
    until(lambda: slurm.state(ended) == "RUNNING")
    slurm.run("srun", "--partition=urgent", "--exclusive", "--nodes=3", "true")
    until(lambda: slurm.state(ended) == "PREEMPTED")


def test_without_accounting_a_job_is_soon_forgotten(slurm_without_accounting: SlurmCluster) -> None:
    slurm = slurm_without_accounting
    job = slurm.run("sbatch", "--parsable", "--wrap=true")
    until(lambda: slurm.state(job) == "COMPLETED")
    until(lambda: "Invalid job id" in slurm.run("squeue", f"--jobs={job}", check=False), seconds=120)
