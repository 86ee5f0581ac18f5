"""The journal of a run: finished episodes and the batches made of them, which a resume and a replay start from."""
