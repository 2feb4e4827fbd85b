"""What the commands print on stdout, one file a command."""
