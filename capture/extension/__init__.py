"""``dspark capture --extend``: fields added to a finished cache, in files of their own."""
