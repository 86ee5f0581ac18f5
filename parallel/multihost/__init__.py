"""Multi-process jobs: joining, failing together, running in lockstep."""
