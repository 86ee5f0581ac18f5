"""Process-wide JAX settings: compilation cache and memory allocator."""
