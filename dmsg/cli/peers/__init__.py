"""Commands between two peers: connecting standard input and output, round trips, throughput."""
