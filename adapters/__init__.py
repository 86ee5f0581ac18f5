"""The borders: HF checkpoints, torch, flax, datasets, tokenizers, reports, the command line."""
