"""Stage 2: stream a cache and train any draft from it. Never opens the target."""
