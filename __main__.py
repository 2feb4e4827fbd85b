"""``python -m dspark``."""

from dspark.cli import main

main()
