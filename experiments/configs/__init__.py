"""Configuration files, one run a file; each begins with its command and what to expect."""
