"""Closed-form estimates of a run's memory, FLOPs and time."""
