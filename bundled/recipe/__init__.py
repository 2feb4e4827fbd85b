"""How the bundled target and its conversations are made, one subject to a file."""
