"""Pure mathematics on arrays and pytrees; imports nothing else of ours."""
