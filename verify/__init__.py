"""Whether a cache is sound, and what is wrong with it: by file, shard, dataset row and field."""
