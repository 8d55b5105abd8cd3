"""Commands ``dmsg host``, ``dmsg join`` and ``dmsg leave``: run a network, or use a network that another person
runs.
"""
