"""Weights on their way to servers: written, transferred, loaded and verified."""
