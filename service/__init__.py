"""Serves Tinker's training API (`areax tinker`): sessions, passes and updates of adapters, sampling, saved states.

A request is durable in a SQLite file before it is answered, and runs in the order of its model's `seq_id`. What a
killed server had done is computed again from the last saved state and that log.
"""
