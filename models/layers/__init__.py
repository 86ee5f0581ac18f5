"""Layers shared by all families: linear, norm, rotary embedding, MLP, mixture of experts, grouped matmuls."""
