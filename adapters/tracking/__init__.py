"""Experiment tracking: the run directory, and export to TensorBoard, wandb, trackio, MLflow, SwanLab and Prometheus."""
