"""What several drafts are built of. Each draft itself is one file in ``drafts``."""
