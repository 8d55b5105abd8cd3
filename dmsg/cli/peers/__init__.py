"""Commands between two peers: standard input and output, round trips, throughput."""
