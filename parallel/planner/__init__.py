"""What a run needs and costs, by formulas: memory, FLOPs, time."""
