"""All time limits that are not settings, in seconds: what waits for what, and why that long.

Those that are settings: `train.hang_timeout`, and on platforms `startup_timeout`, `admission_timeout`, `grace_period`.
"""

# --- a rank, watched by its node; each is the longest silence between two heartbeats ----------------------------------

FIRST_PASS = 900.0
"""The first pass of training or evaluation compiles, and meets the other ranks; at least `train.hang_timeout`."""
STATE_TRANSFER = 7200.0
"""Reading or writing data, a model or a checkpoint: a bucket that keeps refusing can hold up one rank for hours, and
the others wait for it. A peer that dies is noticed at once."""
LEAST_COLLECTIVE = 1800.0
"""torch's own limit of a collective, or twice `train.hang_timeout`: the node finds a hang, with all stacks, before."""
STACKS = 5.0
"""A node waits for its ranks to write their stacks before it ends them."""

# --- a node, before its ranks begin -----------------------------------------------------------------------------------

NETWORK_DAEMON = 120.0
"""The daemon of a node's network comes up: TCPXO's takes 30 s."""
TORCH_PROBE = 300.0
"""A new process imports torch and counts GPUs: an image that was just pulled reads gigabytes."""
DRIVER_PROBE = 60.0
"""A new process queries the driver: with eight GPUs and no persistence daemon it takes 10 s."""

# --- services ---------------------------------------------------------------------------------------------------------

BUCKET = 600.0
"""A bucket gives no good answer to any try of one request; real outages outlast the client's own 120 s."""
INTERACTIVE = 5.0
"""A bucket, registry or hub does not answer while a person waits for a plan or a log."""
REGISTRY = 15.0
"""A registry does not answer a run that needs its image."""
PLATFORM = 900.0
"""A platform is silent, refuses the credentials, or does not know a job: then waiting for the job ends. The job itself
continues, and a new call reattaches to it."""
CANCELLATION = 90.0
"""A platform does not answer a request to cancel a job."""
RUNAI_COMMAND = 120.0
"""One `runai` command: v2's submit waits up to a minute for the workload to be created."""
SLURM_COMMAND = 60.0
"""One command of Slurm."""
BATCH_CANCELLATION = 300.0
"""The tasks of a cancelled Batch job come to their end."""
