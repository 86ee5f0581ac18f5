"""OpenAI's and Anthropic's APIs: requests to asks, answers and streams in the shape of each; for gateway and engine."""
