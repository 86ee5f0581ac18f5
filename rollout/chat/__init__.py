"""Conversations: messages in, tokens as they were sampled, training samples out."""
