"""The contract between the two stages: what a cache is, byte by byte. Imports neither stage."""
