"""Caches at a URL: their small files are fetched when they are opened, their shards when needed."""
