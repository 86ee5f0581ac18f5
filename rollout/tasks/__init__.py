"""Built-in tasks: rows and rewards."""
