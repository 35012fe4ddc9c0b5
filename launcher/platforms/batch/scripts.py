"""Scripts that run on a VM before its container does: POSIX sh, as root, one runnable each.

They end with the exit code of a node fault where the VM is not fit, so that another one is tried.
"""

from __future__ import annotations

from litgpt_demo.errors import EXIT_CODES, Fault

HOME = "/var/lib/litgpt"
"""The node's own folder on the VM: not /run, which is memory; on COS only /var, /tmp and /home can be written."""
VARIABLES = f"{HOME}/node.env"
"""The script that writes what only the VM knows, for `docker run --env-file`."""
NVIDIA = "/var/lib/nvidia"
"""The folder in which Batch puts the driver on COS."""
HOSTS = "/etc/cloudbatch-taskgroup-hosts"
"""The file in which Batch lists the VMs, unless BATCH_HOSTS_FILE says otherwise."""

_HEAD = f"""\
set -eu
fail() {{
  echo "error [$1] $2 -> $3"
  exit {EXIT_CODES[Fault.NODE]}
}}
"""


def debian_gpus() -> str:
    """Let Docker give GPUs to containers. The images have NVIDIA's toolkit, but not configured, so that containers
    would find no libcuda in their linker's cache, which triton and others look through."""
    return f"""{_HEAD}\
nvidia-smi -L || fail batch.driver "nvidia-smi shows no GPU" "leave platform.gpu_driver out, or name one for this GPU"
command -v nvidia-ctk || fail batch.toolkit "the boot image has no nvidia-ctk" "take os: cos, or a newer boot_image"
nvidia-ctk runtime configure --runtime=docker
systemctl restart docker
tries=0
until docker info > /dev/null 2>&1; do
  tries=$((tries + 1))
  [ "$tries" -lt 30 ] || fail batch.docker "Docker does not come back" "see journalctl -u docker on the VM"
  sleep 1
done
ldconfig -p | grep libcuda.so.1 || fail batch.libcuda "the VM has no libcuda.so.1" "see batch_agent_logs on the driver"
"""


def cos_gpus() -> str:
    """Check what is mounted into containers. The root file system cannot be written, so there is no nvidia-ctk; the
    driver's programs lie on a file system that COS mounts noexec
    (https://cloud.google.com/container-optimized-os/docs/how-to/run-gpus)."""
    return f"""{_HEAD}\
ls {NVIDIA}/lib64/libcuda.so.1 || fail batch.libcuda "no driver in {NVIDIA}" "see batch_agent_logs on its installation"
mount --bind {NVIDIA} {NVIDIA}
mount -o remount,exec {NVIDIA}
{NVIDIA}/bin/nvidia-smi -L || fail batch.driver "nvidia-smi shows no GPU" "see batch_agent_logs on its installation"
"""


def cos_firewall() -> str:
    """Let the other VMs in, whom COS's own firewall keeps out; nobody else."""
    return f"""{_HEAD}\
for host in $(cat "${{BATCH_HOSTS_FILE:-{HOSTS}}}"); do
  iptables -w -A INPUT -s "$host" -j ACCEPT
done
"""


def node_variables(attempt: str, *, nodes: int, port: int) -> str:
    """Leave rank, node 0's address and the attempt's name for the container.

    BATCH_TASK_INDEX and BATCH_TASK_RETRY_ATTEMPT are documented. BATCH_MAIN_NODE_HOSTNAME and BATCH_NODE_INDEX occur in
    Google's samples only, and go together (INFERRED: the main node is the one with index 0); where they are missing,
    the hosts file decides both who is first and who is who, so that node 0 is where the others look for it.
    """
    place = f"""\
rank=0
master=127.0.0.1:{port}"""
    if nodes > 1:
        place = f"""\
hosts="${{BATCH_HOSTS_FILE:-{HOSTS}}}"
tries=0
until [ "$(grep -c . "$hosts" 2> /dev/null)" = {nodes} ]; do
  tries=$((tries + 1))
  [ "$tries" -lt 60 ] || fail batch.hosts "$hosts does not list {nodes} VMs: $(cat "$hosts")" "try again"
  sleep 2
done
if [ -n "${{BATCH_MAIN_NODE_HOSTNAME:-}}" ]; then
  main=$BATCH_MAIN_NODE_HOSTNAME
  rank="${{BATCH_NODE_INDEX:-$BATCH_TASK_INDEX}}"
else
  main=$(grep -m 1 . "$hosts")
  rank=
  number=0
  for other in $(cat "$hosts"); do
    case " $host $(hostname -f 2> /dev/null || true) $(hostname -I 2> /dev/null || true) " in
      *" $other "*) rank=$number ;;
    esac
    number=$((number + 1))
  done
  [ -n "$rank" ] || fail batch.rank "$host is not in $hosts: $(cat "$hosts")" "report this; there is no rank to take"
fi
[ "$rank" = "$BATCH_TASK_INDEX" ] || echo "warning [batch.rank] task $BATCH_TASK_INDEX is node $rank"
master=$main:{port}"""
    return f"""{_HEAD}\
mkdir -p {HOME}
chmod 0777 {HOME}  # containers do not run as root
host=$(hostname)
life="${{BATCH_TASK_RETRY_ATTEMPT:-0}}"
{place}
{{
  echo "LITGPT_NODE_RANK=$rank"
  echo "LITGPT_MASTER=$master"
  echo "LITGPT_HOST=$host"
  echo "LITGPT_RESTART=$life"
  echo "LITGPT_ATTEMPT={attempt}-$life"
}} > {VARIABLES}
cat {VARIABLES}
"""
