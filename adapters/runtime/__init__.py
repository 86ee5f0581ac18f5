"""The process that JAX runs in: compilation cache and memory allocator."""
