"""Commands that start, show and stop the agent: dmsg up, status, down."""
