"""The HTTP server of an engine: routes of SGLang's, OpenAI's and Anthropic's APIs."""
