"""Sources of the network profiles' and machines' values, each at the commit that was read."""

from __future__ import annotations

_GITHUB = "https://github.com"
AIP = f"{_GITHUB}/GoogleCloudPlatform/ai-infra-cluster-provisioning/blob/2ff9b95/sample_workloads/lit-gpt-demo"
CEA = f"{_GITHUB}/GoogleCloudPlatform/container-engine-accelerators/blob/992db812"
CEA_98C = f"{_GITHUB}/GoogleCloudPlatform/container-engine-accelerators/blob/98c85a6e"
CTK = f"{_GITHUB}/GoogleCloudPlatform/cluster-toolkit/blob/104708037"
GR = f"{_GITHUB}/AI-Hypercomputer/gpu-recipes/blob/2e1fd5e"
NPX = f"{_GITHUB}/google/nccl-plugin-gpudirect-tcpxo/blob/04815d1"
XPK = f"{_GITHUB}/AI-Hypercomputer/xpk/blob/367c8382"
LAB18 = f"{_GITHUB}/elideng-sg/hypercomputer-internode-deepdive/tree/main/labs/lab-18"
AI_HYPERCOMPUTER = "https://docs.cloud.google.com/ai-hypercomputer/docs"
GKE = "https://docs.cloud.google.com/kubernetes-engine/docs"
