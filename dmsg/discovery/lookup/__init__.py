"""Client of one discovery or several: fetches and posts entries."""
