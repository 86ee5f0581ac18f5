"""What a run writes, and who reads along: metrics.jsonl, TensorBoard, wandb, Prometheus."""
