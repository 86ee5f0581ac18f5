"""Sessions over HTTP: agents written for OpenAI's or Anthropic's API play episodes against the policy."""
