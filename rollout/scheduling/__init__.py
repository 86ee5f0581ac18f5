"""Scheduling of rollouts: the executor, groups of episodes, curricula."""
