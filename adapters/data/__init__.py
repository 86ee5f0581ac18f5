"""Data sets: loading rows, converting formats, and tokenising conversations with loss masks."""
