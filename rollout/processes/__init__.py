"""Processes of a run on one machine: HTTP servers, keys, a guard that ends orphans, folders that a process owns."""
