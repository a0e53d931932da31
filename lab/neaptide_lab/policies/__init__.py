"""Policies of other systems, by their papers and sources. They import ``neaptide.policy`` alone."""

RIVALS = (
    "fcfs-v0",
    "priority-v0",
    "lpm",
    "round-robin",
    "bros",
    "bs+e",
    "bs+e+s",
    "echo",
    "dfs",
    "balance",
    "batchllm",
    "blendserve",
    "qoserve",
    "slidingserve",
)
"""Names of the policies here, as the entry points have them."""
ORDERS = ("balance", "dfs", "batchllm", "blendserve", "density")
"""Names of the orders of the offline pool here."""
