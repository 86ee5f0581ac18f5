"""Meshes, sharding rules and communication between devices."""
