"""Which prompts are sampled when: the executor, groups of episodes, curricula."""
