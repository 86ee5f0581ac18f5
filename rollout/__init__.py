"""Asyncio: clients, workflows, rewards, the executor and the loop. Loads no jax and no torch."""
