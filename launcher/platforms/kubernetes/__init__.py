"""Jobs as Kubernetes objects: rendering without a cluster, and the checks and calls that need one."""
