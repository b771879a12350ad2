"""The simulator: trace the trainer's own step at the real world size, cost it with a hardware model."""
