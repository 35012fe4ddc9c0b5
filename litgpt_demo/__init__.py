"""The software of the nodes: data, model, training, checkpoints. No Prefect, no Kubernetes."""

import sys

__version__ = "0.1.0"

# How our programs are started: without the current folder among those that modules are imported from. It may be /tmp,
# where another user's token.py lies, or hold another user's `launcher` package. Python knows -P since 3.11; older ones,
# which images of users may have, run in the image's own folder.
PYTHON = (sys.executable, "-P") if sys.version_info >= (3, 11) else (sys.executable,)
