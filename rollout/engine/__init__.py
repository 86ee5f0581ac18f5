"""The embedded generation engine: continuous batching in JAX, and a server with SGLang's HTTP API."""
