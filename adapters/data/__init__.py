"""Data sets: rows to prompts, and conversations to tokens with loss masks."""
