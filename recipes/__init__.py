"""Training scripts: a frozen configuration and the loop that reads it, one file each."""
