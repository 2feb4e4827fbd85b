"""What a capture takes, in bytes and hours, before anything is written (``dspark plan``)."""
