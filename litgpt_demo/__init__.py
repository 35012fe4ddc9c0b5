"""The software of the nodes: data, model, training, checkpoints. No Prefect, no Kubernetes."""

__version__ = "0.1.0"
