"""A cache written once more with its shards in another form, or with fewer fields."""
