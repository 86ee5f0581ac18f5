"""What belongs to the process and its machine: compilation cache, memory allocator, downloads, atomic directories."""
