"""Client of discovery: fetches and posts entries at one discovery or several."""
