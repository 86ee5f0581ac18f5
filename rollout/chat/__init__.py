"""Conversations with the policy: sessions, chat templates, parsers, and their conversion to training samples."""
