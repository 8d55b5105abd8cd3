"""What every client and server does with discovery: find servers, stay with some, be found."""
