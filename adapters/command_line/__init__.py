"""Options of a command: groups, files of options, help, and errors in one line."""
