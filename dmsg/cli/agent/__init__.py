"""Commands that start, show and stop the agent: ``dmsg up``, ``dmsg status`` and ``dmsg down``."""
