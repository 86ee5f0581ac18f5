"""Several processes as one job: joining, ending together, running in lockstep."""
