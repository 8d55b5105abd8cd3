"""Plugins of ``twistd``, one for each entity: their options, and the functions that create the services."""
