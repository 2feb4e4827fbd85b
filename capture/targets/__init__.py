"""The frozen target: loading it, finding its parts, running it, keeping what a cache stores."""
