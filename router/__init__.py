"""The gateway: checks, tokenizes, places, streams and retries requests. Knows no tensors."""
