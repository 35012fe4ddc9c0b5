"""Run:ai in small: its program in both generations and its REST API, over a cluster that runs the pods."""

from .api import LOST, Api, serving
from .cluster import Cluster, Training, running, signal_pod
from .program import UNANSWERED, program

__all__ = ["LOST", "UNANSWERED", "Api", "Cluster", "Training", "program", "running", "serving", "signal_pod"]
