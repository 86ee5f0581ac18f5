"""What an engine runs on its devices: programs for prompts, steps of decoding, and the memory of both."""
