"""From the machines to the lake: finished files of events, over dmsg itself, to one place."""
