"""`chatserve serve`: the process that starts the others, keeps them running, and takes them along when it goes."""
