"""The registry of check codes: the summary, cause and fix of each finding that a check can have.

`Finding` accepts only a code of `CODES`. docs/reference/checks.md is generated from it. Texts are Markdown. Both sides
have their codes here, because a node must construct findings without the launching side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Check(NamedTuple):
    """The meaning of a check code: the finding, why it happens, and the fix."""

    severities: str
    """The severities with which the code comes, separated by commas."""
    summary: str
    cause: str
    fix: str = ""


_NO_ANSWER = "This machine has no network or no credentials, or the service does not answer now."
_LOG_IN = "Log in or restore the connection, then run the same command again."

_DATA = {
    "data.left-out": Check(
        "warning",
        "`data.corpus.paths` selects files that are not read.",
        "A folder or pattern contains hidden files or files that are not text.",
        "Name a file by its own path if you want it to be read.",
    ),
    "data.refused": Check(
        "error, unknown",
        "The dataset cannot be prepared.",
        "A trial preparation of the corpus failed, for example at a wrong column or a bad document.",
        "Fix what the message names. `unknown` means that the corpus cannot be read from this machine.",
    ),
    "data.separator": Check(
        "warning",
        "`data.corpus.separator` does not occur in the start of the text.",
        "The separator has a typing mistake or other line ends, or each file is one document.",
        "Set the separator that the message found. Leave it out if each file is one document.",
    ),
    "data.too-small": Check(
        "error",
        "The prepared dataset does not fit the training.",
        "A split has fewer tokens than one sample, or the run has too few steps for its warm-up. With "
        "`train.attention=documents`, token ids may have no end-of-text.",
        "Use more text, a shorter `model.sequence_length`, a smaller `train.warmup_steps`, or causal attention.",
    ),
    "data.unknown": Check(
        "unknown",
        "The files of the dataset are not known, and therefore the run id is not known.",
        "The Hub or a bucket does not answer, or this machine has no credentials for it.",
        _LOG_IN,
    ),
    "dataset_workers.dask-missing": Check(
        "error",
        "`dataset_workers.kind=dask` needs a package that is not installed.",
        "Dask is an optional dependency.",
        "Run `pip install '.[dask]'` in the checkout, here and on the cluster, or use `threads` or `processes`.",
    ),
    "dataset_workers.scheduler": Check(
        "error",
        "The Dask scheduler does not accept connections.",
        "It is not running, or `dataset_workers.scheduler` has a wrong address.",
        "Start it with `dask scheduler`, or fix the address.",
    ),
}

_TRAINING = {
    "evaluation.missing": Check(
        "error",
        "The evaluation needs packages that are not installed.",
        "`lm_eval` and `accelerate` are optional dependencies.",
        "Run `pip install '.[evaluate]'` in the checkout.",
    ),
    "evaluation.task_folder": Check(
        "error",
        "`evaluation.task_folder` is not a folder of this machine.",
        "The path is wrong, or relative to another folder.",
        "Set it to the folder with the YAML files of your tasks.",
    ),
    "model.config": Check(
        "warning",
        "`model.config` changes settings of the named model.",
        "The training uses the changed architecture. The finding lists the changes.",
        "Set `model.config={}` to use the model unchanged.",
    ),
    "model.experts": Check(
        "error",
        "A mixture of experts would train from random weights.",
        "The trainer does not balance the load of experts, so the training would use few of them.",
        "Start from trained weights (`model.init_from`), or use a dense model.",
    ),
    "model.init_from": Check(
        "error",
        "The initial weights do not fit the model.",
        "Names or shapes of tensors or settings differ, or files of the folder are incomplete.",
        "Use the `model.name` and `model.config` of the weights, or other weights.",
    ),
    "model.init_from.optimizer": Check(
        "error",
        "The optimizer's state of the initial weights is that of another optimizer.",
        "`model.load_optimizer_state=true` names a run with another `train.optimizer`.",
        "Set `train.optimizer` to that of the run, or leave out `model.load_optimizer_state`.",
    ),
    "model.init_from.place": Check(
        "error",
        "The initial weights are on this machine, but the nodes are not.",
        "`model.init_from` is a local path, which nodes elsewhere cannot read.",
        "Copy the run's folder into a bucket, and name it there.",
    ),
    "model.init_from.samples": Check(
        "error, info",
        "The training continues a dataset where its weights stood, or this place is unknown.",
        "`model.load_optimizer_state=true` continues a training on the same dataset with the same `train.seed`. "
        "The place is unknown with another `model.sequence_length`, and for a checkpoint that does not record it.",
        "If the place is unknown, set another `train.seed`, or train on another dataset.",
    ),
    "model.init_from.tokenizer": Check(
        "error",
        "The tokenizer of the dataset is not the tokenizer of the initial weights.",
        "Token ids would have other meanings than those that the weights have learned.",
        "Set `data.tokenizer` to the weights' own tokenizer, as the message shows.",
    ),
    "model.vocabulary": Check(
        "error",
        "The tokenizer has more ids than the model has embeddings.",
        "The model and the tokenizer come from different families.",
        "Use another tokenizer, or set `padded_vocab_size` in `model.config` to the number that the message names.",
    ),
    "sweep.memory": Check(
        "error, warning",
        "Trials that run at the same time do not fit in memory together.",
        "`sweep.max_parallel` trials share one device.",
        "Lower `sweep.max_parallel` to the number that the message names.",
    ),
    "train.float8": Check(
        "error",
        "`train.float8` cannot be used here.",
        "It needs a GPU that multiplies in float8 (H100, L4 or newer), a dense model, and multiples of 16 rows.",
        "Leave it off, or change `train.micro_batch` or `model.sequence_length`.",
    ),
    "train.global_batch": Check(
        "error",
        "A stage of the batch has no step.",
        "The stages of `train.global_batch` begin later than the run ends, or two begin with the same step.",
        "Lower `after`, or give a number instead of stages.",
    ),
    "train.memory": Check(
        "error, warning",
        "The training does not fit in the memory of a process.",
        "The estimate of weights, optimizer state and activations exceeds the device. "
        "A warning means that the estimate may be too high.",
        "Apply the change that the message names, or see the arithmetic of `train-litgpt plan`.",
    ),
    "train.precision": Check(
        "error, warning",
        "`train.precision` does not fit this machine.",
        "16-bit training needs a GPU. Most CPUs emulate bfloat16, which is slow.",
        "Set `train.precision=32-true` on a CPU.",
    ),
    "train.strategy": Check(
        "warning",
        "`train.strategy` is ignored.",
        "The job has one process, and strategies distribute a model over several.",
        "Raise `platform.nodes` or `platform.processes_per_node`, or leave `train.strategy` out.",
    ),
    "train.warmup_steps": Check(
        "error",
        "Warm-up and decay leave no step with the highest learning rate.",
        "The run has too few steps for `train.warmup_steps` and `train.decay_steps`.",
        "Use a tenth of the steps for the warm-up and a fifth for the decay.",
    ),
}

_RUN = {
    "attempt.unknown": Check("unknown", "The number of the run's next attempt is not known.", _NO_ANSWER, _LOG_IN),
    "run.live": Check(
        "error",
        "A job of this name is running.",
        "You or another user started it earlier, perhaps with other settings.",
        "Follow or cancel it, replace it with `--replace`, or start a second job with `--allow-duplicate`.",
    ),
    "run.restarts": Check(
        "info",
        "The restart policy of this run differs from the default.",
        "`max_restarts` or `restart_policy` is set. The finding shows the result.",
    ),
    "run.unknown": Check("unknown", "It is not known whether a job of this name is running.", _NO_ANSWER, _LOG_IN),
    "root.disk-space": Check(
        "warning",
        "The disk of `root` has less than 1 GiB free.",
        "Datasets and checkpoints need room.",
        "Free some space, or choose another `root`.",
    ),
    "root.not-a-folder": Check(
        "error", "`root` or a folder above it is a file.", "The path is wrong.", "Choose another `root`."
    ),
    "root.not-writable": Check(
        "error",
        "`root` cannot be written.",
        "You lack permission, or the file system is full or read-only.",
        "Choose another `root`, or give yourself write permission.",
    ),
    "root.region": Check(
        "warning",
        "The bucket of `root` is in another region than the machines.",
        "All data and each checkpoint cross between the regions, which is slow and costs by the gigabyte.",
        "Use a bucket in the region of the machines.",
    ),
    "root.unreachable": Check(
        "error, unknown",
        "The files under `root` are not known.",
        "The bucket does not answer, does not exist, or rejects your credentials.",
        "Fix what the message names, or log in, then run the same command again.",
    ),
    "script.missing": Check(
        "error",
        "The script or module does not exist.",
        "The path is relative to another folder, the module is not installed, or `.dockerignore` excludes the file.",
        "Give a path relative to the folder that you start from, or to `code.folder`.",
    ),
    "script.relative": Check(
        "error",
        "The script is a relative path in an image.",
        "Nodes start in a folder of their own, not in the image's working directory.",
        "Give its absolute path in the image, or `-m package.module`.",
    ),
    "platform.secrets": Check(
        "error",
        "The training needs a secret that the platform does not supply.",
        "`platform.secrets` does not name it, or the local environment has no such variable.",
        "Add it to `platform.secrets`, or export it for the local platform. "
        "`train.wandb.secret=null` keeps the records in the run's folder.",
    ),
}

_MACHINE = {
    "machine.cores": Check("info", "The number of this machine's cores.", "`train-litgpt doctor` lists it."),
    "machine.gpus": Check("info", "The GPUs of this machine.", "Without an NVIDIA GPU a training runs on the CPU."),
    "machine.memory": Check(
        "info, warning",
        "The free memory of this machine.",
        "Less than 4 GiB is a warning: four ranks take 2 GB for torch itself.",
        "Close other programs.",
    ),
    "machine.shm": Check(
        "warning",
        "`/dev/shm` is smaller than 1 GiB.",
        "NCCL and data loaders share memory between processes there. Docker's default is 64 MB.",
        "Start the container with `docker run --shm-size=4g`.",
    ),
    "network.loopback": Check(
        "info, error",
        "Whether processes can connect to each other on 127.0.0.1.",
        "The loopback interface is down, or a sandbox forbids connections.",
        "Run `ip link set lo up`.",
    ),
    "prefect.server": Check(
        "info, error",
        "Whether Prefect's server answers.",
        "`PREFECT_API_URL` names a server that is not running.",
        "Start one with `train-litgpt serve`, or unset `PREFECT_API_URL`.",
    ),
    "python.packages": Check(
        "error",
        "Python would load a package from another folder than its recorded version.",
        "`PYTHONPATH` or the current folder contains a second copy of it.",
        "Remove that folder from `PYTHONPATH`, or install your copy of the package.",
    ),
    "python.version": Check("info", "The version of Python.", "`train-litgpt doctor` lists it."),
    "tool.docker": Check(
        "info", "Whether Docker is installed.", "Only `image.kind=docker` needs it.", "Install Docker for such images."
    ),
    "tool.git": Check(
        "info, warning",
        "Whether git is installed.",
        "Without it a run does not record the commit of the code.",
        "Install git.",
    ),
}
for _name in ("torch", "lightning", "litgpt", "gigatoken", "prefect"):
    _MACHINE[f"package.{_name}"] = Check(
        "info, warning, error",
        f"The installed version of `{_name}`.",
        "An error means that it is not installed, a warning that train-litgpt was not tested with this version.",
        "Run `make train`, which installs the tested versions into `.venv`.",
    )

_NODE = {
    "node.contradiction": Check(
        "error, warning",
        "A variable of the environment contradicts the node's arguments.",
        "The platform started another number of nodes than the job has, or a shell has a variable of another job.",
        "Submit as many nodes as the platform reports, or remove the variable from the environment.",
    ),
    "node.cores": Check(
        "warning",
        "The container lacks the cores that the network's settings reserve for ranks.",
        "The machine type differs from the one that the network was configured for.",
        "Use that machine type. Until then ranks and the network's threads share cores.",
    ),
    "node.directory": Check(
        "error",
        "The node's working folder cannot be written.",
        "The volume is not mounted, is read-only, or is full.",
        "Mount or create a writable folder, or free space on its disk.",
    ),
    "node.location": Check(
        "warning",
        "The place of this node in the data centre is unknown, so ranks keep the platform's order.",
        "The machine belongs to no placement policy, or Google's metadata server does not answer.",
        "Nothing is wrong on other clouds. On Google's, use machines with a compact placement policy.",
    ),
    "node.log": Check(
        "warning",
        "This node's log cannot be written, so only the platform has it.",
        "The folder of the attempt is missing, is read-only, or is full.",
        "Make the root writable for the job's user, or free space on its disk.",
    ),
    "node.log-uri": Check(
        "warning",
        "This node's logs are not copied to the root, and stay on its own disk.",
        "The bucket does not answer, or the job's account may not write to it.",
        "Give that account the roles of the IAM page. The next round copies what is missing.",
    ),
    "node.port": Check(
        "error",
        "The port of the rendezvous is in use on node 0.",
        "Another process on this machine listens there.",
        "End that process, or choose another port.",
    ),
    "node.processes": Check(
        "error",
        "`--processes` is smaller than 1.",
        "The node would have nothing to run.",
        "Give one process per GPU, or at least 1.",
    ),
    "node.program": Check(
        "error",
        "The program is not a file of the node.",
        "The path is relative to another folder, or the image does not contain it.",
        "Give its absolute path, or `-m module`.",
    ),
    "node.rank": Check(
        "error",
        "`--node-rank` is not smaller than `--nodes`.",
        "Nodes are numbered from 0.",
        "Give each node a number from 0 to one less than the number of nodes.",
    ),
    "node.shared-memory": Check(
        "error",
        "`/dev/shm` is too small for the network.",
        "NCCL needs shared memory, and the container's default is 64 MB.",
        "Raise `platform.shm`, mount an emptyDir of medium Memory at `/dev/shm`, or give Docker `--shm-size`.",
    ),
    "torch.hangs": Check(
        "error",
        "torch did not report its GPUs in time.",
        "A GPU or a disk of this machine hangs.",
        "Exclude this machine, and have it repaired.",
    ),
    "torch.import": Check(
        "error",
        "torch cannot report its GPUs.",
        "torch cannot be imported, or a library that it needs is missing in the image.",
        "Run `python -m litgpt_demo.node.gpu torch` in the image, and fix its error.",
    ),
}

_GPU = {
    "gpu.count": Check(
        "error",
        "The node has fewer GPUs than its machine type.",
        "A GPU has fallen off the bus, or the container received fewer GPUs.",
        "Exclude this machine, and have it repaired.",
    ),
    "gpu.driver": Check(
        "error",
        "The GPU driver answered with an error or not at all.",
        "The driver or a GPU of this machine is broken.",
        "Exclude this machine, and have it repaired.",
    ),
    "gpu.driver-version": Check(
        "error",
        "The network does not work with this GPU driver.",
        "The node pool installs another driver version, for example `latest`.",
        "Use node pools whose driver version the network supports.",
    ),
    "gpu.ecc": Check(
        "error",
        "A GPU has memory errors that ECC could not correct.",
        "The memory of the GPU is broken, or the GPU was not reset since the error.",
        "Exclude this machine, and have the GPU reset or replaced.",
    ),
    "gpu.libcuda": Check(
        "error",
        "The driver's library `libcuda.so.1` was not found.",
        "The container has no driver libraries, for example because the pod requests no `nvidia.com/gpu`.",
        "See that the platform mounts the driver's libraries into the container.",
    ),
    "gpu.unseen": Check(
        "warning",
        "Driver version and memory errors were not checked.",
        "The container lacks `libnvidia-ml.so.1`.",
        "Add the driver's library folder to `LD_LIBRARY_PATH`.",
    ),
    "gpu.unused": Check(
        "error, warning",
        "torch cannot use the GPUs of this node.",
        "torch was built without CUDA, for newer drivers, or without code for this GPU, "
        "or `CUDA_VISIBLE_DEVICES` hides all of them.",
        "Apply the fix of the message. Set `CUDA_VISIBLE_DEVICES` to nothing if you want CPUs.",
    ),
    "gpu.visible": Check(
        "error",
        "torch can use fewer GPUs than the job needs.",
        "`CUDA_VISIBLE_DEVICES` or MIG hides some of them.",
        "Check `CUDA_VISIBLE_DEVICES` and the MIG configuration.",
    ),
    "nccl.missing": Check(
        "error",
        "torch was built without NCCL.",
        "The image has a CPU build of torch.",
        "Build the image with a CUDA build of torch.",
    ),
    "nccl.plugin": Check(
        "error",
        "The network's NCCL plugin was not found.",
        "It is not installed on this machine, or not mounted into the container.",
        "Install the plugin on the nodes, and check that the container mounts its folder.",
    ),
    "nccl.plugin-other": Check(
        "error",
        "NCCL would load another plugin first.",
        "The image brings a plugin of its own, such as that of HPC-X.",
        "Remove it from the image.",
    ),
    "nccl.version": Check(
        "error, warning",
        "The NCCL of the image is not qualified for the network's plugin.",
        "Each release of a plugin is qualified for certain NCCL versions. "
        "Others may fail or fall back to slow sockets.",
        "Leave `image.stack` out, or set `platform.network_plugin` to a release for this NCCL. "
        "`platform.allow_unqualified_nccl` lets the job continue.",
    ),
}

_NETWORK = {
    "network.daemon": Check(
        "error",
        "The network's receive daemon does not answer on this node.",
        "Its container has not started, has failed, or mounts another folder for the socket.",
        "Read the daemon's log, and check the mounts of its container.",
    ),
    "network.environment": Check(
        "error",
        "A script of the network could not set the environment.",
        "The plugin is not installed on the node, or the image has no bash.",
        "Install the plugin, mount its folder, or install bash in the image.",
    ),
    "network.interface-down": Check(
        "error",
        "A network interface of this node is down.",
        "A cable or a network card is broken, or the interface is not configured.",
        "Exclude this machine, and have its network card checked.",
    ),
    "network.interfaces": Check(
        "error",
        "Network interfaces are missing on this node.",
        "The pod is not attached to these networks, or the node pool does not have them.",
        "Check the pod's annotations `networking.gke.io/interfaces` and `k8s.v1.cni.cncf.io/networks`.",
    ),
    "network.pmtu": Check(
        "error",
        "TCP probes for the path's MTU, and the container cannot turn that off.",
        "`platform.disable_pmtu` is set, but only a privileged container can write the kernel's setting.",
        "Set it on the machine, use `platform.host_network`, or leave `platform.disable_pmtu` out.",
    ),
    "network.registry": Check(
        "error",
        "`platform.network_registry` has no effect.",
        "The network's images are full paths, so none comes from the mirror.",
        "Leave it out, or give only tags for the network's images.",
    ),
    "network.roce-network": Check(
        "error",
        "`platform.roce_network` and `platform.host_network` do not fit.",
        "Pods reach the network cards either by attachments or on the hosts' network.",
        "Set exactly one of them.",
    ),
    "network.slow": Check(
        "warning",
        "The network test measured less than the expected bandwidth of the network, and the job continues.",
        "A link is slow, or NCCL uses plain TCP.",
        "Compare the machines with `benchmark-network`. Without `platform.allow_tcp_fallback` the job stops instead.",
    ),
    "network.unused": Check(
        "warning",
        "The ranks may not use `platform.network`, and the job continues.",
        "NCCL did not load the plugin or found no card, or it sends through the kernel.",
        "Read NCCL's lines in the log. Without `platform.allow_tcp_fallback` a job that uses plain TCP stops instead.",
    ),
    "network.roce-resource": Check(
        "error",
        "`platform.roce_resource` is not an extended resource.",
        "Only the cluster's administrator knows its name, for example `rdma/shared`.",
        "Use the name that `kubectl describe node` prints under Allocatable.",
    ),
}

_IMAGE = {
    "image.architecture": Check(
        "error",
        "The image is for another processor architecture than the machines.",
        "The machine type has Arm processors and the image is for amd64, or the reverse.",
        "Set `image.architecture`, or use an image for that architecture.",
    ),
    "image.driver": Check(
        "error",
        "`platform.gpu_driver` is too old for the image.",
        "The CUDA of the image's torch or the network's plugin needs a newer driver.",
        "Leave `platform.gpu_driver` out, or name a newer one.",
    ),
    "image.glibc": Check(
        "error",
        "The C library of the image is too old for the network's plugin.",
        "The plugin would not load, and NCCL would use slow sockets.",
        "Build the image on Ubuntu 22.04, Debian 12 or newer.",
    ),
    "image.missing": Check(
        "error",
        "The platform runs images, but the config has none.",
        "`image.kind=none` works only where nodes use an existing environment.",
        "Set `image` to `{kind: docker, repository: …}` or `{kind: prebuilt, reference: …}`.",
    ),
    "image.stack": Check(
        "info",
        "The torch, CUDA and NCCL of the image, and how they fit the network.",
        "The check passed.",
    ),
    "image.torch": Check(
        "error",
        "The torch of the image is too old for the trainer.",
        "The trainer is tested only with newer versions.",
        "Use a newer image, or run your own script in this one.",
    ),
    "image.unknown": Check(
        "warning",
        "The NCCL of an image from your Dockerfile is not known before it is built.",
        "`image.stack` does not say what the Dockerfile installs.",
        "Set `image.stack`. Otherwise the labels of the image are read after the build.",
    ),
    "image.unlabelled": Check(
        "warning",
        "The image has no label with its NCCL version.",
        "It was not built by train-litgpt, and its Dockerfile writes no labels.",
        "Run the `docker run` command of the message, and compare the versions.",
    ),
    "image.unproved": Check(
        "warning",
        "`image.stack` says what the Dockerfile installs, but this was not checked.",
        "An image can be inspected only after it is built.",
        "Let the Dockerfile write labels, which are read after the build.",
    ),
    "image.unread": Check(
        "error, unknown",
        "The image cannot be read, so its NCCL version is not known.",
        "The reference is wrong, or the registry cannot be reached or read from this machine.",
        "Fix `image.reference`, or log in to the registry. Nodes may have access that you lack.",
    ),
    "image.unused": Check(
        "warning",
        "The image is not used.",
        "The platform runs the existing environment of its nodes.",
        "Set `image` to `{kind: none}`.",
    ),
}


def _access(platform: str) -> Check:
    return Check(
        "error, unknown",
        f"`plan` could not query {platform}.",
        "Credentials are missing or lack a permission, or the service does not answer.",
        "Log in, have the missing role granted, or try again later.",
    )


_BATCH = {
    "batch.access": _access("GCP Batch"),
    "batch.boot-disk": Check(
        "error",
        "The machine type does not support this type of boot disk.",
        "A4 and A3 Ultra machines have only Hyperdisk.",
        "Set `platform.boot_disk_type=hyperdisk-balanced`.",
    ),
    "batch.cos": Check(
        "error",
        "`platform.os` does not fit the boot image.",
        "Container-Optimized OS needs another set-up of GPUs and firewall than Debian.",
        "Set `platform.os` to `cos` for such images, else to `debian`.",
    ),
    "batch.docker": Check(
        "error",
        "Docker does not restart on the VM.",
        "The boot image is damaged, or its disk is full.",
        "Read `journalctl -u docker` on the VM, or raise `platform.boot_disk_gb`.",
    ),
    "batch.driver": Check(
        "error",
        "`nvidia-smi` shows no GPU on the VM.",
        "The driver is not installed, or does not support this GPU.",
        "Leave `platform.gpu_driver` out, or name a version for this GPU. On COS, read `batch_agent_logs`.",
    ),
    "batch.external-ip": Check(
        "warning",
        "VMs without external addresses may not reach Google's services.",
        "They need Private Google Access on their subnetwork.",
        "Turn it on for the subnetwork, and set `platform.subnetwork`.",
    ),
    "batch.hosts": Check(
        "error",
        "Batch's hosts file does not list all VMs of the job.",
        "A VM did not start, or another one replaces it.",
        "Run again.",
    ),
    "batch.libcuda": Check(
        "error",
        "The VM has no `libcuda.so.1`.",
        "The installation of NVIDIA's driver failed.",
        "Read `batch_agent_logs` of the job in Cloud Logging.",
    ),
    "batch.machine": Check(
        "error",
        "The machine type cannot be used on Batch.",
        "It is not in the table of machine types, or it has Arm processors, for which Batch has no images.",
        "Use a machine type of the message, set `platform.gpus`, or use `platform.kind=gke`.",
    ),
    "batch.network": Check(
        "warning",
        "The nodes would use plain TCP.",
        "Batch does not set up the fast network of this machine type.",
        "Use `platform.kind=gke` for the full speed.",
    ),
    "batch.rank": Check(
        "error, warning",
        "The position of a VM in the job is not the one that Batch gave it.",
        "An error means that the hosts file lacks this VM. A warning means that its order differs from Batch's.",
        "A warning needs no action. After an error, run again.",
    ),
    "batch.root": Check(
        "error",
        "VMs cannot reach the run's folder.",
        "`root` is a folder of this machine, and no file server is mounted there.",
        "Set `root` to `gs://bucket/prefix`, or to a folder of the file server of `platform.nfs`.",
    ),
    "batch.subnetwork": Check(
        "error",
        "`platform.subnetwork` is in another region than `platform.location`.",
        "A subnetwork belongs to one region.",
        "Use a subnetwork of that region.",
    ),
    "batch.toolkit": Check(
        "error",
        "The boot image has no `nvidia-ctk`.",
        "Docker cannot give GPUs to containers without NVIDIA's toolkit.",
        "Set `platform.os=cos`, or use a newer image.",
    ),
}

_LOCAL = {
    "local.cores": Check(
        "warning",
        "The job has more processes than this machine has cores.",
        "The processes share the cores.",
        "Lower `platform.processes_per_node` or `platform.nodes`. Fewer processes are not slower.",
    ),
    "local.port": Check(
        "error",
        "The port of node 0 cannot be used.",
        "Another process listens on `platform.port`.",
        "End that process, or leave `platform.port` out.",
    ),
}

_RUNAI = {
    "runai.access": _access("Run:ai"),
    "runai.api": Check(
        "error, unknown",
        "Run:ai's REST API rejected the request, or did not answer.",
        "A name in the config does not exist there, or the control plane is down.",
        "Fix what the message names, or try again later.",
    ),
    "runai.interactive": Check(
        "warning",
        "The pods only wait, and hold their GPUs until you cancel the job.",
        "`platform.interactive` is set.",
        "Run the command of the message in each pod, or leave `platform.interactive` out.",
    ),
    "runai.login": Check(
        "error, unknown",
        "Run:ai rejected the login.",
        "You are not logged in, or the application's credentials are wrong.",
        "Run the login command of the `runai` program, or fix `platform.credentials`.",
    ),
    "runai.no-cli": Check(
        "unknown",
        "The `runai` program is not installed.",
        "Without `platform.url`, jobs are submitted with that program.",
        "Install it, set `platform.cli`, or submit by REST with `platform.url`.",
    ),
    "runai.project": Check(
        "error, unknown",
        "Run:ai cannot use the project, or rejected the job's settings.",
        "The project does not exist, or you have no access to it.",
        "Fix `platform.project`, or fix what the message names.",
    ),
    "runai.root": Check(
        "error",
        "The run's folder is on no volume that the pods mount.",
        "`root` is a local path outside of all `platform.pvcs`.",
        "Use `gs://bucket/prefix`, or add the volume's claim to `platform.pvcs`.",
    ),
}

_SLURM = {
    "slurm.access": _access("Slurm"),
    "slurm.commands": Check(
        "unknown",
        "A command of Slurm is not installed here.",
        "This machine is not a login node of the cluster.",
        "Run train-litgpt on a login node, or set `platform.host`.",
    ),
    "slurm.container": Check(
        "error",
        "The node cannot start the container.",
        "Pyxis or Apptainer is not installed on the nodes, or `platform.container_image` cannot be read there.",
        "Use another `platform.container`, or a path that all nodes can read.",
    ),
    "slurm.controller": Check(
        "error, unknown",
        "Slurm's controller did not answer.",
        "slurmctld is down or busy, or the connection to the login node broke.",
        "Try again later.",
    ),
    "slurm.login": Check(
        "error, unknown",
        "ssh to `platform.host` failed.",
        "The host key or your key is not accepted without a prompt.",
        "Make `ssh HOST true` work without a prompt.",
    ),
    "slurm.module": Check(
        "error",
        "A module of `platform.modules` cannot be loaded on the node.",
        "The name or the version does not exist there.",
        "Use a name that `module avail` prints.",
    ),
    "slurm.refused": Check(
        "error",
        "Slurm would refuse the job.",
        "A test submission (`sbatch --test-only`) failed: partition, account, qos, nodes or GPUs do not exist.",
        "Use what the cluster has. `sinfo` lists it.",
    ),
    "slurm.root": Check(
        "warning",
        "The run's folder is on a disk of this machine.",
        "Other nodes may not see that disk.",
        "Use a `root` on a file system that all nodes mount.",
    ),
    "slurm.secret": Check(
        "error",
        "The file of a secret cannot be read on the node.",
        "The path in `platform.secrets` is wrong, or the file system is not mounted there.",
        "Write the secret to a file in your home folder that only you can read.",
    ),
    "slurm.time": Check(
        "error",
        "`platform.time` is longer than the partition allows.",
        "Slurm would accept the job and never start it.",
        "Shorten it. The next attempt continues from the last checkpoint.",
    ),
    "slurm.venv": Check(
        "error",
        "The node has no Python with train-litgpt.",
        "`platform.venv` is wrong or not set, or the file system is not mounted on the nodes.",
        "Install train-litgpt into an environment on a shared file system, and set `platform.venv`.",
    ),
}

_SLURM_PENDING = {
    "slurm.pending.BadConstraints": Check(
        "error", "No nodes match `platform.constraint`.", "The feature does not exist.", "See `sinfo -o '%P %f'`."
    ),
    "slurm.pending.BeginTime": Check(
        "warning",
        "The time to begin has not come.",
        "Slurm holds a requeued job back for two minutes.",
        "Wait.",
    ),
    "slurm.pending.InvalidAccount": Check(
        "error",
        "`platform.account` is not valid.",
        "The account does not exist, or you do not belong to it.",
        "See `sacctmgr show associations user=$USER`.",
    ),
    "slurm.pending.InvalidQOS": Check(
        "error",
        "`platform.qos` is not valid.",
        "The quality of service does not exist, or your account may not use it.",
        "See `sacctmgr show associations user=$USER format=qos`.",
    ),
    "slurm.pending.JobHeldAdmin": Check(
        "warning", "An administrator holds the job.", "It was a decision.", "Contact the administrator."
    ),
    "slurm.pending.JobHeldUser": Check(
        "warning", "You hold the job.", "`scontrol hold` or `sbatch --hold` was used.", "Run `scontrol release`."
    ),
    "slurm.pending.Licenses": Check("warning", "The job waits for a licence.", "Other jobs use all licences.", "Wait."),
    "slurm.pending.PartitionDown": Check(
        "warning", "The partition is down.", "An administrator closed it.", "Use another one of `sinfo`, or wait."
    ),
    "slurm.pending.PartitionInactive": Check(
        "warning", "The partition is inactive.", "An administrator closed it.", "Use another one of `sinfo`, or wait."
    ),
    "slurm.pending.PartitionNodeLimit": Check(
        "warning",
        "The partition has too few nodes for the job.",
        "It allows fewer nodes, or nodes are down or drained.",
        "See `sinfo -R`. Wait, lower `platform.nodes`, or use another `platform.partition`.",
    ),
    "slurm.pending.PartitionTimeLimit": Check(
        "error",
        "`platform.time` is longer than the partition allows.",
        "The limit of the partition is shorter.",
        "Shorten it. See `sinfo -o '%P %l'`.",
    ),
    "slurm.pending.Priority": Check(
        "warning",
        "Jobs of a higher priority come first.",
        "The partition is busy.",
        "Wait, or use another `platform.partition` or `platform.qos`.",
    ),
    "slurm.pending.ReqNodeNotAvail": Check(
        "warning",
        "Nodes that the job needs are down, drained or reserved.",
        "An administrator repairs or reserves them.",
        "See `sinfo -R`, or exclude fewer nodes.",
    ),
    "slurm.pending.Reservation": Check(
        "warning",
        "The job's reservation has not begun.",
        "`platform.reservation` names a later reservation.",
        "Wait, or leave `platform.reservation` out.",
    ),
    "slurm.pending.Resources": Check(
        "warning",
        "The nodes that the job needs are in use.",
        "The partition is busy.",
        "Wait, or request fewer nodes or less time.",
    ),
    "slurm.pending.limit": Check(
        "error, warning",
        "A limit of the account, user or quality of service is reached.",
        "Running jobs use up the limit. An error means that this job itself exceeds it.",
        "Wait for other jobs to end, request less, or have the limit raised.",
    ),
    "slurm.pending.other": Check(
        "error, warning",
        "Slurm has another reason to wait. The message names it.",
        "The reason is one of Slurm's job reason codes.",
        "See `man squeue`, JOB REASON CODES.",
    ),
}

# Refusals of the API server, when a job is checked and when its controllers create its pods.
_REFUSALS = {
    "limits": Check(
        "error",
        "A LimitRange of the namespace does not allow the pods.",
        "Requests or limits are outside of the allowed range.",
        "Change `platform.cpus` or `platform.memory`, or have the LimitRange changed (`kubectl get limitranges`).",
    ),
    "namespace": Check(
        "error",
        "The namespace is being removed.",
        "Another user has deleted it.",
        "Use another `platform.namespace`, or wait and create it again.",
    ),
    "permission": Check(
        "error",
        "An account lacks a permission in the namespace.",
        "The Role of train-litgpt is not bound to it.",
        "Have the Role of `deployments/rbac.yaml` bound to the account.",
    ),
    "pod-security": Check(
        "error",
        "The namespace's Pod Security level forbids the pods.",
        "`baseline` forbids `platform.host_network` and GPUDirect. `restricted` also forbids `platform.uid=0`.",
        "Use another `platform.namespace`, or have its label `pod-security.kubernetes.io/enforce` lowered.",
    ),
    "policy": Check(
        "error",
        "A policy of the cluster denies the pods.",
        "An admission webhook or a ValidatingAdmissionPolicy denied the request.",
        "Follow the policy, or request an exception from the cluster's administrator.",
    ),
    "priority": Check(
        "error",
        "The priority class does not exist.",
        "`platform.priority` has a wrong name.",
        "See `kubectl get priorityclasses`, and fix `platform.priority`.",
    ),
    "quota": Check(
        "error, warning",
        "The namespace's quota has no room for the job.",
        "Other jobs use it, the job needs more than it allows, or it requires requests that the pods lack.",
        "Wait for other jobs to end, have it raised, or lower `platform.nodes`, `platform.cpus` or `platform.memory`.",
    ),
    "refused": Check(
        "error",
        "The cluster refuses the pods for another reason. The message has its words.",
        "A field of the pods is not valid in this cluster.",
        "Change what the message names, or contact the administrator.",
    ),
    "service-account": Check(
        "error",
        "The service account does not exist.",
        "`platform.service_account` has a wrong name, or the account was not created in this namespace.",
        "Run `kubectl create serviceaccount NAME --namespace NAMESPACE`, or fix `platform.service_account`.",
    ),
    "webhook": Check(
        "warning",
        "An admission webhook of the cluster does not answer.",
        "The controller behind it is not running.",
        "Have that controller repaired.",
    ),
}

_KUBERNETES = {
    **{f"kubernetes.{name}": check for name, check in _REFUSALS.items()},
    "kubernetes.access": _access("the cluster"),
    "kubernetes.cluster": Check(
        "error, unknown",
        "The cluster could not be checked.",
        "It does not answer, or your credentials or the name of the cluster or context are wrong.",
        "Run `kubectl get pods` with the same kubeconfig, and fix its error.",
    ),
    "kubernetes.device-injector": Check(
        "error, warning",
        "The DaemonSet `device-injector` is missing or not ready.",
        "Pods receive the devices of their GPUs from it.",
        "Run the `kubectl apply` command of the message, or `kubectl describe` the DaemonSet.",
    ),
    "kubernetes.ending": Check(
        "warning",
        "A node has ended, and others have not yet.",
        "They receive the signal to end, or their machine does not answer.",
        "Wait. A machine that does not answer is detected within a minute.",
    ),
    "kubernetes.host-network-identity": Check(
        "warning",
        "Pods on the hosts' network may have the identity of the node.",
        "`platform.host_network` is set together with `platform.service_account`.",
        "Give the node pool's service account access to `root`, or leave `platform.host_network` out.",
    ),
    "kubernetes.installer": Check(
        "info, warning, error",
        "Whether a DaemonSet installs the network's plugin on the nodes, and which release.",
        "It is missing, not ready on all nodes, or of another release than the job expects.",
        "Apply the manifest of the message, set `platform.network_plugin`, or set `platform.network_install=pod`.",
    ),
    "kubernetes.jobset": Check(
        "info, error",
        "Whether JobSet is installed.",
        "JobSet is missing, or older than 0.10, which cannot distinguish preemptions from mistakes.",
        "Install JobSet 0.10 or newer, or set `platform.workload=job`.",
    ),
    "kubernetes.limits": Check(
        "error, warning",
        "A LimitRange of the namespace forbids the pods, or adds limits to them.",
        "A pod with a default memory limit is killed when it uses more. A CPU limit slows it down.",
        "Change `platform.cpus` or `platform.memory`, have the LimitRange changed, or use another namespace.",
    ),
    "kubernetes.machine-lost": Check(
        "warning",
        "A machine of the job does not answer.",
        "It has failed, or lost its network.",
        "Wait until GKE repairs it. Elsewhere switch it off and run `kubectl delete node NAME`.",
    ),
    "kubernetes.machines": Check(
        "info, warning, error",
        "Whether enough machines fit the pods.",
        "Machines lack GPUs, CPUs, memory or labels, have taints, or are cordoned off. The message counts them.",
        "Lower `platform.nodes`, `platform.cpus` or `platform.memory`, or use another `platform.node_pool`.",
    ),
    "kubernetes.multi-networking": Check(
        "error",
        "The cluster has no multi-networking, which the network needs.",
        "It can be enabled only when a cluster is created.",
        "Create one with `--enable-dataplane-v2 --enable-ip-alias --enable-multi-networking`.",
    ),
    "kubernetes.namespace": Check(
        "info, error",
        "Whether the namespace exists.",
        "It was not created, `platform.namespace` has a wrong name, or it is being removed.",
        "Run `kubectl create namespace NAME`, or fix `platform.namespace`.",
    ),
    "kubernetes.network-release": Check(
        "warning",
        "The network's plugin is older than this version of Kubernetes needs.",
        "`platform.network_plugin` names an older release.",
        "Upgrade the DaemonSet that installs it, and set `platform.network_plugin`.",
    ),
    "kubernetes.networks": Check(
        "info, error",
        "Whether the networks of the pods exist.",
        "Network objects, their parameters or attachment definitions are missing.",
        "Create them with their VPCs, or use names of `kubectl get network-attachment-definitions -A`.",
    ),
    "kubernetes.permission": Check(
        "info, error",
        "Whether you have the permissions that a run needs.",
        "The Role of train-litgpt is not bound to your account.",
        "Have the Role of `deployments/rbac.yaml` bound to your account in the namespace.",
    ),
    "kubernetes.pools": Check(
        "error",
        "No node pool can supply the machines.",
        "No pool has this machine type, or the pools' limits are too low.",
        "Add a pool, raise its limit, or fix `platform.machine` and `platform.node_pool`.",
    ),
    "kubernetes.priority": Check(
        "error",
        "The priority class does not exist.",
        "`platform.priority` has a wrong name. With `platform.queue` it is a WorkloadPriorityClass of Kueue.",
        "See `kubectl get priorityclasses` or `kubectl get workloadpriorityclasses`.",
    ),
    "kubernetes.pull-secret": Check(
        "error",
        "A Secret of `platform.image_pull_secrets` does not exist.",
        "It was not created in this namespace.",
        "Run the `kubectl create secret docker-registry` command of the message.",
    ),
    "kubernetes.pvc": Check(
        "error",
        "The PersistentVolumeClaim does not exist, or only one node can write to it.",
        "`platform.pvc` has a wrong name, or the claim is not ReadWriteMany.",
        "Use a ReadWriteMany claim (Filestore), or a bucket for `root`.",
    ),
    "kubernetes.queue": Check(
        "info, error",
        "Whether Kueue's queue exists and covers GPUs.",
        "The LocalQueue does not exist or is not active, or its ClusterQueue does not cover `nvidia.com/gpu`.",
        "Use a queue of `kubectl get localqueues`, or have the ClusterQueue changed.",
    ),
    "kubernetes.root": Check(
        "warning",
        "The training runs as root in its container.",
        "`platform.uid=0` is set, so all scripts and packages that it loads run as root too.",
        "Leave `platform.uid` out, and use an image whose files another user can read.",
    ),
    "kubernetes.root-not-shared": Check(
        "error",
        "The run's folder is a folder of the pod.",
        "It disappears with the pod, and other nodes cannot see it.",
        "Set `root` to `gs://bucket/prefix`, or to a folder in `platform.pvc_path` with `platform.pvc`.",
    ),
    "kubernetes.secret": Check(
        "error",
        "A Secret of `platform.secrets` does not exist.",
        "It was not created in this namespace.",
        "Run the `kubectl create secret generic` command of the message.",
    ),
    "kubernetes.spot-grace": Check(
        "warning",
        "Spot VMs disappear before the grace period is over.",
        "Google removes them 30 s after the notice.",
        "Set `platform.grace_period` to 25 or less.",
    ),
    "kubernetes.topology": Check(
        "error",
        "`platform.topology` is not a level of Kueue's Topology.",
        "The label does not exist in this cluster.",
        "Use a label that the message lists.",
    ),
    "kubernetes.unseen": Check(
        "warning",
        "A check of the cluster could not be made.",
        "Your account may not read these objects, or the API server did not answer.",
        "Have the Role of `deployments/rbac.yaml` bound to your account, or try again later.",
    ),
    "kubernetes.version": Check(
        "info, error",
        "The version of Kubernetes.",
        "Versions before 1.29 have no sidecar containers.",
        "Upgrade the cluster.",
    ),
}

_KUBERNETES_PENDING = {
    **{f"kubernetes.pending.{name}": check for name, check in _REFUSALS.items()},
    "kubernetes.pending.apart": Check(
        "warning",
        "Machines are used by another job with a receive daemon.",
        "A machine can have one such daemon.",
        "Wait for that job to end, or add machines.",
    ),
    "kubernetes.pending.capacity": Check(
        "warning",
        "Google has no machine of this type available.",
        "The zone is out of stock.",
        "Wait, use `platform.reservation` or `platform.flex_start`, or use another location.",
    ),
    "kubernetes.pending.claims": Check(
        "warning",
        "No machine can supply the devices that the pod claims (DRA).",
        "The node pool was created without its DRA driver, or the devices are in use.",
        "See `kubectl describe resourceclaims`.",
    ),
    "kubernetes.pending.configuration": Check(
        "error",
        "A Secret or ConfigMap of the pod does not exist.",
        "It was deleted, or never created in this namespace.",
        "Create it, or fix `platform.secrets`.",
    ),
    "kubernetes.pending.container": Check(
        "error",
        "A container cannot be created.",
        "A device or a path of the machine may be missing.",
        "See `kubectl describe pod`.",
    ),
    "kubernetes.pending.cordoned": Check(
        "warning",
        "Machines are cordoned off.",
        "An administrator or an upgrade closed them for new pods.",
        "Wait, or run `kubectl uncordon NAME`.",
    ),
    "kubernetes.pending.crash": Check(
        "error",
        "A container of the pod starts and fails repeatedly.",
        "It is usually an installer or daemon of the network.",
        "See `kubectl logs POD -c CONTAINER --previous`.",
    ),
    "kubernetes.pending.deactivated": Check(
        "error",
        "Kueue has deactivated the job.",
        "It was evicted too often, or an administrator deactivated it.",
        "Run the `kubectl patch workload` command of the message.",
    ),
    "kubernetes.pending.evicted": Check(
        "warning",
        "Kueue has taken the machines back.",
        "A job of a higher priority or another queue needs them.",
        "Wait. The job continues automatically from its last checkpoint.",
    ),
    "kubernetes.pending.gated": Check(
        "info",
        "A controller holds the pods back.",
        "Kueue, for example, looks for machines that are close together.",
        "Wait. It continues automatically.",
    ),
    "kubernetes.pending.gpus": Check(
        "warning",
        "Machines have too few free GPUs.",
        "Other pods use them.",
        "Wait for other jobs to end, add machines, or lower `platform.nodes`.",
    ),
    "kubernetes.pending.image": Check(
        "error",
        "The image cannot be pulled.",
        "The reference is wrong, or the nodes' account cannot read the registry.",
        "Give the nodes' service account `roles/artifactregistry.reader`, or set `platform.image_pull_secrets`.",
    ),
    "kubernetes.pending.job": Check(
        "error",
        "JobSet cannot create its Job.",
        "The API server refuses it. The message has its words.",
        "Apply the fix of the message.",
    ),
    "kubernetes.pending.network": Check(
        "warning",
        "The pod's network cannot be set up.",
        "The machine lacks the networks that the pod is attached to.",
        "Check `platform.network` and the GKENetworkParamSet objects.",
    ),
    "kubernetes.pending.nodes": Check(
        "warning", "The cluster has no machines.", "All node pools have size zero.", "Add a node pool."
    ),
    "kubernetes.pending.pods": Check(
        "warning",
        "Machines have as many pods as they allow.",
        "Each machine has a maximum number of pods.",
        "Use other machines.",
    ),
    "kubernetes.pending.ports": Check(
        "warning",
        "Machines have no free port for pods on the hosts' network.",
        "Another job with `platform.host_network` runs there.",
        "Wait for it to end, or leave `platform.host_network` out.",
    ),
    "kubernetes.pending.project-quota": Check(
        "warning",
        "The project's quota is used up.",
        "Google Cloud limits the number of machines or GPUs of a region.",
        "Request more at console.cloud.google.com/iam-admin/quotas, or use another location.",
    ),
    "kubernetes.pending.pvc": Check(
        "error",
        "The PersistentVolumeClaim does not exist.",
        "`platform.pvc` has a wrong name.",
        "Create it, or fix `platform.pvc`.",
    ),
    "kubernetes.pending.queue": Check(
        "error, warning",
        "The job waits in Kueue's queue.",
        "The quota is in use, Kueue is not installed or not running, or the job can never fit.",
        "Wait for other jobs to end, have the quota raised, or fix `platform.queue` or `platform.nodes`.",
    ),
    "kubernetes.pending.resources": Check(
        "warning",
        "Machines have too little free CPU or memory.",
        "Other pods use them, or the machines are too small.",
        "Lower `platform.cpus` or `platform.memory`, or use larger machines.",
    ),
    "kubernetes.pending.scale-up": Check(
        "warning",
        "The autoscaler does not add a machine.",
        "The node pool is at its limit, or no pool fits the pods.",
        "Raise the node pool's limit, or use another `platform.node_pool`.",
    ),
    "kubernetes.pending.selector": Check(
        "warning",
        "No machine has the labels that the pods require.",
        "A setting names a machine type, pool, reservation or label that no machine has.",
        "Compare `platform.machine`, `platform.node_pool`, `platform.node_selector`, `platform.reservation`, "
        "`platform.spot` and `platform.exclude_nodes` with `kubectl get nodes --show-labels`.",
    ),
    "kubernetes.pending.service": Check(
        "error",
        "JobSet cannot create its Service.",
        "The API server refuses it. The message has its words.",
        "Apply the fix of the message.",
    ),
    "kubernetes.pending.taint": Check(
        "error",
        "Machines have a taint that the pods do not tolerate.",
        "An administrator reserved the machines, or they are being repaired.",
        "Remove the taint, or use another `platform.node_pool`.",
    ),
    "kubernetes.pending.unscheduled": Check(
        "warning",
        "The scheduler found no machine for another reason. The message has its words.",
        "The reason is not in the list of known messages.",
        "See `kubectl describe pod` and `kubectl describe nodes`.",
    ),
    "kubernetes.pending.volume": Check(
        "warning",
        "A volume cannot be mounted or attached.",
        "The volume, bucket or folder does not exist, may not be read, or is in use on another machine.",
        "See `kubectl describe pvc` for `platform.pvc`.",
    ),
}


CODES: Mapping[str, Check] = {
    **_DATA,
    **_TRAINING,
    **_RUN,
    **_MACHINE,
    **_NODE,
    **_GPU,
    **_NETWORK,
    **_IMAGE,
    **_LOCAL,
    **_BATCH,
    **_SLURM,
    **_SLURM_PENDING,
    **_RUNAI,
    **_KUBERNETES,
    **_KUBERNETES_PENDING,
}
"""Each check code with its meaning."""
