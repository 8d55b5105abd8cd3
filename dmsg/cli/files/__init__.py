"""Commands that transfer files: ``dmsg cp``, ``send``, ``receive``, ``serve`` and ``curl``."""
