"""The learning rate of another batch size: candidates, trials, and whether accuracy was kept."""
