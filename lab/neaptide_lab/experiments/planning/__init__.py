"""The cost and the quality of plans: times, samples of lengths, parts for replicas."""
