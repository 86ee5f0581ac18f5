"""Layers that families share: linear, norm, rotary embedding, MLP, mixture of experts, grouped matmuls."""
