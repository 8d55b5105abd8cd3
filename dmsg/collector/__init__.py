"""Collection of event files: sealed files travel from the entities' machines over dmsg to one collector."""
