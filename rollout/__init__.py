"""Asynchronous rollouts: clients, workflows, rewards, the executor and the loop. Imports neither jax nor torch."""
