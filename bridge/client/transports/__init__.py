"""How a bucket's bytes get from this process to a server's workers: one file for each way."""
