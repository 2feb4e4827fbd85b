"""Several processes on one capture: who does what, what they tell each other, how they fail."""
