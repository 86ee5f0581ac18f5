"""Segment-causal attention: the chunked reference, and kernels for GPUs and TPUs."""
