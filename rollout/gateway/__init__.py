"""The gateway: serves sessions over HTTP, so that agents written for OpenAI's or Anthropic's API run episodes."""
