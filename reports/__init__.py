"""Results in; tables, figures, verdicts and the gate out. No torch, no Hydra."""
