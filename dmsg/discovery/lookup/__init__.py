"""Client of discovery: asks one discovery or several."""
