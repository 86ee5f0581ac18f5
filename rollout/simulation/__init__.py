"""Simulation of asynchronous runs on a virtual clock."""
