"""Asynchronous runs simulated on a virtual clock."""
