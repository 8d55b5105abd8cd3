"""Collection of event files: senders on the machines of entities transfer sealed files over dmsg to one collector."""
