"""The embedded generation engine: continuous batching in JAX, and a server that speaks SGLang's HTTP contract."""
