"""What the recipes share: trainer, learner, publishing, options."""
