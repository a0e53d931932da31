"""What a plan costs to make, and what it tells: times, samples of lengths, parts for replicas."""
