"""One node of a job: its rank and peers, its checks, its ranks under torchrun, and what they leave."""
