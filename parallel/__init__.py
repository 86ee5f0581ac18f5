"""Meshes, sharding rules and everything that moves between devices."""
